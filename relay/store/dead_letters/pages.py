"""Reads dead letters by pages, for the console: the cost of a page does not depend on how many dead letters exist."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from psycopg import sql
from psycopg.rows import class_row, dict_row, scalar_row

from relay.store.actions import Acted
from relay.store.connections import Connection
from relay.store.dead_letters.selection import DeadLetterSelection

SHOWN_CHARACTERS = 16_000
"""How much of a payload and of an exception is shown, in characters."""
_LINE_CHARACTERS = 300


@dataclass(frozen=True, slots=True)
class Listed:
    """A dead business transaction in a list. `number` is the key of pages, `id` the dead letter of its first event.

    `fault` is the first line of the exception.
    """

    number: int
    id: int
    transaction_id: str | None
    host_id: str | None
    events: int
    event_type: str | None
    sink: str
    handler: str | None
    fault: str
    status: str
    attempts: int
    since: datetime


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of fault of a handler, and how many dead events it has."""

    handler: str | None
    kind: str
    events: int


@dataclass(frozen=True, slots=True)
class ActedOnDead(Acted):
    """One action on a dead transaction; `letter` is the dead letter of its first event."""

    id: int
    letter: int | None
    transaction_id: str | None


def listed(
    conn: Connection, group: str, wanted: DeadLetterSelection, limit: int, before: int | None = None
) -> list[Listed]:
    """List dead transactions with an event that the filter selects, newest first, from before the number `before`."""
    where, parameters = wanted.where()
    with conn.cursor(row_factory=class_row(Listed)) as cursor:
        return cursor.execute(
            sql.SQL(
                """
                with page as materialized (
                    select distinct d.dead_transaction from relay.dead_letter_queue d
                     where {where} and (%(before)s::bigint is null or d.dead_transaction < %(before)s)
                     order by d.dead_transaction desc limit %(limit)s)
                select d.dead_transaction as number, min(d.id) as id, min(d.transaction_id) as transaction_id,
                       min(d.host_id) as host_id, count(*)::int as events,
                       (array_agg(d.event_type order by d.id))[1] as event_type, min(d.sink) as sink,
                       min(d.handler) as handler,
                       min(left(split_part(d.exception, chr(10), 1), %(line)s)) as fault, min(d.status) as status,
                       max(d.attempts) as attempts, min(d.created_dt) as since
                  from page join relay.dead_letter_queue d using (dead_transaction)
                 group by d.dead_transaction order by d.dead_transaction desc
                """
            ).format(where=where),
            {
                **parameters,
                "group": group,
                "before": before,
                "limit": limit,
                "line": _LINE_CHARACTERS,
            },
        ).fetchall()


def statuses(conn: Connection, group: str) -> dict[str, int]:
    """Count the events of the group by status."""
    return dict(
        conn.execute(
            "select status, count(*) from relay.dead_letter_queue where group_id = %s group by status",
            (group,),
        ).fetchall()
    )


def kinds(conn: Connection, group: str, limit: int) -> list[Kind]:
    """List the commonest kinds of fault of dead events, by handler."""
    with conn.cursor(row_factory=class_row(Kind)) as cursor:
        return cursor.execute(
            """
            select handler, split_part(split_part(exception, chr(10), 1), ':', 1) as kind, count(*) as events
              from relay.dead_letter_queue where group_id = %s and status = 'dead'
             group by 1, 2 order by 3 desc, 1, 2 limit %s
            """,
            (group, limit),
        ).fetchall()


def events(conn: Connection, number: int, limit: int, after: int = 0) -> list[dict[str, Any]]:
    """List events of a dead transaction in order, after the dead letter with the id `after`.

    Long values are cut; `payload_bytes` has the whole size.
    """
    with conn.cursor(row_factory=dict_row) as cursor:
        return cursor.execute(
            sql.SQL(
                """
                select d.id, d.status, d.sink, d.handler, left(d.exception, {most}) as exception, d.attempts, d.host_id,
                       d.user_id, d.transaction_id, d.transaction_ordinal, d.transaction_count, d.event_id,
                       d.event_type, d.aggregate_type, d.aggregate_id, d.aggregate_version, d.event_ts,
                       d.deliver_at, d.c_offset, d.commit_lsn::text as commit_lsn, d.created_dt, d.by_reference,
                       {payload} as payload, coalesce(octet_length(d.payload::text), 0) as payload_bytes,
                       {original} as original_payload, {metadata} as metadata,
                       left(d.refused::text, {most}) as refused
                  from relay.dead_letter_queue d
                 where d.dead_transaction = %s and d.id > %s order by d.id limit %s
                """
            ).format(
                most=SHOWN_CHARACTERS,
                payload=_indented("payload"),
                original=_indented("original_payload"),
                metadata=_indented("metadata"),
            ),
            (number, after, limit),
        ).fetchall()


def _indented(column: str) -> sql.Composed:
    """The beginning of a JSON value, indented only if it is short: deep nesting would indent to megabytes."""
    return sql.SQL(
        "left(case when length({0}::text) <= {1} then jsonb_pretty({0}) else {0}::text end, {1})"
    ).format(sql.Identifier("d", column), SHOWN_CHARACTERS)


def payload(conn: Connection, group: str, dead_letter_id: int) -> str | None:
    """Return the whole payload of a dead letter as JSON text; None if there is no such dead letter."""
    with conn.cursor(row_factory=scalar_row) as cursor:
        return cursor.execute(
            "select payload::text from relay.dead_letter_queue where group_id = %s and id = %s",
            (group, dead_letter_id),
        ).fetchone()


def acted(conn: Connection, group: str, limit: int, before: int | None = None) -> list[ActedOnDead]:
    """List the last actions on dead transactions, newest first, from before the id `before`."""
    with conn.cursor(row_factory=class_row(ActedOnDead)) as cursor:
        return cursor.execute(
            """
            select id, letters[1] as letter, transaction_id, action, reason, acted_by, operator, acted_at
              from relay.dead_letter_actions
             where group_id = %(group)s and (%(before)s::bigint is null or id < %(before)s)
             order by id desc limit %(limit)s
            """,
            {"group": group, "limit": limit, "before": before},
        ).fetchall()
