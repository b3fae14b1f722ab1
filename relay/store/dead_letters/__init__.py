"""Writes dead letters, the events of transactions that could not be applied, and changes their status.

The table is `relay.dead_letter_queue`. The dead messages of work queues are in `relay.queue_dead_letters`, which the
functions of queues write; the view `relay.dead_letters` has both. `selection` reads them, `edits` applies edited
payloads.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, LiteralString, NamedTuple

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
_COPIED_AT_ONCE = 64 * 1024
"""About how many characters are sent at once."""
_CHUNK_CHARACTERS = 8 * 1024 * 1024
"""The most characters of their values, but for the last one."""

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

_FACTS = (
    *("group_id", "dead_transaction", "sink", "undelivered", "handler", "attempts"),
    "endpoint",
)
"""The columns that all dead letters of a transaction have alike, as `_rows` writes them, but for the exception."""
_TYPES: list[LiteralString] = [
    "text" if field in ID_FIELDS else SQL_TYPES.get(field, "jsonb")
    for field in _FROM_EVENT.values()
]
# COPY, since an INSERT of each event costs the server three times as much, and psycopg five times.
_COPY = sql.SQL("copy relay.dead_letter_queue ({}) from stdin").format(
    sql.SQL(", ").join(
        map(sql.Identifier, (*_FACTS, "exception", "by_reference", "refused", *_FROM_EVENT))
    )
)

_TABLES = (
    sql.Identifier("relay", "dead_letter_queue"),
    sql.Identifier("relay", "queue_dead_letters"),
)
_QUEUE = "queue:"
"""How the name of a consumer begins that is a work queue."""

_CYCLE = 1 << 32
"""The xids of dead letters are modulo this number, as in the WAL."""

_REFUSALS = (
    psycopg.DataError,
    psycopg.errors.ProgramLimitExceeded,
    psycopg.errors.StatementTooComplex,
    UnicodeEncodeError,
)
"""The errors by which a value is refused: by its type, its size or depth, or the encoding of the target."""


def of_queue(name: str) -> str:
    """Return the consumer that a work queue is, as dead letters name it."""
    return _QUEUE + name


def queue_of(consumer: str) -> str | None:
    """Return the work queue that a consumer of dead letters is; None for the target and sinks."""
    return consumer.removeprefix(_QUEUE) if consumer.startswith(_QUEUE) else None


@dataclass(frozen=True, slots=True)
class NewDeadTransaction:
    """A business transaction to be dead-lettered.

    `handler` is the one that failed, at the `attempts`-th attempt; None if no route matched. `undelivered` says of one
    that could not be applied to the target that no sink has received its events either. `by_reference` has the
    c_offsets of events whose payload and metadata only the outbox has; it may grow while `events` are read. Of several
    endpoints it is dead for `endpoint` alone.
    """

    events: Iterable[Event]
    handler: str | None
    error: BaseException
    undelivered: bool = False
    by_reference: Collection[int] = ()
    attempts: int = 1
    endpoint: str | None = None


class _NewDeadLetter(NamedTuple):
    """A dead letter: the values of `_FACTS` and of `STORED`; `refused` is a JSON object of those that are refused."""

    facts: tuple[str | None, ...]
    exception: str
    by_reference: bool
    values: ColumnValues
    refused: str | None = None

    def line(self) -> str:
        """The row in COPY's text format."""
        by_reference = "t" if self.by_reference else "f"
        fields = (*self.facts, self.exception, by_reference, self.refused, *self.values)
        return "\t".join(map(_copied, fields)) + "\n"


def insert(
    conn: Connection, group: str, dead: Sequence[NewDeadTransaction], sink: str = ""
) -> list[int]:
    """Write every event of business transactions to the dead letters, in the current database transaction.

    `sink` is the one that could not deliver the events; they are replayed to it alone. It is '' if the events could not
    be applied to the target. Returns the numbers of the dead transactions, in the order of `dead`. A value that its
    column refuses is stored as text in `refused`: a dead letter that cannot be written would block everything after it.

    The number of statements grows with that of thousands of events, and with the values that are refused.
    """
    numbers = _next_numbers(conn, len(dead))
    for rows in _chunks(_rows(group, sink, zip(numbers, dead, strict=True))):
        try:
            _write(conn, rows)
        except _REFUSALS:
            _write(conn, list(_degraded(conn, rows)))
    return numbers


def _next_numbers(conn: Connection, count: int) -> list[int]:
    with conn.cursor(row_factory=scalar_row) as cursor:
        return cursor.execute(
            "select nextval('relay.dead_transactions') from generate_series(1, %s)", (count,)
        ).fetchall()


