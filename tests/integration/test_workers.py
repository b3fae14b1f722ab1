"""Workers of queues: `relay.client.worker`, with every driver."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import psycopg
import pytest

from relay import Drop, Fail, RetryLater
from relay.client import Event, attempts, idle, wakeups
from relay.client.idle import Idle, Left, Query
from relay.client.middleware import backoff, limit, timing
from relay.client.worker import LeasedMessage, Message, Queue, Worker, WorkerError
from tests.outbox import Outbox, event, host, relaying, wait_until
from tests.pgbouncer import pooled
from tests.workers import DATABASES, working

every_database = pytest.mark.parametrize("database", DATABASES)
MINE = Queue(name="mail", match=None, backoff=0.01, max_backoff=0.01)


def fill(outbox: Outbox, *payloads: Any, queue: Queue = MINE, **more: str) -> None:
    """Declare a queue of direct messages, and enqueue some."""
    statement, text = queue.declaration()
    outbox.worker.execute(statement.with_parameter("%s").encode(), (text,))
    outbox.conn.execute("create table if not exists done (payload jsonb)")
    for payload in payloads:
        named = "".join(f", {name} => '{value}'" for name, value in more.items())
        outbox.worker.execute(
            f"select relay.enqueue('mail', %s::jsonb{named})".encode(), (json.dumps(payload),)
        )


def done(outbox: Outbox) -> list[Any]:
    return sorted(outbox.column("select payload from done"))


def states(outbox: Outbox) -> list[tuple[str, int, str | None]]:
    rows = outbox.conn.execute(
        "select state, attempts, error from relay.queue_items order by id"
    ).fetchall()
    return [(state, attempts, error) for state, attempts, error in rows]


def is_empty(outbox: Outbox) -> bool:
    return not states(outbox)


@every_database
def test_the_effect_and_the_completion_commit_together(outbox: Outbox, database: str) -> None:
    fill(outbox, 1, 2, 3)
    opened, is_async, execute = DATABASES[database]
    failed: list[int] = []

    def statement_for(message: Message) -> str:
        return f"insert into done values ('{message.payload}')"

    def fail_once(message: Message) -> None:
        if message.payload == 2 and not failed:
            failed.append(message.attempt)
            raise RuntimeError("not yet")

    def handle(message: Message, session: Any) -> None:
        execute(session, statement_for(message))
        fail_once(message)

    async def handle_async(message: Message, session: Any) -> None:
        await execute(session, statement_for(message))
        fail_once(message)

    async def scenario() -> None:
        async with opened(outbox.worker_dsn) as given:
            worker = Worker(given, "mail", concurrency=2, poll=0.05)
            worker.handles()(handle_async if is_async else handle)
            task = asyncio.create_task(worker.run())
            while not is_empty(outbox):
                await asyncio.sleep(0.02)
            worker.stop()
            await task

    asyncio.run(scenario())
    assert failed == [1]
    assert done(outbox) == [1, 2, 3]


def test_what_a_handler_raises_ends_its_message(outbox: Outbox) -> None:
    fill(
        outbox,
        "drop",
        "fail",
        "later",
        "broken",
        queue=Queue(name="mail", match=None, attempts=2, backoff=0),
    )
    worker = Worker(outbox.worker_dsn, "mail", poll=0.05)
    calls: list[tuple[Any, int]] = []

    @worker.handles()
    async def handle(message: Message, conn: psycopg.AsyncConnection[Any]) -> None:
        calls.append((message.payload, message.attempt))
        await conn.execute("insert into done values (%s)", (json.dumps(message.payload),))
        match message.payload:
            case "drop":
                raise Drop("not wanted")
            case "fail":
                raise Fail("no address")
            case "later":
                raise RetryLater("closed", after=3600)
            case _:
                raise KeyError("address")

    with working(worker):
        wait_until(lambda: [state for state, *_ in states(outbox)].count("dead") == 2)
        wait_until(lambda: len(states(outbox)) == 3)
    assert states(outbox) == [
        ("dead", 1, "Fail: no address"),
        ("retry", 1, "RetryLater: closed"),
        ("dead", 2, "KeyError: 'address'"),
    ]
    assert sorted(calls) == [("broken", 1), ("broken", 2), ("drop", 1), ("fail", 1), ("later", 1)]
    assert done(outbox) == []


def test_handlers_are_chosen_by_event_type(outbox: Outbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempts, "_NO_HANDLER_SECONDS", 0)
    worker = Worker(outbox.worker_dsn, Queue(name="mail", attempts=1), poll=0.05)
    handled: list[tuple[str, str]] = []

    @worker.handles("order.placed", "order.paid")
    def exactly(message: Message, conn: object) -> None:
        handled.append(("exactly", message.event_type))

    @worker.handles("order.*")
    def others(message: Message, conn: object) -> None:
        handled.append(("others", message.event_type))

    with relaying(outbox.settings()), working(worker):
        wait_until(lambda: outbox.value("select count(*) from relay.queues") == 1)
        types = ("order.placed", "order.paid", "order.sent", "mail.sent")
        outbox.publish(host(1), *(event(1, each) for each in types))
        wait_until(lambda: len(states(outbox)) == 1 and len(handled) == 3)
    assert sorted(handled) == [
        ("exactly", "order.paid"),
        ("exactly", "order.placed"),
        ("others", "order.sent"),
    ]
    assert states(outbox) == [("dead", 1, "NoHandler: the worker has no handler for mail.sent")]


@pytest.mark.parametrize("lease", [None, 5.0], ids=["taken", "leased"])
@pytest.mark.parametrize("is_async", [False, True], ids=["plain", "async"])
def test_a_message_without_a_handler_is_left_to_workers_of_another_version(
    outbox: Outbox, is_async: bool, lease: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message has one attempt, which no worker may use up that cannot handle it, whatever runs around the call."""
    monkeypatch.setattr(attempts, "_GIVEN_BACK_SECONDS", 0.05)
    fill(outbox, 1, queue=Queue(name="mail", match=None, attempts=1), event_type="mail.new")
    handled: list[int] = []

    def handle(message: Message, *session: object) -> None:
        handled.append(message.attempt)

    async def handle_async(message: Message, *session: object) -> None:
        handled.append(message.attempt)

    def work(event_type: str) -> Worker:
        worker = Worker(outbox.worker_dsn, "mail", lease=lease, poll=0.05, around=[limit(1)])
        worker.handles(event_type)(handle_async if is_async else handle)
        return worker

    given_back = (
        "select count(*) from relay.queue_messages where first_taken_at is not null and not leased"
    )
    with working(work("mail.old")):
        wait_until(lambda: outbox.value(given_back) == 1)
    assert states(outbox) == [("retry", 0, "NoHandler: the worker has no handler for mail.new")]
    with working(work("mail.new")):
        wait_until(lambda: is_empty(outbox))
    assert handled == [1]


