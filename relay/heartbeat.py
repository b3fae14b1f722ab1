"""Signs of life of a thread: when it made its last step, and what it does. No I/O."""

from __future__ import annotations

import time
from enum import Enum


class Due(Enum):
    """When a healthy thread makes its next step."""

    SOON = "soon"
    """Within seconds: everything that it waits for has a short timeout."""
    LATE = "late"
    """Within minutes: something large may be read or written first."""
    OPEN = "open"
    """Not known: it waits for somebody else, or something else watches it."""


class Heartbeat:
    """When a thread went on last (monotonic clock, seconds), what it does, and when it goes on again.

    The thread beats; anybody may read.
    """

    __slots__ = ("at", "doing", "due")

    def __init__(self) -> None:
        self.at = time.monotonic()
        self.doing = "starts"
        self.due = Due.OPEN

    def update(self, doing: str, due: Due = Due.SOON) -> None:
        """Note that the thread goes on, and what it does from now on."""
        self.doing, self.due = doing, due
        self.at = time.monotonic()
