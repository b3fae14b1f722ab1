"""Waits between attempts, and between looks that find nothing: they double up to a longest one."""

from __future__ import annotations

import random

_MOST_DOUBLINGS = 1_000
"""Below the greatest exponent of a float: a wait is in the range of floats after any number of attempts."""


def doubled(first: float, times: int, longest: float) -> float:
    """Return the wait `first` doubled `times` times, but at most `longest` (seconds)."""
    return min(first * 2.0 ** min(times, _MOST_DOUBLINGS), longest)


class Backoff:
    """Waits that double from `first` to `longest` seconds with each that is taken, until `reset`.

    `random_part` of each is random, so that those who wait for the same do not come together: with 0.5 a wait is
    between half of it and all of it.
    """

    def __init__(self, first: float, longest: float, random_part: float = 0.0) -> None:
        self._first = self.next = min(first, longest)
        """`next`: the wait that is taken next, without chance."""
        self._longest = longest
        self._random_part = random_part

    def take(self, longest: float | None = None) -> float:
        """Return how long to wait now, in seconds; `longest` bounds it and the next one instead of the own limit."""
        most = self._longest if longest is None else longest
        wait = min(self.next, most)
        self.next = doubled(wait, 1, most)
        if not self._random_part:
            return wait
        return wait * (1 - self._random_part * random.random())  # noqa: S311

    def reset(self) -> None:
        """Make the next wait short: there was no fault, or something to do."""
        self.next = self._first
