"""The workloads of outages: an endpoint that is down or hangs, a sink that is rebuilt, and relay being killed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from bench import outage
from bench.case import Case
from bench.outbox import Outbox
from bench.plan import Plan
from bench.results import Contender, Measurement, Workload


def _case(name: str, size: str, rows: outage.Rows) -> Iterator[Workload]:
    """The tables of a case that was run once: the healthy sink in each phase, and the totals."""
    before = "healthy sink, before"

    def row(of: str, figures: Measurement, against: str | None) -> Contender:
        return Contender(of, lambda: figures, 1, against)

    phases = [row(of, rows[of], before) for of in rows if of.startswith("healthy sink, ")]
    yield Workload(name, size, phases)
    totals = [row(of, rows[of], None) for of in rows if not of.startswith("healthy sink, ")]
    yield Workload(f"{name}-totals", size, totals)


def _down(
    plan: Plan,
    name: str,
    seconds: float,
    how: str,
    harm: Callable[[Case], outage.Harm],
    instances: int = 1,
) -> Iterator[Workload]:
    rate, before = 500, 10 if plan.quick else 60
    outbox = Outbox(plan.cluster, name.replace("-", "_"))
    case = outage.two_sinks(outbox, plan.folder, instances=instances)
    rows = outage.down(case, rate, before, seconds, before, harm(case))
    size = f"{rate} transactions/s of one event, one endpoint away for {seconds:.0f} s{how}, milliseconds"
    yield from _case(name, size, rows)


def outage_down(plan: Plan) -> Iterator[Workload]:
    """One of two endpoints is down."""
    return _down(plan, "outage-down", 20 if plan.quick else 600, "", lambda _: time.sleep)


def outage_kills(plan: Plan) -> Iterator[Workload]:
    """One of two endpoints is down, and relay is killed every 5 seconds."""
    how = ", relay killed every 5 s"
    return _down(
        plan, "outage-kills", 20 if plan.quick else 120, how, lambda case: outage.killing(case, 5)
    )


def outage_standby(plan: Plan) -> Iterator[Workload]:
    """One of two endpoints is down, and the instance that reads the stream is killed."""
    how = ", relay killed in the middle, a standby takes over"
    return _down(plan, "outage-standby", 20 if plan.quick else 120, how, outage.taking_over, 2)


def outage_rebuild(plan: Plan) -> Iterator[Workload]:
    """A sink receives all events again while live events flow to another one."""
    transactions, rate = 6_000 if plan.quick else 200_000, 200
    outbox = Outbox(plan.cluster, "outage_rebuild")
    events = outbox.publish(transactions).events
    rows = outage.rebuild(outage.two_sinks(outbox, plan.folder), rate, 10 if plan.quick else 30)
    size = (
        f"{events:,} events to one sink, {rate} transactions/s of one event to both, milliseconds"
    )
    yield from _case("outage-rebuild", size, rows)


def outage_hanging(plan: Plan) -> Iterator[Workload]:
    """An endpoint hangs, and with it thousands of keys."""
    keys, rate = 2_000 if plan.quick else 10_000, 500
    # By default, the breaker and the limit of concurrent deliveries prevent that all keys hang at once.
    other = {"concurrency": keys, "circuit_breaker": None, "timeout": 60}
    case = outage.two_sinks(Outbox(plan.cluster, "outage_hanging"), plan.folder, other)
    rows = outage.hanging(case, rate, keys, 10 if plan.quick else 30, keys / rate + 30)
    size = (
        f"{rate} transactions/s of one event, {keys:,} keys hang in one of two sinks, milliseconds"
    )
    yield from _case("outage-hanging", size, rows)
