"""A pgqueuer worker on asyncpg and uvloop, with the set-up of its command line.

Source: pgqueuer's documentation, "Quick Start" and "Enqueue inside a transaction".
"""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import asyncpg
import uvloop
from pgqueuer import PgQueuer
from pgqueuer.db import AsyncpgDriver
from pgqueuer.models import Job
from pgqueuer.queries import Queries

from bench.workers.publisher import events_of, host_of, user_of
from bench.workers.talk import Arrivals, arguments, say

EFFECT = """
    insert into projection (id, host_id, user_id, aggregate_id, amount, payload)
    values ($1, $2, $3, $4, ($5::jsonb->>'amount')::numeric, $5::jsonb)
"""
CONNECTIONS = 10


async def install(queries: Queries) -> None:
    """Recreate the tables."""
    if await queries.schema_is_installed():
        await queries.uninstall()
    await queries.install()


async def fill(queries: Queries, events: int) -> None:
    """Enqueue the backlog; this publisher is not measured."""
    jobs: list[bytes | None] = []
    for transaction in range(events // 5):
        ids = {"host_id": host_of(transaction), "user_id": user_of(transaction)}
        jobs += [json.dumps({**ids, **event}).encode() for event in events_of(transaction)]
        if len(jobs) >= 10_000 or transaction == events // 5 - 1:
            await queries.enqueue(["bench"] * len(jobs), jobs, [0] * len(jobs))
            jobs = []


async def work(job: dict[str, Any]) -> None:
    conn = await asyncpg.connect(job["dsn"])
    queries = Queries(AsyncpgDriver(conn))
    await install(queries)
    left = job["events"]
    if left:
        await fill(queries, left)
        await conn.execute("vacuum analyze pgqueuer")
        await conn.execute("checkpoint")
    pool = await asyncpg.create_pool(job["dsn"], min_size=CONNECTIONS, max_size=CONNECTIONS)
    arrivals = Arrivals(job["arrivals"]) if job["arrivals"] else None
    worker = PgQueuer(AsyncpgDriver(conn))
    started = time.monotonic()

    @worker.entrypoint("bench")  # type: ignore[untyped-decorator]
    async def handle(delivered: Job) -> None:
        nonlocal left
        if arrivals:
            event = json.loads(delivered.payload or b"")
            arrivals.note([event["aggregate_id"]])
            if job["effect"]:
                await insert(event)
        if left is not None:
            left -= 1
            if left == 0:
                say("done", started=started, at=time.monotonic())

    async def insert(event: dict[str, Any]) -> None:
        ids = (event["id"], event["host_id"], event["user_id"], event["aggregate_id"])
        await pool.execute(EFFECT, *ids, json.dumps(event["payload"]))

    running = asyncio.create_task(worker.run(batch_size=job["batch_size"]))
    await asyncio.sleep(1)
    say("ready")
    await running


if __name__ == "__main__":
    uvloop.run(work(arguments()))
