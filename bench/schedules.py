"""What 10,000 schedules cost while nothing is due, and how late their events come when many are."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import psutil
import yaml

from bench.endurance_rows import server_seconds
from bench.environment import variables
from bench.outbox import Outbox, wait_until
from bench.plan import Plan
from bench.results import Contender, Goal, Measurement, Workload

SCHEDULES = 10_000
RATE = 500
"""How many are due in a second."""
FEW, IDLE, SPREAD, TOGETHER = (
    "10, none due",
    f"{SCHEDULES:,}, none due",
    f"{SCHEDULES:,}, {RATE} due in a second",
    f"{SCHEDULES:,}, all due at one moment",
)
IDLE_SECONDS = 30.0
_DECLARE = """
    select count(relay.declare_schedule(
               name => 's' || n, at => to_timestamp(%s) + n * interval '1 s' / %s,
               publish => '{"event_type": "cron.bench", "host_id": "00000000-0000-4000-8000-000000000001"}'))
      from generate_series(1, %s) as n
"""
_LATE = """
    select extract(epoch from pg_xact_commit_timestamp(xmin) - to_timestamp(%s)
                              - substr(metadata ->> 'schedule', 2)::int * interval '1 s' / %s) * 1e3
      from outbox_message_t where event_type = 'cron.bench'
"""


def schedules(plan: Plan) -> Iterator[Workload]:
    """Single times, since their moments can be chosen; they cost what other times do. One `relay schedule run`."""
    outbox = Outbox(plan.cluster, "schedules")
    yield Workload(
        "schedules",
        f"{SCHEDULES:,} schedules; CPU of `relay schedule run` and of the server, milliseconds after each time",
        [
            Contender(FEW, partial(idle, plan, outbox, 10), plan.rounds),
            Contender(IDLE, partial(idle, plan, outbox, SCHEDULES), plan.rounds, FEW),
            Contender(SPREAD, partial(due, plan, outbox, RATE), plan.rounds),
            Contender(TOGETHER, partial(due, plan, outbox, 1_000_000_000), plan.rounds),
        ],
        [Goal(IDLE, "CPU, % of a core", 1), Goal(SPREAD, "p50", 50), Goal(SPREAD, "p99", 250)],
    )


def idle(plan: Plan, outbox: Outbox, number: int) -> Measurement:
    """The CPU while nothing is due, and the seconds until the next times are known."""
    with _running(plan, outbox, number, time.time() + 86_400, 1) as (process, seconds):
        before = _used(plan, outbox, process)
        time.sleep(IDLE_SECONDS)
        used = _used(plan, outbox, process) - before
    return {"CPU, % of a core": used / IDLE_SECONDS * 100, "computed in, s": seconds}


def due(plan: Plan, outbox: Outbox, rate: int) -> Measurement:
    """How late the events come, and what each costs."""
    begins = time.time() + 30
    with _running(plan, outbox, SCHEDULES, begins, rate) as (process, _):
        time.sleep(max(0.0, begins - time.time() - 1))
        before = _used(plan, outbox, process)
        wait_until(lambda: _published(outbox) == SCHEDULES, "all are published")
        used = _used(plan, outbox, process) - before
    late = sorted(float(row[0]) for row in outbox.conn.execute(_LATE.encode(), (begins, rate)))
    cuts = statistics.quantiles(late, n=100)
    return {
        "p50": cuts[49],
        "p99": cuts[98],
        "max": late[-1],
        "CPU, µs/event": used / SCHEDULES * 1e6,
    }


@contextmanager
def _running(
    plan: Plan, outbox: Outbox, number: int, begins: float, rate: int
) -> Iterator[tuple[psutil.Process, float]]:
    """A process that publishes what is due, and in how many seconds it has found the next times of all schedules."""
    outbox.conn.execute("truncate relay.schedules; truncate outbox_message_t")
    outbox.conn.execute(_DECLARE.encode(), (begins, rate, number))
    file = plan.folder / "schedules.yaml"
    file.write_text(yaml.safe_dump(outbox.config("schedules")))
    words = [sys.executable, "-m", "relay", "schedule", "run", "--config", str(file)]
    with (plan.folder / "schedules.log").open("ab") as log:
        process = subprocess.Popen(words, env=variables(), stdout=log, stderr=log)
    try:
        started = time.monotonic()
        wait_until(
            lambda: not outbox.value("select count(*) from relay.schedules where due_at is null"),
            "the next times are known",
            process=process,
        )
        yield psutil.Process(process.pid), time.monotonic() - started
    finally:
        process.terminate()
        process.wait(30)


def _published(outbox: Outbox) -> int:
    return int(outbox.value("select sum(published) from relay.schedules"))


def _used(plan: Plan, outbox: Outbox, process: psutil.Process) -> float:
    of = process.cpu_times()
    return float(of.user + of.system) + server_seconds(plan.cluster, outbox.conn)
