"""The event that a service publishes."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from datetime import datetime
from typing import Any

from relay import causes

Id = uuid.UUID | str | int


def _new_id() -> uuid.UUID:
    """Return a UUID of version 7: the time first, so that ids go to the right end of an index."""
    milliseconds = time.time_ns() // 1_000_000
    random = int.from_bytes(os.urandom(10))
    variant = 0b10 << 62 | random & (1 << 62) - 1
    return uuid.UUID(int=milliseconds << 80 | 7 << 76 | (random >> 62 & 0xFFF) << 64 | variant)


@dataclass(slots=True)
class Event:
    """One event of an aggregate, such as `Event("order.placed", aggregate=("Order", 42), payload={…})`.

    `payload` is a JSON value, a dataclass, a pydantic model or a msgspec struct, and may contain UUID, Decimal, date,
    time, datetime and Enum; UUID, Decimal and times become texts that keep them exactly. `version` is the aggregate's.
    `id` is by default a new UUID that begins with the time (version 7).
    `event_ts` is when the event happened, by default when the transaction began. No handler gets the event before
    `deliver_at`. Both need a time zone. `extra` has values for further columns of the outbox, by column name.
    """

    event_type: str
    aggregate: tuple[str, Id] | None = None
    _: KW_ONLY
    payload: Any
    version: int | None = None
    metadata: Mapping[str, Any] | None = None
    id: Id = field(default_factory=_new_id)
    event_ts: datetime | None = None
    deliver_at: datetime | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)


def caused_by(event: Any) -> dict[str, Any]:
    """Return the metadata of an event that another one causes: `Event(…, metadata=caused_by(event))`.

    `event` is what a handler, a function, a worker or a reader of relay has got. `correlation_id` is that of the first
    event of the chain, `causation_id` the id of this one, `hop_count` one more than its own. `Outbox.publish` adds them
    by itself in code that relay or a worker calls for one business transaction.
    """
    return causes.caused_by(event)
