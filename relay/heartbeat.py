"""Heartbeats of threads, by which health judges whether they make progress. No I/O."""

from __future__ import annotations

import time
from enum import Enum


class Due(Enum):
    """When a healthy thread makes its next step."""

    SOON = "soon"
    """Within seconds: everything that it waits for has a short timeout."""
    LATE = "late"
    """Within minutes: it may read or write something large first."""
    OPEN = "open"
    """Unknown: it waits for another system, or another check watches it."""


class Heartbeat:
    """The last step of a thread: when it was (`at`, monotonic clock in seconds), what follows, when the next is due.

    The thread itself updates it; any thread may read it.
    """

    __slots__ = ("at", "doing", "due")

    def __init__(self) -> None:
        self.at = time.monotonic()
        self.doing = "starts"
        self.due = Due.OPEN

    def update(self, doing: str, due: Due = Due.SOON) -> None:
        """Record a step, and what the thread does from now on."""
        self.doing, self.due = doing, due
        self.at = time.monotonic()
