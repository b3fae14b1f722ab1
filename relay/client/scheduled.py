"""Cancels and moves what was published or enqueued with `deliver_at`, in the caller's transaction of the target."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

from relay.client import sessions
from relay.client.errors import EventInvalid
from relay.client.event import Id

__all__ = [
    "Stop",
    "cancel",
    "cancel_async",
    "cancel_messages",
    "cancel_messages_async",
    "move_messages",
    "move_messages_async",
    "reschedule",
    "reschedule_async",
]


@dataclass(frozen=True, slots=True)
class Stop:
    """What `relay.cancel` or `relay.reschedule` answers about one destination for which an event was deferred.

    `kind` is "target" or "sink", `name` that of the sink; both are None where the event is deferred nowhere. `outcome`
    is that of the SQL functions: "cancelled", "in doubt", "done" or "requested", and "moved", "due", "done" or
    "unknown".
    """

    kind: Literal["target", "sink"] | None
    name: str | None
    outcome: str


def cancel(session: Any, event_id: Id, *, host_id: Id | None = None) -> list[Stop]:
    """Cancel an event in the session's open transaction, which is not committed. Raises the driver's errors.

    The business transaction that it belongs to is not delivered. With a `host_id`, only if it is of that host.
    """
    return _stops(sessions.query(session, _CANCEL, _event(event_id, host_id)))


async def cancel_async(session: Any, event_id: Id, *, host_id: Id | None = None) -> list[Stop]:
    """Do what `cancel` does, in an asynchronous session."""
    return _stops(await sessions.query_async(session, _CANCEL, _event(event_id, host_id)))


def reschedule(
    session: Any, event_id: Id, at: datetime, *, host_id: Id | None = None
) -> list[Stop]:
    """Give a scheduled event another time in the session's open transaction. Raises the driver's errors.

    `at` needs a time zone. The business transaction that the event belongs to is moved.
    """
    return _stops(sessions.query(session, _RESCHEDULE, _event(event_id, host_id, at)))


async def reschedule_async(
    session: Any, event_id: Id, at: datetime, *, host_id: Id | None = None
) -> list[Stop]:
    """Do what `reschedule` does, in an asynchronous session."""
    return _stops(await sessions.query_async(session, _RESCHEDULE, _event(event_id, host_id, at)))


def cancel_messages(
    session: Any,
    queue: str,
    *,
    id: int | None = None,
    event_id: Id | None = None,
    key: str | None = None,
) -> int:
    """Cancel the messages of a queue with an id, of an event or of a key that no worker has; returns how many.

    Raises the driver's errors.
    """
    return int(sessions.query(session, _CANCEL_MESSAGES, _messages(queue, id, event_id, key)))


async def cancel_messages_async(
    session: Any,
    queue: str,
    *,
    id: int | None = None,
    event_id: Id | None = None,
    key: str | None = None,
) -> int:
    """Do what `cancel_messages` does, in an asynchronous session."""
    given = _messages(queue, id, event_id, key)
    return int(await sessions.query_async(session, _CANCEL_MESSAGES, given))


def move_messages(
    session: Any,
    queue: str,
    at: datetime,
    *,
    id: int | None = None,
    event_id: Id | None = None,
) -> int:
    """Give messages of a queue that wait for their time another one; returns how many. Raises the driver's errors."""
    return int(sessions.query(session, _MOVE_MESSAGES, _messages(queue, id, event_id, None, at)))


async def move_messages_async(
    session: Any,
    queue: str,
    at: datetime,
    *,
    id: int | None = None,
    event_id: Id | None = None,
) -> int:
    """Do what `move_messages` does, in an asynchronous session."""
    given = _messages(queue, id, event_id, None, at)
    return int(await sessions.query_async(session, _MOVE_MESSAGES, given))


def _event(event_id: Id, host_id: Id | None, at: datetime | None = None) -> str:
    host = None if host_id is None else str(host_id)
    return json.dumps({"event_id": str(event_id), "host_id": host, "at": moment(at)})


def _messages(
    queue: str, number: int | None, event_id: Id | None, key: str | None, at: datetime | None = None
) -> str:
    event = None if event_id is None else str(event_id)
    given = {"queue": queue, "id": number, "event_id": event, "key": key, "at": moment(at)}
    return json.dumps(given)


def moment(at: datetime | None, name: str = "at") -> str | None:
    """Return a time as text. Raises EventInvalid, which names the argument, for one without a time zone."""
    if at is not None and at.utcoffset() is None:
        raise EventInvalid(f"{name}: has no time zone: give it one, such as datetime.now(UTC)")
    return None if at is None else at.isoformat()


def _stops(text: str) -> list[Stop]:
    return [Stop(**each) for each in json.loads(text)]


_CANCEL = sessions.Statement.selecting(
    "cast(json_agg(c) as text)",
    " cross join lateral relay.cancel(p.a->>'event_id', p.a->>'host_id') as c",
)
_RESCHEDULE = sessions.Statement.selecting(
    "cast(json_agg(c) as text)",
    " cross join lateral "
    "relay.reschedule(p.a->>'event_id', cast(p.a->>'at' as timestamptz), p.a->>'host_id') as c",
)
_CANCEL_MESSAGES = sessions.Statement.selecting(
    "cast(relay.cancel_messages(p.a->>'queue', p.a->>'event_id', p.a->>'key', "
    "cast(p.a->>'id' as bigint)) as text)"
)
_MOVE_MESSAGES = sessions.Statement.selecting(
    "cast(relay.move_messages(p.a->>'queue', cast(p.a->>'at' as timestamptz), p.a->>'event_id', "
    "cast(p.a->>'id' as bigint)) as text)"
)
