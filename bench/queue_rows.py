"""What a queue must bear: idle workers, failing keys, a held snapshot, many queues on one log; and its latency."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import psutil
import psycopg

from bench import live
from bench.endurance_rows import Rows, Together, held_snapshot, server_seconds
from bench.job import Job
from bench.outbox import SERVER_SETTINGS, Backlog, Outbox, wait_until
from bench.peers import Live
from bench.peers.pgqueuer import TUNED_BATCH, PgQueuer
from bench.plan import Plan
from bench.queues import FIGURE, FILL, WORKER, pgbench
from bench.relaying import NOTHING, Relay
from bench.results import Contender, Goal, Measurement, Workload
from relay.admin.install import initialise
from relay.demo.embedded import Cluster

RATE = 200
IDLE_WORKERS = 500
FIRST, LAST = "first part", "last part"
FLAT = 1.15
COST = "CPU, µs/event"
"""Of relay and the server."""
ALL_WELL, SOME_FAIL = "no key fails", "300 keys fail"
HELD = ", under a held snapshot"
ONE, WATCHED, MANY = "one queue", "one queue, for which a worker waits", "100 queues"


@dataclass(frozen=True, slots=True)
class QueueWorker:
    """relay, which fills a queue from the WAL, and a worker in Python that takes from it."""

    name: str = "relay, a queue and its worker"
    style: str = "relay"

    def unavailable(self) -> str | None:
        return None

    @contextmanager
    def consuming(self, live: Live) -> Iterator[None]:
        queue = live.outbox.new_slot()
        job = {"kind": "relay", "dsn": live.outbox.dsn, "queue": queue, "workers": 16}
        job["arrivals"] = str(live.arrivals)
        with Relay(queue, {"type": "queue", "queue": queue}).warm(live.outbox, queue, live.folder):
            declare(live.outbox, queue, queue, None)
            with Job(WORKER, job, live.folder, [sys.executable, "-m", WORKER]) as worker:
                worker.answer("ready")
                yield
        live.outbox.drop(queue)


def declare(outbox: Outbox, name: str, group: str, match: str | None, key: str = "none") -> None:
    """Declare a queue of a group."""
    outbox.conn.execute(
        "select relay.declare_queue(%s, %s, %s, group_id => %s)", (name, match, key, group)
    )


def live_messages(plan: Plan) -> Iterator[Workload]:
    """From just before the publisher's COMMIT to the worker's handler, beside pgqueuer."""
    outbox = Outbox(plan.cluster, "queues_live")
    seconds = 5.0 if plan.quick else 30.0
    against = PgQueuer("default batch")
    consumers = (against, PgQueuer("batch of 500", TUNED_BATCH), QueueWorker())
    yield Workload(
        "queues-live",
        f"{RATE} transactions/s of one event, milliseconds",
        [
            Contender(
                each.name,
                partial(live.measure, each, outbox, plan.folder, RATE, seconds, 1),
                plan.rounds,
                against.name,
                each.unavailable(),
            )
            for each in consumers
            if plan.takes("queues-live", each.name)
        ],
    )


def failing_keys(plan: Plan) -> Iterator[Workload]:
    """Throughput of the other keys while 300 of 10,000 wait for a retry, and have more messages in front of theirs."""
    outbox = Outbox(plan.cluster, "queues_failing")
    declare(outbox, "ordered", f"{outbox.name}_base", None, "host")
    # So many that the later messages of the keys that fail are in front.
    takes = 10_000

    def measure(failing: bool, held: bool) -> Measurement:
        outbox.conn.execute("truncate relay.queue_messages")
        outbox.conn.execute(FILL.encode(), ("ordered", 10_000, 30_000))
        outbox.conn.execute("vacuum analyze relay.queue_messages")
        with held_snapshot(outbox.dsn) if held else nullcontext():
            outbox.conn.execute(
                "select relay.retry('ordered', c.id, c.attempt, '1 hour')"
                " from relay.claim('ordered', 300) as c where %s",
                (failing,),
            )
            script = "select * from relay.take('ordered', 2);"
            seconds = pgbench(outbox.dsn, script, 4, f"--transactions={takes // 4}")
        left = int(outbox.value("select count(*) from relay.queue_messages"))
        return {FIGURE: (30_000 - left) / seconds}

    yield Workload(
        "queues-failing",
        "30,000 messages of 10,000 keys, two at a time, 4 workers",
        [
            Contender(
                name + (HELD if held else ""),
                partial(measure, failing, held),
                plan.rounds,
                ALL_WELL,
            )
            for held in (False, True)
            for name, failing in ((ALL_WELL, False), (SOME_FAIL, True))
        ],
        [
            Goal(SOME_FAIL, FIGURE, 0.9, ALL_WELL, at_least=True),
            Goal(SOME_FAIL + HELD, FIGURE, 0.87, ALL_WELL, at_least=True),
        ],
    )


def filling(plan: Plan) -> Iterator[Workload]:
    """How fast relay fills one queue, one for which a worker waits, so that it is notified, and a hundred."""
    outbox = Outbox(plan.cluster, "queues_filling")
    backlog = backlog_of_types(outbox, 20_000 if plan.quick else 100_000)
    rows: dict[str, Callable[[], Measurement]] = {
        ONE: partial(fill, plan, outbox, backlog, 1),
        WATCHED: partial(fill, plan, outbox, backlog, 1, watched=True),
        MANY: partial(fill, plan, outbox, backlog, 100),
    }
    yield Workload(
        "queues-filling",
        f"{backlog.events:,} events in commits of five, each into one queue",
        [Contender(name, measure, plan.rounds, ONE) for name, measure in rows.items()],
        [
            Goal(MANY, COST, 1.5, ONE),
            Goal(WATCHED, COST, 1.05, ONE),
        ],
    )


def backlog_of_types(outbox: Outbox, events: int) -> Backlog:
    """Publish events of a hundred types, five in a commit."""
    slot = outbox.new_slot()
    outbox.conn.execute(
        f"""
        do $$
        begin
            for t in 1..{events // 5} loop
                set local synchronous_commit = off;
                perform relay.publish(
                    ('00000000-0000-4000-8000-' || lpad((t % 64)::text, 12, '0'))::uuid, null,
                    (select jsonb_agg(jsonb_build_object(
                        'event_type', 'type.' || (5 * t + n) % 100, 'aggregate_type', 'Order', 'aggregate_id', t::text,
                        'payload', jsonb_build_object('order', t, 'note', repeat('x', 100))))
                     from generate_series(1, 5) n));
                commit;
            end loop;
        end $$
        """.encode()
    )
    end = outbox.value("select pg_current_wal_insert_lsn()::text")
    outbox.conn.execute("checkpoint")
    return Backlog(slot, end, events)


def fill(
    plan: Plan, outbox: Outbox, backlog: Backlog, queues: int, watched: bool = False
) -> Measurement:
    """Events a second that relay puts into queues, each event into one of them, and the CPU time that it takes."""
    with outbox.copy(backlog) as slot, ExitStack() as stack:
        outbox.conn.execute("truncate relay.queue_messages")
        initialise(outbox.settings(slot))
        names = [f"{slot} {number}" for number in range(queues)]
        for number, name in enumerate(names):
            match = "{}" if queues == 1 else f'{{"event_type": "type.{number}"}}'
            declare(outbox, name, slot, match)
        if watched:
            conn = stack.enter_context(psycopg.connect(outbox.dsn, autocommit=True))
            row = conn.execute("select relay.watch_queue(%s)", (names[0],)).fetchone()
            conn.execute(f"listen {row and row[0]}".encode())
        with Relay("relay", NOTHING).warm(outbox, slot, plan.folder) as running:
            process = psutil.Process(running.process.pid)
            used = _cpu_seconds(process), server_seconds(plan.cluster, outbox.conn)
            finished = outbox.confirmed(slot, backlog, running.process)
            seconds = finished - running.attached
            cpu = _cpu_seconds(process) + server_seconds(plan.cluster, outbox.conn) - sum(used)
        filled = int(outbox.value("select count(*) from relay.queue_messages"))
        if filled != backlog.events:
            raise AssertionError(f"{filled} of {backlog.events} messages")
        for name in names:
            outbox.conn.execute("select relay.drop_queue(%s)", (name,))
        return {FIGURE: backlog.events / seconds, COST: cpu / backlog.events * 1e6}


def _cpu_seconds(process: psutil.Process) -> float:
    of: Any = process.cpu_times()
    return float(of.user + of.system)


def held(plan: Plan) -> Iterator[Workload]:
    """What a call of `relay.take` costs while somebody holds a snapshot."""
    outbox = Outbox(plan.cluster, "queues_held")
    declare(outbox, "mail", f"{outbox.name}_base", None)
    yield under_a_snapshot(plan, outbox, "queues-held", "rounds of ten messages", take_ten)


def take_ten(outbox: Outbox) -> float:
    """Enqueue ten messages and take them; returns the milliseconds of the latter."""
    outbox.conn.execute("select relay.enqueue('mail', '{}') from generate_series(1, 10)")
    at = time.perf_counter()
    taken = outbox.conn.execute("select id from relay.take('mail', 10)").fetchall()
    took = (time.perf_counter() - at) * 1e3
    if len(taken) != 10:
        raise AssertionError(f"{len(taken)} of 10 messages")
    return took


def under_a_snapshot(
    plan: Plan, outbox: Outbox, name: str, turns: str, turn: Callable[[Outbox], float]
) -> Workload:
    """What `turn` costs while somebody holds a snapshot, in the first and the last thirtieth of the time."""
    minutes = plan.minutes or (0.2 if plan.quick else 2.0)
    rounds = 2_000 if plan.quick else 20_000
    together = Together(partial(first_and_last, outbox, turn, rounds, minutes * 60))
    return Workload(
        name,
        f"{rounds:,} {turns} in {minutes:g} minutes under a held snapshot; milliseconds",
        [together.contender(FIRST, FIRST), together.contender(LAST, FIRST)],
        [Goal(LAST, "p50", FLAT, FIRST)],
    )


def first_and_last(
    outbox: Outbox, turn: Callable[[Outbox], float], rounds: int, seconds: float
) -> Rows:
    """Call `turn` again and again, evenly over a time; it returns what it took, in milliseconds."""
    took: list[float] = []
    with held_snapshot(outbox.dsn):
        began = time.monotonic()
        for number in range(rounds):
            time.sleep(max(0.0, began + number * seconds / rounds - time.monotonic()))
            took.append(turn(outbox))
    part = max(rounds // 30, 20)
    # The first calls of a session plan its statements.
    return {FIRST: percentiles(took[20 : 20 + part]), LAST: percentiles(took[-part:])}


def percentiles(values: list[float]) -> Measurement:
    """The 50th and the 99th percentile."""
    centiles = statistics.quantiles(values, n=100, method="inclusive")
    return {"p50": centiles[49], "p99": centiles[98]}


def idle(plan: Plan) -> Iterator[Workload]:
    """What idle workers cost the server, and their process."""
    workers = 50 if plan.quick else IDLE_WORKERS
    name = f"{workers} idle workers"

    def measure() -> Measurement:
        settings = {**SERVER_SETTINGS, "max_connections": str(2 * workers + 50)}
        with Cluster(settings=settings) as cluster:
            outbox = Outbox(cluster, "queues_idle")
            outbox.drop(f"{outbox.name}_base")
            declare(outbox, "mail", f"{outbox.name}_base", None)
            job = {"kind": "relay", "dsn": outbox.dsn, "queue": "mail", "workers": 1}
            command = [sys.executable, "-m", WORKER]
            with Job(WORKER, {**job, "idle": workers}, plan.folder, command) as process:
                process.answer("ready")
                count = "select count(*) from pg_stat_activity where starts_with(application_name, 'relay ')"
                wait_until(
                    lambda: int(outbox.value(count)) >= 2 * workers, "all are connected", 120
                )
                # By then, all of them have their longest pause.
                time.sleep(100)
                return usage(cluster, outbox, psutil.Process(process.pid), 10 if plan.quick else 60)

    yield Workload(
        "queues-idle",
        "in one process, each with a connection and one that listens; CPU in percent of a core",
        [Contender(name, measure, plan.rounds)],
        [
            Goal(name, "writes/s", 60),
            Goal(name, "server CPU, %", 3),
            Goal(name, "process CPU, %", 3),
        ],
    )


def usage(cluster: Cluster, outbox: Outbox, process: psutil.Process, seconds: float) -> Measurement:
    """What the server and a process use in so many seconds: CPU, transactions and records of the WAL."""

    def counters() -> tuple[float, ...]:
        # A session's statistics reach the view within a second.
        row = outbox.conn.execute(
            "select (select wal_records from pg_stat_wal), xact_commit + xact_rollback from pg_stat_database"
            " where datname = current_database()"
        ).fetchone()
        used = server_seconds(cluster, outbox.conn), _cpu_seconds(process)
        return (*(row or ()), *used, time.monotonic())

    before = counters()
    time.sleep(seconds)
    used = [now - then for now, then in zip(counters(), before, strict=True)]
    names = ("writes/s", "transactions a second", "server CPU, %", "process CPU, %")
    factors = (1.0, 1.0, 100.0, 100.0)
    return {
        name: factor * value / used[-1]
        for name, factor, value in zip(names, factors, used, strict=False)
    }
