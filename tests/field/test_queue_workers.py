"""Reports of users of job queues, tried on relay's workers in Python: what ends, stalls or fails them."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Any

import asyncpg
import psycopg
import pytest

from relay import Drop, Fail, RetryLater
from relay.client.worker import LeasedMessage, Message, Queue, Worker, WorkerError
from tests.client_sessions import parameters
from tests.outbox import Outbox, wait_until
from tests.pgbouncer import pooled
from tests.postgres import Server
from tests.workers import DATABASES, working

QUICK = Queue(name="mail", match=None, attempts=3, backoff=0.01, max_backoff=0.01)
SLOW = Queue(name="mail", match=None, backoff=60, max_backoff=60)
leases = pytest.mark.parametrize("lease", [None, 30.0], ids=["claimed", "leased"])
every_database = pytest.mark.parametrize("database", DATABASES)


def fill(outbox: Outbox, *payloads: str, queue: Queue = QUICK) -> None:
    """Declare a queue of direct messages, and enqueue JSON texts."""
    statement, text = queue.declaration()
    outbox.worker.execute(statement.with_parameter("%s").encode(), (text,))
    outbox.conn.execute("create table if not exists done (payload jsonb)")
    for payload in payloads:
        outbox.worker.execute("select relay.enqueue('mail', %s::text::jsonb)", (payload,))


def states(outbox: Outbox) -> list[tuple[str, int, str | None]]:
    rows = outbox.conn.execute("select state, attempts, error from relay.queue_items order by id")
    return [(state, attempts, error) for state, attempts, error in rows]


def is_empty(outbox: Outbox) -> bool:
    return not states(outbox)


def set_default(outbox: Outbox, setting: str) -> None:
    outbox.conn.execute(f"alter database {outbox.slot} {setting}".encode())


def insert_for(message: Message) -> str:
    return f"insert into done values ('{message.payload}')"


async def work(
    outbox: Outbox,
    database: str,
    handle: Callable[[Any, Message, Any], Any],
    until: Callable[[], bool],
    concurrency: int = 4,
) -> None:
    """Run a worker on a kind of database until a condition holds; `handle` gets what runs a statement in a session."""
    opened, is_async, execute = DATABASES[database]
    async with opened(outbox.worker_dsn) as given:
        worker = Worker(given, "mail", concurrency=concurrency, poll=0.05)

        async def handle_async(message: Message, session: Any) -> None:
            await handle(execute, message, session)

        def handle_here(message: Message, session: Any) -> None:
            handle(execute, message, session)

        worker.handles()(handle_async if is_async else handle_here)
        task = asyncio.create_task(worker.run())
        while not until():
            assert not task.done(), task.exception()
            await asyncio.sleep(0.02)
        worker.stop()
        await task


@leases
@pytest.mark.parametrize("payload", ["9" * 5000, "[" * 3000 + "]" * 3000], ids=["digits", "deep"])
def test_a_message_that_python_cannot_read_is_a_dead_letter(
    outbox: Outbox, payload: str, lease: float | None
) -> None:
    """celery/celery#4308, #5044, symfony/symfony#58510, vgv/kolbasa#79: one stopped all workers, again and again."""
    fill(outbox, payload, "1")
    worker = Worker(outbox.worker_dsn, "mail", lease=lease, concurrency=1, poll=0.02)
    handled: list[Any] = []

    @worker.handles()
    async def handle(message: Message, *_: object) -> None:
        handled.append(message.payload)

    with working(worker):
        wait_until(lambda: [state[:2] for state in states(outbox)] == [("dead", 3)])
    assert handled == [1]


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError


@leases
@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("a\ud800b"), "ValueError: a\\ud800b"),
        (ValueError("a\0b"), "ValueError: a\\x00b"),
        (Unspeakable(), "Unspeakable"),
        (RetryLater(after=float("inf")), "RetryLater"),
        (RetryLater(after=float("nan")), "RetryLater"),
        (RetryLater(after=1e300), "RetryLater"),
        (SystemExit(3), "SystemExit: 3"),
        (asyncio.CancelledError(), "CancelledError"),
    ],
    ids=["surrogate", "NUL", "str", "inf", "nan", "huge", "exit", "cancelled"],
)
def test_whatever_a_handler_raises_is_noted(
    outbox: Outbox, error: BaseException, text: str, lease: float | None
) -> None:
    """fazer-ai/agents#243, fractal-server#3390, procrastinate#1446: the note of the failure failed."""
    fill(outbox, "1", queue=SLOW)
    worker = Worker(outbox.worker_dsn, "mail", lease=lease, concurrency=1, poll=0.02)

    @worker.handles()
    async def handle(message: Message, *_: object) -> None:
        raise error

    with working(worker):
        wait_until(lambda: states(outbox) == [("retry", 1, text)])


