"""Workloads of what Spark is for: handlers that compute or wait, large events, many rows; rows twice for the noise."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import deltalake

from bench.backlog import LARGE_NOTE, STATEMENTS
from bench.memory import Footprint
from bench.outbox import Outbox, wait_until
from bench.plan import Plan
from bench.relaying import COMPUTE_1_MS, SESSION_READY, WAIT, Relay
from bench.results import Contender, Measurement, Workload

SLOTS = (1, 2, 4, 8)
PARTITIONS = 64
"""For 64 hosts. With fewer, one has twice the hosts of another, and the longest task determines a batch."""
AGAIN = "again"
"""The suffix of a row that repeats another one: the two differ by nothing but the noise."""


def waits(plan: Plan) -> Iterator[Workload]:
    """A handler that waits 5 ms for each event."""
    return _slots(plan, "spark-work-waits", WAIT, "waits 5 ms", 800 if plan.quick else 4_000)


def computes(plan: Plan) -> Iterator[Workload]:
    """A handler that computes 1 ms for each event."""
    events = 2_000 if plan.quick else 10_000
    return _slots(plan, "spark-work-computes", COMPUTE_1_MS, "computes 1 ms", events)


def _slots(
    plan: Plan, name: str, handler: dict[str, str], does: str, events: int
) -> Iterator[Workload]:
    """Inline, inline again, and on one to eight slots: transactions of one event."""
    outbox = Outbox(plan.cluster, name.replace("-", "_"))
    backlog = outbox.publish(plan.rows or events, events=1)
    inline = Relay("relay inline", handler, partitions=PARTITIONS)
    on_spark = [
        Relay(
            *(f"relay on Spark, slots: {number}", handler, True, f"local[{number}]"),
            partitions=PARTITIONS,
        )
        for number in SLOTS
    ]

    def row(relay: Relay, name: str) -> Contender:
        return Contender(
            name,
            lambda: {"events/s": relay.drain(outbox, backlog, plan.folder, effect=False)},
            plan.often(expensive=True),
            inline.name,
        )

    rows = [row(inline, inline.name), row(inline, f"{inline.name}, {AGAIN}")]
    rows += [row(relay, relay.name) for relay in on_spark]
    size = f"{backlog.events:,} transactions of one event, for which the handler {does}"
    yield Workload(name, size, rows)


def large(plan: Plan) -> Iterator[Workload]:
    """Events of 10 kB into a table, with the memory of relay's processes."""
    name = "spark-work-large"
    outbox = Outbox(plan.cluster, "spark_work_large")
    transactions = -(-(plan.rows or (5_000 if plan.quick else 20_000)) // 5)
    backlog = outbox.publish(transactions, note=LARGE_NOTE)
    statement = STATEMENTS["each: batch"]
    inline = Relay("relay inline", statement)
    spark = Relay("relay on Spark", statement, spark=True)

    def row(relay: Relay, name: str) -> Contender:
        def measure() -> Measurement:
            with (
                outbox.copy(backlog) as slot,
                relay.warm(outbox, slot, plan.folder) as running,
                Footprint(running.process.pid) as footprint,
            ):
                started = running.attached
                seconds = outbox.confirmed(slot, backlog, running.process) - started
            return {"events/s": backlog.events / seconds, **footprint.peaks}

        return Contender(name, measure, plan.often(expensive=True), inline.name)

    rows = [
        row(inline, inline.name),
        row(inline, f"{inline.name}, {AGAIN}"),
        row(spark, spark.name),
    ]
    yield Workload(name, f"{backlog.events:,} events of 10 kB into a table", rows)


def catch_up(plan: Plan) -> Iterator[Workload]:
    """Rows that are older than the slot into a table, twice."""
    outbox = Outbox(plan.cluster, "spark_work_catch_up")
    transactions = -(-(plan.rows or (20_000 if plan.quick else 1_000_000)) // 5)
    events = outbox.publish(transactions).events
    relay = Relay("relay on Spark", STATEMENTS["each: batch"], spark=True)

    def measure() -> Measurement:
        group = outbox.new_name()
        return {"events/s": relay.catch_up(outbox, group, events, plan.folder)}

    rows = [
        Contender(name, measure, plan.often(expensive=True), relay.name)
        for name in (relay.name, f"{relay.name}, {AGAIN}")
    ]
    yield Workload("spark-work-catch-up", f"{events:,} rows into a table", rows)


def to_delta(plan: Plan) -> Iterator[Workload]:
    """All rows of the outbox to a Delta table by a Spark sink, twice, with the memory of relay's processes."""
    outbox = Outbox(plan.cluster, "spark_work_delta")
    transactions = -(-(plan.rows or (20_000 if plan.quick else 1_000_000)) // 5)
    events = outbox.publish(transactions).events

    def measure() -> Measurement:
        group = outbox.new_name()
        path = plan.folder / group
        sink = {
            **{"type": "spark", "format": "delta", "path": str(path)},
            **{"start": "beginning", "every": 0.1, "max_events": 200_000},
        }
        relay = Relay("", sink, mode="auto")
        with relay.cold(outbox, group, plan.folder) as running:
            started = running.said(SESSION_READY)
            with Footprint(running.process.pid) as footprint:
                seconds = (
                    wait_until(
                        lambda: _written(path) >= events,
                        "every row in the table",
                        seconds=max(300.0, events / 2_000),
                        process=running.process,
                    )
                    - started
                )
        outbox.drop(group)
        if (found := _written(path)) != events:
            raise AssertionError(f"{found} of {events} rows")
        return {"events/s": events / seconds, **footprint.peaks}

    first = "relay on Spark, to Delta"
    rows = [
        Contender(name, measure, plan.often(expensive=True), first)
        for name in (first, f"{first}, {AGAIN}")
    ]
    yield Workload("spark-work-delta", f"{events:,} rows of the outbox to a Delta table", rows)


def _written(path: Path) -> int:
    """The rows of a Delta table; 0 before its first commit. Asked twice a second: it takes CPU from relay."""
    time.sleep(0.5)
    return (
        deltalake.DeltaTable(path).count() if deltalake.DeltaTable.is_deltatable(str(path)) else 0
    )