@pytest.mark.parametrize("lease", [None, 5.0], ids=["taken", "leased"])
def test_a_reply_is_published_with_the_completion(outbox: Outbox, lease: float | None) -> None:
    shared = Queue(name="mail", match=None, backoff=0, workers="relay_worker")
    caused_by = {"host_id": str(host(7)), "event_id": "e1", "metadata": '{"correlation_id": "c"}'}
    fill(outbox, 1, queue=shared, **caused_by)
    answers = iter(["lost", "kept"])

    def handle(message: Message, *conn: object) -> None:
        answer = next(answers)
        message.reply(Event("mail.sent", payload={"answer": answer}))
        if answer == "lost":
            raise RuntimeError

    with outbox.member("relay_worker", "relay_publisher") as dsn:
        worker = Worker(dsn, "mail", lease=lease, poll=0.05)
        worker.handles()(handle)
        with working(worker):
            wait_until(lambda: is_empty(outbox))
    rows = outbox.conn.execute(
        "select host_id, payload ->> 'answer', metadata from outbox_message_t"
    ).fetchall()
    caused = {"correlation_id": "c", "causation_id": "e1", "hop_count": 1}
    assert rows == [(host(7), "kept", caused)]


def test_as_many_handlers_run_at_once_as_the_concurrency_says(outbox: Outbox) -> None:
    fill(outbox, *range(6))
    worker = Worker(outbox.worker_dsn, "mail", concurrency=3, poll=30)
    together = threading.Barrier(3)

    @worker.handles()
    def handle(message: Message, conn: object) -> None:
        together.wait(20)

    with working(worker):
        wait_until(lambda: is_empty(outbox))


