"""Counts what a sink has delivered and what has failed, for `relay sink list`. No I/O."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Activity:
    """Delivery attempts since the last `take`: how many, what succeeded in how many seconds, and the last fault."""

    confirmed: int = 0
    events: int = 0
    failed: int = 0
    seconds: float = 0.0
    slowest: float = 0.0
    fault: str | None = None

    def confirm(self, seconds: float, events: int) -> None:
        """Count an attempt that has delivered so many events after so many seconds."""
        self.confirmed += 1
        self.events += events
        self.seconds += seconds
        self.slowest = max(self.slowest, seconds)

    def fail(self, fault: str) -> None:
        """Count an attempt that has failed; the text is safe in a log."""
        self.failed += 1
        self.fault = fault
