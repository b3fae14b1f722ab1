"""Transactions that could not be applied: `relay.dead_letter_queue`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import datetime
from itertools import islice
from typing import Any

import psycopg
from psycopg import sql
from psycopg.rows import class_row, scalar_row

from relay.events import SQL_TYPES, Events
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


def _insert(as_written: bool) -> sql.Composed:
    """The insert of one event; JSON that jsonb refuses (an escaped NUL) is kept as a string of its text."""
    casts = []
    for field in _FROM_EVENT.values():
        if field in ("payload", "metadata") and not as_written:
            casts.append(sql.SQL("to_jsonb(%s::text)"))
        else:
            casts.append(sql.SQL("%s::") + sql.SQL(SQL_TYPES[field]))  # type: ignore[arg-type]
    return sql.SQL("insert into relay.dead_letter_queue ({}) values (%s, %s, %s, %s, {})").format(
        sql.SQL(", ").join(map(sql.Identifier, _COLUMNS)), sql.SQL(", ").join(casts)
    )


def _plain(text: str | None) -> str | None:
    """The text as PostgreSQL can hold it: what was no UTF-8 in the source becomes a replacement character."""
    return (
        None if text is None else text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    )


def bury(
    conn: psycopg.Connection[Any],
    group: str,
    events: Events,
    handler: str | None,
    error: BaseException,
) -> None:
    """Write every event of one business transaction to the dead letters, in the current database transaction.

    `handler` is the one that failed; None where no route matched.
    """
    first = (group, handler, exception_text(error), 1)
    rows = (
        (*first, *(_plain(event.text(field)) for field in _FROM_EVENT.values())) for event in events
    )
    while chunk := list(islice(rows, _CHUNK)):
        try:
            _write(conn, chunk, as_written=True)
        except psycopg.DataError:
            _write(conn, chunk, as_written=False)


def _write(conn: psycopg.Connection[Any], rows: list[tuple[Any, ...]], as_written: bool) -> None:
    with conn.transaction(), conn.cursor() as cursor:
        cursor.executemany(_insert(as_written), rows)


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
