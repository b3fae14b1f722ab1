"""Reads dead transactions of `relay.dead_letter_queue`: selects, lists, counts, shows and exports them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, LiteralString, TypeVar

from psycopg import sql
from psycopg.rows import class_row, dict_row, scalar_row

from relay.store.actions import Acted
from relay.store.dead_letters import DeadLetterRow

if TYPE_CHECKING:
    # The module imports the connection pool, which `relay --help` does not need.
    from relay.store.connections import Connection


_CHUNK = 1_000
"""How many dead transactions are fetched at once."""
SHOWN_CHARACTERS = 16_000
"""How much of a payload and of an exception a page of events has, in characters."""
_LINE_CHARACTERS = 300
_KIND = sql.SQL("split_part(split_part(d.exception, chr(10), 1), ':', 1)")
"""An SQL expression: the kind of fault of a dead letter `d`."""


@dataclass(frozen=True, slots=True)
class DeadLetterSelection:
    """A filter for dead transactions: it selects those with an event that meets every condition that is not None.

    `event_type`, `handler` and `sink` ('' for the target) match exactly, `exception` matches a part of the text, `kind`
    its beginning, such as `CheckViolation [23514]`. `since` and `until` bound the time of dead-lettering.
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
        """Return the condition on a dead letter `d`, and its parameters."""
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
            "kind": ("{kind} = %(kind)s", self.kind),
        }
        given = {name: test for name, test in tests.items() if test[1] is not None}
        conditions = [sql.SQL(condition).format(kind=_KIND) for condition, _ in given.values()]
        return (
            sql.SQL(" and ").join([sql.SQL("d.group_id = %(group)s"), *conditions]),
            {name: value for name, (_, value) in given.items()},
        )


