"""Gathers the Arrow batches of a frame in the executors' tasks of all writers."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa

FILE_BYTES = 64 << 20
"""The bytes of Arrow memory that a task gathers before it writes a file, or a file for each partition value."""


def gathered(schema: pa.Schema, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.Table]:
    """Yield the rows of a task as tables of about `FILE_BYTES`, cast to the schema; none for a task without rows."""
    held: list[pa.RecordBatch] = []
    size = 0
    for batch in batches:
        if batch.num_rows:
            held.append(batch)
            size += batch.nbytes
        if size >= FILE_BYTES:
            yield pa.Table.from_batches(held).cast(schema)
            held, size = [], 0
    if held:
        yield pa.Table.from_batches(held).cast(schema)
