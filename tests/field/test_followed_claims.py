"""A message that is claimed in the trip that commits the one before: reports of workers that fetch ahead."""

from __future__ import annotations

import json
from itertools import count
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from relay.client.worker import Message, Queue, Worker
from tests.chaos.proxy import through_proxy
from tests.outbox import Outbox, wait_until
from tests.workers import working

QUEUE = Queue(name="mail", match=None, backoff=0.01, max_backoff=0.01)
each_kind = pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])


def fill(outbox: Outbox, *payloads: Any, queue: Queue = QUEUE) -> None:
    statement, text = queue.declaration()
    outbox.worker.execute(statement.with_parameter("%s").encode(), (text,))
    outbox.conn.execute("create table if not exists done (payload jsonb)")
    for payload in payloads:
        outbox.worker.execute("select relay.enqueue('mail', %s::jsonb)", (json.dumps(payload),))


def states(outbox: Outbox) -> list[tuple[Any, ...]]:
    rows = outbox.conn.execute(
        "select event_id, state, attempts, error from relay.queue_items order by id"
    )
    return rows.fetchall()


def worker_of(dsn: str, is_async: bool, *before: str) -> Worker:
    """A worker that notes each message, once it has run some statements."""
    worker = Worker(dsn, "mail", concurrency=1, poll=0.05, listen=False)
    insert = b"insert into done values (%s)"

    if is_async:

        @worker.handles()
        async def handle_async(message: Message, conn: psycopg.AsyncConnection[Any]) -> None:
            for each in before:
                await conn.execute(each.encode())
            await conn.execute(insert, (json.dumps(message.payload),))
    else:

        @worker.handles()
        def handle(message: Message, conn: psycopg.Connection[Any]) -> None:
            for each in before:
                conn.execute(each.encode())
            conn.execute(insert, (json.dumps(message.payload),))

    return worker


@each_kind
def test_a_commit_that_a_deferred_constraint_refuses(outbox: Outbox, is_async: bool) -> None:
    """OCA/queue#142, doctrine/dbal#5967, matomo-org/matomo#17511."""
    fill(outbox, 1, 2, 2, 3, queue=Queue(name="mail", match=None, attempts=2, backoff=0.01))
    outbox.conn.execute("alter table done add unique (payload) deferrable initially deferred")
    with working(worker_of(outbox.worker_dsn, is_async)):
        wait_until(lambda: [each[1] for each in states(outbox)] == ["dead"], 15)
    [(_, _, attempts, error)] = states(outbox)
    assert attempts == 2
    assert "UniqueViolation" in error
    assert sorted(outbox.column("select payload from done")) == [1, 2, 3]


