"""What a service publishes."""

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

    `payload` is what JSON can hold, or a dataclass, a pydantic model or a msgspec struct, with UUID, Decimal, date,
    time, datetime and Enum in them; UUID, Decimal and times become texts that hold them exactly. `version` is the
    aggregate's. `event_ts` is when it happened, by default when the transaction began; no handler gets the event before
    `deliver_at`; both need a time zone. `extra` has values for further columns of the outbox, by their names.
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
