"""Computes the demo's figures from the database and from relay's log."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from psycopg.rows import dict_row

from relay.demo.play import Performance
from relay.demo.process import LoggedBatch
from relay.demo.verify import Check, verify
from relay.store.connections import connect

Figures = dict[str, Any]

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
_DEAD = """
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
            next(cursor.execute(query, known)) for query in (_OUTBOX, _IMPORT, _DEAD, _DRAIN, _LIVE)
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
