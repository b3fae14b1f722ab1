"""Transactions that could not be applied: `relay.dead_letter_queue`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from itertools import islice
from typing import Any
from uuid import UUID

import psycopg
from psycopg import sql
from psycopg.rows import class_row, scalar_row

from relay.events import SQL_TYPES, Event
from relay.faults import exception_text

_CHUNK = 1_000

_FROM_EVENT = {
    "event_id": "id",
    "host_id": "host_id",
    "user_id": "user_id",
    "c_offset": "c_offset",
    "transaction_id": "transaction_id",
    "event_type": "event_type",
    "payload": "payload",
    "metadata": "metadata",
    "commit_lsn": "commit_lsn",
    "aggregate_id": "aggregate_id",
    "aggregate_type": "aggregate_type",
    "aggregate_version": "aggregate_version",
    "event_ts": "event_ts",
    "transaction_ordinal": "transaction_ordinal",
    "transaction_count": "transaction_count",
    "commit_ts": "commit_ts",
    "xid": "xid",
}
_COLUMNS = ("group_id", "handler", "exception", "attempts", *_FROM_EVENT)


def _insert(json_cast: str) -> sql.Composed:
    casts = [
        sql.SQL(json_cast if SQL_TYPES[field] == "jsonb" else f"%s::{SQL_TYPES[field]}")
        for field in _FROM_EVENT.values()
    ]
    return sql.SQL("insert into relay.dead_letter_queue ({}) values (%s, %s, %s, %s, {})").format(
        sql.SQL(", ").join(map(sql.Identifier, _COLUMNS)), sql.SQL(", ").join(casts)
    )


_AS_IT_IS = _insert("%s::jsonb")
_AS_TEXT = _insert("to_jsonb(%s::text)")
"""JSON that jsonb refuses, such as an escaped NUL, is kept as a JSON string of its text."""


def bury(
    conn: psycopg.Connection[Any],
    group: str,
    events: Iterable[Event],
    handler: str | None,
    error: BaseException,
) -> None:
    """Write every event of one business transaction to the dead letters, in the current database transaction.

    `handler` is the one that failed; None where no route matched. What the table's types or the target's encoding
    refuse is written as near to it as can be, since a dead letter that cannot be written would hold up the rest.
    """
    exception = exception_text(error)
    remaining = iter(events)
    while chunk := list(islice(remaining, _CHUNK)):
        try:
            _write(conn, _AS_IT_IS, group, handler, exception, chunk, _plain)
        except (psycopg.DataError, UnicodeEncodeError):
            _write(conn, _AS_TEXT, group, handler, _ascii(exception), chunk, _acceptable)


def _write(
    conn: psycopg.Connection[Any],
    insert: sql.Composed,
    group: str,
    handler: str | None,
    exception: str,
    events: Sequence[Event],
    form: Callable[[str, str | None], str | None],
) -> None:
    first = (group, handler, exception, 1)
    rows = [
        (*first, *(form(SQL_TYPES[field], event.text(field)) for field in _FROM_EVENT.values()))
        for event in events
    ]
    with conn.transaction(), conn.cursor() as cursor:
        cursor.executemany(insert, rows)


def _plain(_: str, text: str | None) -> str | None:
    return text


def _acceptable(sql_type: str, text: str | None) -> str | None:
    """A text that every database takes for the type, or None."""
    if text is None:
        return None
    if sql_type in ("text", "jsonb"):
        return _ascii(text)
    if sql_type == "uuid":
        return text if _is_uuid(text) else None
    if sql_type in ("int", "bigint"):
        digits = 9 if sql_type == "int" else 18
        return text if re.fullmatch(rf"-?\d{{1,{digits}}}", text, re.ASCII) else None
    # Positions and times come from PostgreSQL's own types, or from a column of another type.
    return text if text.isascii() and sql_type == "pg_lsn" else None


def _is_uuid(text: str) -> bool:
    try:
        UUID(text)
    except ValueError:
        return False
    return True


def _ascii(text: str) -> str:
    return text.encode("ascii", "backslashreplace").decode()


@dataclass(frozen=True, slots=True)
class DeadTransaction:
    """One dead business transaction in a list."""

    id: int
    transaction_id: str | None
    host_id: str | None
    events: int
    event_type: str | None
    handler: str | None
    exception: str
    status: str
    created_dt: datetime


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """One dead event, whole."""

    id: int
    group_id: str
    status: str
    handler: str | None
    exception: str
    attempts: int
    host_id: str | None
    user_id: str | None
    transaction_id: str | None
    transaction_ordinal: int | None
    transaction_count: int | None
    event_id: str | None
    event_type: str | None
    aggregate_type: str | None
    aggregate_id: str | None
    aggregate_version: int | None
    event_ts: datetime | None
    c_offset: int | None
    commit_lsn: str | None
    payload: Any
    metadata: Any
    created_dt: datetime


def count(conn: psycopg.Connection[Any], group: str) -> int:
    """How many dead events the group has."""
    with conn.cursor(row_factory=scalar_row) as cursor:
        found = cursor.execute(
            "select count(*) from relay.dead_letter_queue where group_id = %s and status = 'dead'",
            (group,),
        ).fetchone()
    return int(found or 0)


def transactions(conn: psycopg.Connection[Any], group: str, limit: int) -> list[DeadTransaction]:
    """The newest dead transactions, newest first; `id` is that of the first event."""
    with conn.cursor(row_factory=class_row(DeadTransaction)) as cursor:
        return cursor.execute(
            """
            select min(id) as id, transaction_id::text as transaction_id, min(host_id::text) as host_id,
                   count(*)::int as events, (array_agg(event_type order by id))[1] as event_type,
                   min(handler) as handler, min(exception) as exception, min(status) as status,
                   min(created_dt) as created_dt
              from relay.dead_letter_queue
             where group_id = %s
             group by transaction_id, commit_lsn, case when transaction_id is null then (host_id, user_id) end
             order by min(id) desc
             limit %s
            """,
            (group, limit),
        ).fetchall()


def letters(conn: psycopg.Connection[Any], group: str, letter_id: int) -> Iterator[DeadLetter]:
    """Every event of the dead transaction that holds the given letter, in order."""
    columns = [
        sql.SQL("d.{0}::text as {0}").format(sql.Identifier(name))
        if name in ("host_id", "user_id", "transaction_id", "event_id", "commit_lsn")
        else sql.SQL("d.{}").format(sql.Identifier(name))
        for name in DeadLetter.__dataclass_fields__
    ]
    with conn.cursor(row_factory=class_row(DeadLetter)) as cursor:
        yield from cursor.execute(
            sql.SQL(
                """
                select {} from relay.dead_letter_queue d
                  join relay.dead_letter_queue asked on asked.id = %s and asked.group_id = %s
                 where d.group_id = asked.group_id
                   and d.commit_lsn is not distinct from asked.commit_lsn
                   and d.transaction_id is not distinct from asked.transaction_id
                   and (asked.transaction_id is not null
                        or (d.host_id, d.user_id) is not distinct from (asked.host_id, asked.user_id))
                 order by d.id
                """
            ).format(sql.SQL(", ").join(columns)),
            (letter_id, group),
        )


def as_json(item: DeadTransaction | DeadLetter) -> dict[str, Any]:
    """The entry as JSON values: times in ISO 8601."""
    return {
        key: value.isoformat() if isinstance(value, datetime) else value
        for key, value in asdict(item).items()
    }
