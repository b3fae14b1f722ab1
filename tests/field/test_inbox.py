"""Reports of consumers that handled a message twice, or not at all, tried on `relay.client.inbox`.

Each test names the report. What it describes is done here: an id has its effects once, and none is lost.
"""

from __future__ import annotations

import asyncio
import json
import threading
import uuid
from contextlib import suppress
from datetime import timedelta
from typing import Any

import asyncpg
import psycopg
import pytest

from relay.client import Event
from relay.client import Outbox as Publisher
from relay.client.inbox import Inbox
from relay.client.schema import install_inbox
from tests.client_sessions import parameters
from tests.outbox import Outbox

inbox = Inbox("billing")
_Connection = psycopg.Connection[Any]


@pytest.fixture
def service(database: str) -> str:
    """The database of a service with an inbox and a table for effects."""
    with psycopg.connect(database, autocommit=True) as conn:
        conn.execute(install_inbox().encode())
        conn.execute("create table effects (id text)")
    return database


def _effects(dsn: str) -> list[str]:
    with psycopg.connect(dsn) as conn:
        return [row[0] for row in conn.execute("select id from effects order by id")]


def _handle(conn: _Connection, event_id: str, to: Inbox = inbox) -> bool:
    """A delivery with an effect."""
    with to.once(conn, event_id) as first:
        if first:
            conn.execute("insert into effects values (%s)", (event_id,))
    return first


def _wait_until_blocked(conn: _Connection, pid: int) -> None:
    while not conn.execute("select from pg_locks where pid = %s and not granted", (pid,)).rowcount:
        pass


def test_two_copies_at_once_are_not_handled_at_once(service: str) -> None:
    """Particular/NServiceBus#4086, #6583, #3330: copies of a message at two instances, and both called the handler."""
    running: list[str] = []
    with (
        psycopg.connect(service) as first,
        psycopg.connect(service) as second,
        psycopg.connect(service, autocommit=True) as other,
    ):
        with inbox.once(first, "a") as is_first:
            assert is_first
            thread = threading.Thread(
                target=lambda: running.append(f"second {_handle(second, 'a')}")
            )
            thread.start()
            _wait_until_blocked(other, second.info.backend_pid)
            running.append("first")
        first.commit()
        thread.join(60)
    assert running == ["first", "second False"]


