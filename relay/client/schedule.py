"""Schedules of a service that declares its own: events that relay publishes at given times."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from relay.client import sessions
from relay.client.errors import EventInvalid
from relay.client.event import Event, Id
from relay.client.payloads import encode

__all__ = ["EventSchedule", "drop_schedule", "drop_schedule_async"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EventSchedule:
    """A schedule that a service declares, as `relay.declare_schedule` does; `relay_publisher` may.

    One of `cron`, `every` (seconds) and `at` says when; `timezone` is that of `cron`. `event` is published with an id
    of its own each time; the id, the times and the version of the given one are not used. `jitter` is in seconds. Its
    payload may be what that of a published event may be; `declare` raises EventInvalid for another.
    """

    name: str
    event: Event
    host_id: Id
    user_id: Id | None = None
    cron: str | None = None
    every: int | None = None
    at: datetime | None = None
    timezone: str = "UTC"
    missed: str = "latest"
    jitter: float = 0.0

    def declare(self, session: Any) -> None:
        """Declare it in the session's open transaction, which is not committed. Raises the driver's errors."""
        sessions.execute(session, _DECLARE, self._arguments())

    async def declare_async(self, session: Any) -> None:
        """Do what `declare` does, in an asynchronous session."""
        await sessions.execute_async(session, _DECLARE, self._arguments())

    def _arguments(self) -> str:
        if self.at is not None and self.at.utcoffset() is None:
            raise EventInvalid("at: has no time zone: give it one, such as datetime.now(UTC)")
        publish: dict[str, Any] = {
            "event_type": self.event.event_type,
            "host_id": str(self.host_id),
            "payload": self.event.payload,
        }
        if self.user_id is not None:
            publish["user_id"] = str(self.user_id)
        if self.event.aggregate is not None:
            publish["aggregate_type"], publish["aggregate_id"] = map(str, self.event.aggregate)
        if self.event.metadata:
            publish["metadata"] = dict(self.event.metadata)
        given = {
            "name": self.name,
            "publish": json.loads(encode([publish]))[0],
            "cron": self.cron,
            "every": self.every,
            "at": None if self.at is None else self.at.isoformat(),
            "timezone": self.timezone,
            "missed": self.missed,
            "jitter": self.jitter,
        }
        return json.dumps(given)


def drop_schedule(session: Any, name: str) -> None:
    """Drop a schedule that SQL or a service declared, in the session's open transaction. Raises the driver's errors."""
    sessions.execute(session, _DROP, json.dumps({"name": name}))


async def drop_schedule_async(session: Any, name: str) -> None:
    """Do what `drop_schedule` does, in an asynchronous session."""
    await sessions.execute_async(session, _DROP, json.dumps({"name": name}))


_DECLARE = sessions.Statement.selecting(
    "relay.declare_schedule(p.a->>'name', (p.a->'publish')::jsonb, p.a->>'cron', "
    "make_interval(secs => (p.a->>'every')::float8), (p.a->>'at')::timestamptz, p.a->>'timezone', p.a->>'missed', "
    "make_interval(secs => (p.a->>'jitter')::float8))"
)
_DROP = sessions.Statement.selecting("relay.drop_schedule(p.a->>'name')")
