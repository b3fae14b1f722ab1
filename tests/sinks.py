"""Creates transactions for sinks without a database."""

from __future__ import annotations

from typing import Any

from relay.model.events import EVENT_FIELDS, Commit, Event, Lsn, Transaction


def make_event(number: int, host: int = 1, **fields: str) -> Event:
    """An event of a host; `number` is its offset and its amount."""
    values = {
        "id": f"{host:08d}-0000-0000-0000-{number:012d}",
        "host_id": f"00000000-0000-0000-0000-{host:012d}",
        "event_type": "order.placed",
        "c_offset": str(number),
        "payload": f'{{"amount": {number}}}',
        **fields,
    }
    return Event(tuple(values.get(name) for name in EVENT_FIELDS))


def transaction(*events: Event) -> Transaction:
    """A business transaction of these events."""
    untyped: Any = events
    return Transaction(None, Commit(Lsn(0), Lsn(0), 0, 0), untyped)
