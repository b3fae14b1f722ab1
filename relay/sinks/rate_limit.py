"""Spaces the attempts of a sink, or of one of its endpoints (`rate_limit`). No I/O."""

from __future__ import annotations

import time


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

    @property
    def ahead(self) -> float:
        """The seconds until the next turn, which nobody has taken yet."""
        return max(0.0, self._next - time.monotonic())