def test_the_loser_of_a_race_runs_nothing(service: str) -> None:
    """Devlaner/devlane#332, stellarBank/StellarBank#39: asked before, inserted after; the error was only logged."""
    barrier = threading.Barrier(6)
    found: list[bool] = []

    def deliver() -> None:
        with psycopg.connect(service) as conn:
            barrier.wait()
            found.append(_handle(conn, "a"))

    threads = [threading.Thread(target=deliver) for _ in range(6)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(60)
    assert sorted(found) == [False] * 5 + [True]
    assert _effects(service) == ["a"]


def test_a_crash_between_effects_and_commit(service: str) -> None:
    """JasperFx/wolverine#1677: effects were stored in a transaction of their own, and came twice after a crash."""
    with psycopg.connect(service) as conn, psycopg.connect(service, autocommit=True) as other:
        assert _handle(conn, "a")
        other.execute("select pg_terminate_backend(%s)", (conn.info.backend_pid,))
        with pytest.raises(psycopg.OperationalError):
            conn.commit()
    with psycopg.connect(service) as conn:
        assert _handle(conn, "a")
    assert _effects(service) == ["a"]


def test_each_consumer_has_its_own_ids(service: str) -> None:
    """BrighterCommand/Brighter#375, #311: the first handler's record hid an event from the others."""
    with psycopg.connect(service) as conn:
        assert _handle(conn, "a")
        assert _handle(conn, "a", Inbox("shipping"))
        assert not _handle(conn, "a", Inbox("shipping"))


def test_an_id_is_scoped_by_its_recipient_alone(service: str) -> None:
    """dbos-inc/dbos-transact-ts#1307: names and ids that are the same when they are put together are two."""
    with psycopg.connect(service) as conn:
        assert _handle(conn, "b c", Inbox("a"))
        assert _handle(conn, "c", Inbox("a b"))
        assert _handle(conn, "C", Inbox("a b"))


def test_a_record_that_is_kept_is_the_window(service: str) -> None:
    """dex-it/dex-common#232, JasperFx/wolverine#1880: what was cleaned up early was handled again."""
    kept = Inbox("billing", keep=timedelta(hours=2))
    with psycopg.connect(service, autocommit=True) as conn:
        with conn.transaction():
            _handle(conn, "young", kept)
            _handle(conn, "old", kept)
        conn.execute(
            "update relay.inbox set handled_at = now() - interval '119 minutes' where id = 'young'"
        )
        conn.execute(
            "update relay.inbox set handled_at = now() - interval '121 minutes' where id = 'old'"
        )
        with conn.transaction():
            assert kept.purge(conn) == 1
            assert not _handle(conn, "young", kept)


def test_a_purge_beside_a_delivery(service: str) -> None:
    """dex-it/dex-common#232: a cleaner and a redelivery of what it deletes do not wait for each other for ever."""
    short = Inbox("billing", keep=timedelta(seconds=1))
    with psycopg.connect(service) as conn, psycopg.connect(service) as cleaner:
        _handle(conn, "a", short)
        conn.commit()
        conn.execute("update relay.inbox set handled_at = now() - interval '1 minute'")
        conn.commit()
        assert not _handle(conn, "a", short)
        assert short.purge(cleaner) == 1
        cleaner.commit()
        conn.commit()
        assert _handle(conn, "a", short)


def test_a_handler_that_is_cancelled(service: str) -> None:
    """preloop/preloop#517: the worker was told to stop, and the row that says "handled" was committed before."""

    async def run() -> None:
        conn = await asyncpg.connect(**parameters(service))
        started = asyncio.Event()

        async def handle() -> None:
            async with conn.transaction(), inbox.once(conn, "a") as first:
                assert first
                await conn.execute("insert into effects values ('a')")
                started.set()
                await asyncio.sleep(60)

        task = asyncio.create_task(handle())
        await started.wait()
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        assert not conn.is_in_transaction()
        async with conn.transaction(), inbox.once(conn, "a") as first:
            assert first
        await conn.close()

    asyncio.run(run())
    assert _effects(service) == []


@pytest.mark.parametrize("level", ["REPEATABLE_READ", "SERIALIZABLE"])
def test_a_copy_at_a_stricter_level_is_tried_again(service: str, level: str) -> None:
    """MassTransit/MassTransit#4470: a second delivery at REPEATABLE READ failed, and what should become of it?"""
    with psycopg.connect(service) as first, psycopg.connect(service) as second:
        for conn in (first, second):
            conn.isolation_level = psycopg.IsolationLevel[level]
        second.execute("select from effects")
        assert _handle(first, "a")
        first.commit()
        with pytest.raises(psycopg.errors.SerializationFailure):
            _handle(second, "a")
        second.rollback()
        assert not _handle(second, "a")


def test_a_copy_does_not_abort_the_transaction(service: str) -> None:
    """JasperFx/wolverine#1863: the second insert of an envelope was an error, after which PostgreSQL takes nothing."""
    with psycopg.connect(service) as conn:
        _handle(conn, "a")
        conn.commit()
        conn.execute("insert into effects values ('before')")
        assert not _handle(conn, "a")
        conn.execute("insert into effects values ('after')")
    assert _effects(service) == ["a", "after", "before"]


def test_a_batch_of_which_one_fails(service: str) -> None:
    """Particular/docs.particular.net#3552: what is configured in the persistence commits once, also in a batch."""
    with psycopg.connect(service) as conn:
        for number in range(4):
            with suppress(ZeroDivisionError), inbox.once(conn, number) as first:
                assert first
                conn.execute("insert into effects values (%s)", (str(number),))
                if number == 2:
                    raise ZeroDivisionError
        conn.commit()
        assert [_handle(conn, str(number)) for number in range(4)] == [False, False, True, False]
    assert _effects(service) == ["0", "1", "2", "3"]


def test_what_a_handler_publishes_is_published_once(outbox: Outbox) -> None:
    """MassTransit/MassTransit#3791, BrighterCommand/Brighter#2541: messages of a handler went out again with a copy."""
    outbox.conn.execute(install_inbox().encode())
    outbox.conn.execute("grant select, insert on relay.inbox to app_publisher")
    host, publisher = uuid.uuid4(), Publisher()
    with psycopg.connect(outbox.publisher_dsn) as conn:
        for fails in (True, False, False):
            with suppress(ZeroDivisionError), inbox.once(conn, "a") as first:
                if first:
                    publisher.publish(conn, Event("invoice.made", payload={}), host_id=host)
                if fails:
                    raise ZeroDivisionError
            conn.commit()
    assert outbox.column("select event_type from outbox_message_t") == ["invoice.made"]


def test_ids_of_senders_are_texts(service: str) -> None:
    """frain-dev/convoy#1262: an id that a provider repeats may be a number, a UUID, or a text with quotes."""
    ids = [7, uuid.UUID(int=7), 'it\'s "a"; --', "ключ", json.dumps({"a": [1]}), "a" * 1000]
    with psycopg.connect(service) as conn:
        assert [_handle(conn, str(each)) for each in ids] == [True] * len(ids)
        for each in ids:
            with inbox.once(conn, each) as first:
                assert not first
