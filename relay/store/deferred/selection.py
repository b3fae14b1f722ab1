"""Selects, lists and counts deferred transactions, and makes them due: how many, why, and since when."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, LiteralString

from psycopg import sql
from psycopg.rows import class_row

from relay.store.connections import Connection
from relay.store.deferred.due import DUE_COLUMNS, DueTransaction
from relay.store.filters import DeferredSelection

KIND = sql.SQL(
    """
    case when d.blocked then 'holding'
         when d.attempts > 0 then 'retry'
         when d.dead_transaction is not null then 'replay'
         when d.resent_by is not null then 'resend'
         when d.holds then 'blocked'
         else 'scheduled' end
    """
)
"""An SQL expression: why a row `d` is deferred, one of `states.DEFERRED`, as `Reason.kind`."""
_KEYS = sql.SQL("array(select split_part(own.key, chr(31), 1) from unnest(d.keys) as own (key))")
"""An SQL expression: the ordering keys of a row `d`, without its endpoint."""


def _where(
    wanted: DeferredSelection, event: str | None = None
) -> tuple[sql.Composable, dict[str, Any]]:
    """Return the condition on a row `d` of relay.deferred, and its parameters.

    With an `event`, as `event_key` has it, also that it has that one: those without event_ids are left out.
    """
    tests: dict[str, tuple[LiteralString, Any]] = {
        "ids": ("d.id = any(%(ids)s)", list(wanted.ids) or None),
        "sink": ("d.sink = %(sink)s", wanted.sink),
        "handler": ("d.handler = %(handler)s", wanted.handler),
        "kind": ("{kind} = %(kind)s", wanted.kind),
        "key": ("%(key)s = any({keys})", wanted.key),
        "host": ("%(host)s = any(d.hosts)", wanted.host),
        "event": ("d.event_ids @> array[%(event)s]", event),
        "endpoint": ("d.endpoint = %(endpoint)s", wanted.endpoint),
    }
    given = {name: test for name, test in tests.items() if test[1] is not None}
    conditions = [sql.SQL(each).format(kind=KIND, keys=_KEYS) for each, _ in given.values()]
    return (
        sql.SQL(" and ").join([sql.SQL("d.group_id = %(group)s"), *conditions]),
        {name: value for name, (_, value) in given.items()},
    )


@dataclass(frozen=True, slots=True)
class Deferred:
    """A deferred transaction in a list; `sink` is empty for the target.

    `kind` and `next` (the time of the next attempt) are as in `Reason`. `since` is when it first failed
    or was deferred.
    """

    id: int
    sink: str
    transaction_id: str | None
    hosts: list[str]
    keys: list[str]
    events: int
    kind: str
    handler: str | None
    reason: str | None
    attempts: int
    since: datetime
    next: datetime | None
    endpoint: str | None


@dataclass(frozen=True, slots=True)
class FoundDeferred:
    """The transactions that a filter selected at a moment, without later ones; `holding` counts the dead ones."""

    wanted: DeferredSelection
    last_id: int
    transactions: int
    events: int
    holding: int


def listed(
    conn: Connection,
    group: str,
    wanted: DeferredSelection,
    limit: int,
    after: int = 0,
    event: str | None = None,
) -> list[Deferred]:
    """List deferred transactions, oldest first, from the one after the id `after`; `event` is as in `_where`."""
    where, parameters = _where(wanted, event)
    with conn.cursor(row_factory=class_row(Deferred)) as cursor:
        return cursor.execute(
            sql.SQL(
                """
                select d.id, d.sink, d.transaction_id, d.hosts, {keys} as keys, d.events, {kind} as kind, d.handler,
                       d.reason, d.attempts, coalesce(d.first_failed_at, d.deferred_at) as since,
                       case when {kind} in ('retry', 'scheduled') then least(d.retry_at, '9999-01-01') end as next,
                       d.endpoint
                  from relay.deferred d where {where} and d.id > %(after)s order by d.id limit %(limit)s
                """
            ).format(kind=KIND, keys=_KEYS, where=where),
            {**parameters, "group": group, "limit": limit, "after": after},
        ).fetchall()


def find(conn: Connection, group: str, wanted: DeferredSelection) -> FoundDeferred:
    """Count the transactions that a filter selects."""
    where, parameters = _where(wanted)
    last_id, transactions, events, holding = conn.execute(
        sql.SQL(
            """
            select coalesce(max(d.id), 0), count(*) filter (where not d.blocked),
                   coalesce(sum(d.events) filter (where not d.blocked), 0)::bigint, count(*) filter (where d.blocked)
              from relay.deferred d where {where}
            """
        ).format(where=where),
        {**parameters, "group": group},
    ).fetchall()[0]
    return FoundDeferred(wanted, last_id, transactions, events, holding)


def oldest(
    conn: Connection, group: str, found: FoundDeferred, limit: int
) -> list[tuple[str, DueTransaction]]:
    """Return the oldest of the found transactions that are still deferred, at most `limit`, each with its sink."""
    where, parameters = _where(found.wanted)
    rows = conn.execute(
        sql.SQL(
            """
            select d.sink, {due} from relay.deferred d
             where {where} and d.id <= %(last_id)s and not d.blocked order by d.id limit %(limit)s
            """
        ).format(due=DUE_COLUMNS, where=where),
        {**parameters, "group": group, "last_id": found.last_id, "limit": limit},
    )
    return [(sink, DueTransaction(*due)) for sink, *due in rows]


def without_ids(
    conn: Connection, group: str, wanted: DeferredSelection, offset: int | None = None
) -> list[DueTransaction]:
    """Return the selected transactions without event_ids, oldest first: large ones, and those of former editions.

    With an `offset`, only those that may have the row of the outbox with this c_offset.
    """
    where, parameters = _where(wanted)
    rows = conn.execute(
        sql.SQL(
            """
            select {due} from relay.deferred d
             where {where} and d.event_ids is null
               and (%(offset)s::bigint is null or %(offset)s between d.first_offset and d.last_offset)
             order by d.id
            """
        ).format(due=DUE_COLUMNS, where=where),
        {**parameters, "group": group, "offset": offset},
    )
    return [DueTransaction(*due) for due in rows]


def make_due(conn: Connection, group: str, found: FoundDeferred) -> dict[str, int]:
    """Make the found transactions due now; returns how many of each sink."""
    where, parameters = _where(found.wanted)
    return dict(
        conn.execute(
            sql.SQL(
                """
                with due as (
                    update relay.deferred d set retry_at = least(d.retry_at, now())
                     where {where} and d.id <= %(last_id)s and not d.blocked
                    returning d.sink)
                select sink, count(*) from due group by sink order by sink
                """
            ).format(where=where),
            {**parameters, "group": group, "last_id": found.last_id},
        ).fetchall()
    )


def move(conn: Connection, group: str, found: FoundDeferred, to: datetime) -> dict[str, int]:
    """Set the time of the found transactions that are still scheduled; returns how many of each sink.

    Those of sinks whose time has come may be in flight, and keep it: what is not due is never in flight.
    """
    where, parameters = _where(found.wanted)
    return dict(
        conn.execute(
            sql.SQL(
                """
                with moved as (
                    update relay.deferred d set retry_at = %(to)s
                     where {where} and {kind} = 'scheduled' and d.id <= %(last_id)s
                       and (d.sink = '' or d.retry_at > clock_timestamp())
                    returning d.sink)
                select sink, count(*) from moved group by sink order by sink
                """
            ).format(kind=KIND, where=where),
            {**parameters, "group": group, "last_id": found.last_id, "to": to},
        ).fetchall()
    )


@dataclass(frozen=True, slots=True)
class Reason:
    """Why some transactions are deferred, and since and until when.

    `kind` is one of `states.DEFERRED`; with `retry` the handler failed with `reason`. `since` is when the first of them
    failed or was deferred, `next` when the first of them is due and `until` when the last is; both are None where none
    is deferred to a time. `sink` is empty for the target.
    """

    sink: str
    kind: str
    handler: str | None
    reason: str | None
    transactions: int
    since: datetime
    next: datetime | None
    until: datetime | None


@dataclass(frozen=True, slots=True)
class DeferredSummary:
    """How many transactions of a group are deferred, how many of these are dead, and the most frequent reasons."""

    transactions: int
    holding: int
    reasons: Sequence[Reason] = ()


_REASONS = 20
"""How many reasons a summary has at most."""


def deferred_for_others(conn: Connection, group: str, handlers: Collection[str]) -> dict[str, int]:
    """Count the deferred transactions of the target by the handler that failed, for handlers not among `handlers`."""
    return dict(
        conn.execute(
            """
            select handler, count(*) from relay.deferred
             where group_id = %s and sink = '' and handler <> all(%s::text[]) group by 1 order by 1
            """,
            (group, list(handlers)),
        ).fetchall()
    )


def count_by_sink(conn: Connection, group: str) -> dict[str, int]:
    """Count the deferred transactions of each sink; '' is the target."""
    rows = conn.execute(
        "select sink, count(*) from relay.deferred where group_id = %s group by sink", (group,)
    )
    return dict(rows.fetchall())


@dataclass(frozen=True, slots=True)
class DeferredCount:
    """Deferred transactions of a sink, or ('') of the target, by `kind`, as in Reason. `since`: the oldest of them."""

    sink: str
    kind: str
    transactions: int
    since: datetime


def count_by_kind(conn: Connection, group: str) -> list[DeferredCount]:
    """Count the deferred transactions by sink and kind. Reads all of them."""
    with conn.cursor(row_factory=class_row(DeferredCount)) as cursor:
        return cursor.execute(
            sql.SQL(
                """
                select d.sink, {kind} as kind, count(*) as transactions,
                       min(coalesce(d.first_failed_at, d.deferred_at)) as since
                  from relay.deferred as d where d.group_id = %s group by 1, 2
                """
            ).format(kind=KIND),
            (group,),
        ).fetchall()


def count_keys(conn: Connection, group: str) -> dict[str, int]:
    """Count the ordering keys that deferred transactions of each sink hold; '' is the target."""
    rows = conn.execute(
        "select sink, count(distinct key) from relay.deferred_keys where group_id = %s group by 1",
        (group,),
    )
    return dict(rows.fetchall())


def count(conn: Connection, group: str) -> DeferredSummary:
    """Count the deferred transactions of the group, with the most frequent reasons. Reads all of them."""
    with conn.cursor(row_factory=class_row(Reason)) as cursor:
        reasons = cursor.execute(
            sql.SQL(
                """
                with reasons as (
                    select d.sink, {kind} as kind, d.handler, d.reason, d.deferred_at, d.first_failed_at, d.retry_at
                      from relay.deferred as d where d.group_id = %s)
                select sink, kind, handler, reason, count(*) as transactions,
                       min(coalesce(first_failed_at, deferred_at)) as since,
                       case when kind in ('retry', 'scheduled') then least(min(retry_at), '9999-01-01') end as next,
                       case when kind in ('retry', 'scheduled') then least(max(retry_at), '9999-01-01') end as until
                  from reasons group by sink, kind, handler, reason
                 order by count(*) desc, sink, kind, handler, reason
                """
            ).format(kind=KIND),
            (group,),
        ).fetchall()
    return DeferredSummary(
        sum(each.transactions for each in reasons),
        sum(each.transactions for each in reasons if each.kind == "holding"),
        tuple(reasons[:_REASONS]),
    )
