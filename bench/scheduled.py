"""What scheduled events cost, from their publication to their effect, beside live ones; and how late they come."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from functools import partial

import psutil

from bench.backlog import STATEMENTS
from bench.endurance_rows import server_seconds
from bench.outbox import Outbox, wait_until
from bench.plan import Plan
from bench.relaying import Relay
from bench.results import Contender, Goal, Measurement, Workload
from relay.admin.install import initialise

RATE = 1_000
"""How many are due in a second."""
AT_ONCE = 1_000_000_000
LIVE, SCHEDULED, TOGETHER = "live", "scheduled", "scheduled, all due at one moment"
STEADY = "live, as many a second"
PUBLISH, HOLD, DELIVER = "publish, CPU µs/event", "hold, CPU µs/event", "deliver, CPU µs/event"
TOTAL = "total, CPU µs/event"
_PUBLISH = """
    do $$
    declare
        at timestamptz := clock_timestamp();
    begin
        for portion in 0..{last} loop
            perform pg_sleep_until(at + portion * interval '1 s' * {pause});
            insert into outbox_message_t (id, host_id, user_id, aggregate_type, aggregate_id, event_type, payload,
                                          transaction_id, transaction_ordinal, transaction_count, deliver_at)
            select gen_random_uuid(), ('00000000-0000-4000-8000-' || lpad((n % 64)::text, 12, '0'))::uuid,
                   '00000000-0000-4000-9000-000000000001', 'Order', n::text, 'order.placed',
                   jsonb_build_object('order', n, 'amount', n, 'note', repeat('x', 100)), gen_random_uuid(), 1, 1,
                   {deliver_at}
              from generate_series(portion * {size}, portion * {size} + {size} - 1) as n;
            commit;
        end loop;
    end $$
"""
_LATE = """
    select extract(epoch from pg_xact_commit_timestamp(xmin) - to_timestamp(%s)
                              - aggregate_id::int * interval '1 s' / %s) * 1e3
      from projection
"""


def scheduled(plan: Plan) -> Iterator[Workload]:
    """Business transactions of one event, of 64 hosts, into a table: 100 in a commit; 10 where they come steadily."""
    outbox = Outbox(plan.cluster, "scheduled")
    events = 5_000 if plan.quick else 100_000
    yield Workload(
        "scheduled",
        f"{events:,} events, {RATE:,} of them due in a second; milliseconds after their time",
        [
            Contender(
                name, partial(measure, plan, outbox, events, due, paced=paced), plan.rounds, LIVE
            )
            for name, due, paced in (
                (LIVE, None, False),
                (STEADY, None, True),
                (SCHEDULED, RATE, False),
                (TOGETHER, AT_ONCE, False),
            )
        ],
        [Goal(SCHEDULED, "p50", 50), Goal(SCHEDULED, "p99", 250)],
    )


def measure(
    plan: Plan, outbox: Outbox, events: int, rate: int | None, *, paced: bool
) -> Measurement:
    """CPU of relay and the server for each event of publishing, holding and delivering; how late they are applied.

    So many are due in a second; None: they are not scheduled. If `paced`, RATE are published in a second.
    """
    slot = outbox.new_slot()
    outbox.conn.execute("truncate projection; truncate relay.deferred cascade")
    initialise(outbox.settings(slot))
    relay = Relay("relay", STATEMENTS["each: batch"])
    with relay.warm(outbox, slot, plan.folder) as running:
        process = psutil.Process(running.process.pid)

        def used() -> float:
            of = process.cpu_times()
            return float(of.user + of.system) + server_seconds(plan.cluster, outbox.conn)

        # Enough to publish and hold them on a slow machine.
        begins = time.time() + 5 + events / 1_500
        at = f"to_timestamp({begins}) + n * interval '1 s' / {rate}" if rate else "null"
        before = used()
        size = 10 if paced else 100
        pause = size / RATE if paced else 0
        statement = _PUBLISH.format(last=events // size - 1, size=size, pause=pause, deliver_at=at)
        own = _session_seconds(outbox)
        outbox.conn.execute(statement.encode())
        published = _session_seconds(outbox) - own
        if rate:
            wait_until(lambda: _deferred(outbox) == events, "all are deferred")
            if time.time() > begins:
                raise AssertionError("the first were due before the last were deferred")
        else:
            wait_until(lambda: outbox.applied() == events, "all are applied")
        first = used()
        figures = {PUBLISH: published, HOLD if rate else DELIVER: first - before}
        if rate:
            time.sleep(max(0.0, begins - time.time()))
            first = used()
            time.sleep(events / rate)
            wait_until(lambda: _deferred(outbox) == 0, "all are delivered")
            figures[DELIVER] = used() - first
    outbox.drop(slot)
    if outbox.applied() != events:
        raise AssertionError(f"{outbox.applied()} of {events} are applied")
    figures = {name: seconds / events * 1e6 for name, seconds in figures.items()}
    figures[TOTAL] = sum(figures.values())
    return figures | (_lateness(outbox, begins, rate) if rate else {})


def _session_seconds(outbox: Outbox) -> float:
    """CPU seconds of the session that publishes, which `server_seconds` leaves out."""
    of = psutil.Process(outbox.conn.info.backend_pid).cpu_times()
    return float(of.user + of.system)


def _deferred(outbox: Outbox) -> int:
    return int(outbox.value("select count(*) from relay.deferred"))


def _lateness(outbox: Outbox, begins: float, rate: int) -> Measurement:
    late = sorted(float(row[0]) for row in outbox.conn.execute(_LATE.encode(), (begins, rate)))
    if rate == AT_ONCE:
        return {"delivered/s": len(late) / late[-1] * 1e3}
    cuts = statistics.quantiles(late, n=100)
    return {"p50": cuts[49], "p99": cuts[98], "max": late[-1]}
