"""Limits how fast a sink delivers: a rate, and a share of a processor. No I/O."""

from __future__ import annotations

import time

_BURST_SECONDS = 0.005


class RateLimit:
    """Spaces turns evenly, `rate` a second."""

    def __init__(self, rate: float) -> None:
        self._interval = 1 / rate
        self._next = 0.0

    def turn(self) -> float:
        """Take the next turn; returns the seconds until it."""
        now = time.monotonic()
        turn = max(now, self._next)
        self._next = turn + self._interval
        return turn - now


class ProcessorShare:
    """Limits a thread to a share of a processor, in small portions, so that other threads of the process run.

    Python runs one thread at a time.
    """

    def __init__(self, share: float) -> None:
        self._share = share
        self._left = _BURST_SECONDS
        self._at, self._used = time.monotonic(), time.thread_time()

    def wait(self) -> float:
        """Seconds that the calling thread has to wait; 0 means that it may run now."""
        at, used = time.monotonic(), time.thread_time()
        self._left += (at - self._at) * self._share - (used - self._used)
        self._left = min(self._left, _BURST_SECONDS)
        self._at, self._used = at, used
        return max(0.0, -self._left / self._share)
