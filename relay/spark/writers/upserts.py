"""The present state: which event of a batch is the newest of its key, and whether it is newer than the table's row.

An event's position is its commit and its `c_offset`. Polling knows commits by snapshots: a batch has those that its
later snapshot sees and its earlier one does not. So each row of the table keeps the two snapshots of its batch
(`relay_snapshots`), and for an event of any time, be it a replay, a rebuild or a batch of a late writer:

- a commit that the row's earlier snapshot sees is older than the row,
- one that its later snapshot does not see is newer,
- among those in between, which a poll cannot tell apart, `c_offset` decides: an event that was inserted after another's
  commit has the greater one.

A deleted key keeps a row of its position with `relay_deleted`, so that no older event brings it back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from relay.faults import ConfigurationError
from relay.model.snapshots import BEGINNING, Snapshot, full_xids
from relay.spark.writers import BATCH_COLUMN, BatchId
from relay.spark.writers.arrow import arrow_schema

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from pyspark.sql import DataFrame

SNAPSHOTS = "relay_snapshots"
"""The column with the two snapshots between which the event of a row was committed."""
DELETED = "relay_deleted"
"""The column that says that the key is deleted: its other columns are null."""
POSITION = ("c_offset", "xid")
"""The columns of a frame that tell which event is the newest."""


@dataclass(frozen=True)
class Newest:
    """The newest event of each key of a batch. `rows` is as the table has them; the others have one element for each.

    `keys` are texts, `xids` full transaction ids, and 0 where a row is older than the column c_xid.
    """

    rows: pa.Table
    keys: pa.Array
    xids: NDArray[np.int64]
    offsets: NDArray[np.int64]

    def without(self, indices: NDArray[np.int64]) -> pa.Table:
        """The rows but those of some events."""
        kept = np.ones(self.rows.num_rows, np.bool_)
        kept[indices] = False
        return self.rows.filter(pa.array(kept))


def marked(key: str, frame: DataFrame, columns: Sequence[str], deletes: str | None) -> DataFrame:
    """The frame with `relay_deleted`. Raises ConfigurationError, which names `key`, for a frame without `columns`."""
    from pyspark.errors import AnalysisException
    from pyspark.sql.functions import coalesce, expr, lit

    from relay.spark.descriptions import safe_description

    for name in (*columns, *POSITION):
        if name not in frame.columns:
            raise ConfigurationError(
                f"{key}.mode: upsert needs the column {name}, which the batch does not have: keep it in `sql`; it has "
                f"{', '.join(frame.columns)}"
            )
    try:
        condition = lit(False) if deletes is None else coalesce(expr(deletes), lit(False))
        return frame.withColumn(DELETED, condition.cast("boolean"))
    except AnalysisException as error:
        raise ConfigurationError(f"{key}.deletes: {safe_description(error)}") from error


def collected(frame: DataFrame) -> pa.Table:
    """The rows of a frame, in this process."""
    return frame.toArrow().cast(arrow_schema(frame))


def newest(rows: pa.Table, key: Sequence[str], batch: BatchId) -> Newest:
    """The newest event of each key. `rows` are a batch's, with `relay_deleted`.

    What the batch's earlier snapshot sees are replays: they are older than the batch's own events. Raises
    ConfigurationError for a column of the key whose type has no text.
    """
    for name in key:
        kind = rows.schema.field(name).type
        if pa.types.is_nested(kind) or pa.types.is_binary(kind):
            raise ConfigurationError(
                f"key: the column {name} is {kind}, which cannot identify a row: convert it with `sql`"
            )
    before = Snapshot.parse(batch.before) if batch.before else BEGINNING
    after = Snapshot.parse(batch.snapshot)
    xids = full_ids(rows["xid"], after)
    offsets = _numbers(rows["c_offset"])
    is_own = ~before.sees(xids) | (xids == 0 if before.is_beginning else np.False_)
    order = np.lexsort((offsets, is_own))
    keys = key_texts(rows, key)
    codes = _numbers(keys.dictionary_encode().indices)[order]
    # The first of each from the end.
    last = len(order) - 1 - np.unique(codes[::-1], return_index=True)[1]
    picked = np.sort(order[last])
    rows = rows.take(pa.array(picked))
    snapshots = np.where(is_own[picked], f"{before} {after}", f"{BEGINNING} {before}")
    rows = _without_values(rows, {*key, *POSITION, BATCH_COLUMN, DELETED})
    rows = rows.append_column(SNAPSHOTS, pa.array(snapshots, pa.string()))
    return Newest(rows, keys.take(pa.array(picked)), xids[picked], offsets[picked])


def compared(
    current: pa.Table, key: Sequence[str], events: Newest
) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
    """Which rows of a table are older than the event of their key, and the indices of events that are not newer.

    `current` has the columns of the key, c_offset and `relay_snapshots`; an event without a row is in neither.
    """
    found = pc.index_in(key_texts(current, key), value_set=events.keys)
    there = np.flatnonzero(found.is_valid().to_numpy(zero_copy_only=False))
    indices = _numbers(found.take(pa.array(there)))
    rows = current.select(["c_offset", SNAPSHOTS]).take(pa.array(there))
    is_newer = are_newer(events.xids[indices], events.offsets[indices], rows)
    superseded = np.zeros(current.num_rows, np.bool_)
    superseded[there] = is_newer
    return superseded, np.unique(indices[~is_newer])


def are_newer(
    xids: NDArray[np.int64], offsets: NDArray[np.int64], rows: pa.Table
) -> NDArray[np.bool_]:
    """Which events are newer than the row of their key: for each event the row at its index.

    `xids` are full transaction ids; `rows` has c_offset and `relay_snapshots`.
    """
    snapshots = rows[SNAPSHOTS].combine_chunks().dictionary_encode()
    codes = _numbers(snapshots.indices, missing=-1)
    is_newer = offsets > _numbers(rows["c_offset"], missing=-1)
    # A row that relay did not write has no snapshots, and is older than every event.
    is_newer[codes < 0] = True
    for code, text in enumerate(snapshots.dictionary.to_pylist()):
        before, after = map(Snapshot.parse, text.split(" "))
        here = codes == code
        of_row = xids[here]
        is_newer[here] = ~before.sees(of_row) & (~after.sees(of_row) | is_newer[here])
    return is_newer


def key_texts(rows: pa.Table, key: Sequence[str]) -> pa.Array:
    """The key of each row as one text: the values with their lengths, so that no two keys have the same.

    The number -0.0 is the key 0.0, as deltalake and Spark compare them.
    """
    parts = []
    for name in key:
        values = rows[name].combine_chunks()
        if pa.types.is_floating(values.type):
            # A float that its table keeps as a double since its column was widened is the same key.
            values = pc.add(values.cast(pa.float64()), pa.scalar(0.0))
        text = values.cast(pa.string())
        length = pc.utf8_length(text).cast(pa.string())
        part = pc.binary_join_element_wise(length, text, ":")
        parts.append(pc.fill_null(part, "-"))
    return reduce(lambda left, right: pc.binary_join_element_wise(left, right, ""), parts)


def full_ids(xids: pa.ChunkedArray, after: Snapshot) -> NDArray[np.int64]:
    """Full transaction ids of those below the end of a snapshot, from their lower 32 bits; 0 for null."""
    lower = _numbers(xids)
    return np.where(lower == 0, 0, np.maximum(full_xids(lower, after.xmax, -1), 0))


def _numbers(values: pa.ChunkedArray | pa.Array, missing: int = 0) -> NDArray[np.int64]:
    filled: NDArray[np.int64] = (
        pc.fill_null(values.cast(pa.int64()), missing).to_numpy(zero_copy_only=False)
        if isinstance(values, pa.Array)
        else pc.fill_null(values.cast(pa.int64()), missing).to_numpy()
    )
    return filled.copy()


def _without_values(rows: pa.Table, kept: set[str]) -> pa.Table:
    """The rows with null in all columns but `kept` where the key is deleted."""
    deleted = rows[DELETED]
    if not pc.any(deleted).as_py():
        return rows
    for index, field in enumerate(rows.schema):
        if field.name not in kept:
            empty = pa.nulls(rows.num_rows, field.type)
            rows = rows.set_column(index, field, pc.if_else(deleted, empty, rows[field.name]))
    return rows