def test_the_messages_of_one_key_are_worked_in_order(outbox: Outbox) -> None:
    fill(
        outbox, *range(5), queue=Queue(name="mail", match=None, key="host", backoff=0), host_id="h"
    )
    worker = Worker(outbox.worker_dsn, "mail", poll=0.02)
    order: list[int] = []

    @worker.handles()
    async def handle(message: Message, conn: object) -> None:
        if message.payload == 2 and message.attempt == 1:
            raise RuntimeError
        order.append(message.payload)

    with working(worker):
        wait_until(lambda: is_empty(outbox))
    assert order == [0, 1, 2, 3, 4]


def test_a_lease_is_prolonged_and_its_block_completes_the_message(outbox: Outbox) -> None:
    fill(outbox, 1)
    worker = Worker(outbox.worker_dsn, "mail", lease=1.5, poll=0.02)
    calls: list[int] = []
    ends = "select available_at from relay.queue_messages"

    @worker.handles()
    async def handle(message: LeasedMessage) -> None:
        calls.append(message.attempt)
        first = outbox.value(ends)
        # riverqueue/river#682, celery/celery#5935, boringnode/queue#16: what is prolonged is so beyond its first end.
        while outbox.value(ends) <= first + timedelta(seconds=1.5):
            await asyncio.sleep(0.05)
        async with message.transaction() as conn:
            await conn.execute("insert into done values ('1')")
        assert message.lease.is_completed

    with working(worker):
        wait_until(lambda: done(outbox) == [1])
    assert is_empty(outbox)
    assert calls == [1]


@pytest.mark.parametrize("is_async", [True, False])
def test_a_lost_lease_undoes_the_block(outbox: Outbox, is_async: bool) -> None:
    fill(outbox, 1)
    worker = Worker(outbox.worker_dsn, "mail", lease=30, poll=0.02)

    def lose() -> None:
        outbox.conn.execute("update relay.queue_messages set attempts = attempts + 1")

    if is_async:

        @worker.handles()
        async def handle_async(message: LeasedMessage) -> None:
            async with message.transaction() as conn:
                await conn.execute("insert into done values ('1')")
                lose()

    else:

        @worker.handles()
        def handle(message: LeasedMessage) -> None:
            with message.transaction() as conn:
                conn.execute("insert into done values ('1')")
                lose()

    with working(worker):
        wait_until(lambda: [state[:2] for state in states(outbox)] == [("leased", 2)])
        wait_until(lambda: not worker._handling.leased)
    assert done(outbox) == []
    assert [state[:2] for state in states(outbox)] == [("leased", 2)]


@pytest.mark.parametrize("is_async", [True, False])
def test_an_expired_lease_may_be_followed_by_one_of_the_same_worker(
    outbox: Outbox, is_async: bool, caplog: pytest.LogCaptureFixture
) -> None:
    fill(outbox, 1)
    worker = Worker(outbox.worker_dsn, "mail", concurrency=2, lease=30, poll=0.02)
    attempts: list[int] = []
    second = threading.Event()

    def attempt(message: LeasedMessage) -> None:
        attempts.append(message.attempt)
        if message.attempt == 1:
            outbox.conn.execute("update relay.queue_messages set available_at = now()")
            assert second.wait(30)
        else:
            second.set()

    if is_async:

        @worker.handles()
        async def handle_async(message: LeasedMessage) -> None:
            await asyncio.to_thread(attempt, message)

    else:

        @worker.handles()
        def handle(message: LeasedMessage) -> None:
            attempt(message)

    with working(worker):
        wait_until(lambda: second.is_set() and not worker._handling.leased)
    assert attempts == [1, 2]
    assert states(outbox) == []
    assert "the database does not answer" not in caplog.text


