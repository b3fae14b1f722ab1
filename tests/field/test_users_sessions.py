"""Sessions of users' frameworks: those without transactions are refused, those that were lost are renewed.

AUTOCOMMIT makes begin, commit and rollback of SQLAlchemy do nothing, without a word: sqlalchemy/sqlalchemy#7141 and
#6002, sqlalchemy-continuum/sqlalchemy-continuum#333, dalibo/temboard#877. Django's connection stays closed in a process
that serves no requests: celery/celery#621, #2996 and #4674, dimagi/commcare-hq#37013.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from threading import Event
from typing import Any

import asyncpg
import django.db
import psycopg
import pytest
import sqlalchemy
from asgiref.sync import sync_to_async
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.orm import sessionmaker

from relay import Delivery
from relay.client.worker import LeasedMessage, Message, Worker, WorkerError
from relay.model.events import Transaction
from tests.client_sessions import django_connection, parameters
from tests.integration.test_workers import fill, states
from tests.outbox import Outbox, event, host, relaying, wait_until
from tests.workers import working

ALIAS = "users_sessions"


def autocommit(dsn: str) -> sqlalchemy.Engine:
    url = sqlalchemy.make_url(dsn).set(drivername="postgresql+psycopg")
    return sqlalchemy.create_engine(url, isolation_level="AUTOCOMMIT")


def autocommit_async(dsn: str) -> Any:
    return create_async_engine(
        "postgresql+asyncpg://",
        async_creator=lambda: asyncpg.connect(**parameters(dsn)),
        isolation_level="AUTOCOMMIT",
    )


DATABASES: dict[str, tuple[Callable[[str], Any], bool]] = {
    "Engine": (autocommit, False),
    "sessionmaker": (lambda dsn: sessionmaker(autocommit(dsn)), False),
    "AsyncEngine": (autocommit_async, True),
    "async_sessionmaker": (lambda dsn: async_sessionmaker(autocommit_async(dsn)), True),
}


@pytest.mark.parametrize("lease", [None, 30.0])
@pytest.mark.parametrize("database", DATABASES)
def test_a_database_without_transactions_is_refused(
    outbox: Outbox, database: str, lease: float | None
) -> None:
    fill(outbox, 1)
    open_database, is_async = DATABASES[database]
    worker = Worker(open_database(outbox.worker_dsn), "mail", concurrency=1, lease=lease)
    called: list[object] = []

    def handle(message: Message | LeasedMessage, *session: Any) -> None:
        called.append(message)

    async def handle_async(message: Message | LeasedMessage, *session: Any) -> None:
        called.append(message)

    worker.handles()(handle_async if is_async else handle)
    with pytest.raises(WorkerError, match="isolation level AUTOCOMMIT"):
        worker.run_forever()
    assert not called
    assert [state for state, _, _ in states(outbox)] == ["enqueued"]


def orm() -> Any:
    return django.db.connections[ALIAS]


def insert(amount: Any) -> None:
    with orm().cursor() as cursor:
        cursor.execute("insert into effects values (%s)", [amount])


def deliver(delivery: Delivery) -> None:
    for each in delivery.events:
        insert(each.payload["amount"])


async def deliver_async(delivery: Delivery) -> None:
    for each in delivery.events:
        await sync_to_async(insert)(each.payload["amount"])


def apply(transaction: Transaction, cursor: psycopg.Cursor[Any]) -> None:
    for each in transaction.events:
        insert(each.payload["amount"])


@pytest.fixture
def effects(outbox: Outbox) -> Iterator[Callable[[], list[int]]]:
    """A table, and Django's connection to it, whose sessions have a name of their own."""
    outbox.conn.execute("create table effects (amount int)")
    configured: Any = django_connection(outbox.worker_dsn).settings_dict
    configured |= {"OPTIONS": {"application_name": ALIAS}, "CONN_MAX_AGE": None}
    django.db.connections.settings[ALIAS] = configured
    yield lambda: outbox.column("select distinct amount from effects order by 1")
    # Its thread lives as long as the process.
    asyncio.run(sync_to_async(forget)())
    del django.db.connections.settings[ALIAS]


def forget() -> None:
    orm().close()
    del django.db.connections[ALIAS]


def kill(outbox: Outbox) -> None:
    killed = "select count(pg_terminate_backend(pid, 5000)) from pg_stat_activity where application_name = %s"
    wait_until(lambda: bool(outbox.value(killed, (ALIAS,))))


KINDS: dict[str, dict[str, Any]] = {
    "function": {"type": "function", "callable": f"{__name__}:deliver", "concurrency": 1},
    "async function": {"type": "function", "callable": f"{__name__}:deliver_async"},
    "python": {"type": "python", "callable": f"{__name__}:apply"},
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_connection_of_django_that_was_lost_is_opened_again(
    outbox: Outbox, effects: Callable[[], list[int]], kind: str
) -> None:
    retry = {"on": "any", "attempts": 5, "wait": 0.1, "jitter": 0.0}
    settings = outbox.settings(
        handlers={"orm": {**KINDS[kind], "retry": retry}}, routes=[{"handlers": ["orm"]}]
    )
    with relaying(settings):
        for number in range(1, 4):
            outbox.publish(host(1), event(number))
            wait_until(lambda number=number: effects() == [*range(1, number + 1)])  # type: ignore[misc]
            kill(outbox)
    assert not outbox.value("select count(*) from relay.dead_letter_queue")


@pytest.mark.parametrize("lease", [None, 30.0])
@pytest.mark.parametrize("is_async", [False, True])
def test_other_connections_of_a_worker_are_opened_again_too(
    outbox: Outbox, effects: Callable[[], list[int]], lease: float | None, is_async: bool
) -> None:
    fill(outbox)
    worker = Worker(outbox.worker_dsn, "mail", concurrency=1, poll=0.1, lease=lease)

    def handle(message: Message | LeasedMessage, *session: Any) -> None:
        insert(message.payload)

    async def handle_async(message: Message | LeasedMessage, *session: Any) -> None:
        await sync_to_async(insert)(message.payload)

    worker.handles()(handle_async if is_async else handle)
    with working(worker):
        for number in range(1, 4):
            outbox.worker.execute("select relay.enqueue('mail', to_jsonb(%s::int))", (number,))
            wait_until(lambda number=number: effects() == [*range(1, number + 1)])  # type: ignore[misc]
            kill(outbox)


def test_no_handler_waits_for_what_others_do_in_the_thread_of_the_orm(outbox: Outbox) -> None:
    fill(outbox, 1, 2)
    worker = Worker(outbox.worker_dsn, "mail", concurrency=2, poll=0.1, deadline=60)
    called: list[Any] = []
    both_run = Event()

    @worker.handles()
    async def handle(message: Message, *session: Any) -> None:
        called.append(message.payload)
        if len(called) == 2:
            both_run.set()
        assert await sync_to_async(both_run.wait)(30)

    django_connection(outbox.worker_dsn)
    with working(worker):
        wait_until(lambda: len(states(outbox)) == 0)
    assert sorted(called) == [1, 2]