def _rows(
    group: str, sink: str, dead: Iterable[tuple[int, NewDeadTransaction]]
) -> Iterator[_NewDeadLetter]:
    for number, each in dead:
        undelivered = "t" if each.undelivered else "f"
        facts = (
            *(group, str(number), sink, undelivered, each.handler, str(each.attempts)),
            each.endpoint,
        )
        exception = exception_text(each.error)
        for event in each.events:
            values = tuple(event.text(field) for field in _FROM_EVENT.values())
            yield _NewDeadLetter(facts, exception, event.c_offset in each.by_reference, values)


def _chunks(rows: Iterable[_NewDeadLetter]) -> Iterator[list[_NewDeadLetter]]:
    chunk: list[_NewDeadLetter] = []
    size = 0
    for row in rows:
        chunk.append(row)
        size += len(row.exception) + sum(len(value) for value in row.values if value)
        if len(chunk) >= _CHUNK or size >= _CHUNK_CHARACTERS:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def _write(conn: Connection, rows: Sequence[_NewDeadLetter]) -> None:
    with conn.transaction(), conn.cursor() as cursor, cursor.copy(_COPY) as copy:
        lines: list[str] = []
        size = 0
        for row in rows:
            lines.append(row.line())
            size += len(lines[-1])
            if size > _COPIED_AT_ONCE:
                copy.write("".join(lines))
                lines, size = [], 0
        copy.write("".join(lines))


def _copied(value: str | None) -> str:
    """Return a field in COPY's text format.

    Source: PostgreSQL documentation, "COPY", Text Format.
    """
    if value is None:
        return "\\N"
    if "\\" in value:
        value = value.replace("\\", "\\\\")
    return value.replace("\t", "\\t").replace("\n", "\\n").replace("\r", "\\r")


