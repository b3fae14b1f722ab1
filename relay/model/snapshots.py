"""Snapshots: the transactions of the source that are visible at a moment, which is a position of polling. No I/O."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from uuid import UUID

import numpy as np
from numpy.typing import NDArray

from relay.model.events import Lsn

Xids = NDArray[np.int64]
"""Full transaction ids, with their epoch, int64."""

XID_CYCLE = 1 << 32
"""Transaction ids in the WAL are modulo this number."""


@dataclass(frozen=True)
class Snapshot:
    """A value of PostgreSQL's type `pg_snapshot`: the transactions that had ended when it was taken.

    All transactions below `xmin` had ended, none from `xmax` on, and those in between except `in_progress`.

    Source: PostgreSQL documentation, "Transaction ID and Snapshot Information Functions".
    """

    xmin: int
    xmax: int
    in_progress: tuple[int, ...] = ()

    @classmethod
    def parse(cls, text: str) -> Snapshot:
        """Parse `xmin:xmax:xid,xid`. Raises ValueError for any other text."""
        xmin, xmax, between = text.split(":")
        return cls(int(xmin), int(xmax), tuple(map(int, between.split(","))) if between else ())

    def __str__(self) -> str:
        return f"{self.xmin}:{self.xmax}:{','.join(map(str, self.in_progress))}"

    @property
    def is_beginning(self) -> bool:
        """Whether no transaction is visible."""
        return self.xmax <= BEGINNING.xmax

    def certain(self) -> Snapshot:
        """A hot standby's snapshot up to `xmin`: it does not list transactions in progress above that."""
        return Snapshot(self.xmin, self.xmin)

    def sees(self, xids: Xids) -> NDArray[np.bool_]:
        """Whether each transaction is visible, if it was committed; bool, one element for each of `xids`."""
        visible: NDArray[np.bool_] = xids < self.xmax
        if self.in_progress and bool((xids[visible] >= self.xmin).any()):
            visible &= ~np.isin(xids, self._between)
        return visible

    def covers(self, other: Snapshot) -> bool:
        """Whether every transaction that is visible in another snapshot is visible in this one."""
        later = sum(xid >= self.xmax for xid in other.in_progress)
        return other.xmax - self.xmax <= later and not bool(other.sees(self._between).any())

    def shows(self, *wanted: Snapshot | Xids) -> bool:
        """Whether all is visible that some snapshots see, and that some transactions (full xids) have committed."""
        return all(
            self.covers(each) if isinstance(each, Snapshot) else bool(self.sees(each).all())
            for each in wanted
        )

    @cached_property
    def _between(self) -> Xids:
        return np.array(self.in_progress, np.int64)


@dataclass(frozen=True, slots=True)
class Witness:
    """A row of the source that proves where it is what `snapshot` sees; all of that ends in the WAL at or before `lsn`.

    `relay.source.witnesses` says how.
    """

    id: UUID
    snapshot: Snapshot
    lsn: Lsn

    @classmethod
    def parse(cls, witness: UUID, snapshot: str, lsn: str) -> Witness:
        """Parse the columns of a row, of which the last two are text."""
        return cls(witness, Snapshot.parse(snapshot), Lsn.parse(lsn))

    def proves(self, snapshot: Snapshot) -> bool:
        """Whether a server that holds this witness has all that a snapshot sees."""
        return self.snapshot.covers(snapshot)


@dataclass(frozen=True, eq=False)
class RowCounts:
    """How many rows of the outbox transactions have. `xids` are distinct and ascending, `rows` has one for each."""

    xids: Xids
    rows: NDArray[np.int64]

    @classmethod
    def summed(cls, xids: Xids, rows: NDArray[np.int64]) -> RowCounts:
        """The sums of the rows of equal xids, which may have any order."""
        distinct, index = np.unique(xids, return_inverse=True)
        return cls(distinct, np.bincount(index, rows, len(distinct)).astype(np.int64))

    @classmethod
    def none(cls) -> RowCounts:
        """No transaction."""
        return cls(np.zeros(0, np.int64), np.zeros(0, np.int64))

    def of(self, xids: Xids) -> NDArray[np.int64]:
        """The number of rows of each transaction, 0 for those that are not counted: int64, in order of `xids`."""
        if not len(self.xids):
            return np.zeros(len(xids), np.int64)
        index = np.minimum(np.searchsorted(self.xids, xids), len(self.xids) - 1)
        return np.where(self.xids[index] == xids, self.rows[index], 0)


BEGINNING = Snapshot(1, 1)
"""A snapshot in which no transaction is visible: the first one of a cluster is 3."""


def full_xids(
    xids: NDArray[np.int64] | NDArray[np.uint32], next_xid: int, ahead: int = XID_CYCLE // 2
) -> Xids:
    """Add the epoch to transaction ids of the WAL: each becomes the greatest full id up to `next_xid + ahead`.

    With half a cycle it is the nearest one: PostgreSQL assigns no id that is more than that past the oldest one that a
    slot still has to read. What is known to be before `next_xid`, -1 ahead, may be older.
    """
    last = next_xid + ahead
    full: Xids = last - (last - np.asarray(xids, np.int64)) % XID_CYCLE
    return full
