"""Counts, times and text as commands and the console print them.

Text is escaped for terminals, so that a value from outside cannot move the cursor.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from relay.store.activity import RecentActivity


def counted(count: int, one: str, many: str) -> str:
    """Return a count with its words: those for one, or those for any other number."""
    return f"{count} {one if count == 1 else many}"


def moment(time: datetime | None) -> str:
    """Return a time in its own zone, such as `2026-03-01 12:00:00 UTC`; a dash without one."""
    return f"{time:%Y-%m-%d %H:%M:%S %Z}" if time else "-"


def due(time: datetime | None) -> str:
    """Return when something is due; one that is due already waits for its turn."""
    if time is not None and time <= datetime.now(UTC):
        return "due"
    return moment(time)


def lasting(seconds: float) -> str:
    """Return a duration with its largest unit, such as `12 min`."""
    for limit, divisor, unit in ((120, 1, "s"), (7200, 60, "min"), (172_800, 3600, "h")):
        if seconds < limit:
            return f"{seconds / divisor:.0f} {unit}"
    return f"{seconds / 86_400:.0f} d"


def recently(recent: RecentActivity | None) -> str:
    """Return what became of a sink's delivery attempts in the last minutes, such as `120 ok, 3 failed, 12 ms`."""
    if recent is None:
        return "-"
    parts = [f"{recent.confirmed} ok", f"{recent.failed} failed"]
    if recent.mean_seconds is not None:
        parts.append(f"{recent.mean_seconds * 1000:.0f} ms")
    return ", ".join(parts)


def with_events(transactions: int, events: int) -> str:
    """Return how many transactions there are, and how many events they have."""
    return f"{counted(transactions, 'transaction', 'transactions')} with {counted(events, 'event', 'events')}"


def printable(cell: object, kept: str = "") -> str:
    """Return a cell as text with control characters escaped, except those in `kept`."""
    return "".join(c if c.isprintable() or c in kept else repr(c)[1:-1] for c in str(cell))


def printable_json(text: str) -> str:
    """Return the same JSON with control characters, which only strings can hold, as JSON escapes."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else json.dumps(c)[1:-1] for c in text)