@each_kind
def test_a_handler_that_deallocates_what_is_prepared(
    outbox: Outbox, is_async: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """psycopg/psycopg#1105, #1408, pgbouncer/pgbouncer#974: no outage, and no attempt that counts."""
    fill(outbox, *range(20))
    with working(worker_of(outbox.worker_dsn, is_async, "deallocate all")):
        wait_until(lambda: not states(outbox), 15)
    assert sorted(outbox.column("select payload from done")) == list(range(20))
    assert [each.getMessage() for each in caplog.records if each.levelname == "WARNING"] == []


@each_kind
def test_a_handler_with_psycopgs_own_prepared_statements(
    outbox: Outbox, is_async: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """psycopg/psycopg#1105: what psycopg prepares, a savepoint that is rolled back deallocates, all of it."""
    fill(outbox, *range(10))
    worker = Worker(outbox.worker_dsn, "mail", concurrency=1, poll=0.05)
    if is_async:

        @worker.handles()
        async def handle_async(message: Message, conn: psycopg.AsyncConnection[Any]) -> None:
            conn.prepare_threshold = 0
            async with conn.transaction(force_rollback=True):
                await conn.execute("select 1")
            await conn.execute("insert into done values (%s)", (json.dumps(message.payload),))
    else:

        @worker.handles()
        def handle(message: Message, conn: psycopg.Connection[Any]) -> None:
            conn.prepare_threshold = 0
            with conn.transaction(force_rollback=True):
                conn.execute("select 1")
            conn.execute("insert into done values (%s)", (json.dumps(message.payload),))

    with working(worker):
        wait_until(lambda: not states(outbox), 15)
    assert sorted(outbox.column("select payload from done")) == list(range(10))
    assert [each.getMessage() for each in caplog.records if each.levelname == "WARNING"] == []


@each_kind
@pytest.mark.parametrize(
    "ending", ["commit", "rollback", "commit; begin", "rollback; begin", "commit and chain"]
)
def test_a_handler_that_ends_the_transaction_by_sql(
    outbox: Outbox, is_async: bool, ending: str
) -> None:
    """OCA/queue#889: no message is lost, and none is claimed for ever."""
    fill(outbox, 1, 2, queue=Queue(name="mail", match=None, attempts=2, backoff=0.01))
    with working(worker_of(outbox.worker_dsn, is_async, *ending.split("; "))):
        wait_until(lambda: [each[1] for each in states(outbox)] == ["dead", "dead"], 15)
    assert {each[2] for each in states(outbox)} == {2}


def test_a_worker_that_is_stopped_gives_its_next_message_back(outbox: Outbox) -> None:
    """collectiveidea/delayed_job#812, timgit/pg-boss#303, graphile/worker#222."""
    fill(outbox, *range(50))
    worker = Worker(outbox.worker_dsn, "mail", concurrency=1, poll=0.05)

    @worker.handles()
    async def handle(message: Message, conn: psycopg.AsyncConnection[Any]) -> None:
        await conn.execute("insert into done values (%s)", (json.dumps(message.payload),))
        if message.payload == 5:
            worker.stop()

    with working(worker):
        wait_until(lambda: outbox.value("select count(*) from done") >= 6, 15)
    done = outbox.column("select payload from done")
    left = states(outbox)
    assert sorted(done) == list(range(6))
    assert len(left) == 44
    assert {each[1:] for each in left} == {("enqueued", 0, None)}
    with working(worker_of(outbox.worker_dsn, True)):
        wait_until(lambda: not states(outbox), 15)


@each_kind
def test_a_session_that_is_ended_between_messages(outbox: Outbox, is_async: bool) -> None:
    fill(outbox, *range(30))
    worker = worker_of(outbox.worker_dsn, is_async, "select pg_sleep(0.02)")
    with working(worker):
        for _ in range(4):
            outbox.conn.execute(
                "select pg_terminate_backend(pid) from pg_stat_activity"
                " where application_name = 'relay worker mail' and backend_xmin is not null"
            )
            outbox.conn.execute("select pg_sleep(0.1)")
        wait_until(lambda: not states(outbox), 20)
    assert sorted(outbox.column("select payload from done")) == list(range(30))


def test_a_queue_that_is_paused_under_a_worker(outbox: Outbox) -> None:
    fill(outbox, *range(300))
    with working(worker_of(outbox.worker_dsn, True)):
        wait_until(lambda: outbox.value("select count(*) from done") >= 5, 15)
        outbox.worker.execute("select relay.pause_queue('mail')")
        before = outbox.value("select count(*) from done")
        outbox.conn.execute("select pg_sleep(0.5)")
        assert outbox.value("select count(*) from done") <= before + 2
        outbox.worker.execute("select relay.pause_queue('mail', false)")
        wait_until(lambda: not states(outbox), 15)
    assert sorted(outbox.column("select payload from done")) == list(range(300))


@each_kind
def test_a_client_of_another_encoding(outbox: Outbox, is_async: bool) -> None:
    fill(outbox, "grün", "für")
    worker = worker_of(make_conninfo(outbox.worker_dsn, client_encoding="latin1"), is_async)
    with working(worker):
        wait_until(lambda: not states(outbox), 15)
    assert sorted(outbox.column("select payload from done")) == ["für", "grün"]


@each_kind
@pytest.mark.parametrize("keep_done", [None, 3600.0], ids=["removed", "kept"])
def test_the_answer_to_a_commit_is_lost(
    outbox: Outbox, is_async: bool, keep_done: float | None
) -> None:
    """OCA/connector#51, ansible/awx#11027: done once, and neither retried nor a dead letter."""
    fill(outbox, *range(60), queue=Queue(name="mail", match=None, attempts=3, keep_done=keep_done))
    commits = count(1)
    with through_proxy(outbox.worker_dsn) as proxy:
        proxy.cut_after = lambda data: b"; commit" in data and next(commits) % 7 == 0
        with working(worker_of(proxy.dsn, is_async)):
            wait_until(lambda: {each[1] for each in states(outbox)} <= {"done"})
        assert proxy.cuts > 5
    assert {each[1:] for each in states(outbox)} <= {("done", 1, None)}
    assert sorted(outbox.column("select payload from done")) == list(range(60))


def test_the_order_of_keys_with_two_workers(outbox: Outbox) -> None:
    """procrastinate-org/procrastinate#231: a message is claimed in the trip that commits the one before of its key."""
    fill(outbox, queue=Queue(name="mail", match=None, key="user", backoff=0.01))
    outbox.conn.execute("alter table done add number int generated always as identity")
    for number in range(140):
        outbox.worker.execute(
            "select relay.enqueue('mail', %s::jsonb, key => %s)",
            (json.dumps([number % 7, number]), str(number % 7)),
        )
    workers = [worker_of(outbox.worker_dsn, True, "select pg_sleep(0.001)") for _ in range(2)]
    with working(workers[0]), working(workers[1]):
        wait_until(lambda: not states(outbox))
    handled = outbox.column("select payload from done order by number")
    assert sorted(handled, key=lambda pair: pair[0]) == sorted(handled)
