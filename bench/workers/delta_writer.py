"""Writes events to a Delta table and prints the seconds of each round. Runs in relay's own environment.

Arguments: `relay` (the writer of `type: spark`, on Spark) or `deltalake` (`write_deltalake` of the same Arrow data, in
this process), the Parquet file with the events, the number of rounds.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from uuid import uuid4

import pyarrow as pa
import pyarrow.parquet

TASKS = 2


def main() -> None:
    """Write the events to a new table in each round; the first one warms up."""
    kind, source, rounds = sys.argv[1:]
    events = pyarrow.parquet.read_table(source)
    write = _on_spark(events) if kind == "relay" else _in_process(events)
    for _ in range(int(rounds) + 1):
        with tempfile.TemporaryDirectory(prefix="relay-bench-") as folder:
            started = time.monotonic()
            write(Path(folder) / "table")
            print(time.monotonic() - started, flush=True)


def _in_process(events: pa.Table) -> Callable[[Path], None]:
    import deltalake

    return lambda path: deltalake.write_deltalake(path, events)


def _on_spark(events: pa.Table) -> Callable[[Path], None]:
    from relay.config.handlers import SparkHandler
    from relay.config.settings import SparkSettings
    from relay.spark.session import Session
    from relay.spark.writers import BatchId, writer

    conf = {"spark.driver.memory": "2g"}
    session = Session(SparkSettings.model_validate({"master": f"local[{TASKS}]", "conf": conf}))
    session.start()
    spark = session.get(120)
    if spark is None:
        raise SystemExit("no Spark session within 120 s")
    # Partitioned as on a sink's executors, and in Spark's memory before the clock starts.
    frame = spark.createDataFrame(events).repartition(TASKS).cache()
    frame.count()

    def write(path: Path) -> None:
        settings = {"type": "spark", "format": "delta", "path": str(path), "partition_by": []}
        destination = writer("lake", SparkHandler.model_validate(settings))
        destination.write(frame, BatchId(str(uuid4()), 1, str(uuid4())))

    return write


if __name__ == "__main__":
    main()
