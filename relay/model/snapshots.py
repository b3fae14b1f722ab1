"""Snapshots: which transactions of the source are visible at a moment. They are the positions of polling. No I/O."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Xids = NDArray[np.int64]
"""Full transaction ids, with their epoch."""

_CYCLE = 1 << 32
"""The WAL has transaction ids modulo this."""


@dataclass(frozen=True)
class Snapshot:
    """What PostgreSQL's `pg_snapshot` says: which transactions had ended when it was taken.

    Those below `xmin` had, those from `xmax` on had not, of those between, all but `in_progress` had.

    Source: PostgreSQL documentation, "Transaction ID and Snapshot Information Functions".
    """

    xmin: int
    xmax: int
    in_progress: tuple[int, ...] = ()

    @classmethod
    def parse(cls, text: str) -> Snapshot:
        """Read `xmin:xmax:xid,xid`. Raises ValueError for anything else."""
        xmin, xmax, between = text.split(":")
        return cls(int(xmin), int(xmax), tuple(map(int, between.split(","))) if between else ())

    def __str__(self) -> str:
        return f"{self.xmin}:{self.xmax}:{','.join(map(str, self.in_progress))}"

    @property
    def is_beginning(self) -> bool:
        """Whether it sees nothing at all."""
        return self.xmax <= BEGINNING.xmax

    def certain(self) -> Snapshot:
        """The part of a hot standby's snapshot that is certain: it does not list what is in progress above `xmin`."""
        return Snapshot(self.xmin, self.xmin)

    def sees(self, xids: Xids) -> NDArray[np.bool_]:
        """Which of some transactions are visible if they were committed; a bool for each element of `xids`."""
        visible: NDArray[np.bool_] = xids < self.xmax
        if self.in_progress and bool((xids[visible] >= self.xmin).any()):
            visible &= ~np.isin(xids, self._between)
        return visible

    def covers(self, other: Snapshot) -> bool:
        """Whether this snapshot sees everything that another one sees."""
        later = sum(xid >= self.xmax for xid in other.in_progress)
        return other.xmax - self.xmax <= later and not bool(other.sees(self._between).any())

    @cached_property
    def _between(self) -> Xids:
        return np.array(self.in_progress, np.int64)


BEGINNING = Snapshot(1, 1)
"""Sees nothing: the first transaction of a cluster is 3."""


def full_xids(xids: NDArray[np.int64] | NDArray[np.uint32], next_xid: int) -> Xids:
    """Add the epoch to transaction ids of the WAL: each becomes the full id that is nearest to `next_xid`.

    PostgreSQL gives no id that is further than half a cycle from the oldest one that a slot has still to read.
    """
    near = next_xid & ~(_CYCLE - 1) | np.asarray(xids, np.int64)
    near -= np.where(near - next_xid > _CYCLE // 2, _CYCLE, 0)
    near += np.where(next_xid - near > _CYCLE // 2, _CYCLE, 0)
    return near