@every_database
def test_workers_do_not_conflict_where_the_default_is_serializable(
    outbox: Outbox, database: str
) -> None:
    """oban-bg/oban#1132, graphile/worker#387: fetching and finishing jobs failed."""
    fill(outbox, *map(str, range(40)))
    set_default(outbox, "set default_transaction_isolation = serializable")

    def handle(execute: Any, message: Message, session: Any) -> Any:
        return execute(session, insert_for(message))

    asyncio.run(
        work(outbox, database, handle, lambda: {state for state, *_ in states(outbox)} <= {"dead"})
    )
    assert is_empty(outbox)
    assert sorted(outbox.column("select payload from done")) == list(range(40))


@every_database
def test_a_worker_leaves_a_server_that_has_become_a_standby(
    outbox: Outbox, database: str, caplog: pytest.LogCaptureFixture
) -> None:
    """laravel/framework#48486, #53115, jobrunr/jobrunr#1264, vgarvardt/gue#202: it asked a standby for ever."""
    fill(outbox, "1")
    set_default(outbox, "set default_transaction_read_only = on")

    def handle(execute: Any, message: Message, session: Any) -> Any:
        return execute(session, insert_for(message))

    def until() -> bool:
        if any(each.startswith("the database does not answer") for each in caplog.messages):
            # Sessions that are open stay read-only.
            set_default(outbox, "reset default_transaction_read_only")
        return is_empty(outbox)

    asyncio.run(work(outbox, database, handle, until, concurrency=1))
    assert outbox.column("select payload from done") == [1]


@every_database
def test_a_worker_outlives_its_connections(outbox: Outbox, database: str) -> None:
    """janbjorge/pgqueuer#224, tobymao/saq#163, que-rb/que#130, rails/solid_queue#512: workers ended, or hung."""
    fill(outbox, "1")

    def handle(execute: Any, message: Message, session: Any) -> Any:
        return execute(session, insert_for(message))

    def cut() -> None:
        outbox.conn.execute(
            "select pg_terminate_backend(pid) from pg_stat_activity where datname = current_database()"
            " and pid <> pg_backend_pid() and backend_type = 'client backend'"
        )
        outbox.close_logins()
        fill(outbox, "2")

    cuts = iter(range(2))

    def until() -> bool:
        if not is_empty(outbox):
            return False
        if next(cuts, None) is None:
            return True
        cut()
        return False

    asyncio.run(work(outbox, database, handle, until))


@leases
def test_a_crash_of_the_server_is_an_outage(killable_server: Server, lease: float | None) -> None:
    """janbjorge/pgqueuer#224, supabase/pg_net#211, florentx/pgqueue#2: after a restart nothing was processed."""
    with Outbox(killable_server.create_database("crashed")) as outbox:
        outbox.install()
        fill(outbox, "1", "2", "3")
        worker = Worker(outbox.worker_dsn, "mail", lease=lease and 2.0, concurrency=2, poll=0.05)
        begun = threading.Event()

        @worker.handles()
        async def handle(message: Message, *_: object) -> None:
            begun.set()
            await asyncio.sleep(0.2)

        with working(worker):
            assert begun.wait(20)
            killable_server.stop("immediate")
            killable_server.start()
            outbox.reconnect()
            wait_until(lambda: is_empty(outbox), 30)


def test_a_handler_that_blocks_the_event_loop_keeps_its_lease(outbox: Outbox) -> None:
    """hatchet-dev/hatchet#322, janbjorge/pgqueuer#323, #430: other workers got the task, one after another."""
    fill(outbox, "1")
    calls: list[int] = []

    def worker() -> Worker:
        made = Worker(outbox.worker_dsn, "mail", lease=0.6, concurrency=1, poll=0.02)

        @made.handles()
        async def handle(message: LeasedMessage) -> None:
            calls.append(message.attempt)
            time.sleep(1.5)

        return made

    with working(worker()), working(worker()):
        wait_until(lambda: is_empty(outbox), 20)
    assert calls == [1]


