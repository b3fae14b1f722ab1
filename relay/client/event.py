"""The event that a service publishes."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from datetime import datetime
from typing import Any

Id = uuid.UUID | str | int


@dataclass(slots=True)
class Event:
    """One event of an aggregate, such as `Event("order.placed", aggregate=("Order", 42), payload={…})`.

    `payload` is a JSON value, a dataclass, a pydantic model or a msgspec struct, and may contain UUID, Decimal, date,
    time, datetime and Enum; UUID, Decimal and times become texts that keep them exactly. `version` is the aggregate's.
    `event_ts` is when the event happened, by default when the transaction began. No handler gets the event before
    `deliver_at`. Both need a time zone. `extra` has values for further columns of the outbox, by column name.
    """

    event_type: str
    aggregate: tuple[str, Id] | None = None
    _: KW_ONLY
    payload: Any
    version: int | None = None
    metadata: Mapping[str, Any] | None = None
    id: Id = field(default_factory=uuid.uuid4)
    event_ts: datetime | None = None
    deliver_at: datetime | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
