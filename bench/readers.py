"""Readers of relay's outbox: how fast `subscribe` drains it, what a page costs, and what readers that wait cost."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import psutil

from bench import live
from bench.backlog import fill
from bench.job import Job
from bench.outbox import SERVER_SETTINGS, Backlog, Outbox, wait_until
from bench.peers import Live
from bench.plan import Plan
from bench.queue_rows import IDLE_WORKERS, RATE, percentiles, under_a_snapshot, usage
from bench.relaying import NOTHING, Relay
from bench.results import Contender, Goal, Measurement, Workload
from relay.admin.install import initialise
from relay.demo.embedded import Cluster

FIGURE = "events/s"
WORKER = "bench.workers.reader"
INLINE = "relay inline"
PLAIN, ASYNC = "relay's reader", "relay's reader, async"
LOOKS, EACH_DONE = "relay's reader, all events taken", "relay's reader, each transaction done"
LOOP = "a loop over the table"
WITH, WITHOUT = "relay's reader, beside relay", "relay's reader, without relay"
PAGE = "relay.read of 1,000"
PAGES = 20
INSERT = """
    do $$
    begin
        for t in 1..{} loop
            insert into public.outbox_message_t (host_id, aggregate_type, aggregate_id, event_type, payload, c_offset)
            select '00000000-0000-4000-8000-000000000001', 'Order', t::text, 'order.placed',
                   jsonb_build_object('order', t, 'amount', n, 'note', repeat('x', 100)), nextval('relay.offsets')
              from generate_series(1, 1000) as n;
            commit;
        end loop;
    end $$
"""


def new_outbox(cluster: Cluster, name: str) -> Outbox:
    """An outbox with the index on c_xid, which readers need, and without a slot that nobody reads."""
    outbox = Outbox(cluster, name)
    outbox.drop(f"{name}_base")
    initialise(outbox.settings(f"{name}_base", mode="poll"))
    return outbox


def _worker(plan: Plan, outbox: Outbox, kind: str, reader: str, **job: Any) -> Job:
    given = {"kind": kind, "dsn": outbox.dsn, "reader": reader, **job}
    return Job(WORKER, given, plan.folder, [sys.executable, "-m", WORKER])


def drain_by(plan: Plan, outbox: Outbox, backlog: Backlog, kind: str, **job: Any) -> Measurement:
    """Events a second of a reader that begins at the beginning."""
    reader = outbox.new_name()
    given = {"every": 1_000, **job, "events": backlog.events}
    with _worker(plan, outbox, kind, reader, **given) as worker:
        seconds = float(worker.answer("done")["seconds"])
    if kind != "loop":
        outbox.conn.execute("select relay.drop_reader(%s)", (reader,))
    return {FIGURE: backlog.events / seconds}


def drain(plan: Plan) -> Iterator[Workload]:
    """A backlog to a reader that does nothing, beside relay with a handler that does nothing."""
    transactions = 8_000 if plan.quick else 40_000
    outbox = new_outbox(plan.cluster, "readers_drain")
    backlog = outbox.publish(transactions)
    outbox.conn.execute("vacuum analyze outbox_message_t")
    inline, by = Relay(INLINE, NOTHING), partial(drain_by, plan, outbox, backlog)
    rows: dict[str, Callable[[], Measurement]] = {
        INLINE: lambda: {FIGURE: inline.drain(outbox, backlog, plan.folder, effect=False)},
        PLAIN: partial(by, "plain"),
        ASYNC: partial(by, "async"),
        LOOKS: partial(by, "plain", looks=True),
        EACH_DONE: partial(by, "plain", every=1),
        LOOP: partial(by, "loop"),
    }
    yield Workload(
        "readers-drain",
        f"{backlog.events:,} events in {transactions:,} commits, done every 1,000 transactions",
        [Contender(name, measure, plan.rounds, INLINE) for name, measure in rows.items()],
        [
            Goal(PLAIN, FIGURE, 0.7, INLINE, at_least=True),
            Goal(ASYNC, FIGURE, 0.7, INLINE, at_least=True),
        ],
    )


def pages(plan: Plan) -> Iterator[Workload]:
    """What `relay.read` of 1,000 events costs in the midst of a backlog."""
    rows = plan.rows or (100_000 if plan.quick else 10_000_000)
    outbox = new_outbox(plan.cluster, "readers_pages")
    conn = outbox.conn
    conn.execute(INSERT.format(rows // 2_000).encode())
    conn.execute("select relay.declare_reader('midst')")
    fill(conn, (PAGES + 2) * 1_000, events=1)
    conn.execute(INSERT.format(rows // 2_000).encode())
    conn.execute("vacuum analyze outbox_message_t")
    yield Workload(
        "readers-pages",
        f"in a backlog of {rows:,} events, in commits of one; milliseconds",
        [Contender(PAGE, partial(read_pages, outbox), plan.rounds)],
        [Goal(PAGE, "p50", 5)],
    )


def read_pages(outbox: Outbox) -> Measurement:
    """Milliseconds of a page, from the statement to its result, for pages one after the other."""
    took: list[float] = []
    at = outbox.value("select position from relay.read('midst', 1000)")
    for _ in range(PAGES):
        began = time.perf_counter()
        rows = outbox.conn.execute("select * from relay.read('midst', 1000, %s)", (at,))
        took.append((time.perf_counter() - began) * 1e3)
        first = rows.fetchone()
        if first is None or rows.rowcount != 1_000:
            raise AssertionError(f"{rows.rowcount} of 1,000 rows")
        at = first[0]
    # The first ones of a session plan its statements.
    return percentiles(took[2:])


def held(plan: Plan) -> Iterator[Workload]:
    """What a reader's turn costs while somebody holds a snapshot."""
    outbox = new_outbox(plan.cluster, "readers_held")
    outbox.conn.execute("select relay.declare_reader('held')")
    yield under_a_snapshot(plan, outbox, "readers-held", "turns of five events", read_five)


