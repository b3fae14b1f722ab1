"""Counts deferred business transactions: how many, why, and since when."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime

from psycopg import sql
from psycopg.rows import class_row

from relay.store.connections import Connection

KIND = sql.SQL(
    """
    case when d.blocked then 'holding'
         when d.attempts > 0 then 'retry'
         when d.dead_transaction is not null then 'replay'
         when d.holds then 'blocked'
         else 'scheduled' end
    """
)
"""An SQL expression: why a row `d` is deferred, as `Reason.kind`."""


@dataclass(frozen=True, slots=True)
class Reason:
    """Why some transactions are deferred, and since and until when.

    `kind` is `retry` (the handler failed with `reason`), `holding` (a dead transaction that holds its key),
    `replay`, `scheduled` (deliver_at) or `blocked` (an earlier transaction holds one of their keys). `since` is when
    the first of them failed or was deferred, `next` when the first of them is due and `until` when the last is; both
    are None where none is deferred to a time. `sink` is empty for the target.
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


def deferred_for_sinks(conn: Connection, group: str, sinks: Collection[str]) -> dict[str, int]:
    """Count the deferred transactions by sink, for sinks not among `sinks`."""
    return dict(
        conn.execute(
            """
            select sink, count(*) from relay.deferred
             where group_id = %s and sink <> '' and sink <> all(%s::text[]) group by 1 order by 1
            """,
            (group, list(sinks)),
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
