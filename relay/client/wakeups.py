"""Wakes the idle slots of a worker when messages come, by LISTEN on a connection of its own.

Nothing depends on it: a worker polls all the same.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
from typing import Any

from relay.client.errors import outage_of
from relay.client.idle import Idle, either
from relay.client.outages import OutageLog
from relay.runtime.adapters import own_adapters
from relay.runtime.notifications import take_notifications
from relay.waits import Backoff

log = logging.getLogger("relay.worker")

_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.2, 30.0
_FIRST_COUNT_SECONDS = 0.1
"""How long after a session has begun to watch it asks again who may not have seen it; twice as long each time."""


async def listen(dsn: str, queue: str, idle: Idle) -> None:
    """Wake idle slots until the task is cancelled, or until it is known that no notification will come."""
    import psycopg

    pauses = Backoff(_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS, random_part=0.5)
    outage = OutageLog(
        log,
        {"queue": queue},
        begins="the connection that listens was lost",
        ends="the worker listens again",
    )
    while True:
        try:
            conn = await psycopg.AsyncConnection.connect(
                dsn,
                autocommit=True,
                prepare_threshold=None,
                context=own_adapters(),
                application_name=f"relay listener {queue}"[:63],
            )
            async with conn:
                if await _is_pooled(conn):
                    log.info(
                        "a pooler is between the worker and the server: no notification wakes the worker, and it polls",
                        extra={"queue": queue},
                    )
                    return
                outage.ends(queue)
                await _wake(conn, queue, idle)
        except psycopg.errors.UndefinedObject:
            # A slot that looks finds the queue that was declared again meanwhile, or ends the worker.
            idle.distrust()
            idle.poll()
        except psycopg.ProgrammingError as error:
            log.warning(
                "no notification wakes the worker, and it polls",
                extra={"queue": queue, "error": type(error).__name__},
            )
            return
        except (psycopg.Error, OSError) as error:
            outage.fails(queue, outage_of(error))
            idle.distrust()
            # A slot may be in a long pause, and a notification lost.
            idle.poll()
        if idle.was_woken:
            pauses.reset()
            idle.was_woken = False
        await asyncio.sleep(pauses.take())


async def _is_pooled(conn: Any) -> bool:
    """Return whether a pooler is between, which has made up the process id that the client knows.

    In transaction mode, PgBouncer passes LISTEN on and forgets the notifications.
    """
    cursor = await conn.execute("select pg_backend_pid()")
    (number,) = await cursor.fetchone()
    return bool(number != conn.info.backend_pid)


async def _wake(conn: Any, queue: str, idle: Idle) -> None:
    """Ask for notifications while a slot is idle, and pass them on. Raises psycopg.Error."""
    from psycopg import sql

    # Those that come with the result of a statement.
    conn.add_notify_handler(lambda _: idle.notify())
    channel: str | None = None
    while True:
        await idle.is_watched.wait()
        cursor = await conn.execute("select relay.watch_queue(%s)", (queue,))
        (named,) = await cursor.fetchone()
        if named != channel:
            channel = named
            await conn.execute(sql.SQL("listen {}").format(sql.Identifier(channel)))
        workers, unaware = await _watchers(conn, queue)
        idle.poll()
        counts = Backoff(_FIRST_COUNT_SECONDS, math.inf)
        while True:
            if not unaware:
                idle.trust(workers)
            after = idle.count_after
            if not await _pass_on(conn, idle, counts.take(after) if unaware else after):
                break
            # Were the connection dead, nobody would answer, nor notify.
            idle.distrust()
            workers, running = await _watchers(conn, queue)
            if not workers:
                # Not even this session: the queue was dropped and declared again, and has another channel.
                break
            # Those that put messages into the queue before the session watched have notified nobody.
            if unaware and not unaware & running:
                idle.wake()
            unaware &= running
        idle.distrust()
        await conn.execute("select pg_advisory_unlock_all()")


async def _watchers(conn: Any, queue: str) -> tuple[int, frozenset[str]]:
    """Return how many sessions watch a queue, and the running transactions of the server."""
    cursor = await conn.execute("select watchers, running from relay.queue_watchers(%s)", (queue,))
    workers, running = await cursor.fetchone()
    return workers, frozenset(running)


async def _pass_on(conn: Any, idle: Idle, seconds: float) -> bool:
    """Pass notifications on; returns whether a slot is idle when it is time to count the workers, after some seconds.

    It is not after a notification that has found none: while all are at work, nobody should send any.
    """
    # A wait of psycopg would wake the process ten times a second.
    loop, arrived = asyncio.get_running_loop(), asyncio.Event()
    socket = conn.pgconn.socket
    loop.add_reader(socket, arrived.set)
    ends = loop.time() + seconds * random.uniform(0.75, 1.25)  # noqa: S311
    try:
        while True:
            # What libpq has read already comes first: the socket does not show it.
            if take_notifications(conn.pgconn) and not idle.notify():
                return False
            await either(arrived, ends - loop.time())
            if not arrived.is_set():
                return idle.is_watched.is_set()
            arrived.clear()
    finally:
        loop.remove_reader(socket)