def read_five(outbox: Outbox) -> float:
    """Publish five events, read them and advance; returns the milliseconds of the latter two."""
    fill(outbox.conn, 1)
    at = time.perf_counter()
    read = outbox.conn.execute("select position from relay.read('held')").fetchall()
    outbox.conn.execute("select relay.advance('held', %s)", read[0])
    took = (time.perf_counter() - at) * 1e3
    if len(read) != 5:
        raise AssertionError(f"{len(read)} of 5 events")
    return took


@dataclass(frozen=True, slots=True)
class Reading:
    """A reader in Python, with a relay that wakes it or without."""

    plan: Plan
    beside_relay: bool
    style: str = "relay"

    def unavailable(self) -> str | None:
        return None

    @contextmanager
    def consuming(self, live: Live) -> Iterator[None]:
        slot = live.outbox.new_slot()
        with ExitStack() as stack:
            if self.beside_relay:
                stack.enter_context(Relay(slot, NOTHING).warm(live.outbox, slot, live.folder))
            arrivals = {"arrivals": str(live.arrivals)}
            worker = _worker(self.plan, live.outbox, "live", slot, **arrivals)
            stack.enter_context(worker).answer("ready")
            yield
        live.outbox.conn.execute("select relay.drop_reader(%s)", (slot,))
        live.outbox.drop(slot)


def latencies(plan: Plan) -> Iterator[Workload]:
    """From just before the publisher's COMMIT to the reader's code."""
    outbox = new_outbox(plan.cluster, "readers_live")
    seconds = 5.0 if plan.quick else 30.0
    yield Workload(
        "readers-live",
        f"{RATE} transactions/s of one event, milliseconds",
        [
            Contender(
                name,
                partial(live.measure, Reading(plan, beside), outbox, plan.folder, RATE, seconds, 1),
                plan.rounds,
            )
            for name, beside in ((WITH, True), (WITHOUT, False))
        ],
        [Goal(WITH, "p50", 5), Goal(WITHOUT, "p50", 20)],
    )


def idle(plan: Plan) -> Iterator[Workload]:
    """What readers that wait cost the server, and their process."""
    readers = 50 if plan.quick else IDLE_WORKERS
    name = f"{readers} idle readers"

    def measure() -> Measurement:
        settings = {**SERVER_SETTINGS, "max_connections": str(readers + 50)}
        with Cluster(settings=settings) as cluster:
            outbox = new_outbox(cluster, "readers_idle")
            with _worker(plan, outbox, "idle", "r", idle=readers) as process:
                process.answer("ready")
                count = "select count(*) from pg_stat_activity where starts_with(application_name, 'relay reader ')"
                wait_until(lambda: int(outbox.value(count)) >= readers, "all are connected", 120)
                # By then, all of them have their longest pause.
                time.sleep(20)
                seconds = 10 if plan.quick else 60
                found = usage(cluster, outbox, psutil.Process(process.pid), seconds)
        return {**found, "queries a second of a reader": found["transactions a second"] / readers}

    yield Workload(
        "readers-idle",
        "in one process, each with a connection; CPU in percent of a core",
        [Contender(name, measure, plan.rounds)],
        [Goal(name, "server CPU, %", 2), Goal(name, "queries a second of a reader", 1)],
    )
