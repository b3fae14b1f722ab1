"""Transactions that could not be applied: `relay.dead_letter_queue`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from itertools import islice
from typing import Any, LiteralString
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
STORED = tuple(_FROM_EVENT)
"""The columns of a letter that hold fields of its event."""
FIELD_OF = _FROM_EVENT
"""The field that each of them holds."""
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
class Filter:
    """Which dead transactions: those with an event that all of this holds of. None says nothing.

    `event_type` and `handler` are exact, `exception` is a part of the text, times are those of the dead-lettering.
    """

    ids: Sequence[int] = ()
    transaction_id: UUID | None = None
    host_id: UUID | None = None
    handler: str | None = None
    event_type: str | None = None
    since: datetime | None = None
    until: datetime | None = None
    exception: str | None = None
    status: str | None = None

    def where(self) -> tuple[sql.Composable, dict[str, Any]]:
        """The condition on a letter `d`, and its parameters."""
        tests: dict[str, tuple[LiteralString, Any]] = {
            "ids": ("d.id = any(%(ids)s)", list(self.ids) or None),
            "transaction": ("d.transaction_id = %(transaction)s", self.transaction_id),
            "host": ("d.host_id = %(host)s", self.host_id),
            "handler": ("d.handler = %(handler)s", self.handler),
            "event_type": ("d.event_type = %(event_type)s", self.event_type),
            "since": ("d.created_dt >= %(since)s", self.since),
            "until": ("d.created_dt < %(until)s", self.until),
            "exception": ("strpos(d.exception, %(exception)s) > 0", self.exception),
            "status": ("d.status = %(status)s", self.status),
        }
        given = {name: test for name, test in tests.items() if test[1] is not None}
        conditions = [sql.SQL(condition) for condition, _ in given.values()]
        return (
            sql.SQL(" and ").join([sql.SQL("d.group_id = %(group)s"), *conditions]),
            {name: value for name, (_, value) in given.items()},
        )


@dataclass(frozen=True, slots=True)
class DeadTransaction:
    """One dead business transaction in a list; `id` is that of its first event, `letters` those of all, in order."""

    id: int
    transaction_id: str | None
    host_id: str | None
    events: int
    event_type: str | None
    handler: str | None
    exception: str
    status: str
    attempts: int
    created_dt: datetime
    letters: list[int]


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
    original_payload: Any
    metadata: Any
    created_dt: datetime


@dataclass(frozen=True, slots=True)
class Done:
    """Something that was done about a dead transaction."""

    action: str
    reason: str | None
    acted_by: str
    acted_at: datetime


_WHOLE: LiteralString = """
    concat_ws('/', coalesce(d.transaction_id::text, concat_ws('/', '', d.host_id, d.user_id)), d.commit_lsn)
"""
"""What the letters of one business transaction have in common."""


def count(conn: psycopg.Connection[Any], group: str) -> int:
    """How many dead events the group has."""
    with conn.cursor(row_factory=scalar_row) as cursor:
        found = cursor.execute(
            "select count(*) from relay.dead_letter_queue where group_id = %s and status = 'dead'",
            (group,),
        ).fetchone()
    return int(found or 0)


def transactions(
    conn: psycopg.Connection[Any],
    group: str,
    limit: int | None = None,
    wanted: Filter | None = None,
    newest_first: bool = True,
) -> list[DeadTransaction]:
    """Dead transactions, whole, newest first or in the order in which they were published."""
    where, parameters = (wanted or Filter()).where()
    with conn.cursor(row_factory=class_row(DeadTransaction)) as cursor:
        return cursor.execute(
            sql.SQL(
                """
                select min(d.id) as id, min(d.transaction_id::text) as transaction_id,
                       min(d.host_id::text) as host_id, count(*)::int as events,
                       (array_agg(d.event_type order by d.id))[1] as event_type, min(d.handler) as handler,
                       min(d.exception) as exception, min(d.status) as status, max(d.attempts) as attempts,
                       min(d.created_dt) as created_dt, array_agg(d.id order by d.id) as letters
                  from relay.dead_letter_queue d
                 where d.group_id = %(group)s
                   and {whole} in (select {whole} from relay.dead_letter_queue d where {where})
                 group by {whole}
                 order by {order}
                 limit %(limit)s
                """
            ).format(
                whole=sql.SQL(_WHOLE),
                where=where,
                order=sql.SQL(
                    "min(d.id) desc" if newest_first else "min(d.c_offset) nulls last, min(d.id)"
                ),
            ),
            {**parameters, "group": group, "limit": limit},
        ).fetchall()


def letters(conn: psycopg.Connection[Any], group: str, ids: Sequence[int]) -> Iterator[DeadLetter]:
    """Every event of the dead transactions that hold the given letters, in order."""
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
                select {columns} from relay.dead_letter_queue d
                 where d.group_id = %(group)s
                   and {whole} in (select {whole} from relay.dead_letter_queue d
                                    where d.group_id = %(group)s and d.id = any(%(ids)s))
                 order by d.id
                """
            ).format(columns=sql.SQL(", ").join(columns), whole=sql.SQL(_WHOLE)),
            {"group": group, "ids": list(ids)},
        )


