"""The declared queues of a group, their figures and items: `relay.queue_figures`, `relay.queue_items`."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime
from typing import Any, LiteralString

import psycopg
from psycopg import sql
from psycopg.rows import class_row
from pydantic import Field

from relay.store.filters import Filter, Text
from relay.store.states import MESSAGES, MessageState, listed


@dataclass(frozen=True, slots=True)
class QueueFigures:
    """How many messages a queue has, each figure up to 100,001, and how long the oldest that can be taken waits.

    `ready` can be taken now or are taken by transactions; `waiting` wait for their time or a retry. `filled` is how
    many messages relay has put into it from the log, None unless it is being filled; `fill_error` is why it is not.
    `fault` is why relay has put no events of the log into it since `stopped_at`. `stuck` counts its sagas whose undo
    has failed for good.
    """

    queue: str
    paused_at: datetime | None
    ready: int
    waiting: int
    leased: int
    dead: int
    oldest_seconds: float
    workers: int
    filled: int | None = None
    fill_error: str | None = None
    stopped_at: datetime | None = None
    fault: str | None = None
    stuck: int = 0

    @property
    def undone(self) -> int:
        """The messages that are neither done nor dead."""
        return self.ready + self.waiting + self.leased


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
    unique_key: str | None
    note: Any
    result: Any
    host_id: str | None


class MessageSelection(Filter):
    """A filter for the messages of a queue: it selects those that meet every condition."""

    id: int | None = Field(None, description="The id of the message.")
    event_id: Text | None = Field(None, description="The id of its event.")
    key: Text | None = Field(None, description="Its ordering key.")
    event_type: Text | None = Field(None, description="Its event_type.")
    host_id: Text | None = Field(None, description="Its host_id.")
    error: Text | None = Field(None, description="A part of the error of its last attempt.")
    states: list[MessageState] | None = Field(
        None, description=f"Its state: {listed(MESSAGES)}; repeatable."
    )

    def arguments(self) -> sql.Composed:
        """Return the conditions as arguments of a function, with their names as placeholders."""
        each = [
            sql.SQL("{} => {}").format(sql.Identifier(n), sql.Placeholder(n)) for n in self.given()
        ]
        return sql.SQL(", ").join(each)


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
            "select queue, paused_at, ready, waiting, leased, dead, oldest_seconds, workers, filled, fill_error,"
            " stopped_at, fault, (select count(*) from relay.sagas as s where s.saga = queue and s.ended_at is null"
            " and s.state = 'stuck') as stuck from relay.queue_figures"
            " where group_id = %s and (%s::text is null or queue = %s) order by queue",
            (group, name, name),
        ).fetchall()


def items(
    conn: psycopg.Connection[Any], name: str, wanted: MessageSelection, limit: int
) -> list[QueueItem]:
    """Read at most `limit` items of a queue that a filter selects, the oldest first. Raises psycopg.Error."""
    tests: dict[str, LiteralString] = {
        "states": "state = any(%(states)s)",
        "error": "strpos(error, %(error)s) > 0",
    }
    given = wanted.given()
    where = [
        sql.SQL(tests[field])
        if field in tests
        else sql.SQL("{} = {}").format(sql.Identifier(field), sql.Placeholder(field))
        for field in given
    ]
    with conn.cursor(row_factory=class_row(QueueItem)) as cursor:
        return cursor.execute(
            sql.SQL(
                "select id, state, event_id, event_type, key, attempts, enqueued_at, first_taken_at, available_at,"
                " error, unique_key, note, result, host_id from relay.queue_items where {} order by id limit %(limit)s"
            ).format(sql.SQL(" and ").join([sql.SQL("queue = %(queue)s"), *where])),
            {"queue": name, "limit": limit, **given},
        ).fetchall()


def stopped(conn: psycopg.Connection[Any], group: str) -> list[tuple[str, datetime, str]]:
    """List a group's queues into which nothing of the log goes, by name: since when, and why. Raises psycopg.Error."""
    return conn.execute(
        "select name, stopped_at, fault from relay.queues where group_id = %s and stopped_at is not null order by name",
        (group,),
    ).fetchall()


