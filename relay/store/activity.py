"""Stores what relay has done: delivery attempts of sinks in the last minutes, and batches of engines.

The tables are `relay.sink_activity` and `relay.engines`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple, dataclass, replace
from datetime import datetime

from psycopg.rows import class_row

from relay.store.connections import Connection
from relay.store.literals import storable

MINUTES = 5
"""How many minutes commands look back."""
_KEPT_MINUTES = 15


@dataclass(slots=True)
class Attempts:
    """Delivery attempts of a while: how many succeeded, with how many events and in how many seconds, and failed."""

    confirmed: int = 0
    events: int = 0
    failed: int = 0
    seconds: float = 0.0
    slowest: float = 0.0
    fault: str | None = None

    def confirm(self, seconds: float, events: int) -> None:
        """Count an attempt that has delivered so many events after so many seconds."""
        self.confirmed += 1
        self.events += events
        self.seconds += seconds
        self.slowest = max(self.slowest, seconds)

    def fail(self, fault: str) -> None:
        """Count an attempt that has failed; the text is safe in a log."""
        self.failed += 1
        self.fault = fault


@dataclass(frozen=True, slots=True)
class RecentActivity:
    """Delivery attempts of a sink in the last MINUTES: how many, the mean and the greatest seconds, and the last fault.

    `rows_per_second` is about how fast it gets through the outbox: from what it delivers or, in a difference of several
    portions, from its position there.
    """

    confirmed: int
    failed: int
    mean_seconds: float | None
    slowest_seconds: float
    fault: str | None
    rows_per_second: float | None


def add_attempts(
    conn: Connection, group: str, attempts: Mapping[str, tuple[Attempts, int | None]]
) -> None:
    """Add attempts to those of the current minute, and delete the minutes before the last ones. Raises psycopg.Error.

    `attempts` has those of each sink, with its position in the difference that it polls, or None.
    """
    # Sorted, so that two instances do not deadlock.
    sinks = sorted(attempts)
    rows = (
        (*astuple(replace(done, fault=storable(conn, done.fault))), polled)
        for done, polled in map(attempts.__getitem__, sinks)
    )
    columns = zip(*rows, strict=True)
    conn.execute(
        """
        with old as (
            delete from relay.sink_activity
             where group_id = %s and sink = any(%s) and minute < now() - make_interval(mins => %s))
        insert into relay.sink_activity as a
               (group_id, sink, minute, confirmed, events, failed, seconds, slowest, fault, polled_offset)
        select %s, g.sink, date_trunc('minute', now()), g.confirmed, g.events, g.failed, g.seconds, g.slowest, g.fault,
               g.polled
          from unnest(%s::text[], %s::bigint[], %s::bigint[], %s::bigint[], %s::float8[], %s::float8[], %s::text[],
                      %s::bigint[]) as g (sink, confirmed, events, failed, seconds, slowest, fault, polled)
        on conflict (group_id, sink, minute) do update
           set confirmed = a.confirmed + excluded.confirmed, events = a.events + excluded.events,
               failed = a.failed + excluded.failed, seconds = a.seconds + excluded.seconds,
               slowest = greatest(a.slowest, excluded.slowest), fault = coalesce(excluded.fault, a.fault)
        """,
        (group, sinks, _KEPT_MINUTES, group, sinks, *map(list, columns)),
    )


def recent_attempts(conn: Connection, group: str) -> dict[str, RecentActivity]:
    """Read the attempts of each sink in the last MINUTES. Raises psycopg.Error."""
    rows = conn.execute(
        """
        select a.sink, sum(a.confirmed)::bigint, sum(a.failed)::bigint,
               sum(a.seconds) / nullif(sum(a.confirmed), 0), max(a.slowest),
               (array_agg(a.fault order by a.minute desc) filter (where a.fault is not null))[1],
               coalesce((select nullif(s.polled_offset - f.polled_offset, 0)
                                / nullif(extract(epoch from s.updated_at - f.noted_at)::float8, 0)
                           from relay.sinks as s
                           join lateral (
                                select f.polled_offset, f.noted_at from relay.sink_activity as f
                                 where f.group_id = %(group)s and f.sink = a.sink and f.polled_offset <= s.polled_offset
                                   and f.minute > now() - make_interval(mins => %(minutes)s)
                                 order by f.minute limit 1) as f on true
                          where s.group_id = %(group)s and s.sink = a.sink and s.following is not null),
                        nullif(sum(a.events), 0)::float8
                        / greatest(1, extract(epoch from clock_timestamp() - min(a.noted_at))::float8))
          from relay.sink_activity as a
         where a.group_id = %(group)s and a.minute > now() - make_interval(mins => %(minutes)s) group by a.sink
        """,
        {"group": group, "minutes": MINUTES},
    )
    return {sink: RecentActivity(*values) for sink, *values in rows}


@dataclass(frozen=True, slots=True)
class EngineTotals:
    """The batches, events and transactions that an engine has applied for one reason, since a time."""

    engine: str
    reason: str
    batches: int
    events: int
    transactions: int
    since: datetime


def add_batches(
    conn: Connection, group: str, counts: Mapping[tuple[str, str], tuple[int, int, int]]
) -> None:
    """Add counts (batches, events, transactions) by engine and reason."""
    # Sorted, so that two instances do not deadlock.
    rows = [(group, *key, *counts[key]) for key in sorted(counts)]
    with conn.cursor() as cursor:
        cursor.executemany(
            """
            insert into relay.engines as e (group_id, engine, reason, batches, events, transactions)
            values (%s, %s, %s, %s, %s, %s)
            on conflict (group_id, engine, reason) do update
               set batches = e.batches + excluded.batches, events = e.events + excluded.events,
                   transactions = e.transactions + excluded.transactions, updated_at = now()
            """,
            rows,
        )


def engine_totals(conn: Connection, group: str) -> list[EngineTotals]:
    """List the totals of a group, by engine and reason."""
    with conn.cursor(row_factory=class_row(EngineTotals)) as cursor:
        return cursor.execute(
            "select engine, reason, batches, events, transactions, since from relay.engines"
            " where group_id = %s order by 1, 2",
            (group,),
        ).fetchall()