def _degraded(conn: Connection, rows: Sequence[_NewDeadLetter]) -> Iterator[_NewDeadLetter]:
    """Yield the rows with values that their columns accept, and the values that they refuse in `refused`."""
    exceptions = _writable(conn, [row.exception for row in rows])
    columns = zip(*(row.values for row in rows), strict=True)
    by_column = [
        _accepted(conn, sql_type, values) for sql_type, values in zip(_TYPES, columns, strict=True)
    ]
    for row, exception, accepted in zip(
        rows, exceptions, zip(*by_column, strict=True), strict=True
    ):
        refused = {
            name: value
            for name, value, is_accepted in zip(STORED, row.values, accepted, strict=True)
            if not is_accepted
        }
        values = tuple(
            value if is_accepted else _nearest(sql_type, value or "")
            for sql_type, value, is_accepted in zip(_TYPES, row.values, accepted, strict=True)
        )
        yield _NewDeadLetter(
            row.facts,
            exception,
            row.by_reference,
            values,
            json.dumps(refused) if refused else None,
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


def _writable(conn: Connection, texts: Sequence[str]) -> list[str]:
    """Return the texts, each escaped if the encoding of the target lacks one of its characters."""
    distinct = list(dict.fromkeys(texts))
    accepted = dict(zip(distinct, _accepted(conn, "text", distinct), strict=True))
    return [text if accepted[text] else _ascii(text) for text in texts]


def _ascii(text: str) -> str:
    return text.encode("ascii", "backslashreplace").decode()


class DeadLetterAction(Acted):
    """An action on a dead transaction."""

    __slots__ = ()


def count(conn: Connection, group: str) -> int:
    """Count the dead events of the group, also those of work queues."""
    with conn.cursor(row_factory=scalar_row) as cursor:
        events = cursor.execute(
            "select count(*) from relay.dead_letters where group_id = %s and status = 'dead'",
            (group,),
        ).fetchone()
    return int(events or 0)


def count_by_handler(conn: Connection, group: str) -> dict[tuple[str, str], int]:
    """Count the dead transactions by consumer (empty: the target) and handler (empty: no handler failed)."""
    rows = conn.execute(
        """
        select consumer, coalesce(handler, ''), count(distinct dead_transaction) from relay.dead_letters
         where group_id = %s and status = 'dead' group by 1, 2
        """,
        (group,),
    )
    return {(consumer, handler): count for consumer, handler, count in rows}


def dead_of(conn: Connection, group: str, events: Sequence[str]) -> set[str]:
    """Return which of some ids of events of the log have a dead letter. Raises psycopg.Error."""
    with conn.cursor(row_factory=scalar_row) as cursor:
        return set(
            cursor.execute(
                "select event_id from relay.dead_letter_queue where group_id = %s and event_id = any(%s::text[])",
                (group, list(events)),
            )
        )


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
                 where dead_transaction = any(%(dead)s) order by id for update),
            messages as (
                select dead_transaction from relay.queue_dead_letters
                 where dead_transaction = any(%(dead)s) order by id for update)
            select dead_transaction from locked group by 1 having bool_and(status = any(%(statuses)s))
            union all select dead_transaction from messages where 'dead' = any(%(statuses)s)
            """,
            {"dead": list(dead), "statuses": list(statuses)},
        )
        return set(cursor)


def lock_undelivered(
    conn: Connection, group: str, first: int, last: int
) -> list[tuple[int, int | None, str | None]]:
    """Lock the dead transactions of a range of full xids whose replay goes to the sinks too; returns their events.

    An event is its 32-bit xid, c_offset and id; the last two are None where their columns refused them. Left out are
    replayed transactions, and those that cannot be replayed as they are, since only the outbox has an event of them.
    The locks are shared, and held until the database transaction ends.
    """
    ranges = [(0, _CYCLE - 1)]
    if last - first < _CYCLE:
        low, high = first % _CYCLE, last % _CYCLE
        ranges = [(low, high)] if low <= high else [(low, _CYCLE - 1), (0, high)]
    found: list[tuple[int, int | None, str | None]] = []
    with conn.cursor() as cursor:
        for ends in ranges:
            cursor.execute(
                """
                with locked as (
                    select dead_transaction, xid, by_reference, c_offset, event_id from relay.dead_letter_queue
                     where group_id = %s and sink = '' and undelivered and xid between %s and %s
                       and status in ('dead', 'replaying')
                     order by id for share)
                select xid, c_offset, event_id from locked as l
                 where not exists (select from locked as o
                                    where o.dead_transaction = l.dead_transaction and o.by_reference)
                """,
                (group, *ends),
                prepare=False,
            )
            found += cursor
    return found


def lock_as_published(conn: Connection, dead: Sequence[int]) -> set[int]:
    """Lock dead transactions until the database transaction ends; returns those of which no payload was edited."""
    with conn.cursor(row_factory=scalar_row) as cursor:
        cursor.execute(
            """
            with locked as (
                select dead_transaction, original_payload from relay.dead_letter_queue
                 where dead_transaction = any(%s) order by id for update)
            select dead_transaction from locked group by dead_transaction having bool_and(original_payload is null)
            """,
            (list(dead),),
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
    conn: Connection, group: str, dead: Sequence[tuple[int, str | None, BaseException, int]]
) -> None:
    """Set replayed transactions to dead again.

    `dead` has the number of each, the handler that failed, its error, and the attempts since the replay.
    """
    numbers, handlers, errors, attempts = zip(*dead, strict=True)
    exceptions = _writable(conn, [exception_text(error) for error in errors])
    conn.execute(
        """
        update relay.dead_letter_queue as d
           set status = 'dead', handler = again.handler, exception = again.exception,
               attempts = d.attempts + again.attempts
          from unnest(%s::bigint[], %s::text[], %s::text[], %s::int[])
               as again (number, handler, exception, attempts)
         where d.dead_transaction = again.number
        """,
        ([*numbers], [*handlers], exceptions, [*attempts]),
    )
    note(conn, group, [*numbers], "died again", None)


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
        (*_writable(conn, [exception]), list(dead)),
    )
    note(conn, group, dead, "cancel", reason)


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
    """Delete dead transactions, also messages of queues; returns how many dead letters they had."""
    return sum(
        conn.execute(
            sql.SQL("delete from {} where dead_transaction = any(%s)").format(table), (list(dead),)
        ).rowcount
        for table in _TABLES
    )


def erase(conn: Connection, group: str, host: str) -> int:
    """Delete the dead letters of a host; returns how many."""
    return sum(
        conn.execute(
            sql.SQL(
                "delete from {} as d using relay.dead_letters as l where l.group_id = %s and l.host_id = %s"
                " and d.dead_transaction = l.dead_transaction and d.id = l.id"
            ).format(table),
            (group, host),
        ).rowcount
        for table in _TABLES
    )


def note(
    conn: Connection, group: str, dead: Sequence[int], action: str, reason: str | None
) -> None:
    """Record an action on each of the dead transactions. The server adds who acted, and when."""
    conn.execute(
        """
        insert into relay.dead_letter_actions
               (group_id, dead_transaction, letters, transaction_id, action, reason, consumer)
        select %(group)s, dead_transaction, array_agg(id order by id), min(transaction_id),
               %(action)s, %(reason)s, min(consumer)
          from relay.dead_letters where dead_transaction = any(%(dead)s)
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