@pytest.mark.parametrize("is_async", [True, False])
def test_a_lease_that_is_lost_ends_the_call(
    outbox: Outbox, is_async: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """What the call raises then is no failure of the message, which another worker has."""
    fill(outbox, 1)
    worker = Worker(outbox.worker_dsn, "mail", lease=0.3, poll=0.02)
    ended = threading.Event()

    def lose() -> None:
        outbox.conn.execute(
            "update relay.queue_messages set attempts = 4, available_at = now() + interval '1 hour'"
        )

    if is_async:

        @worker.handles()
        async def handle_async(message: LeasedMessage) -> None:
            # Not in the worker's thread, where a renewal that holds the row could not end.
            await asyncio.to_thread(lose)
            try:
                await asyncio.sleep(60)
            finally:
                ended.set()
                assert message.is_lost

    else:

        @worker.handles()
        def handle(message: LeasedMessage) -> None:
            lose()
            wait_until(lambda: message.is_lost)
            ended.set()
            raise ValueError("in vain")

    with working(worker):
        assert ended.wait(20)
    assert [state[:2] for state in states(outbox)] == [("leased", 4)]
    logged = [each.getMessage() for each in caplog.records]
    assert "the lease of a message was lost" in logged
    assert "a message was not handled" not in logged


def test_a_stop_lets_a_handler_finish(outbox: Outbox) -> None:
    fill(outbox, 1, 2)
    worker = Worker(outbox.worker_dsn, "mail", concurrency=1, poll=0.02)
    begun = threading.Event()

    @worker.handles()
    def handle(message: Message, conn: psycopg.Connection[Any]) -> None:
        begun.set()
        time.sleep(0.3)
        conn.execute("insert into done values (%s)", (json.dumps(message.payload),))

    with working(worker):
        assert begun.wait(20)
    assert done(outbox) == [1]
    assert [state for state, *_ in states(outbox)] == ["enqueued"]


def test_a_handler_cannot_commit_by_itself(outbox: Outbox) -> None:
    fill(outbox, 1, queue=Queue(name="mail", match=None, attempts=1))
    worker = Worker(outbox.worker_dsn, "mail", poll=0.02)

    @worker.handles()
    def handle(message: Message, conn: psycopg.Connection[Any]) -> None:
        conn.execute("insert into done values ('1')")
        conn.commit()

    with working(worker):
        wait_until(lambda: [state for state, *_ in states(outbox)] == ["dead"])
    assert done(outbox) == []


async def roll_back(conn: psycopg.AsyncConnection[Any]) -> None:
    await conn.execute("insert into done values ('1')")
    raise psycopg.Rollback


async def fail_within(conn: psycopg.AsyncConnection[Any]) -> None:
    await conn.execute("insert into done values ('2')")
    with suppress(psycopg.DataError):
        async with conn.transaction():
            await conn.execute("insert into done values ('3')")
            await conn.execute("select 1 / 0")


async def commit(conn: psycopg.AsyncConnection[Any]) -> None:
    await conn.commit()


async def end_in_sql(conn: psycopg.AsyncConnection[Any]) -> None:
    await conn.execute("commit")


async def deallocate(conn: psycopg.AsyncConnection[Any]) -> None:
    await conn.execute("deallocate all")
    await conn.execute("insert into done values ('4')")


async def leave_open(conn: psycopg.AsyncConnection[Any]) -> None:
    await conn.execute("begin")
    await conn.execute("insert into done values ('5')")


def test_what_handlers_do_with_their_connection(outbox: Outbox) -> None:
    acts = {
        each.__name__: each
        for each in (roll_back, fail_within, commit, end_in_sql, deallocate, leave_open)
    }
    queue = Queue(name="mail", match=None, attempts=1)
    fill(outbox, *acts, "end_in_sql", *acts, queue=queue)
    worker = Worker(outbox.worker_dsn, "mail", concurrency=1, poll=0.02)

    @worker.handles()
    async def handle(message: Message, conn: psycopg.AsyncConnection[Any]) -> None:
        await acts[message.payload](conn)

    with working(worker):
        wait_until(lambda: {state for state, *_ in states(outbox)} == {"dead"})
    dead = outbox.column("select payload from relay.queue_dead_letters order by id")
    assert dead == ["commit", "end_in_sql", "end_in_sql", "commit", "end_in_sql"]
    assert done(outbox) == [2, 2, 4, 4, 5, 5]


@pytest.mark.parametrize("is_async", [False, True], ids=["", "async"])
def test_a_message_costs_one_trip_or_two_beside_those_of_its_handler(
    outbox: Outbox, is_async: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    messages = 20
    fill(outbox, *range(messages))
    worker = Worker(outbox.worker_dsn, "mail", concurrency=1, poll=3600, listen=False)
    kind = psycopg.AsyncConnection if is_async else psycopg.Connection
    waited: Any = kind.wait
    trips: list[object] = []

    def wait(conn: Any, *given: Any, **more: Any) -> Any:
        if conn.info.get_parameters().get("application_name") == "relay worker mail":
            trips.append(conn)
        return waited(conn, *given, **more)

    async def handle_async(message: Message, conn: object) -> None:
        seen.append(len(trips))

    def handle(message: Message, conn: object) -> None:
        seen.append(len(trips))

    seen: list[int] = []
    worker.handles()(handle_async if is_async else handle)
    monkeypatch.setattr(kind, "wait", wait)
    with working(worker):
        wait_until(lambda: is_empty(outbox))
    assert len(seen) == messages
    assert {after - before for before, after in pairwise(seen)} == {1 if is_async else 2}


def test_what_is_claimed_with_the_last_commit_is_given_back(outbox: Outbox) -> None:
    fill(outbox, 1, 2, 3)
    worker = Worker(outbox.worker_dsn, "mail", concurrency=1, listen=False)

    @worker.handles()
    async def handle(message: Message, conn: psycopg.AsyncConnection[Any]) -> None:
        await conn.execute("insert into done values (%s)", (json.dumps(message.payload),))
        worker.stop()

    asyncio.run(worker.run())
    assert done(outbox) == [1]
    assert outbox.column("select interruptions from relay.queue_messages") == [0, 0]
    assert [state for state, *_ in states(outbox)] == ["enqueued", "enqueued"]


def test_a_claim_that_fails_behind_a_commit_is_no_failure_of_the_message(
    outbox: Outbox, caplog: pytest.LogCaptureFixture
) -> None:
    fill(outbox, 1, 2)
    worker = Worker(outbox.worker_dsn, "mail", concurrency=1, listen=False)

    @worker.handles()
    async def handle(message: Message, conn: psycopg.AsyncConnection[Any]) -> None:
        await conn.execute("insert into done values (%s)", (json.dumps(message.payload),))
        await conn.execute("deallocate all")

    with working(worker):
        wait_until(lambda: is_empty(outbox))
    assert done(outbox) == [1, 2]
    assert "a message was not handled" not in caplog.text


def test_through_a_pooler_of_transactions(outbox: Outbox) -> None:
    fill(outbox, *range(20))
    with pooled(outbox.worker_dsn, sessions=2) as dsn:
        worker = Worker(dsn, "mail", concurrency=8, poll=0.05)

        @worker.handles()
        async def handle(message: Message, conn: psycopg.AsyncConnection[Any]) -> None:
            await conn.execute("insert into done values (%s)", (json.dumps(message.payload),))

        with working(worker):
            wait_until(lambda: is_empty(outbox))
    assert done(outbox) == list(range(20))


def test_what_a_handler_runs_in(outbox: Outbox, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "relay.worker")
    fill(outbox, 1)
    around = [timing(), limit(3), backoff(0, 0.01)]
    worker = Worker(outbox.worker_dsn, "mail", around=around, poll=0.02)
    attempts: list[int] = []

    @worker.handles()
    async def handle(message: Message, conn: object) -> None:
        attempts.append(message.attempt)
        raise RuntimeError("down")

    with working(worker):
        wait_until(lambda: [state for state, *_ in states(outbox)] == ["dead"])
    assert states(outbox) == [("dead", 3, "RuntimeError: down")]
    assert attempts == [1, 2, 3]
    timed = [record for record in caplog.records if record.getMessage() == "a message was handled"]
    assert len(timed) == 3


@pytest.mark.parametrize(
    ("prepare", "text"),
    [
        (lambda outbox: None, "there is no queue 'mail'"),
        (
            lambda outbox: outbox.conn.execute("drop schema relay cascade"),
            "run `relay init`",
        ),
    ],
    ids=["no queue", "no relay"],
)
def test_a_worker_that_cannot_work_says_why(
    outbox: Outbox, prepare: Callable[[Outbox], Any], text: str
) -> None:
    prepare(outbox)
    worker = Worker(outbox.worker_dsn, "mail")
    worker.handles()(lambda message, conn: None)
    with pytest.raises(WorkerError, match=text):
        asyncio.run(worker.run())


def test_a_worker_that_is_set_up_wrongly_is_refused() -> None:
    with pytest.raises(TypeError, match="is no database"):
        Worker(object(), "mail")
    with pytest.raises(ValueError, match="concurrency"):
        Worker("", "mail", concurrency=0)
    with pytest.raises(WorkerError, match="has no handlers"):
        asyncio.run(Worker("", "mail").run())
    worker = Worker("", "mail", deadline=1)
    with pytest.raises(ValueError, match="deadline"):
        worker.handles()(lambda message, conn: None)

    async def handle(message: Message, conn: object) -> None: ...

    mixed = Worker("", "mail")
    mixed.handles("a")(handle)
    with pytest.raises(ValueError, match="no coroutine function"):
        mixed.handles("b")(lambda message, conn: None)


PROGRAM = """
import sys, time
from relay.client.worker import Worker

worker = Worker(sys.argv[1], "mail", grace=0.1, poll=0.02)

@worker.handles()
def handle(message, conn):
    print("begun", flush=True)
    while True:
        time.sleep(1)

worker.run_forever()
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_process_that_ends_gives_its_message_back(
    outbox: Outbox, tmp_path: Path, number: signal.Signals
) -> None:
    fill(outbox, 1)
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    command = [sys.executable, str(program), outbox.worker_dsn]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=os.getcwd()) as process:  # noqa: PTH109
        assert process.stdout is not None
        assert process.stdout.readline() == b"begun\n"
        process.send_signal(number)
        assert process.wait(20) == (1 if number is signal.SIGTERM else -number)
    wait_until(lambda: outbox.worker.column("select payload from relay.take('mail')") == [1])


LISTENERS = """
    select a.pid from pg_stat_activity as a join pg_locks as l on l.pid = a.pid
     where a.application_name = 'relay listener mail' and a.datname = current_database()
       and l.locktype = 'advisory' and l.classid = x'7169776b'::int and l.granted and a.state = 'idle'
"""


@pytest.fixture
def no_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Idle workers look for messages after a notification only."""
    monkeypatch.setattr(idle, "_FIRST_PAUSE_SECONDS", 3600.0)


def noting(outbox: Outbox, poll: float = 3600, **more: Any) -> Worker:
    worker = Worker(outbox.worker_dsn, "mail", poll=poll, **more)

    @worker.handles()
    async def handle(message: Message, conn: psycopg.AsyncConnection[Any]) -> None:
        await conn.execute("insert into done values (%s)", (json.dumps(message.payload),))

    return worker


def handled(outbox: Outbox) -> int:
    return len(outbox.column("select payload from done"))


def listeners(outbox: Outbox) -> list[int]:
    return outbox.column(LISTENERS)


@pytest.mark.usefixtures("no_polls")
def test_an_idle_worker_is_woken(outbox: Outbox) -> None:
    fill(outbox, queue=Queue(name="mail", backoff=0.01))
    with working(noting(outbox)):
        wait_until(lambda: len(listeners(outbox)) == 1)
        fill(outbox, 1, queue=Queue(name="mail", backoff=0.01))
        wait_until(lambda: done(outbox) == [1])
        wait_until(lambda: len(listeners(outbox)) == 1)
        outbox.publish(host(1), event(2))
        with relaying(outbox.settings()):
            wait_until(lambda: handled(outbox) == 2)
        with psycopg.connect(outbox.worker_dsn) as conn:
            conn.execute("select relay.enqueue('mail', '0') from generate_series(3, 50)")
        wait_until(lambda: handled(outbox) == 50)


@pytest.mark.usefixtures("no_polls")
def test_a_worker_whose_listening_connection_is_cut_is_woken_again(outbox: Outbox) -> None:
    fill(outbox)
    former: list[int] = []

    def listens_again() -> bool:
        found = listeners(outbox)
        is_another = found not in ([], former)
        former[:] = found or former
        return is_another

    with working(noting(outbox, concurrency=2)):
        wait_until(listens_again)
        outbox.conn.execute("select pg_terminate_backend(%s)", (former[0],))
        wait_until(listens_again)
        fill(outbox, 1)
        wait_until(lambda: done(outbox) == [1])


def test_idle_workers_share_the_polls_once_nobody_can_have_missed_them(
    outbox: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a transaction runs that began before they watched, and may not have seen them, each polls as if alone."""
    counted: list[int] = []
    count = wakeups._watchers

    async def counting(conn: Any, queue: str) -> tuple[int, frozenset[str]]:
        found = await count(conn, queue)
        counted.append(found[0])
        return found

    monkeypatch.setattr(wakeups, "_watchers", counting)
    fill(outbox)
    workers = [noting(outbox, poll=0.05) for _ in range(3)]
    with psycopg.connect(outbox.worker_dsn) as conn, ExitStack() as stack:
        conn.execute("select relay.enqueue('mail', '1')")
        for each in workers:
            stack.enter_context(working(each))
        wait_until(lambda: counted.count(3) > 10)
        assert {each._idle.longest for each in workers} == {0.05}
        conn.commit()
        wait_until(lambda: done(outbox) == [1])
        wait_until(lambda: {round(each._idle.longest, 3) for each in workers} == {0.15})


def test_a_worker_behind_a_pooler_polls(outbox: Outbox, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "relay.worker")
    fill(outbox)
    with pooled(outbox.worker_dsn, sessions=2) as dsn:
        worker = Worker(dsn, "mail", poll=0.05)
        worker.handles()(lambda message, conn: None)
        with working(worker):
            wait_until(lambda: any("pooler" in each.getMessage() for each in caplog.records))
            fill(outbox, 1)
            wait_until(lambda: is_empty(outbox))


def test_nobody_is_notified_while_nobody_waits(outbox: Outbox) -> None:
    fill(outbox, 1)
    with psycopg.connect(outbox.worker_dsn, autocommit=True) as conn:
        channel = conn.execute("select relay.watch_queue('mail')").fetchone()
        assert channel is not None
        conn.execute(f"listen {channel[0]}".encode())
        fill(outbox, 2)
        assert next(conn.notifies(timeout=30)).channel == channel[0]
        conn.execute("select pg_advisory_unlock_all()")
        fill(outbox, 3)
        # The notifications of a session come in order, and this one after that which does not come.
        outbox.conn.execute(f"notify {channel[0]}, 'mine'".encode())
        assert next(conn.notifies(timeout=30)).payload == "mine"


class Counted(Idle):
    """Counts the queries of the slots, and those that have found no message."""

    def __init__(self) -> None:
        super().__init__(3600)
        self.all = self.vain = 0

    def begin(self) -> Query:
        self.all += 1
        return super().begin()

    def ended(self, query: Query, left: Left | None) -> bool:
        self.vain += left is None
        return super().ended(query, left)

    @property
    def slots(self) -> int:
        """How many slots are idle."""
        return len(self._sleeping)


@pytest.mark.parametrize("lease", [None, 60])
@pytest.mark.parametrize("key", ["none", "host"])
def test_a_message_that_comes_alone_costs_one_query(
    outbox: Outbox, key: str, lease: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(idle, "_FIRST_PAUSE_SECONDS", 3600)
    queue = Queue(name="mail", match=None, key=key)
    fill(outbox, queue=queue)
    worker = Worker(outbox.worker_dsn, "mail", concurrency=2, lease=lease, listen=False)
    worker._idle = counted = Counted()
    handled: list[Any] = []

    @worker.handles()
    async def handle(message: Message, *session: Any) -> None:
        handled.append(message.payload)

    with working(worker):
        for number in range(5):
            wait_until(lambda: counted.slots == 2)
            before = counted.all, counted.vain
            fill(outbox, number, queue=queue)
            assert worker._loop is not None
            worker._loop.call_soon_threadsafe(counted.wake)
            wait_until(lambda: len(handled) == number + 1 and counted.slots == 2)  # noqa: B023
            assert (counted.all, counted.vain) == (before[0] + 1, before[1])


def make_silent(outbox: Outbox) -> None:
    """Let takes say nothing of further messages, as in schemas that are older than relay.more_messages."""
    definition = "select pg_get_functiondef('relay.note_progress'::regproc)"
    says = "perform set_config('relay.more_messages', locked.more::text, true);"
    now = outbox.value(definition)
    assert says in now
    outbox.conn.execute(now.replace(says, "").encode())


@pytest.mark.parametrize("is_older", [False, True], ids=["", "older"])
@pytest.mark.parametrize("lease", [None, 60])
def test_messages_that_come_together_cost_one_query_each(
    outbox: Outbox, lease: float | None, is_older: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And one more for all, beside an older schema, where each that is found lets a further slot ask."""
    monkeypatch.setattr(idle, "_FIRST_PAUSE_SECONDS", 3600)
    fill(outbox)
    if is_older:
        make_silent(outbox)
    worker = Worker(outbox.worker_dsn, "mail", concurrency=8, lease=lease, listen=False)
    worker._idle = counted = Counted()
    handled: list[Any] = []

    @worker.handles()
    async def handle(message: Message, *session: Any) -> None:
        handled.append(message.payload)
        # Each has a slot of its own, since none ends before.
        async with asyncio.timeout(30):
            while len(handled) < 5:
                await asyncio.sleep(0.005)

    with working(worker):
        wait_until(lambda: counted.slots == 8)
        before = counted.vain
        with psycopg.connect(outbox.worker_dsn) as conn:
            conn.execute("select relay.enqueue('mail', '1') from generate_series(1, 5)")
        assert worker._loop is not None
        worker._loop.call_soon_threadsafe(counted.wake)
        wait_until(lambda: len(handled) == 5 and counted.slots == 8)
        assert counted.vain == before + is_older


@pytest.mark.parametrize("lease", [None, 60])
def test_beside_an_older_schema_no_message_of_a_key_waits(
    outbox: Outbox, lease: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing but what takes say, and what is done, tells that there are more."""
    monkeypatch.setattr(idle, "_FIRST_PAUSE_SECONDS", 3600)
    by_host = Queue(name="mail", match=None, key="host")
    fill(outbox, queue=by_host)
    make_silent(outbox)
    for key in ("Ada", "Bob", "Cai"):
        fill(outbox, *([key, number] for number in range(4)), queue=by_host, host_id=key)
    worker = Worker(outbox.worker_dsn, "mail", concurrency=2, lease=lease, listen=False)
    worker._idle = counted = Counted()
    handled: list[list[Any]] = []

    @worker.handles()
    async def handle(message: Message, *session: Any) -> None:
        handled.append(message.payload)

    with working(worker):
        wait_until(lambda: is_empty(outbox) and counted.slots == 2)
        for number in (4, 5):
            fill(outbox, ["Ada", number], queue=by_host, host_id="Ada")
            assert worker._loop is not None
            worker._loop.call_soon_threadsafe(counted.wake)
            wait_until(lambda: is_empty(outbox) and counted.slots == 2)
    for key, count in (("Ada", 6), ("Bob", 4), ("Cai", 4)):
        assert [number for of, number in handled if of == key] == list(range(count))


@pytest.mark.parametrize("function", ["queue_watchers", "watch_queue"])
def test_a_worker_beside_a_schema_without_notifications_polls(
    outbox: Outbox, function: str, caplog: pytest.LogCaptureFixture
) -> None:
    fill(outbox)
    outbox.conn.execute(f"drop function relay.{function}".encode())
    with working(noting(outbox, poll=0.05)):
        wait_until(
            lambda: any("no notification wakes" in each.getMessage() for each in caplog.records)
        )
        fill(outbox, 1)
        wait_until(lambda: done(outbox) == [1])


@pytest.mark.parametrize("lease", [None, 60])
def test_a_slot_looks_again_for_what_the_end_of_its_message_lets_be_taken(
    outbox: Outbox, lease: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(idle, "_FIRST_PAUSE_SECONDS", 3600)
    at_once = Queue(name="mail", match=None, key="host", backoff=0)
    fill(outbox, *range(5), queue=at_once, key="Ada")
    worker = Worker(outbox.worker_dsn, "mail", concurrency=2, lease=lease, listen=False)
    worker._idle = counted = Counted()
    failed: list[Any] = []

    @worker.handles()
    async def handle(message: Message, *session: Any) -> None:
        # The other slot cannot take the next message of the key.
        async with asyncio.timeout(30):
            while counted.vain == 0:
                await asyncio.sleep(0.005)
        if message.payload == 3 and not failed:
            failed.append(message.attempt)
            raise RetryLater("not yet")

    with working(worker):
        wait_until(lambda: is_empty(outbox))
    assert failed == [1]
