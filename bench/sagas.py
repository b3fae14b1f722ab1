"""Sagas of three steps with an effect each: relay's beside DBOS and a hand-written state table."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial

from bench.environment import no_venv
from bench.job import Job
from bench.outbox import Outbox
from bench.plan import Plan
from bench.results import Contender, Measurement, Workload

WORKER = "bench.workers.saga_worker"
STEPS = 3
ROWS = {
    "a state table, by hand": "plain",
    "relay, effects commit with their step": "relay",
    "DBOS, effects commit with their step": "dbos",
}


def _measure(plan: Plan, kind: str, count: int) -> Measurement:
    outbox = Outbox(plan.cluster, f"sagas_{kind}")
    outbox.conn.execute("create table effects (saga int, step int)")
    job = {"kind": kind, "sagas": count, "workers": 4, "dsn": outbox.dsn}
    command = None if kind == "dbos" else [sys.executable, "-m", WORKER]
    with Job(WORKER, job, plan.folder, command) as process:
        return {"steps/s": count * STEPS / float(process.answer("done")["seconds"])}


def sagas(plan: Plan) -> Iterator[Workload]:
    """Throughput of the steps of sagas, four workers in one process."""
    count = 300 if plan.quick else 2_000
    first, *_ = ROWS
    yield Workload(
        "sagas",
        f"{count:,} sagas of {STEPS} steps, 4 workers",
        [
            Contender(
                *(row, partial(_measure, plan, kind, count), plan.rounds, first),
                no_venv() if kind == "dbos" else None,
            )
            for row, kind in ROWS.items()
            if plan.takes("sagas", row) or row == first
        ],
    )