@dataclass(frozen=True, slots=True)
class DeadTransaction:
    """A dead business transaction in a list. `number` is its key, `id` the dead letter of its first event.

    `fault` is the first line of the exception, `sink` is empty if it could not be applied to the target.
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
class WholeDeadTransaction(DeadTransaction):
    """The same with its whole exception, and the dead letters of all its events."""

    exception: str
    letters: list[int]


Row = TypeVar("Row", bound=DeadTransaction)


@dataclass(frozen=True, slots=True)
class FoundDeadLetters:
    """The dead transactions that a filter selected at a moment, without those that are dead-lettered later."""

    wanted: DeadLetterSelection
    statuses: Sequence[str]
    last_id: int
    transactions: int
    events: int


@dataclass(frozen=True, slots=True)
class FoundTransaction:
    """A found transaction: its number, how many events it has, and the size of their payloads and metadata in bytes.

    A replay delivers it to `sink`. '' is the target, and the sinks too if it is `undelivered`.
    """

    number: int
    events: int
    size: int
    sink: str
    undelivered: bool


def listed(
    conn: Connection,
    group: str,
    wanted: DeadLetterSelection,
    limit: int,
    kind: type[Row],
    statuses: Sequence[str] | None = None,
    before: int | None = None,
) -> list[Row]:
    """List dead transactions with an event that the filter selects, newest first, from before the number `before`.

    `kind` is what is read of each; they have any status where `statuses` is None. The cost does not depend on how many
    dead letters exist.
    """
    where, parameters = wanted.where()
    whole = sql.SQL(", min(d.exception) as exception, array_agg(d.id order by d.id) as letters")
    with conn.cursor(row_factory=class_row(kind)) as cursor:
        return cursor.execute(
            sql.SQL(
                """
                with page as materialized (
                    select distinct d.dead_transaction from relay.dead_letter_queue d
                     where {where} and (%(before)s::bigint is null or d.dead_transaction < %(before)s)
                       and (%(statuses)s::text[] is null or d.status = any(%(statuses)s))
                     order by d.dead_transaction desc limit %(limit)s)
                select d.dead_transaction as number, min(d.id) as id, min(d.transaction_id) as transaction_id,
                       min(d.host_id) as host_id, count(*)::int as events,
                       (array_agg(d.event_type order by d.id))[1] as event_type, min(d.sink) as sink,
                       min(d.handler) as handler, min(left(split_part(d.exception, chr(10), 1), {line})) as fault,
                       min(d.status) as status, max(d.attempts) as attempts, min(d.created_dt) as since{whole}
                  from page join relay.dead_letter_queue d using (dead_transaction)
                 group by d.dead_transaction order by d.dead_transaction desc
                """
            ).format(
                where=where,
                line=_LINE_CHARACTERS,
                whole=whole if issubclass(kind, WholeDeadTransaction) else sql.SQL(""),
            ),
            {
                **parameters,
                "group": group,
                "before": before,
                "limit": limit,
                "statuses": None if statuses is None else list(statuses),
            },
        ).fetchall()


def find(
    conn: Connection, group: str, wanted: DeadLetterSelection, statuses: Sequence[str]
) -> FoundDeadLetters:
    """Count the dead transactions of some statuses that a filter selects."""
    where, parameters = wanted.where()
    last_id, transactions, events = conn.execute(
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
    return FoundDeadLetters(wanted, tuple(statuses), last_id, transactions, events)


def numbers(conn: Connection, group: str, found: FoundDeadLetters) -> Iterator[FoundTransaction]:
    """Yield the found transactions in the order of publishing. Needs an open database transaction."""
    where, parameters = found.wanted.where()
    with conn.cursor("dead_transactions", row_factory=class_row(FoundTransaction)) as cursor:
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


def failed_handlers(conn: Connection, group: str, found: FoundDeadLetters) -> dict[str, int]:
    """Count the found transactions by the handler of the target that failed."""
    return _by_name(conn, group, found, sql.SQL("case when d.sink = '' then d.handler end"))


def sinks(conn: Connection, group: str, found: FoundDeadLetters) -> dict[str, int]:
    """Count the found transactions by the sink that they could not be delivered to."""
    return _by_name(conn, group, found, sql.SQL("nullif(d.sink, '')"))


def _by_name(
    conn: Connection, group: str, found: FoundDeadLetters, name: sql.SQL
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


_PRINTED = (
    *("id", "transaction_id", "host_id", "events", "event_type", "sink", "handler", "exception"),
    *("status", "attempts", "created_dt", "letters"),
)


def as_json(item: WholeDeadTransaction) -> dict[str, Any]:
    """Return the entry as JSON values, as `relay dlq list` prints it: times in ISO 8601."""
    values = {**asdict(item), "created_dt": item.since.isoformat()}
    return {name: values[name] for name in _PRINTED}


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
            sql.SQL(
                """
                select d.handler, {kind} as kind, count(*) as events from relay.dead_letter_queue d
                 where d.group_id = %s and d.status = 'dead' group by 1, 2 order by 3 desc, 1, 2 limit %s
                """
            ).format(kind=_KIND),
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
                payload=_beginning("payload"),
                original=_beginning("original_payload"),
                metadata=_beginning("metadata"),
            ),
            (number, after, limit),
        ).fetchall()


def _beginning(column: str) -> sql.Composed:
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


_SHOWN = (
    *("id", "group_id", "status", "sink", "handler", "exception", "attempts", "host_id", "user_id"),
    *("transaction_id", "transaction_ordinal", "transaction_count", "event_id", "event_type"),
    *("aggregate_type", "aggregate_id", "aggregate_version", "event_ts", "deliver_at", "c_offset"),
    *("commit_lsn", "payload", "original_payload", "metadata", "headers", "created_dt"),
)
"""The columns of a dead letter that are exported and shown."""

_PRETTY_CHARACTERS = 100_000
"""JSON is indented only up to this length: deep nesting would indent to megabytes."""


def exported(conn: Connection, group: str, wanted: DeadLetterSelection) -> Iterator[str]:
    """Yield every event of the dead transactions that a filter selects, each as the text of a JSON object.

    The events come in the order of publishing and are streamed. PostgreSQL writes the JSON, so that numbers keep every
    digit and no nesting is too deep.
    """
    where, parameters = wanted.where()
    # The JSON is made after sorting, so that the sort moves stored values and not their text.
    query = sql.SQL(
        """
        select row_to_json(event)::text from (
            select {columns}
              from relay.dead_letter_queue d
              join (select d.dead_transaction, min(d.c_offset) as first_offset
                      from relay.dead_letter_queue d
                     where d.dead_transaction in (
                           select d.dead_transaction from relay.dead_letter_queue d where {where})
                     group by d.dead_transaction) whole using (dead_transaction)
             order by whole.first_offset nulls last, d.dead_transaction, d.id) event
        """
    ).format(columns=_columns(), where=where)
    with conn.cursor(row_factory=scalar_row) as cursor:
        yield from cursor.stream(query, {**parameters, "group": group})


def events_as_json(conn: Connection, number: int) -> Iterator[str]:
    """Yield every event of a dead transaction as the text of a JSON object, in order."""
    query = sql.SQL(
        """
        select row_to_json(event)::text from (
            select {columns} from relay.dead_letter_queue d where d.dead_transaction = %s order by d.id) event
        """
    ).format(columns=_columns())
    with conn.cursor(row_factory=scalar_row) as cursor:
        yield from cursor.stream(query, (number,))


def events_as_text(conn: Connection, number: int, pretty: bool) -> Iterator[DeadLetterRow]:
    """Yield every event of a dead transaction in order, each field as PostgreSQL prints it; `pretty` indents JSON."""
    columns = [
        _indented(name) if pretty and name in _JSON else sql.SQL("{}::text").format(_column(name))
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


def _columns() -> sql.Composed:
    return sql.SQL(", ").join(map(_column, _SHOWN))


def _indented(name: str) -> sql.Composed:
    return sql.SQL(
        "case when length(jsonb_pretty({0})) <= {1} then jsonb_pretty({0}) else {0}::text end"
    ).format(_column(name), sql.Literal(_PRETTY_CHARACTERS))
