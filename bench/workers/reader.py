"""Readers of relay's outbox, each as its users run it: `subscribe`, and a loop by hand over the table.

A drain: the answer `done` has the seconds from the start of the iteration to the last position that is stored. With
`arrivals`, a reader notes when it gets each event, until it is ended; with `idle`, so many readers wait in one process.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import psycopg

from bench.workers.talk import Arrivals, arguments, say
from relay.client.reader import subscribe

_LOOP = "select * from public.outbox_message_t where c_offset > %s order by c_offset limit 1000"


def plain(job: dict[str, Any]) -> None:
    """Iterate in this thread; `looks` says that the handler takes every event."""
    left, every = job["events"], job["every"]
    reader = subscribe(job["dsn"], job["reader"], start="beginning")
    for number, transaction in enumerate(reader, 1):
        left -= len(list(transaction.events)) if job.get("looks") else len(transaction)
        if number % every == 0 or left <= 0:
            transaction.done()
        if left <= 0:
            return


async def asynchronous(job: dict[str, Any]) -> None:
    """Iterate in a task."""
    left, number, every = job["events"], 0, job["every"]
    async for transaction in subscribe(job["dsn"], job["reader"], start="beginning"):
        left -= len(transaction)
        number += 1
        if number % every == 0 or left <= 0:
            await transaction.done()
        if left <= 0:
            return


def loop(job: dict[str, Any]) -> None:
    """Page over the table by c_offset, which misses what commits late, and store the last one after each page."""
    with psycopg.connect(job["dsn"], autocommit=True) as conn:
        conn.execute("create table if not exists loop_position (last bigint)")
        conn.execute("truncate loop_position")
        conn.execute("insert into loop_position values (0)")
        cursor = conn.cursor()
        left, last = job["events"], 0
        while left > 0:
            rows = cursor.execute(_LOOP, (last,)).fetchall()
            at = [each.name for each in cursor.description or ()].index("c_offset")
            last = rows[-1][at]
            left -= len(rows)
            conn.execute("update loop_position set last = %s", (last,))


async def live(job: dict[str, Any]) -> None:
    """Note arrivals, and what is done, transaction after transaction."""
    arrivals = Arrivals(job["arrivals"])
    reader = subscribe(job["dsn"], job["reader"])
    asyncio.get_running_loop().call_later(1, say, "ready")
    async for transaction in reader:
        arrivals.note([event.aggregate_id for event in transaction.events])
        await transaction.done()


async def idle(job: dict[str, Any]) -> None:
    """Wait with many readers."""

    async def wait(number: int) -> None:
        async for _ in subscribe(job["dsn"], f"{job['reader']} {number}"):
            pass

    say("ready")
    await asyncio.gather(*(wait(number) for number in range(job["idle"])))


def main() -> None:
    job = arguments()
    kind = KINDS[job["kind"]]
    started = time.monotonic()
    if asyncio.iscoroutinefunction(kind):
        asyncio.run(kind(job))
    else:
        kind(job)
    say("done", seconds=time.monotonic() - started)


KINDS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "plain": plain,
    "async": asynchronous,
    "loop": loop,
    "live": live,
    "idle": idle,
}

if __name__ == "__main__":
    main()
