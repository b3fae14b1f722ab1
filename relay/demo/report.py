"""Computes the demo's figures from the database and from relay's log.

The checks compare the database with what the demo published; each counts violations of a promise, and can fail.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from psycopg.rows import dict_row

from relay.demo.performance import LoggedBatch, Performance
from relay.demo.screen import Check
from relay.demo.shop import Poison
from relay.store.connections import Connection, connect

_QUERIES: Mapping[str, str] = {
    "projection + dead letters = outbox": """
        with outcome as (
            select id from shop.projection union all select event_id::uuid from relay.dead_letter_queue
        ), counted as (
            select id, count(*) as times from outcome group by id
        )
        select count(*) filter (where c.times is null)                       as missing,
               count(*) filter (where o.id is not null and c.times > 1)      as twice,
               count(*) filter (where o.id is null)                          as foreign
          from public.outbox_message_t o full join counted c on c.id = o.id
    """,
    "events as they were published": """
        select (select count(*) from shop.projection p join public.outbox_message_t o using (id)
                 where (p.host_id, p.transaction_id, p.c_offset, p.event_type, p.amount) is distinct from
                       (o.host_id, o.transaction_id, o.c_offset, o.event_type, (o.payload ->> 'amount')::numeric))
                   as projected_otherwise,
               (select count(*) from relay.dead_letter_queue d join public.outbox_message_t o on o.id::text = d.event_id
                 where (d.host_id, d.user_id, d.transaction_id, d.c_offset, d.event_type, d.payload, d.metadata)
                       is distinct from
                       (o.host_id::text, o.user_id::text, o.transaction_id::text, o.c_offset, o.event_type,
                        o.payload, o.metadata))
                   as dead_lettered_otherwise
    """,
    # Without a transaction_id, a business transaction is the events of one user of a host in one commit.
    "business transactions whole": """
        with event as (
            select coalesce(o.transaction_id::text, concat_ws(' ', o.host_id, o.user_id, o.xmin)) as business,
                   p.id is not null as applied, pg_xact_commit_timestamp(p.xmin) as committed
              from public.outbox_message_t o left join shop.projection p using (id)
        ), business as (
            select count(*) filter (where applied) as applied, count(*) as events,
                   count(distinct committed) as commits
              from event group by business
        )
        select count(*) filter (where applied not in (0, events)) as torn,
               count(*) filter (where commits > 1)                as in_several_commits
          from business
    """,
    "order of every host": """
        select count(*) as after_a_later_one
          from (select o.c_offset < lag(o.c_offset) over (partition by o.host_id order by p.seq) as late
                  from shop.projection p join public.outbox_message_t o using (id)) as applied
         where late
    """,
    "totals = projection": """
        with wanted as (
            select o.host_id, (o.payload ->> 'customer')::int as customer, count(*) as orders, sum(p.amount) as amount
              from shop.projection p join public.outbox_message_t o using (id)
             where p.event_type = 'order.placed'
             group by 1, 2
        )
        select count(*) as differing
          from wanted w full join shop.customer_totals t using (host_id, customer)
         where (w.orders, w.amount) is distinct from (t.orders, t.amount)
    """,
    "offsets of the partitions": """
        with wanted as (
            select abs(hashtext(host_id::text)::bigint) % (select count(*) from relay.consumer_offsets) as partition_id,
                   max(c_offset) + 1 as next_offset
              from public.outbox_message_t group by 1
        )
        select count(*) as not_at_the_end
          from relay.consumer_offsets c left join wanted w using (partition_id)
         where c.next_offset <> coalesce(w.next_offset, 1)
    """,
}

_DEAD = """
    with expected as (
        select * from unnest(%s::text[], %s::text[], %s::text[]) as poison (event_id, handler, fault)
    ), found as (
        select event_id, handler, substring(exception from '^\\w+') as fault from relay.dead_letter_queue
    )
    select (select count(*) from (select * from expected except all select * from found) as x) as missing,
           (select count(*) from (select * from found except all select * from expected) as x) as unexpected
"""

_SLOT = """
    select confirmed_flush_lsn::text as confirmed, confirmed_flush_lsn >= %s::pg_lsn as at_the_end, active
      from pg_replication_slots where database = current_database()
"""


def verify(conn: Connection, poisons: Sequence[Poison], end: str) -> list[Check]:
    """Check every promise. `end` is an LSN after the last commit of the outbox."""
    expected = (
        [poison.event_id for poison in poisons],
        [poison.handler for poison in poisons],
        [poison.fault for poison in poisons],
    )
    return [
        *(_count(conn, promise, query) for promise, query in _QUERIES.items()),
        _count(conn, "dead letters = poison", _DEAD, expected),
        _slot(conn, end),
    ]


def _count(
    conn: Connection, promise: str, query: str, parameters: Sequence[Any] | None = None
) -> Check:
    """Run a query that counts violations of a promise, each kind in a column named after it."""
    with conn.cursor(row_factory=dict_row) as cursor:
        violations: dict[str, int] = next(cursor.execute(query.encode(), parameters))
    counts = ", ".join(f"{count:,} {name.replace('_', ' ')}" for name, count in violations.items())
    return Check(promise, not any(violations.values()), counts)


def _slot(conn: Connection, end: str) -> Check:
    with conn.cursor(row_factory=dict_row) as cursor:
        state = cursor.execute(_SLOT, (end,)).fetchone()
    promise = "slot confirmed to the end"
    if state is None:
        return Check(promise, False, "there is no slot")
    kept = state["at_the_end"] and not state["active"]
    active = ", still active" if state["active"] else ""
    return Check(promise, kept, f"{state['confirmed']}, end {end}{active}")


_OUTBOX = """
    select count(*) as events, count(distinct host_id) as hosts,
           count(distinct coalesce(transaction_id::text, concat_ws(' ', host_id, user_id, xmin))) as transactions,
           count(*) filter (where c_offset < %(live)s) as backlog
      from public.outbox_message_t
