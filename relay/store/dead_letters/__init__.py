"""Writes dead letters, the events of transactions that could not be applied, and changes their status.

The table is `relay.dead_letter_queue`. `selection` reads them, `edits` applies edited payloads.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, LiteralString

import psycopg
from psycopg import sql
from psycopg.rows import class_row, scalar_row

from relay.faults import exception_text
from relay.model.events import ID_FIELDS, SQL_TYPES, Event
from relay.store.actions import Acted

if TYPE_CHECKING:
    # The module imports the connection pool, which `relay --help` does not need.
    from relay.store.connections import Connection

_CHUNK = 1_000
"""How many events are written at once."""

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
    "deliver_at": "deliver_at",
    "headers": "headers",
}
STORED = tuple(_FROM_EVENT)
"""The columns of a dead letter that hold fields of its event."""
FIELD_OF = _FROM_EVENT
"""The field that each column of `STORED` holds."""

ColumnValues = tuple[str | None, ...]
"""The values of `STORED` as text."""
DeadLetterRow = dict[str, str | None]
"""The fields of a dead event by the names in `STORED`, as PostgreSQL prints them."""

_FACTS = ("group_id", "dead_transaction", "sink", "undelivered", "handler", "exception")
"""The columns that all dead letters of a transaction have alike, as `insert` writes them."""
_TYPES: list[LiteralString] = [
    "text" if field in ID_FIELDS else SQL_TYPES.get(field, "jsonb")
    for field in _FROM_EVENT.values()
]
_INSERT = sql.SQL("insert into relay.dead_letter_queue ({}) values ({}, %s::json, {})").format(
    sql.SQL(", ").join(map(sql.Identifier, (*_FACTS, "refused", *_FROM_EVENT))),
    sql.SQL(", ").join([sql.Placeholder()] * len(_FACTS)),
    sql.SQL(", ").join(sql.SQL(f"%s::{sql_type}") for sql_type in _TYPES),
)

_REFUSALS = (
    psycopg.DataError,
    psycopg.errors.ProgramLimitExceeded,
    psycopg.errors.StatementTooComplex,
    UnicodeEncodeError,
)
"""The errors by which a value is refused: by its type, its size or depth, or the encoding of the target."""


def insert(
    conn: Connection,
    group: str,
    events: Iterable[Event],
    handler: str | None,
    error: BaseException,
    sink: str = "",
    undelivered: bool = False,
) -> int:
    """Write every event of one business transaction to the dead letters, in the current database transaction.

    `handler` is the one that failed; None if no route matched. `sink` is the one that could not deliver the events;
    they are replayed to it alone. It is '' if the events could not be applied to the target; `undelivered` then says
    that no sink has received them either. Returns the number of the dead transaction. A value that its column
    refuses is stored as text in `refused`: a dead letter that cannot be written would block everything after it.
    """
    number = _next_number(conn)
    facts = (group, number, sink, undelivered, handler)
    exception = exception_text(error)
    remaining = iter(events)
    while chunk := list(islice(remaining, _CHUNK)):
        rows = [tuple(event.text(field) for field in _FROM_EVENT.values()) for event in chunk]
        try:
            _write(conn, [(*facts, exception, None, *row) for row in rows])
        except _REFUSALS:
            exception = _writable(conn, exception)
            _write(conn, [(*facts, exception, *row) for row in _degraded(conn, rows)])
    return number


def _next_number(conn: Connection) -> int:
    with conn.cursor(row_factory=scalar_row) as cursor:
        number = cursor.execute("select nextval('relay.dead_transactions')").fetchone()
    return int(number or 0)


def _write(conn: Connection, rows: Sequence[Sequence[Any]]) -> None:
    with conn.transaction(), conn.cursor() as cursor:
        cursor.executemany(_INSERT, rows)


def _degraded(conn: Connection, rows: Sequence[ColumnValues]) -> Iterator[ColumnValues]:
    """Yield the rows with values that their columns accept, each after a JSON object of the values that they refuse."""
    by_column = [
        _accepted(conn, sql_type, values)
        for sql_type, values in zip(_TYPES, zip(*rows, strict=True), strict=True)
    ]
    for row, accepted in zip(rows, zip(*by_column, strict=True), strict=True):
        refused = {
            name: value
            for name, value, is_accepted in zip(STORED, row, accepted, strict=True)
            if not is_accepted
        }
        yield (
            json.dumps(refused) if refused else None,
            *(
                value if is_accepted else _nearest(sql_type, value or "")
                for sql_type, value, is_accepted in zip(_TYPES, row, accepted, strict=True)
            ),
        )


def _accepted(
    conn: Connection, sql_type: LiteralString, values: Sequence[str | None]
) -> list[bool]:
    """Return for each value whether PostgreSQL accepts it for a type. Refused values are found by bisection."""
    try:
        with conn.transaction():
            conn.execute(
                sql.SQL("select count(cast(value as {})) from unnest(%s::text[]) as value").format(
                    sql.SQL(sql_type)
                ),
                (list(values),),
            )
    except _REFUSALS:
        if len(values) == 1:
            return [False]
        middle = len(values) // 2
        first = _accepted(conn, sql_type, values[:middle])
        return first + _accepted(conn, sql_type, values[middle:])
    return [True] * len(values)


def _nearest(sql_type: str, value: str) -> str | None:
    """Return the value that a column stores instead of one that it refuses."""
    if sql_type == "text":
        return _ascii(value)
    # JSON that jsonb refuses, such as an escaped NUL, can be read as a JSON string of its text.
    return json.dumps(_ascii(value)) if sql_type == "jsonb" else None


def _writable(conn: Connection, text: str) -> str:
    """Return the text, escaped if the encoding of the target lacks one of its characters."""
    return text if all(_accepted(conn, "text", [text])) else _ascii(text)


def _ascii(text: str) -> str:
    return text.encode("ascii", "backslashreplace").decode()


class DeadLetterAction(Acted):
    """An action on a dead transaction."""

    __slots__ = ()


def count(conn: Connection, group: str) -> int:
    """Count the dead events of the group."""
    with conn.cursor(row_factory=scalar_row) as cursor:
        events = cursor.execute(
            "select count(*) from relay.dead_letter_queue where group_id = %s and status = 'dead'",
            (group,),
        ).fetchone()
    return int(events or 0)


def count_by_handler(conn: Connection, group: str) -> dict[tuple[str, str], int]:
    """Count the dead transactions by sink (empty: the target) and handler (empty: no handler failed)."""
    rows = conn.execute(
        """
        select sink, coalesce(handler, ''), count(distinct dead_transaction) from relay.dead_letter_queue
         where group_id = %s and status = 'dead' group by 1, 2
        """,
        (group,),
    )
    return {(sink, handler): count for sink, handler, count in rows}


def dead_of(conn: Connection, group: str, events: Sequence[str]) -> set[str]:
    """Return which of some event ids have a dead letter. Raises psycopg.Error."""
    with conn.cursor(row_factory=scalar_row) as cursor:
        return set(
            cursor.execute(
                "select event_id from relay.dead_letter_queue where group_id = %s and event_id = any(%s::text[])",
                (group, list(events)),
            )
        )


def transaction_of(conn: Connection, group: str, dead_letter_id: int) -> int | None:
    """Return the number of the dead transaction of a dead letter; None if the group has no such dead letter."""
    with conn.cursor(row_factory=scalar_row) as cursor:
        return cursor.execute(
            "select dead_transaction from relay.dead_letter_queue where group_id = %s and id = %s",
            (group, dead_letter_id),
        ).fetchone()


def stored(
    conn: Connection, dead: Sequence[int], at_once: int
) -> Iterator[tuple[int, DeadLetterRow]]:
    """Yield (dead transaction, event) for the events of dead transactions as they were published, in order.

    A value that its column refused is returned as it was published. Fetches `at_once` rows at a time. Needs an open
    database transaction.
    """
    columns = [sql.SQL("{}::text").format(sql.Identifier(name)) for name in STORED]
    # Each cursor has its own name: one may be read while another is open.
    with conn.cursor(f"dead_letters_{dead[0]}_{len(dead)}") as cursor:
        cursor.itersize = at_once
        cursor.execute(
            sql.SQL(
                """
                select dead_transaction, refused::text, original_payload is not null, {}
                  from relay.dead_letter_queue where dead_transaction = any(%s) order by dead_transaction, id
                """
            ).format(sql.SQL(", ").join(columns)),
            (list(dead),),
        )
        for number, refused, edited, *values in cursor:
            event = dict(zip(STORED, values, strict=True))
            if refused is not None:
                as_published = json.loads(refused)
                if edited:
                    as_published.pop("payload", None)
                event |= as_published
            yield number, event


def lock(conn: Connection, dead: Sequence[int], statuses: Sequence[str]) -> set[int]:
    """Lock dead transactions until the database transaction ends; returns those that have one of the statuses."""
    with conn.cursor(row_factory=scalar_row) as cursor:
        cursor.execute(
            """
            with locked as (
                select dead_transaction, status from relay.dead_letter_queue
                 where dead_transaction = any(%s) order by id for update)
            select dead_transaction from locked group by dead_transaction having bool_and(status = any(%s))
            """,
            (list(dead), list(statuses)),
        )
        return set(cursor)


def mark(
    conn: Connection,
    group: str,
    dead: Sequence[int],
    action: str,
    status: str,
    reason: str | None = None,
) -> None:
    """Set the status of dead transactions, and record the action."""
    conn.execute(
        "update relay.dead_letter_queue set status = %s where dead_transaction = any(%s)",
        (status, list(dead)),
    )
    note(conn, group, dead, action, reason)


def mark_dead_again(
    conn: Connection,
    group: str,
    number: int,
    handler: str | None,
    error: BaseException,
) -> None:
    """Set a replayed transaction to dead again, since it could not be applied."""
    exception = _writable(conn, exception_text(error))
    conn.execute(
        """
        update relay.dead_letter_queue
           set status = 'dead', handler = %s, exception = %s, attempts = attempts + 1
         where dead_transaction = %s
        """,
        (handler, exception, number),
    )
    note(conn, group, [number], "died again", None)


def put_back(
    conn: Connection,
    group: str,
    dead: Sequence[int],
    exception: str,
    reason: str | None,
) -> None:
    """Cancel the replay of dead transactions: they are dead again."""
    conn.execute(
        "update relay.dead_letter_queue set status = 'dead', exception = %s where dead_transaction = any(%s)",
        (_writable(conn, exception), list(dead)),
    )
    note(conn, group, dead, "cancel", reason)


def mark_by_reference(conn: Connection, number: int, offsets: Sequence[int]) -> None:
    """Mark the dead letters at these c_offsets: only the outbox has their payload and metadata."""
    conn.execute(
        "update relay.dead_letter_queue set by_reference = true where dead_transaction = %s and c_offset = any(%s)",
        (number, list(offsets)),
    )


def by_reference(conn: Connection, dead: Sequence[int]) -> tuple[int, int] | None:
    """Return id and c_offset of the first dead letter whose payload only the outbox has; None if there is none."""
    return conn.execute(
        """
        select id, c_offset from relay.dead_letter_queue
         where dead_transaction = any(%s) and by_reference order by id limit 1
        """,
        (list(dead),),
    ).fetchone()


def purge(conn: Connection, dead: Sequence[int]) -> int:
    """Delete dead transactions; returns how many dead letters they had."""
    return conn.execute(
        "delete from relay.dead_letter_queue where dead_transaction = any(%s)", (list(dead),)
    ).rowcount


def note(
    conn: Connection, group: str, dead: Sequence[int], action: str, reason: str | None
) -> None:
    """Record an action on each of the dead transactions. The server adds who acted, and when."""
    conn.execute(
        """
        insert into relay.dead_letter_actions (group_id, dead_transaction, letters, transaction_id, action, reason)
        select %(group)s, dead_transaction, array_agg(id order by id), min(transaction_id),
               %(action)s, %(reason)s
          from relay.dead_letter_queue where dead_transaction = any(%(dead)s)
         group by dead_transaction order by dead_transaction
        """,
        {"group": group, "dead": list(dead), "action": action, "reason": reason},
    )


def actions(conn: Connection, number: int) -> list[DeadLetterAction]:
    """List the actions on a dead transaction, oldest first."""
    with conn.cursor(row_factory=class_row(DeadLetterAction)) as cursor:
        return cursor.execute(
            """
            select action, reason, acted_by, operator, acted_at from relay.dead_letter_actions
             where dead_transaction = %s order by id
            """,
            (number,),
        ).fetchall()


def statuses(conn: Connection, dead: Sequence[int]) -> dict[str, int]:
    """Count the dead transactions by status; purged ones are not counted."""
    rows = conn.execute(
        """
        select status, count(distinct dead_transaction) from relay.dead_letter_queue
         where dead_transaction = any(%s) group by status
        """,
        (list(dead),),
    )
    return dict(rows.fetchall())
