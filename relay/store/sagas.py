"""The sagas of a group and what has happened in them: `relay.sagas`, `relay.saga_steps`."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

import psycopg
from psycopg.rows import class_row
from pydantic import Field

from relay.store import states
from relay.store.filters import Filter, Text
from relay.store.states import SagaState


@dataclass(frozen=True, slots=True)
class SagaRow:
    """A saga; `step` is what it waits for, or the step that has failed, and `next_at` until when it waits."""

    id: int
    saga: str
    key: str
    version: int
    state: str
    step: str | None
    next_at: datetime | None
    since: datetime
    started_at: datetime
    event_id: str
    error: str | None


@dataclass(frozen=True, slots=True)
class SagaEntry:
    """One thing that has happened in a saga."""

    number: int
    kind: str
    step: str
    result: Any
    at: datetime


class SagaSelection(Filter):
    """A filter for sagas: it selects those that meet every condition; without states or an id, those not ended."""

    saga: Text | None = Field(None, description="Its name.")
    id: int | None = Field(None, description="Its id.")
    version: int | None = Field(None, description="Its version.")
    states: list[SagaState] | None = Field(
        None,
        description=f"Its state: {states.listed(states.SAGAS)}; repeatable. By default, not ended.",
    )


def listed(
    conn: psycopg.Connection[Any], group: str, wanted: SagaSelection, limit: int, after: int = 0
) -> list[SagaRow]:
    """Read the sagas of a group that a filter selects, the oldest first, from an id on. Raises psycopg.Error."""
    with conn.cursor(row_factory=class_row(SagaRow)) as cursor:
        return cursor.execute(
            """
            select s.id, s.saga, s.key, s.version, s.state, s.step, s.next_at, s.since, s.started_at, s.event_id,
                   s.error
              from relay.sagas as s join relay.queues as q on q.name = s.saga
             where q.group_id = %(group)s and s.id > %(after)s and (%(saga)s::text is null or s.saga = %(saga)s)
               and (%(id)s::bigint is null or s.id = %(id)s)
               and (%(version)s::int is null or s.version = %(version)s)
               and case when %(states)s::text[] is not null then s.state = any (%(states)s)
                        else %(id)s::bigint is not null or s.ended_at is null end
             order by s.id limit %(limit)s
            """,
            {**dict(wanted), "group": group, "limit": limit, "after": after},
        ).fetchall()


def entries(
    conn: psycopg.Connection[Any], number: int, limit: int | None = None, after: int = 0
) -> list[SagaEntry]:
    """Read what has happened in a saga, in order, from a number on. Raises psycopg.Error."""
    with conn.cursor(row_factory=class_row(SagaEntry)) as cursor:
        return cursor.execute(
            "select number, kind, step, result, at from relay.saga_steps where saga_id = %s and number > %s "
            "order by number limit %s",
            (number, after, limit),
        ).fetchall()


def steer(
    conn: psycopg.Connection[Any],
    saga: str,
    number: int,
    act: str,
    reason: str | None,
    result: str | None,
) -> bool:
    """Act on a saga as `relay.steer_saga` does; returns whether there was something to do. Raises psycopg.Error."""
    row = conn.execute(
        "select relay.steer_saga(%s, %s, %s, %s, %s::json)", (saga, number, act, reason, result)
    ).fetchone()
    return row == (True,)
