"""The snapshots between the transactions of a page of the log. No I/O, and no package, since clients use it."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate


class PageSnapshots:
    """The snapshots after each transaction of a page: each sees this one, those before it, and none after it.

    `xids` are the transactions in the order of the page, each once. `xmax` is that of the snapshot before the page,
    `in_progress`, ascending, are the transactions that the snapshot after the page does not see.
    """

    def __init__(self, xids: Sequence[int], xmax: int, in_progress: Sequence[int]) -> None:
        self._xids = xids
        self._in_progress = in_progress
        self._xmax = [each + 1 for each in accumulate(xids, max, initial=xmax - 1)][1:]
        self._least = list(accumulate(reversed(xids), min))[::-1]
        """The least xid from each transaction on."""

    def after(self, index: int) -> tuple[int, int, tuple[int, ...]]:
        """The `xmin`, the `xmax`, and what was in progress, ascending, of the snapshot after a transaction."""
        xmax = self._xmax[index]
        missing = set(self._in_progress[: bisect_left(self._in_progress, xmax)])
        later = index + 1
        while later < len(self._xids) and self._least[later] < xmax:
            if self._xids[later] < xmax:
                missing.add(self._xids[later])
            later += 1
        return min(missing, default=xmax), xmax, tuple(sorted(missing))
