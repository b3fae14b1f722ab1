"""Transactions that could not be applied: `relay.dead_letter_queue`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from itertools import islice
from typing import Any, LiteralString

import psycopg
from psycopg import sql
from psycopg.rows import class_row, dict_row, scalar_row

from relay.faults import exception_text
from relay.model.events import ID_FIELDS, SQL_TYPES, Event
from relay.store.actions import Acted

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
    "deliver_at": "deliver_at",
    "headers": "headers",
}
STORED = tuple(_FROM_EVENT)
"""The columns of a letter that hold fields of its event."""
FIELD_OF = _FROM_EVENT
"""The field that each of them holds."""

ColumnValues = tuple[str | None, ...]
"""The values of `STORED` as text."""
DeadLetterRow = dict[str, str | None]
"""The fields of a dead event by the names in `STORED`, as PostgreSQL prints them."""

_COLUMNS = (
    *("group_id", "dead_transaction", "sink", "undelivered", "handler", "exception", "attempts"),
    *("refused", *_FROM_EVENT),
)
_TYPES: list[LiteralString] = [
    "text" if field in ID_FIELDS else SQL_TYPES.get(field, "jsonb")
    for field in _FROM_EVENT.values()
]
_INSERT = sql.SQL(
    "insert into relay.dead_letter_queue ({}) values (%s, %s, %s, %s, %s, %s, 1, %s::json, {})"
).format(
    sql.SQL(", ").join(map(sql.Identifier, _COLUMNS)),
    sql.SQL(", ").join(sql.SQL(f"%s::{sql_type}") for sql_type in _TYPES),
)

_REFUSALS = (
    psycopg.DataError,
    psycopg.errors.ProgramLimitExceeded,
    psycopg.errors.StatementTooComplex,
    UnicodeEncodeError,
)
"""What a value is refused with: by its type, by its size or depth, by the encoding of the target."""


def insert(
    conn: psycopg.Connection[Any],
    group: str,
    events: Iterable[Event],
    handler: str | None,
    error: BaseException,
    sink: str = "",
    undelivered: bool = False,
) -> int:
    """Write every event of one business transaction to the dead letters, in the current database transaction.

    `handler` is the one that failed; None where no route matched. `sink` is the one that the events were to be
    delivered to, and to which alone they are replayed; '' where they were to be applied to the target, and then
    `undelivered` says that no sink has had them either. Returns the number of the dead transaction. A value that its
    column refuses is kept beside it, as text: a dead letter that cannot be written would hold up the rest.
    """
    number = _next_number(conn)
    exception = exception_text(error)
    remaining = iter(events)
    while chunk := list(islice(remaining, _CHUNK)):
        rows = [tuple(event.text(field) for field in _FROM_EVENT.values()) for event in chunk]
        head = (group, number, sink, undelivered, handler)
        try:
            _write(conn, [(*head, exception, None, *row) for row in rows])
        except _REFUSALS:
            exception = _writable(conn, exception)
            _write(conn, [(*head, exception, *row) for row in _degraded(conn, rows)])
    return number


def _next_number(conn: psycopg.Connection[Any]) -> int:
    with conn.cursor(row_factory=scalar_row) as cursor:
        found = cursor.execute("select nextval('relay.dead_transactions')").fetchone()
    return int(found or 0)


def _write(conn: psycopg.Connection[Any], rows: Sequence[Sequence[Any]]) -> None:
    with conn.transaction(), conn.cursor() as cursor:
        cursor.executemany(_INSERT, rows)


def _degraded(
    conn: psycopg.Connection[Any], rows: Sequence[ColumnValues]
) -> Iterator[ColumnValues]:
    """The rows with what their columns take, each behind the JSON object of the values that they refuse."""
    taken = [
        _accepted(conn, sql_type, values)
        for sql_type, values in zip(_TYPES, zip(*rows, strict=True), strict=True)
    ]
    for row, takes in zip(rows, zip(*taken, strict=True), strict=True):
        refused = {
            name: value
            for name, value, taken_as_is in zip(STORED, row, takes, strict=True)
            if not taken_as_is
        }
        yield (
            json.dumps(refused) if refused else None,
            *(
                value if taken_as_is else _nearest(sql_type, value or "")
                for sql_type, value, taken_as_is in zip(_TYPES, row, takes, strict=True)
            ),
        )


def _accepted(
    conn: psycopg.Connection[Any], sql_type: LiteralString, values: Sequence[str | None]
) -> list[bool]:
    """Which of the values PostgreSQL takes for a type. Those that it refuses are found by halving."""
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
    """What a column takes instead of a value that it refuses."""
    if sql_type == "text":
        return _ascii(value)
    # JSON that jsonb refuses, such as an escaped NUL, can be read as a JSON string of its text.
    return json.dumps(_ascii(value)) if sql_type == "jsonb" else None


def _writable(conn: psycopg.Connection[Any], text: str) -> str:
    """The text, with escapes where the encoding of the target lacks its characters."""
    return text if all(_accepted(conn, "text", [text])) else _ascii(text)


def _ascii(text: str) -> str:
    return text.encode("ascii", "backslashreplace").decode()


@dataclass(frozen=True, slots=True)
class DeadLetterSelection:
    """Which dead transactions: those with an event that all of this holds of. None says nothing.

    `event_type`, `handler` and `sink` ('' for the target) are exact, `exception` is a part of the text, `kind` what
    it begins with, such as `CheckViolation [23514]`, times are those of the dead-lettering.
    """

    ids: Sequence[int] = ()
    transaction_id: str | None = None
    host_id: str | None = None
    handler: str | None = None
    event_type: str | None = None
    since: datetime | None = None
    until: datetime | None = None
    exception: str | None = None
    status: str | None = None
    sink: str | None = None
    kind: str | None = None

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
            "sink": ("d.sink = %(sink)s", self.sink),
            "kind": (
                "split_part(split_part(d.exception, chr(10), 1), ':', 1) = %(kind)s",
                self.kind,
            ),
        }
        given = {name: test for name, test in tests.items() if test[1] is not None}
        conditions = [sql.SQL(condition) for condition, _ in given.values()]
        return (
            sql.SQL(" and ").join([sql.SQL("d.group_id = %(group)s"), *conditions]),
            {name: value for name, (_, value) in given.items()},
        )


@dataclass(frozen=True, slots=True)
class DeadTransaction:
    """One dead business transaction in a list; `id` is that of its first event, `letters` those of all, in order.

    `sink` is empty where it could not be applied to the target.
    """

    id: int
    transaction_id: str | None
    host_id: str | None
    events: int
    event_type: str | None
    sink: str
    handler: str | None
    exception: str
    status: str
    attempts: int
    created_dt: datetime
    letters: list[int]


@dataclass(frozen=True, slots=True)
class FoundDeadLetters:
    """The dead transactions that a filter selects, of some statuses; none that are dead-lettered later."""

    wanted: DeadLetterSelection
    statuses: Sequence[str]
    last_id: int
    transactions: int
    events: int


@dataclass(frozen=True, slots=True)
class Dead:
    """The number of a dead transaction, how many events it has, and the bytes of their payloads and metadata.

    `sink` is the one that it goes to; '' for the target, and for the sinks as well if it is `undelivered`.
    """

    number: int
    events: int
    size: int
    sink: str
    undelivered: bool


class DeadLetterAction(Acted):
    """Something that was done about a dead transaction."""

    __slots__ = ()


_SHOWN = (
    *("id", "group_id", "status", "sink", "handler", "exception", "attempts", "host_id", "user_id"),
    *("transaction_id", "transaction_ordinal", "transaction_count", "event_id", "event_type"),
    *("aggregate_type", "aggregate_id", "aggregate_version", "event_ts", "deliver_at", "c_offset"),
    *("commit_lsn", "payload", "original_payload", "metadata", "headers", "created_dt"),
)
"""The columns of a dead letter that are exported and shown."""

_PRETTY_CHARACTERS = 100_000
"""JSON that is longer when it is laid out is shown as it is: deep nesting indents to megabytes."""


def count(conn: psycopg.Connection[Any], group: str) -> int:
    """How many dead events the group has."""
    with conn.cursor(row_factory=scalar_row) as cursor:
        found = cursor.execute(
            "select count(*) from relay.dead_letter_queue where group_id = %s and status = 'dead'",
            (group,),
        ).fetchone()
    return int(found or 0)


def count_by_handler(conn: psycopg.Connection[Any], group: str) -> dict[tuple[str, str], int]:
    """How many dead transactions there are, by sink (empty: the target) and handler (empty: none is to blame)."""
    rows = conn.execute(
        """
        select sink, coalesce(handler, ''), count(distinct dead_transaction) from relay.dead_letter_queue
         where group_id = %s and status = 'dead' group by 1, 2
        """,
        (group,),
    )
    return {(sink, handler): count for sink, handler, count in rows}


def transactions(
    conn: psycopg.Connection[Any],
    group: str,
    limit: int,
    wanted: DeadLetterSelection,
    statuses: Sequence[str] | None = None,
) -> list[DeadTransaction]:
    """Dead transactions, whole, newest first; of any status where none is given."""
    where, parameters = wanted.where()
    with conn.cursor(row_factory=class_row(DeadTransaction)) as cursor:
        return cursor.execute(
            sql.SQL(
                """
                select min(d.id) as id, min(d.transaction_id) as transaction_id,
                       min(d.host_id) as host_id, count(*)::int as events,
                       (array_agg(d.event_type order by d.id))[1] as event_type, min(d.sink) as sink,
                       min(d.handler) as handler,
                       min(d.exception) as exception, min(d.status) as status, max(d.attempts) as attempts,
                       min(d.created_dt) as created_dt, array_agg(d.id order by d.id) as letters
                  from relay.dead_letter_queue d
                 where d.dead_transaction in (
                       select distinct d.dead_transaction from relay.dead_letter_queue d
                        where {where} and (%(statuses)s::text[] is null or d.status = any(%(statuses)s))
                        order by d.dead_transaction desc limit %(limit)s)
                 group by d.dead_transaction
                 order by d.dead_transaction desc
                """
            ).format(where=where),
            {
                **parameters,
                "group": group,
                "limit": limit,
                "statuses": None if statuses is None else list(statuses),
            },
        ).fetchall()


def find(
    conn: psycopg.Connection[Any], group: str, wanted: DeadLetterSelection, statuses: Sequence[str]
) -> FoundDeadLetters:
    """Count the dead transactions of some statuses that a filter selects."""
    where, parameters = wanted.where()
    last_id, found, events = conn.execute(
        sql.SQL(
            """
            select coalesce(max(d.id), 0), count(distinct d.dead_transaction), count(*)
              from relay.dead_letter_queue d
             where d.status = any(%(statuses)s) and d.dead_transaction in (
                   select d.dead_transaction from relay.dead_letter_queue d where {where})
            """
        ).format(where=where),
        {**parameters, "group": group, "statuses": list(statuses)},
    ).fetchall()[0]
    return FoundDeadLetters(wanted, tuple(statuses), last_id, found, events)


def numbers(conn: psycopg.Connection[Any], group: str, found: FoundDeadLetters) -> Iterator[Dead]:
    """The transactions that were found, in the order in which they were published. Needs a database transaction."""
    where, parameters = found.wanted.where()
    with conn.cursor("dead_transactions", row_factory=class_row(Dead)) as cursor:
        cursor.itersize = _CHUNK
        cursor.execute(
            sql.SQL(
                """
                select d.dead_transaction as number, count(*) as events,
                       sum(coalesce(octet_length(d.payload::text), 0) + coalesce(octet_length(d.metadata::text), 0))
                           ::bigint as size,
                       min(d.sink) as sink, bool_or(d.undelivered) as undelivered
                  from relay.dead_letter_queue d
                 where d.status = any(%(statuses)s) and d.dead_transaction in (
                       select d.dead_transaction from relay.dead_letter_queue d
                        where d.id <= %(last_id)s and {where})
                 group by d.dead_transaction
                 order by min(d.c_offset) nulls last, d.dead_transaction
                """
            ).format(where=where),
            {
                **parameters,
                "group": group,
                "statuses": list(found.statuses),
                "last_id": found.last_id,
            },
        )
        yield from cursor


def failed_handlers(
    conn: psycopg.Connection[Any], group: str, found: FoundDeadLetters
) -> dict[str, int]:
    """The handlers of the target that the transactions failed in, and how many of them in each."""
    return _by_name(conn, group, found, sql.SQL("case when d.sink = '' then d.handler end"))


def sinks(conn: psycopg.Connection[Any], group: str, found: FoundDeadLetters) -> dict[str, int]:
    """The sinks that the transactions could not be delivered to, and how many of them to each."""
    return _by_name(conn, group, found, sql.SQL("nullif(d.sink, '')"))


def _by_name(
    conn: psycopg.Connection[Any], group: str, found: FoundDeadLetters, name: sql.SQL
) -> dict[str, int]:
    where, parameters = found.wanted.where()
    rows = conn.execute(
        sql.SQL(
            """
            select {name}, count(distinct d.dead_transaction) from relay.dead_letter_queue d
             where {name} is not null and d.status = any(%(statuses)s) and d.id <= %(last_id)s and {where}
             group by 1 order by 1
            """
        ).format(name=name, where=where),
        {
            **parameters,
            "group": group,
            "statuses": list(found.statuses),
            "last_id": found.last_id,
        },
    )
    return dict(rows.fetchall())


def exported(
    conn: psycopg.Connection[Any], group: str, wanted: DeadLetterSelection
) -> Iterator[str]:
    """Every event of the dead transactions that a filter selects, each as the text of a JSON object.

    In the order of publishing, read one after the other. PostgreSQL writes the JSON: numbers keep every digit, and
    nothing is too deep.
    """
    where, parameters = wanted.where()
    # The objects are made after sorting, so that the sort moves what is stored and not its text.
    query = sql.SQL(
        """
        select row_to_json(letter)::text from (
            select {columns}
              from relay.dead_letter_queue d
              join (select d.dead_transaction, min(d.c_offset) as first_offset
                      from relay.dead_letter_queue d
                     where d.dead_transaction in (
                           select d.dead_transaction from relay.dead_letter_queue d where {where})
                     group by d.dead_transaction) whole using (dead_transaction)
             order by whole.first_offset nulls last, d.dead_transaction, d.id) letter
        """
    ).format(columns=_columns(_SHOWN), where=where)
    with conn.cursor(row_factory=scalar_row) as cursor:
        yield from cursor.stream(query, {**parameters, "group": group})


def transaction_of(conn: psycopg.Connection[Any], group: str, dead_letter_id: int) -> int | None:
    """The number of the dead transaction that holds a letter; None where there is no such letter in the group."""
    with conn.cursor(row_factory=scalar_row) as cursor:
        return cursor.execute(
            "select dead_transaction from relay.dead_letter_queue where group_id = %s and id = %s",
            (group, dead_letter_id),
        ).fetchone()


def events_as_json(conn: psycopg.Connection[Any], number: int) -> Iterator[str]:
    """Every event of a dead transaction as the text of a JSON object, in order."""
    query = sql.SQL(
        """
        select row_to_json(letter)::text from (
            select {columns} from relay.dead_letter_queue d where d.dead_transaction = %s order by d.id) letter
        """
    ).format(columns=_columns(_SHOWN))
    with conn.cursor(row_factory=scalar_row) as cursor:
        yield from cursor.stream(query, (number,))


def events_as_text(
    conn: psycopg.Connection[Any], number: int, pretty: bool
) -> Iterator[DeadLetterRow]:
    """Every event of a dead transaction, each field as PostgreSQL prints it, in order; `pretty` lays JSON out."""
    columns = [
        _laid_out(name) if pretty and name in _JSON else sql.SQL("{}::text").format(_column(name))
        for name in (*_SHOWN, "refused")
    ]
    query = sql.SQL(
        "select {} from relay.dead_letter_queue d where d.dead_transaction = %s order by d.id"
    ).format(
        sql.SQL(", ").join(
            sql.SQL("{} as {}").format(column, sql.Identifier(name))
            for column, name in zip(columns, (*_SHOWN, "refused"), strict=True)
        )
    )
    with conn.cursor(row_factory=dict_row) as cursor:
        yield from cursor.stream(query, (number,))


_JSON = ("payload", "original_payload", "metadata", "headers")


def _column(name: str) -> sql.Composed:
    return sql.SQL("d.{}").format(sql.Identifier(name))


def _columns(names: Sequence[str]) -> sql.Composed:
    return sql.SQL(", ").join(map(_column, names))


def _laid_out(name: str) -> sql.Composed:
    return sql.SQL(
        "case when length(jsonb_pretty({0})) <= {1} then jsonb_pretty({0}) else {0}::text end"
    ).format(_column(name), sql.Literal(_PRETTY_CHARACTERS))


def stored(
    conn: psycopg.Connection[Any], dead: Sequence[int], at_once: int
) -> Iterator[tuple[int, DeadLetterRow]]:
    """The events of dead transactions as they were published, with the numbers of these, in order.

    A value that its column refused comes as it was. Fetches `at_once` rows. Needs a database transaction.
    """
    columns = [sql.SQL("{}::text").format(sql.Identifier(name)) for name in STORED]
    # A name of its own for each cursor: one may be read while another one is open.
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
            letter = dict(zip(STORED, values, strict=True))
            if refused is not None:
                as_published = json.loads(refused)
                if edited:
                    as_published.pop("payload", None)
                letter |= as_published
            yield number, letter


def lock(conn: psycopg.Connection[Any], dead: Sequence[int], statuses: Sequence[str]) -> set[int]:
    """Lock dead transactions to the end of the database transaction; returns those that have one of the statuses."""
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
    conn: psycopg.Connection[Any],
    group: str,
    dead: Sequence[int],
    action: str,
    status: str,
    reason: str | None = None,
) -> None:
    """Give dead transactions another status, and note why."""
    conn.execute(
        "update relay.dead_letter_queue set status = %s where dead_transaction = any(%s)",
        (status, list(dead)),
    )
    note(conn, group, dead, action, reason)


def mark_dead_again(
    conn: psycopg.Connection[Any],
    group: str,
    number: int,
    handler: str | None,
    error: BaseException,
) -> None:
    """A dead transaction that was replayed could not be applied once more."""
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
    conn: psycopg.Connection[Any],
    group: str,
    dead: Sequence[int],
    exception: str,
    reason: str | None,
) -> None:
    """Dead transactions that were queued to be replayed are cancelled: they are dead as before."""
    conn.execute(
        "update relay.dead_letter_queue set status = 'dead', exception = %s where dead_transaction = any(%s)",
        (_writable(conn, exception), list(dead)),
    )
    note(conn, group, dead, "cancel", reason)


def mark_by_reference(conn: psycopg.Connection[Any], number: int, offsets: Sequence[int]) -> None:
    """Mark the letters at these c_offsets: only the outbox has their payload and metadata."""
    conn.execute(
        "update relay.dead_letter_queue set by_reference = true where dead_transaction = %s and c_offset = any(%s)",
        (number, list(offsets)),
    )


def by_reference(conn: psycopg.Connection[Any], dead: Sequence[int]) -> tuple[int, int] | None:
    """The id and the c_offset of the first letter whose payload only the outbox has, if there is one."""
    return conn.execute(
        """
        select id, c_offset from relay.dead_letter_queue
         where dead_transaction = any(%s) and by_reference order by id limit 1
        """,
        (list(dead),),
    ).fetchone()


def purge(conn: psycopg.Connection[Any], dead: Sequence[int]) -> int:
    """Delete dead transactions; returns how many letters they had."""
    return conn.execute(
        "delete from relay.dead_letter_queue where dead_transaction = any(%s)", (list(dead),)
    ).rowcount


def note(
    conn: psycopg.Connection[Any], group: str, dead: Sequence[int], action: str, reason: str | None
) -> None:
    """Keep what was done about each of the dead transactions, by whom and when."""
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


def actions(conn: psycopg.Connection[Any], number: int) -> list[DeadLetterAction]:
    """What was done about a dead transaction, oldest first."""
    with conn.cursor(row_factory=class_row(DeadLetterAction)) as cursor:
        return cursor.execute(
            """
            select action, reason, acted_by, operator, acted_at from relay.dead_letter_actions
             where dead_transaction = %s order by id
            """,
            (number,),
        ).fetchall()


def statuses(conn: psycopg.Connection[Any], dead: Sequence[int]) -> dict[str, int]:
    """How many of the dead transactions have which status; those that were purged have none."""
    rows = conn.execute(
        """
        select status, count(distinct dead_transaction) from relay.dead_letter_queue
         where dead_transaction = any(%s) group by status
        """,
        (list(dead),),
    )
    return dict(rows.fetchall())


def as_json(item: DeadTransaction) -> dict[str, Any]:
    """The entry as JSON values: times in ISO 8601."""
    return {
        key: value.isoformat() if isinstance(value, datetime) else value
        for key, value in asdict(item).items()
    }
