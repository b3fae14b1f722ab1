"""Who drops a queue that somebody works keeps the group from nothing: its events are applied meanwhile."""

from __future__ import annotations

import asyncio
from threading import Thread

import psycopg
import pytest

from relay.client.idle import Idle
from relay.client.wakeups import listen
from relay.client.worker import Worker
from tests.outbox import Outbox, event, host, relaying, wait_until
from tests.workers import working

_WAITS = """
    select exists (select from pg_stat_activity where datname = current_database() and query ~ 'drop_queue'
                      and wait_event_type = 'Lock' and pid <> pg_backend_pid())
"""


def test_a_queue_is_dropped_while_a_worker_has_a_message(outbox: Outbox) -> None:
    """relay.drop_queue waited for the worker with the lock of all partitions, so that relay applied nothing."""
    outbox.worker.execute("select relay.declare_queue('q', '{}', key => 'host')")
    with relaying(outbox.settings()), psycopg.connect(outbox.worker_dsn) as working:
        outbox.publish(host(1), event())
        outbox.wait_handled()
        assert working.execute("select id from relay.take('q')").fetchall()
        dropping = Thread(target=_drop, args=(outbox.worker_dsn,))
        dropping.start()
        try:
            wait_until(lambda: outbox.value(_WAITS))
            for number in range(8):
                outbox.publish(host(number), event())
            outbox.wait_handled()
            assert dropping.is_alive()
        finally:
            working.rollback()
            dropping.join(60)
        outbox.publish(host(1), event())
        outbox.wait_handled()
    assert outbox.column("select name from relay.queues") == []
    assert outbox.value("select count(*) from relay.queue_messages") == 0


_WATCHED = """
    select exists (select from pg_locks join relay.queues as q on q.name = 'q'
                    where locktype = 'advisory' and classid = x'7169776b'::int and objid = q.id and mode = 'ShareLock'
                      and database = (select oid from pg_database where datname = current_database()))
"""
"""Whether a worker waits for notifications of the queue that has the name now."""


@pytest.mark.parametrize("messages_before", [0, 1])
def test_an_idle_worker_hears_of_a_queue_that_was_declared_again(
    outbox: Outbox, messages_before: int
) -> None:
    """It listened to the former queue for as long as it was idle: each message waited for the next poll.

    taskforcesh/bullmq#4729, TeamWarp/effect-mq#16: a dead subscription that is kept.
    """
    outbox.worker.execute("select relay.declare_queue('q', null)")
    worker = Worker(outbox.worker_dsn, "q", poll=0.3)
    done: list[int] = []

    @worker.handles()
    def handle(message: object, session: object) -> None:
        done.append(1)

    with working(worker):
        wait_until(lambda: outbox.value(_WATCHED), 30)
        outbox.worker.execute(
            f"select relay.enqueue('q', '{{}}') from generate_series(1, {messages_before})"
        )
        wait_until(lambda: len(done) == messages_before, 30)
        with psycopg.connect(outbox.worker_dsn) as conn:
            conn.execute("select relay.drop_queue('q')")
            conn.execute("select relay.declare_queue('q', null)")
        wait_until(lambda: outbox.value(_WATCHED), 30)
        outbox.worker.execute("select relay.enqueue('q', '{}')")
        wait_until(lambda: len(done) > messages_before, 30)


def test_a_listener_outlives_a_moment_without_the_queue(outbox: Outbox) -> None:
    """It ended for good where it asked in between, while the worker, which had not, went on."""
    outbox.worker.execute("select relay.declare_queue('q', null)")

    async def main() -> None:
        idle, stopping = Idle(0.05), asyncio.Event()
        listening = asyncio.create_task(listen(outbox.worker_dsn, "q", idle))
        waiting = asyncio.create_task(_wait_for_ever(idle, stopping))
        try:
            await _until(_WATCHED)
            await asyncio.to_thread(_drop, outbox.worker_dsn)
            await _until(f"select not exists (select from pg_locks where classid = {0x7169776B})")
            outbox.worker.execute("select relay.declare_queue('q', null)")
            await _until(_WATCHED)
            assert not listening.done()
        finally:
            waiting.cancel()
            listening.cancel()
            await asyncio.wait([waiting, listening])

    async def _until(query: str) -> None:
        async with asyncio.timeout(30):
            while not outbox.value(query):
                await asyncio.sleep(0.02)

    asyncio.run(main())


async def _wait_for_ever(idle: Idle, stopping: asyncio.Event) -> None:
    while True:
        await idle.wait(stopping)


def _drop(dsn: str) -> None:
    with psycopg.connect(dsn, autocommit=True) as conn:
        conn.execute("select relay.drop_queue('q')")
