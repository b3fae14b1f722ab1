"""Counts, times and text as commands and the console print them.

Text is escaped for terminals, so that a value from outside cannot move the cursor.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from relay.store.activity import RecentActivity
    from relay.store.dead_letters.selection import FoundDeadLetters
    from relay.store.positions.rewind import GivenUp


def counted(count: int, one: str, many: str) -> str:
    """Return a count with its words: those for one, or those for any other number."""
    return f"{count} {one if count == 1 else many}"


def moment(time: datetime | None) -> str:
    """Return a time in its own zone, such as `2026-03-01 12:00:00 UTC`; a dash without one."""
    return f"{time:%Y-%m-%d %H:%M:%S %Z}" if time else "-"


def pausing(paused: bool, changed: bool) -> str:
    """Return what became of a sink, queue or schedule that was to be paused, or to go on."""
    if paused:
        return "is paused" if changed else "was paused already"
    return "is resumed" if changed else "was not paused"


def due(time: datetime | None) -> str:
    """Return when something is due; one that is due already waits for its turn."""
    if time is not None and time <= datetime.now(UTC):
        return "due"
    return moment(time)


def duration(seconds: float) -> str:
    """Return a duration with its largest unit of which it has two, such as `0.4 s`, `12 s`, `119 s` or `12 min`."""
    seconds = max(0.0, seconds)
    if seconds < 10:
        return f"{seconds:.1f} s"
    for size, unit in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


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


def dead_are(count: int, selected: FoundDeadLetters) -> str:
    """Return how many of the selected dead letters, which are transactions, messages of queues or both, with a verb."""
    if selected.messages == selected.transactions:
        return counted(count, "message is", "messages are")
    if selected.messages:
        return counted(count, "dead letter is", "dead letters are")
    return counted(count, "transaction is", "transactions are")


def dead(selected: FoundDeadLetters) -> str:
    """Return how many transactions, with their events, and how many messages of queues are selected."""
    messages = selected.messages
    if messages == selected.transactions:
        return counted(messages, "message", "messages")
    transactions = with_events(selected.transactions - messages, selected.events - messages)
    of_queues = counted(messages, "message of queues", "messages of queues")
    return f"{transactions} and {of_queues}" if messages else transactions


def replayed_to(selected: FoundDeadLetters) -> str:
    """Return where the selected dead letters are once they are replayed."""
    return "in the queue again" if selected.messages == selected.transactions else "queued"


def given_up(discarded: GivenUp) -> list[str]:
    """Return a line on the dead and deferred transactions that a seek discards, if there are any."""
    if not any(discarded):
        return []
    return [
        f"of the transactions that are delivered again, {discarded.dead} dead ones are discarded and "
        f"{discarded.deferred} deferred ones are forgotten"
    ]


def destination(sink: str, endpoint: str | None) -> str:
    """Where something was to go: the sink, and the one of its endpoints; `-` for the target."""
    return (f"{sink}: {endpoint}" if endpoint else sink) or "-"


def printable(cell: object, kept: str = "") -> str:
    """Return a cell as text with control characters escaped, except those in `kept`."""
    return "".join(c if c.isprintable() or c in kept else repr(c)[1:-1] for c in str(cell))


def printable_json(text: str) -> str:
    """Return the same JSON with control characters, which only strings can hold, as JSON escapes."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else json.dumps(c)[1:-1] for c in text)
