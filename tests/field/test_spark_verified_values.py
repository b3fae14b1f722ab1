"""Values for which a comparison of a sink's table with the outbox tells differences that are none, or fails.

Reports: apache/iceberg#6779, apache/arrow#39660 and apache/spark#31549 (a partition of the text 01 is read as a
number), AbsaOSS/pramen#387, apache/spark#45599 and #45638 (infinite times and dates of PostgreSQL).
"""

from __future__ import annotations

from pathlib import Path

from relay.config.handlers import SparkHandler
from relay.spark import destinations, frames
from relay.spark.session import Session, own_session
from tests.outbox import Outbox


def test_a_partition_of_a_text_that_looks_like_a_number_is_the_text(
    spark_session: Session, tmp_path: Path
) -> None:
    session = spark_session.get(timeout=120)
    assert session is not None
    texts = ["007", "-0", "1e3", "2026-01-01", "1.50"]
    path = str(tmp_path / "lake")
    written = session.createDataFrame(
        [(each, each, 7) for each in texts], "id string, aggregate_id string, host_bucket int"
    )
    written.write.partitionBy("aggregate_id", "host_bucket").save(path)
    handler = SparkHandler.model_validate({"type": "spark", "path": path})
    columns = frames.arrow_schema(["id", "aggregate_id", "host_bucket"])
    own = own_session(session, remote=False)
    rows = destinations.stored(own, "lake", handler, columns, 1).collect()
    assert sorted(tuple(row) for row in rows) == sorted((each, each, 7) for each in texts)


def test_infinite_times_of_other_rows_are_null(outbox: Outbox) -> None:
    outbox.conn.execute(
        "create table lake (id text, event_ts timestamptz, commit_ts timestamp, date date);"
        "insert into lake values ('a', 'infinity', '-infinity', 'infinity'),"
        " ('b', '2026-01-01 12:00:00.000005+02', '1969-12-31 23:59:59.999999', '1969-12-31'),"
        " ('c', '12026-01-01 00:00+00', null, '12026-01-01')"
    )
    columns = ("id", "event_ts", "commit_ts", "date")
    reading = destinations._PostgresRows(outbox.relay_dsn, "public.lake", columns, 1)
    (batch,) = reading(0)
    first, second, third = sorted(
        zip(
            *(
                batch.column(name).cast(kind).to_pylist()
                for name, kind in zip(columns, ("string", "int64", "int64", "int32"), strict=True)
            ),
            strict=True,
        )
    )
    assert first == ("a", None, None, None)
    noon = 1_767_261_600_000_005
    assert second == ("b", noon, -1, -1)
    assert third == ("c", 317_336_745_600_000_000, None, 3_672_879)