"""
_IMPORT = """
    select count(*) as events, coalesce(sum(octet_length(payload::text)), 0) as bytes
      from public.outbox_message_t where event_type = 'catalogue.product_imported'
"""
_DEAD_FACTS = """
    select count(*) as events,
           count(distinct coalesce(transaction_id::text, concat_ws(' ', host_id, user_id, commit_lsn))) as transactions
      from relay.dead_letter_queue
"""
_DRAIN = """
    select coalesce(extract(epoch from max(pg_xact_commit_timestamp(xmin)) - %(from)s), 'NaN')::float8 as seconds
      from shop.projection where c_offset < %(live)s
"""
# The latency is from the time stamp of the event, inside its own transaction, to the commit of its effect.
_LIVE = """
    with live as (
        select o.transaction_id, o.event_ts,
               1000 * extract(epoch from pg_xact_commit_timestamp(p.xmin) - o.event_ts)::float8 as ms
          from shop.projection p join public.outbox_message_t o using (id)
         where o.c_offset >= %(live)s
    )
    select count(distinct transaction_id) as transactions,
           coalesce(extract(epoch from max(event_ts) - min(event_ts)), 'NaN')::float8 as seconds,
           coalesce(percentile_cont(0.5) within group (order by ms), 'NaN') as median,
           coalesce(percentile_cont(0.99) within group (order by ms), 'NaN') as tail
      from live
"""


def judge(dsn: str, performance: Performance) -> list[Check]:
    """Check the database, the use of both engines, and relay's exit status."""
    with connect(dsn) as conn:
        checks = verify(conn, performance.poisons, performance.end)
    spark, inline = (_events(performance.batches, engine) for engine in ("spark", "inline"))
    status = performance.exit_status
    return [
        *checks,
        Check(
            "Spark and inline at work",
            spark > 0 and inline > 0,
            f"{spark:,} events on Spark, {inline:,} inline",
        ),
        Check("relay ended by SIGTERM", status == 0, f"exit status {status}"),
    ]


def facts(dsn: str, performance: Performance) -> list[tuple[str, str]]:
    """Return the names and figures of the summary."""
    known = {"live": performance.first_live_offset, "from": performance.drained_from}
    with connect(dsn) as conn, conn.cursor(row_factory=dict_row) as cursor:
        outbox, large, dead, drain, live = (
            next(cursor.execute(query, known))
            for query in (_OUTBOX, _IMPORT, _DEAD_FACTS, _DRAIN, _LIVE)
        )
    batches = performance.batches
    whole = [batch.number for batch in batches if batch.events == large["events"]]
    rate = outbox["backlog"] / drain["seconds"]
    return [
        ("events", f"{outbox['events']:,} of {outbox['hosts']} hosts"),
        ("business transactions", f"{outbox['transactions']:,}"),
        (
            "largest transaction",
            f"{large['events']:,} events, {large['bytes'] / 1e6:.1f} MB of payload, in batch {_ranges(whole)}",
        ),
        ("dead letters", f"{dead['events']:,} events of {dead['transactions']:,} transactions"),
        ("on Spark", _share(batches, "spark")),
        ("inline", _share(batches, "inline")),
        ("backlog", f"{outbox['backlog']:,} events in {drain['seconds']:.1f} s: {rate:,.0f}/s"),
        ("live", f"{live['transactions']:,} transactions in {live['seconds']:.1f} s"),
        (
            "live latency, publish to commit",
            f"p50 {live['median']:.1f} ms, p99 {live['tail']:.1f} ms",
        ),
    ]


def _events(batches: Sequence[LoggedBatch], engine: str) -> int:
    return sum(batch.events for batch in batches if batch.engine == engine)


def _share(batches: Sequence[LoggedBatch], engine: str) -> str:
    """Format how many batches and events an engine ran, with the numbers of the batches."""
    numbers = [batch.number for batch in batches if batch.engine == engine]
    if not numbers:
        return "nothing"
    return f"{_events(batches, engine):,} events in {len(numbers):,} batches ({_ranges(numbers)})"


def _ranges(numbers: Sequence[int]) -> str:
    """Format ascending numbers as ranges: 1, 4-7, 9."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return ", ".join("-".join(map(str, run)) for run in runs)
