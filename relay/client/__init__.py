"""Publishes events to the outbox inside the caller's transaction. Needs only the caller's database driver.

outbox = Outbox()
outbox.publish(session, Event("order.placed", aggregate=("Order", 42), payload=order), host_id=tenant)
"""

from relay.client.errors import (
    DuplicateEvent,
    EventInvalid,
    EventTooLarge,
    NotInTransaction,
    OutboxError,
    OutboxForbidden,
    OutboxMismatch,
    OutboxMissing,
    TooManyHops,
    UnknownSession,
)
from relay.client.event import Event, caused_by
from relay.client.outbox import Outbox

__all__ = [
    "DuplicateEvent",
    "Event",
    "EventInvalid",
    "EventTooLarge",
    "NotInTransaction",
    "Outbox",
    "OutboxError",
    "OutboxForbidden",
    "OutboxMismatch",
    "OutboxMissing",
    "TooManyHops",
    "UnknownSession",
    "caused_by",
]