def texts(conn: psycopg.Connection[Any], ids: Sequence[int]) -> list[tuple[str | None, ...]]:
    """The fields of letters as PostgreSQL prints them, in the order of the ids and of `STORED`."""
    columns = [sql.SQL("{}::text").format(sql.Identifier(name)) for name in STORED]
    return conn.execute(
        sql.SQL(
            "select {} from relay.dead_letter_queue join unnest(%s::bigint[]) with ordinality as asked (id, place)"
            " using (id) order by place"
        ).format(sql.SQL(", ").join(columns)),
        (list(ids),),
    ).fetchall()


def lock(conn: psycopg.Connection[Any], ids: Sequence[int], status: str) -> bool:
    """Lock letters to the end of the transaction; returns whether all of them are there and have the status."""
    found = conn.execute(
        "select id from relay.dead_letter_queue where id = any(%s) and status = %s order by id for update",
        (list(ids), status),
    )
    return found.rowcount == len(ids)


def mark(
    conn: psycopg.Connection[Any],
    group: str,
    ids: Sequence[int],
    action: str,
    status: str,
    reason: str | None = None,
) -> None:
    """Give the letters of one transaction another status, and note why."""
    conn.execute(
        "update relay.dead_letter_queue set status = %s where id = any(%s)", (status, list(ids))
    )
    note(conn, group, ids, action, reason)


def bury_again(
    conn: psycopg.Connection[Any],
    group: str,
    ids: Sequence[int],
    handler: str | None,
    error: BaseException,
) -> None:
    """A transaction that was replayed could not be applied once more."""
    conn.execute(
        """
        update relay.dead_letter_queue
           set status = 'dead', handler = %s, exception = %s, attempts = attempts + 1
         where id = any(%s)
        """,
        (handler, exception_text(error), list(ids)),
    )
    note(conn, group, ids, "died again", None)


def edit(conn: psycopg.Connection[Any], letter_id: int, edited: str) -> bool:
    """Give a letter the payload of another version of it (a JSON object); returns whether that is another one.

    The first payload is kept beside it. PostgreSQL reads the JSON, so numbers keep every digit.
    """
    changed = conn.execute(
        """
        update relay.dead_letter_queue
           set original_payload = coalesce(original_payload, payload), payload = %(edited)s::jsonb -> 'payload'
         where id = %(id)s and payload is distinct from %(edited)s::jsonb -> 'payload'
        """,
        {"edited": edited, "id": letter_id},
    )
    return changed.rowcount > 0


def purge(conn: psycopg.Connection[Any], ids: Sequence[int]) -> int:
    """Delete letters; returns how many there were."""
    return conn.execute(
        "delete from relay.dead_letter_queue where id = any(%s)", (list(ids),)
    ).rowcount


def note(
    conn: psycopg.Connection[Any], group: str, ids: Sequence[int], action: str, reason: str | None
) -> None:
    """Keep what was done about a transaction, by whom and when."""
    conn.execute(
        """
        insert into relay.dead_letter_actions (group_id, letters, transaction_id, action, reason)
        select %(group)s, %(ids)s, (select transaction_id from relay.dead_letter_queue where id = %(first)s),
               %(action)s, %(reason)s
        """,
        {"group": group, "ids": list(ids), "first": ids[0], "action": action, "reason": reason},
    )


def actions(conn: psycopg.Connection[Any], group: str, ids: Sequence[int]) -> list[Done]:
    """What was done about the transaction of some letters, oldest first."""
    with conn.cursor(row_factory=class_row(Done)) as cursor:
        return cursor.execute(
            """
            select action, reason, acted_by, acted_at from relay.dead_letter_actions
             where group_id = %s and letters && %s::bigint[] order by id
            """,
            (group, list(ids)),
        ).fetchall()


def as_json(item: DeadTransaction | DeadLetter | Done) -> dict[str, Any]:
    """The entry as JSON values: times in ISO 8601."""
    return {
        key: value.isoformat() if isinstance(value, datetime) else value
        for key, value in asdict(item).items()
    }
