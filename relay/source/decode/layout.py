"""The outbox's columns as the stream has them, and the fields of rows that planning needs. No I/O."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from relay.faults import ConfigurationError
from relay.model.events import INSERTED_BY
from relay.model.transactions import COMMIT_FACTS, Int64Array, Mask, Rows
from relay.model.tuples import FEW_ROWS, Walked, columns

_MOST = np.iinfo(np.int64).max
_CONTENTS = ("id", "event_type", "payload")
XID_MASK = 0xFFFFFFFF
"""Masks a full xid to the xid that the WAL has, which has no epoch."""


Ends = NDArray[np.void]
ENDS = np.dtype([("rows", np.int64), *COMMIT_FACTS])
"""The dtype of commits' ends: how many rows there are up to each end, and the fields of `Commit`."""


def polled(ends: Sequence[tuple[int, int]]) -> Ends:
    """Ends of commits that were polled, from (rows up to the end, `c_xid` or 0) of each."""
    result = np.zeros(len(ends), ENDS)
    result["rows"], result["xid"] = [rows for rows, _ in ends], [xid & XID_MASK for _, xid in ends]
    return result


class Peeked(NamedTuple):
    """The fields that planning needs, one element for each row. A missing offset or xid is 0.

    `users` are all None if every row has a transaction_id: only rows without one are grouped by user. `event_ids` are
    all None unless the outbox is a partitioned table.
    """

    hosts: Sequence[bytes | None]
    transaction_ids: Sequence[bytes | None]
    offsets: Sequence[int]
    users: Sequence[bytes | None]
    xids: Sequence[int]
    event_ids: Sequence[bytes | None]


class Survey(NamedTuple):
    """The fields of whole commits that planning needs, one element for each commit.

    They are valid for a commit that is one business transaction of one host (`uniform`). `old` is a mask of the rows
    that are copies, one element for each row; None without copies. `forged`: a row has a c_xid that no transaction has.
    """

    uniform: Sequence[bool]
    hosts: Sequence[bytes | None]
    ids: Sequence[bytes | None]
    first_offsets: Int64Array
    last_offsets: Int64Array
    old: Mask | None
    forged: bool