def test_a_blocked_event_loop_does_not_keep_a_lease_past_the_deadline(outbox: Outbox) -> None:
    """hatchet-dev/hatchet#4254, riverqueue/river#682: a heart beat for work that no longer went on."""
    fill(outbox, "1")
    worker = Worker(outbox.worker_dsn, "mail", lease=0.4, deadline=0.4, concurrency=1, poll=0.02)
    begun, freed = threading.Event(), threading.Event()

    @worker.handles()
    async def handle(message: LeasedMessage) -> None:
        begun.set()
        freed.wait(20)

    with working(worker):
        lease = "select attempt from relay.lease('mail', 1, '1 hour')"
        assert begun.wait(20)
        wait_until(lambda: outbox.column(lease) == [2], 10)
        freed.set()
    assert [state[:2] for state in states(outbox)] == [("leased", 2)]


@leases
def test_a_stop_gives_its_message_and_its_key_back(outbox: Outbox, lease: float | None) -> None:
    """janbjorge/pgqueuer#630, googleapis/python-pubsub#150, #276: what it interrupted stalled others."""
    fill(outbox, queue=Queue(name="mail", match=None, key="user"))
    for number in (1, 2):
        outbox.worker.execute(
            "select relay.enqueue('mail', %s::text::jsonb, key => 'a')", (number,)
        )
    worker = Worker(outbox.worker_dsn, "mail", lease=lease, grace=0.1, poll=0.02)
    begun = threading.Event()

    @worker.handles()
    async def handle(message: Message, *_: object) -> None:
        begun.set()
        await asyncio.sleep(60)

    with working(worker):
        assert begun.wait(20)
    for number in (1, 2):
        assert outbox.worker.column("select payload from relay.take('mail', 5)") == [number]


@pytest.mark.parametrize("is_pool", [False, True], ids=["psycopg", "asyncpg"])
def test_a_role_without_rights_is_told_which_one_to_get(outbox: Outbox, is_pool: bool) -> None:
    """The server's own text, "permission denied for schema relay", names no cure."""
    fill(outbox)
    role = f"{outbox.slot}_plain"
    outbox.conn.execute(f"create role {role} login password 'p'".encode())
    dsn = outbox.dsn_as(role)

    async def scenario() -> None:
        async with AsyncExitStack() as stack:
            database: Any = dsn
            if is_pool:
                database = await stack.enter_async_context(
                    asyncpg.create_pool(**parameters(dsn), min_size=1)
                )
            worker = Worker(database, "mail", concurrency=1, listen=False)

            @worker.handles()
            async def handle(message: Message, conn: object) -> None: ...

            await worker.run()

    try:
        with pytest.raises(WorkerError, match="schema relay: grant the role relay_worker"):
            asyncio.run(scenario())
    finally:
        outbox.conn.execute(f"drop role {role}".encode())


def test_a_worker_does_not_end_in_silence(outbox: Outbox) -> None:
    """JasperFx/wolverine#3111, eswolinsky3241/hatchet-rust-sdk#48: it ended or stood still as if well."""
    fill(outbox, "1")
    worker = Worker(outbox.worker_dsn, "mail", concurrency=2, poll=0.02)

    @worker.handles()
    async def handle(message: Message, conn: object) -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await asyncio.sleep(60)

    with pytest.raises(WorkerError, match="has cancelled the task"):
        asyncio.run(worker.run())


@every_database
def test_a_commit_that_fails_is_a_failed_attempt(outbox: Outbox, database: str) -> None:
    """SweetProcess/django-pg-queue#16: an error at the end of the transaction ended the worker."""
    fill(outbox, "1", "2")
    outbox.conn.execute(
        "create table once (payload int, constraint once_only unique (payload) deferrable initially deferred);"
        "insert into once values (1)"
    )

    def handle(execute: Any, message: Message, session: Any) -> Any:
        return execute(session, f"insert into once values ({message.payload})")

    def until() -> bool:
        return [state for state, *_ in states(outbox)] == ["dead"]

    # Another one could claim the message between the failed commit and the note of it.
    asyncio.run(work(outbox, database, handle, until, concurrency=1))
    ((_, attempts, error),) = states(outbox)
    assert attempts == 3
    assert error is not None
    assert "once_only" in error
    assert sorted(outbox.column("select payload from once")) == [1, 2]


