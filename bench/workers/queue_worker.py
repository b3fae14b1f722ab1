"""Workers of queues in Python, each as its users run it: pgqueuer, procrastinate, and relay's.

A drain: `messages` are enqueued, and `workers` handle them with a handler that does nothing. The answer `done` has the
seconds from the first to the last. The database of a peer is new. With `arrivals`, relay's worker notes when it gets
each message, until it is ended; with `idle`, so many of relay's workers wait in one process.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from typing import Any

from bench.workers.talk import Arrivals, arguments, say

PAYLOAD = {"order": 1, "amount": 1}


class Countdown:
    """Counts handled messages from the first to the last."""

    def __init__(self, messages: int) -> None:
        self._left, self._began = messages, 0.0
        self.done = asyncio.Event()
        self.seconds = 0.0

    def one(self) -> None:
        if not self._began:
            self._began = time.monotonic()
        self._left -= 1
        if self._left == 0:
            self.seconds = time.monotonic() - self._began
            self.done.set()


async def pgqueuer(job: dict[str, Any], count: Countdown) -> Awaitable[Any]:
    """As many queue managers as workers, each with a connection of its own."""
    import asyncpg
    from pgqueuer import PgQueuer
    from pgqueuer.db import AsyncpgDriver
    from pgqueuer.models import Job
    from pgqueuer.queries import Queries

    from bench.workers.pgqueuer import install

    conn = await asyncpg.connect(job["dsn"])
    queries = Queries(AsyncpgDriver(conn))
    await install(queries)
    number, text = job["messages"], json.dumps(PAYLOAD).encode()
    await queries.enqueue(["bench"] * number, [text] * number, [0] * number)
    await conn.execute("vacuum analyze pgqueuer")
    running = []
    for _ in range(job["workers"]):
        worker = PgQueuer(AsyncpgDriver(await asyncpg.connect(job["dsn"])))

        @worker.entrypoint("bench")  # type: ignore[untyped-decorator]
        async def handle(delivered: Job) -> None:
            count.one()

        running.append(worker.run(batch_size=job["batch"]))
    return asyncio.gather(*running)


async def procrastinate(job: dict[str, Any], count: Countdown) -> Awaitable[Any]:
    """One worker with a concurrency, which deletes what is done."""
    from procrastinate import App, PsycopgConnector

    app = App(
        connector=PsycopgConnector(conninfo=job["dsn"], min_size=1, max_size=job["workers"] + 2)
    )
    await app.open_async()
    await app.schema_manager.apply_schema_async()

    @app.task(name="bench")  # type: ignore[untyped-decorator]
    async def handle(**payload: Any) -> None:
        count.one()

    left = job["messages"]
    while left:
        portion = min(left, 1_000)
        await handle.batch_defer_async(*[PAYLOAD] * portion)
        left -= portion
    working: Awaitable[Any] = app.run_worker_async(
        concurrency=job["workers"], delete_jobs="always", install_signal_handlers=False
    )
    return working


async def relay(job: dict[str, Any], count: Countdown) -> Awaitable[Any]:
    """A worker with a concurrency; its handler gets the connection in whose transaction the message is."""
    from relay.client.worker import Message, Worker

    arrivals = Arrivals(job["arrivals"]) if job.get("arrivals") else None
    running = []
    for _ in range(job.get("idle", 1)):
        worker = Worker(job["dsn"], job["queue"], concurrency=job["workers"])

        @worker.handles()
        async def handle(message: Message, conn: object) -> None:
            if arrivals:
                arrivals.note([message.aggregate_id])
            else:
                count.one()

        running.append(worker.run())
    return asyncio.gather(*running)


async def main() -> None:
    job = arguments()
    count = Countdown(job.get("messages", 0))
    running = asyncio.ensure_future(await KINDS[job["kind"]](job, count))
    if job.get("arrivals") or job.get("idle"):
        await asyncio.sleep(1)
        say("ready")
        await running
    waiting = asyncio.create_task(count.done.wait())
    await asyncio.wait([running, waiting], return_when=asyncio.FIRST_COMPLETED)
    if running.done():
        running.result()
    say("done", seconds=count.seconds)


KINDS: dict[str, Callable[[dict[str, Any], Countdown], Awaitable[Awaitable[Any]]]] = {
    "pgqueuer": pgqueuer,
    "procrastinate": procrastinate,
    "relay": relay,
}

if __name__ == "__main__":
    asyncio.run(main())