@dataclass(frozen=True, slots=True)
class Layout:
    """The outbox's current columns, and the index of each field that planning needs; None where it is missing.

    `partitioned`: the outbox is a partitioned table, where a row that is moved between partitions is streamed again. It
    has the same id then and, unless moved rows are `renumbered`, the same c_offset. Neither need be unique by itself.
    """

    columns: tuple[str, ...]
    indices: tuple[int | None, ...]
    offset_column: str
    partitioned: bool
    renumbered: bool = False

    @classmethod
    def of(
        cls,
        columns: Sequence[str],
        mapping: dict[str, str],
        table: str,
        partitioned: bool = False,
        renumbered: bool = False,
    ) -> Layout:
        """Locate the fields by name. Raises ConfigurationError if there is no host column."""
        index = {name: number for number, name in enumerate(columns)}
        names = [
            mapping.get(name, name)
            for name in ("host_id", "transaction_id", "c_offset", INSERTED_BY, "user_id", "id")
        ]
        if names[0] not in index:
            raise ConfigurationError(
                f"source.table: {table} no longer has the column {names[0]!r}: "
                "restore it, or map host_id in source.columns"
            )
        indices = [index.get(name) for name in names]
        if not partitioned:
            indices[-1] = None
        return cls(
            tuple(columns),
            tuple(indices),
            names[2],
            partitioned,
            renumbered and indices[-1] is not None,
        )

    def peek(self, rows: Rows) -> Peeked:
        """Read the fields of rows.

        Raises ProtocolError for a row that is cut short, ConfigurationError for a c_offset that is not a whole number.
        """
        *indices, user, event_id = self.indices
        hosts, ids, offsets, xids = columns(rows, indices)
        users, event_ids = columns(rows, [user if None in ids else None, event_id])
        return Peeked(hosts, ids, self._numbers(offsets), users, _xids(xids), event_ids)

    def survey(self, rows: Rows, commits: Ends, next_xid: int = 0) -> Survey | None:
        """Read the fields of whole commits, whose ends are `commits`. Raises as `peek` does.

        `next_xid` is the first full xid that no transaction has yet, 0 where that is unknown.

        Returns None where `peek` is as fast: for few rows, and for tables without transaction_id.
        """
        host, transaction_id, offset, xid, _, event_id = self.indices
        if len(rows) < FEW_ROWS or host is None or transaction_id is None:
            return None
        wanted = (host, transaction_id, offset, xid, event_id)
        walked = Walked(rows, [index for index in wanted if index is not None])
        ends = commits["rows"]
        starts = np.concatenate(([0], ends[:-1]))
        same_transaction = np.ones(len(rows), np.bool_)
        same_transaction[1:] = walked.repeats(host) & walked.repeats(transaction_id)
        same_transaction[starts] = ~walked.absent(transaction_id)[starts]
        offsets = self._offsets(walked, offset, len(rows))
        known = np.where(offsets == 0, _MOST, offsets)
        first = np.minimum.reduceat(known, starts)
        return Survey(
            np.logical_and.reduceat(same_transaction, starts).tolist(),
            walked.some(host, starts),
            walked.some(transaction_id, starts),
            np.where(first == _MOST, 0, first),
            np.maximum.reduceat(offsets, starts),
            *self._old(walked, xid, offsets, commits, next_xid),
        )

    def _old(
        self,
        walked: Walked,
        index: int | None,
        offsets: Int64Array,
        ends: Ends,
        next_xid: int,
    ) -> tuple[Mask | None, bool]:
        """Mark copies of rows: those that another transaction inserted, and those that a commit has twice.

        Also returns whether a c_xid is forged.
        """
        if index is None:
            return None, False
        numbers = walked.numbers(index)
        full = np.array(_xids(walked.values(index)), np.int64) if numbers is None else numbers
        xids = full & XID_MASK
        commits = np.repeat(np.arange(len(ends)), np.diff(ends["rows"], prepend=0))
        expected = ends["xid"][commits]
        old: Mask = (xids != expected) & (xids != 0) & (expected != 0)
        if self.partitioned:
            old |= self._copies(walked, commits, offsets, ~old)
        forged = bool(next_xid) and bool((full >= next_xid).any())
        return old if old.any() else None, forged

    def _copies(self, walked: Walked, commits: Int64Array, offsets: Int64Array, own: Mask) -> Mask:
        """Mark the rows, of `own`, that their commit has twice, since it has moved them to another partition."""
        event_id = self.indices[-1]
        if self.renumbered and event_id is not None:
            return _repeated(commits, np.where(own, _codes(walked.values(event_id)), 0))
        offsets = np.where(own, offsets, 0)
        copies = _repeated(commits, offsets)
        if event_id is None or not copies.any():
            return copies
        pairs = zip(offsets.tolist(), walked.values(event_id), strict=True)
        return _repeated(commits, _codes([pair if pair[0] else None for pair in pairs]))

    def _offsets(self, walked: Walked, index: int | None, count: int) -> Int64Array:
        if index is None:
            return np.zeros(count, np.int64)
        numbers = walked.numbers(index)
        return np.array(self._numbers(walked.values(index))) if numbers is None else numbers

    def _numbers(self, offsets: Sequence[bytes | None]) -> list[int]:
        if not all(offset is None or offset.removeprefix(b"-").isdigit() for offset in offsets):
            raise ConfigurationError(
                f"source.columns: the outbox's column {self.offset_column!r} has values that are not "
                "whole numbers: map a column of type bigint to c_offset"
            )
        return [int(offset or 0) for offset in offsets]


def require_contents(columns: Sequence[str], mapping: dict[str, str], table: str) -> None:
    """Raise ConfigurationError if the outbox has lost a column without which its rows are no events.

    Their fields would be null: events without a type, or without what they say.
    """
    for field in _CONTENTS:
        column = mapping[field]
        if column not in columns:
            raise ConfigurationError(
                f"source.table: {table} no longer has the column {column!r}: restore it, or map {field} in "
                "source.columns"
            )


def _xids(values: Sequence[bytes | None]) -> list[int]:
    """Full xids, at most 2^63 - 1; 0 where there is none."""
    return [min(int(value), _MOST) if value else 0 for value in values]


def _codes(values: Sequence[Hashable | None]) -> Int64Array:
    """A number for each distinct value, 0 for None."""
    known: dict[Hashable, int] = {}
    return np.array(
        [0 if value is None else known.setdefault(value, len(known) + 1) for value in values],
        np.int64,
    )


def _repeated(commits: Int64Array, offsets: Int64Array) -> Mask:
    """Mark the rows whose number, unless it is 0, an earlier row of the same commit has."""
    order = np.lexsort((np.arange(len(offsets)), offsets, commits))
    same = np.concatenate(
        ([False], (np.diff(commits[order]) == 0) & (np.diff(offsets[order]) == 0))
    )
    repeated: Mask = np.zeros(len(offsets), np.bool_)
    repeated[order] = same & (offsets[order] != 0)
    return repeated
