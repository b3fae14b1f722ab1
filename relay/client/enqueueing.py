"""Puts messages into work queues, in the caller's transaction of the target."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any, Literal, TypedDict, Unpack

from relay.client import sessions
from relay.client.event import Id
from relay.client.payloads import encode_object
from relay.client.scheduled import moment

__all__ = ["MessageOptions", "enqueue", "enqueue_async"]


class MessageOptions(TypedDict, total=False):
    """What may be said of a message beside its payload, as `relay.enqueue` takes it in SQL.

    `key` orders it within the host, in a queue that is ordered. It can be taken from `deliver_at` on, which needs a
    time zone. With a `unique_key`, no second message with that key waits. `on_duplicate` says what becomes of the one
    that does: "skip" leaves it as it is, "replace" gives it these contents and the time if there is one, "move" the
    time alone. While a worker has it, "skip" puts in nothing, and the other two another message, which a worker may
    take beside it.
    """

    event_type: str
    host_id: Id | None
    key: str | None
    deliver_at: datetime | None
    metadata: Mapping[str, Any] | None
    event_id: Id | None
    unique_key: str | None
    on_duplicate: Literal["skip", "replace", "move"]


def enqueue(session: Any, queue: str, payload: Any, **options: Unpack[MessageOptions]) -> int:
    """Put a message into a queue in the session's open transaction, which is not committed; returns its id.

    The session is one that `Outbox.publish` takes, of the database of the queue. The payload is one that an `Event`
    takes. With a `unique_key` the id may be that of the message that is there. Raises EventInvalid, NotInTransaction,
    UnknownSession, and the driver's errors.
    """
    return int(sessions.query(session, _ENQUEUE, _given(queue, payload, options)))


async def enqueue_async(
    session: Any, queue: str, payload: Any, **options: Unpack[MessageOptions]
) -> int:
    """Do what `enqueue` does, in an asynchronous session."""
    return int(await sessions.query_async(session, _ENQUEUE, _given(queue, payload, options)))


def _given(queue: str, payload: Any, options: MessageOptions) -> str:
    unknown = sorted(options.keys() - MessageOptions.__annotations__.keys())
    if unknown:
        raise TypeError(f"enqueue: has no option {unknown[0]!r}")
    texts = {
        name: None if options.get(name) is None else str(options[name])
        for name in ("host_id", "event_id")
    }
    return encode_object(
        {
            "event_type": "message",
            "on_duplicate": "skip",
            **options,
            **texts,
            "queue": queue,
            "payload": payload,
            "deliver_at": moment(options.get("deliver_at"), "deliver_at"),
        }
    )


_ENQUEUE = sessions.Statement.selecting(
    "cast(relay.enqueue(p.a->>'queue', cast(p.a->'payload' as jsonb), p.a->>'event_type', p.a->>'host_id', "
    "p.a->>'key', cast(p.a->>'deliver_at' as timestamptz), nullif(cast(p.a->'metadata' as jsonb), 'null'), "
    "p.a->>'event_id', p.a->>'unique_key', p.a->>'on_duplicate') as text)"
)
