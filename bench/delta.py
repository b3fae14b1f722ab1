"""Measures Delta tables: the writer of Spark sinks beside deltalake's own, with the same Arrow data."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet

from bench.environment import seconds_of
from bench.outbox import Outbox
from bench.results import Measurement
from relay.model.snapshots import BEGINNING
from relay.source.outbox.differences import Difference
from relay.source.server import current_position
from relay.spark.data_source_options import parse
from relay.spark.reading import TaskPortion, read


def export(outbox: Outbox, file: Path) -> int:
    """Write all events of an outbox to a Parquet file, and return their number."""
    options = parse({"dsn": outbox.dsn})
    portion = TaskPortion(Difference(BEGINNING, current_position(outbox.conn).snapshot))
    table = pa.Table.from_batches(read(outbox.dsn, options.table, portion, 8, None))
    pyarrow.parquet.write_table(table, file)
    return int(table.num_rows)


def write(kind: str, file: Path, events: int) -> Measurement:
    """Events a second in the second round of `relay` or `deltalake`, in a new process."""
    return {"events/s": events / seconds_of("delta_writer", kind, str(file), "1")}