@pytest.mark.parametrize("database", ["psycopg", "psycopg async", "asyncpg", "SQLAlchemy Engine"])
def test_a_handler_that_hides_an_error_of_the_database_is_a_failed_attempt(
    outbox: Outbox, database: str
) -> None:
    """OCA/queue#41, #142: the state of a job could not be written in the transaction that its error had aborted."""
    fill(outbox, "1")
    _, is_async, _ = DATABASES[database]

    def handle(execute: Any, message: Message, session: Any) -> Any:
        if is_async:
            return hidden(execute, session)
        try:
            execute(session, "select 1/0")
        except Exception:
            return None

    async def hidden(execute: Any, session: Any) -> None:
        try:
            await execute(session, "select 1/0")
        except Exception:
            return

    def until() -> bool:
        return [state[:2] for state in states(outbox)] == [("dead", 3)]

    asyncio.run(work(outbox, database, handle, until, concurrency=1))


def test_asyncpg_through_a_pooler_of_transactions(outbox: Outbox) -> None:
    """graphile/worker#119, que-rb/que#110, malthe/pq#30, MagicStack/asyncpg#1058: prepared statements of others."""
    fill(outbox, *map(str, range(20)))

    async def scenario(dsn: str) -> None:
        async with asyncpg.create_pool(
            **parameters(dsn), min_size=1, max_size=8, statement_cache_size=0
        ) as pool:
            worker = Worker(pool, "mail", concurrency=8, poll=0.05)

            @worker.handles()
            async def handle(message: Message, conn: Any) -> None:
                await conn.execute(insert_for(message))

            task = asyncio.create_task(worker.run())
            while not is_empty(outbox):
                assert not task.done(), task.exception()
                await asyncio.sleep(0.05)
            worker.stop()
            await task

    with pooled(outbox.worker_dsn, sessions=2) as dsn:
        asyncio.run(asyncio.wait_for(scenario(dsn), 30))
    assert sorted(outbox.column("select payload from done")) == list(range(20))


def test_a_role_with_timeouts_ends_what_exceeds_them(outbox: Outbox) -> None:
    """que-rb/que#142: work froze without an end. A session that the server ends is a failed attempt, which says why."""
    fill(outbox, "1", "2")
    set_default(outbox, "set idle_in_transaction_session_timeout = '200ms'")
    set_default(outbox, "set statement_timeout = '200ms'")
    worker = Worker(outbox.worker_dsn, "mail", concurrency=1, poll=0.02)

    @worker.handles()
    async def handle(message: Message, conn: psycopg.AsyncConnection[Any]) -> None:
        if message.payload == 1:
            await asyncio.sleep(0.5)
        await conn.execute("insert into done values (%s)", (json.dumps(message.payload),))

    with working(worker):
        wait_until(lambda: [state[:2] for state in states(outbox)] == [("dead", 3)])
    assert outbox.column("select payload from done") == [2]
    ((*_, error),) = states(outbox)
    assert error is not None
    assert "idle-in-transaction" in error


def test_a_large_message_and_many_attempts(outbox: Outbox) -> None:
    """contribsys/faktory#190, beanstalkd/beanstalkd#18, collectiveidea/delayed_job#595: large jobs came cut."""
    fill(outbox, json.dumps("x" * 20_000_000), queue=QUICK)
    worker = Worker(outbox.worker_dsn, "mail", concurrency=1, poll=0.02)
    sizes: list[int] = []

    @worker.handles()
    async def handle(message: Message, conn: object) -> None:
        sizes.append(len(message.payload))
        raise Drop

    with working(worker):
        wait_until(lambda: is_empty(outbox), 30)
    assert sizes == [20_000_000]


def test_what_a_handler_has_said_counts_also_where_its_connection_is_lost(outbox: Outbox) -> None:
    """jobrunr/jobrunr#1264, activepieces/activepieces#15130: the end of a job was forgotten with its connection."""
    fill(outbox, "1", queue=SLOW)
    worker = Worker(outbox.worker_dsn, "mail", concurrency=1, poll=0.02)

    @worker.handles()
    async def handle(message: Message, conn: psycopg.AsyncConnection[Any]) -> None:
        outbox.conn.execute("select pg_terminate_backend(%s)", (conn.info.backend_pid,))
        raise Fail("no such address")

    with working(worker):
        wait_until(lambda: states(outbox) == [("dead", 1, "Fail: no such address")])
