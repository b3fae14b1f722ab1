"""The declared queues of a group, their figures and items: `relay.queue_figures`, `relay.queue_items`."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import psycopg
from psycopg.rows import class_row

UNDONE_STATES = ("enqueued", "scheduled", "retry", "leased", "dead")
ITEM_STATES = (*UNDONE_STATES, "done")


@dataclass(frozen=True, slots=True)
class QueueFigures:
    """How many messages a queue has, each figure up to 100,001, and how long the oldest that can be taken waits.

    `ready` can be taken now or are taken by transactions; `waiting` wait for their time or a retry.
    """

    queue: str
    paused_at: datetime | None
    ready: int
    waiting: int
    leased: int
    dead: int
    oldest_seconds: float
    workers: int


@dataclass(frozen=True, slots=True)
class QueueItem:
    """A message of a queue."""

    id: int
    state: str
    event_id: str
    event_type: str
    key: str | None
    attempts: int
    enqueued_at: datetime
    first_taken_at: datetime | None
    available_at: datetime | None
    error: str | None


def names(conn: psycopg.Connection[Any], group: str) -> list[str]:
    """Read the names of a group's queues, in order. Raises psycopg.Error."""
    found = conn.execute(
        "select name from relay.queues where group_id = %s order by name", (group,)
    )
    return [name for (name,) in found]


def figures(
    conn: psycopg.Connection[Any], group: str, name: str | None = None
) -> list[QueueFigures]:
    """Read the figures of a group's queues, or of one, in the order of their names. Raises psycopg.Error."""
    with conn.cursor(row_factory=class_row(QueueFigures)) as cursor:
        return cursor.execute(
            "select queue, paused_at, ready, waiting, leased, dead, oldest_seconds, workers from relay.queue_figures"
            " where group_id = %s and (%s::text is null or queue = %s) order by queue",
            (group, name, name),
        ).fetchall()


def items(
    conn: psycopg.Connection[Any], name: str, states: Collection[str], limit: int
) -> list[QueueItem]:
    """Read at most `limit` items of a queue in some states, the oldest first. Raises psycopg.Error."""
    with conn.cursor(row_factory=class_row(QueueItem)) as cursor:
        return cursor.execute(
            "select id, state, event_id, event_type, key, attempts, enqueued_at, first_taken_at, available_at, error"
            " from relay.queue_items where queue = %s and state = any(%s) order by id limit %s",
            (name, list(states), limit),
        ).fetchall()


def pause(conn: psycopg.Connection[Any], name: str, paused: bool) -> bool:
    """Pause a queue or let it go on; returns whether that changed anything. Raises psycopg.Error."""
    return _value(conn, "select relay.pause_queue(%s, %s)", (name, paused)) is True


def purge(conn: psycopg.Connection[Any], name: str) -> int:
    """Delete what is in a queue and nobody has, and its dead letters; returns how many. Raises psycopg.Error."""
    return int(_value(conn, "select relay.purge_queue(%s)", (name,)))


def requeue(conn: psycopg.Connection[Any], name: str, ids: Collection[int] | None) -> int:
    """Put dead letters into a queue again, all or those with some ids; returns how many. Raises psycopg.Error."""
    return int(
        _value(conn, "select relay.requeue(%s, %s)", (name, None if ids is None else list(ids)))
    )


def drop(conn: psycopg.Connection[Any], name: str) -> None:
    """Drop a queue with its messages. Raises psycopg.Error."""
    conn.execute("select relay.drop_queue(%s)", (name,))


def _value(conn: psycopg.Connection[Any], query: str, parameters: tuple[object, ...]) -> Any:
    row = conn.execute(query.encode(), parameters).fetchone()
    return row and row[0]