def stop(conn: psycopg.Connection[Any], group: str, queue: int, why: str) -> bool | None:
    """Put no more events of the log into a queue, until it is declared otherwise or rebuilt; returns whether any went.

    None if it is to be asked again, since another session declares or drops the queue now: who commits the events of
    all does not wait for it. Raises psycopg.Error.
    """
    free = conn.execute(
        "select from relay.queues where id = %s for update skip locked", (queue,)
    ).rowcount
    if not free:
        is_there = conn.execute("select from relay.queues where id = %s", (queue,)).rowcount > 0
        return None if is_there else False
    stopped = conn.execute(
        "update relay.queues set stopped_at = clock_timestamp(), fault = %s where id = %s and stopped_at is null",
        (why, queue),
    ).rowcount
    if stopped:
        conn.execute("select relay.note_queues(%s)", (group,))
    return stopped > 0


def pause(conn: psycopg.Connection[Any], name: str, paused: bool) -> bool:
    """Pause a queue or let it go on; returns whether that changed anything. Raises psycopg.Error."""
    return _value(conn, "select relay.pause_queue(%s, %s)", (name, paused)) is True


def purge(conn: psycopg.Connection[Any], name: str) -> int:
    """Delete what is in a queue and nobody has; returns how many. Raises psycopg.Error."""
    return int(_value(conn, "select relay.purge_queue(%s)", (name,)))


def cancel(conn: psycopg.Connection[Any], name: str, wanted: MessageSelection) -> int:
    """Cancel selected messages that nobody has; returns how many. Raises psycopg.Error."""
    query = sql.SQL("select relay.cancel_messages(%(queue)s, {})").format(wanted.arguments())
    return int(_value(conn, query, {"queue": name, **wanted.given()}))


def move(
    conn: psycopg.Connection[Any], name: str, wanted: MessageSelection, to: datetime | None
) -> int:
    """Give selected messages that wait for their time another one, None: now; returns how many.

    Raises psycopg.Error.
    """
    query = sql.SQL("select relay.move_messages(%(queue)s, coalesce(%(at)s, now()), {})")
    values = {"queue": name, "at": to, **wanted.given()}
    return int(_value(conn, query.format(wanted.arguments()), values))


def edit(
    conn: psycopg.Connection[Any], name: str, number: int, payload: str, reason: str | None
) -> bool:
    """Give a message that nobody has, or a dead letter, another payload; returns whether there is one.

    Raises psycopg.Error.
    """
    query = "select relay.edit_message(%s, %s, %s::jsonb, %s)"
    return _value(conn, query, (name, number, payload, reason)) is True


def requeue(
    conn: psycopg.Connection[Any], name: str, ids: Collection[int], reason: str | None
) -> int:
    """Put dead letters with some ids into a queue again, and record that; returns how many. Raises psycopg.Error."""
    return int(_value(conn, "select relay.requeue(%s, %s, %s)", (name, list(ids), reason)))


def rebuild(conn: psycopg.Connection[Any], name: str, start: str) -> None:
    """Ask for a queue to be emptied and filled from the log again. Raises psycopg.Error."""
    conn.execute("select relay.rebuild_queue(%s, %s)", (name, start))


def drop(conn: psycopg.Connection[Any], name: str) -> None:
    """Drop a queue with its messages. Raises psycopg.Error."""
    conn.execute("select relay.drop_queue(%s)", (name,))


def _value(
    conn: psycopg.Connection[Any],
    query: LiteralString | sql.Composed,
    parameters: tuple[object, ...] | dict[str, object],
) -> Any:
    row = conn.execute(query, parameters).fetchone()
    return row and row[0]
