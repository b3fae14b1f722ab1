"""Selects, lists and counts dead transactions of `relay.dead_letter_queue`, for commands and the console."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, LiteralString

from psycopg import sql
from psycopg.rows import class_row

if TYPE_CHECKING:
    # The module imports the connection pool, which `relay --help` does not need.
    from relay.store.connections import Connection


_CHUNK = 1_000
"""How many dead transactions are fetched at once."""


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
    """A dead business transaction in a list. `id` is the dead letter of its first event, `letters` has those of all.

    `sink` is empty if it could not be applied to the target.
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
    """The dead transactions that a filter selected at a moment, without those that are dead-lettered later."""

    wanted: DeadLetterSelection
    statuses: Sequence[str]
    last_id: int
    transactions: int
    events: int


@dataclass(frozen=True, slots=True)
class Dead:
    """A dead transaction: its number, how many events it has, and the size of their payloads and metadata in bytes.

    A replay delivers it to `sink`. '' is the target, and the sinks too if it is `undelivered`.
    """

    number: int
    events: int
    size: int
    sink: str
    undelivered: bool


def transactions(
    conn: Connection,
    group: str,
    limit: int,
    wanted: DeadLetterSelection,
    statuses: Sequence[str] | None = None,
) -> list[DeadTransaction]:
    """List whole dead transactions, newest first; of any status where `statuses` is None."""
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


def numbers(conn: Connection, group: str, found: FoundDeadLetters) -> Iterator[Dead]:
    """Yield the found transactions in the order of publishing. Needs an open database transaction."""
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


def as_json(item: DeadTransaction) -> dict[str, Any]:
    """Return the entry as JSON values: times in ISO 8601."""
    return {
        key: value.isoformat() if isinstance(value, datetime) else value
        for key, value in asdict(item).items()
    }
