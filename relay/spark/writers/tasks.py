"""What the executors' tasks of all writers do with the Arrow batches of a frame."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa

FILE_BYTES = 64 << 20
"""How much Arrow memory a task gathers before it writes a file, or a file for each partition value."""


def gathered(schema: pa.Schema, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.Table]:
    """The rows of a task as tables of about `FILE_BYTES`, cast to the schema; a task without rows gives none."""
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
