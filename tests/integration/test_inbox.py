"""The inbox of a consumer: an id has effects once, in every driver and whatever the first delivery comes to."""

from __future__ import annotations

import asyncio
import threading
from datetime import timedelta
from typing import Any

import psycopg
import pytest

from relay.client.errors import EventInvalid
from relay.client.inbox import Inbox, key
from relay.client.schema import install_inbox, remove_inbox
from tests.client_sessions import DRIVERS, Opened

inbox = Inbox("shop")


@pytest.fixture
def dsn(database: str) -> str:
    with psycopg.connect(database, autocommit=True) as conn:
        conn.execute(install_inbox().encode())
        conn.execute("create table effects (id text)")
    return database


def effects(dsn: str) -> list[str]:
    with psycopg.connect(dsn) as conn:
        return [row[0] for row in conn.execute("select id from effects order by id")]


async def deliver(opened: Opened, event_id: str, fails: bool = False) -> bool:
    async def work() -> None:
        await opened.run(lambda: opened.execute(f"insert into effects values ('{event_id}')"))
        if fails:
            raise RuntimeError

    if opened.asynchronous:
        async with inbox.once(opened.session, event_id) as first:
            if first:
                await work()
    else:
        with inbox.once(opened.session, event_id) as first:
            if first:
                await work()
    return first


@pytest.mark.parametrize("driver", DRIVERS)
def test_drivers(dsn: str, driver: str) -> None:
    """The id and the effects commit, or are undone, together, also where the caller commits after an error."""

    async def run() -> None:
        async with DRIVERS[driver](dsn) as opened:
            with pytest.raises(RuntimeError):
                await deliver(opened, "a", fails=True)
            assert await deliver(opened, "b")
            assert not await deliver(opened, "b")
            await opened.run(opened.commit)
        assert effects(dsn) == ["b"]
        async with DRIVERS[driver](dsn) as opened:
            assert await deliver(opened, "a")
            await opened.run(opened.rollback)
        async with DRIVERS[driver](dsn) as opened:
            assert await deliver(opened, "a")
            assert not await deliver(opened, "b")
            await opened.run(opened.commit)
        assert effects(dsn) == ["a", "b"]

    asyncio.run(run())


@pytest.mark.parametrize("ending", ["commit", "rollback", "kill"])
@pytest.mark.parametrize("level", ["READ_COMMITTED", "SERIALIZABLE"])
def test_two_at_once(dsn: str, ending: str, level: str) -> None:
    """The second delivery waits for the first, and has effects unless that commits."""
    got: list[Any] = []

    def second() -> None:
        with psycopg.connect(dsn, application_name="second") as conn:
            conn.isolation_level = psycopg.IsolationLevel[level]
            try:
                with inbox.once(conn, "a") as first:
                    got.append(first)
            except psycopg.errors.SerializationFailure:
                got.append("retry")

    with psycopg.connect(dsn) as conn, psycopg.connect(dsn, autocommit=True) as other:
        conn.isolation_level = psycopg.IsolationLevel[level]
        with inbox.once(conn, "a") as first:
            assert first
        thread = threading.Thread(target=second)
        thread.start()
        blocked = "select 1 from pg_stat_activity where application_name = 'second' and wait_event_type = 'Lock'"
        while not other.execute(blocked).fetchone():
            pass
        if ending == "kill":
            other.execute("select pg_terminate_backend(%s)", (conn.info.backend_pid,))
        else:
            getattr(conn, ending)()
        thread.join(60)
        if ending == "kill":
            conn.close()
    committed = False if level == "READ_COMMITTED" else "retry"
    assert got == [committed if ending == "commit" else True]


def test_purge(dsn: str) -> None:
    """What is younger than `keep`, or another consumer's, stays."""
    with psycopg.connect(dsn) as conn:
        conn.execute(
            "insert into relay.inbox select c, i::text, clock_timestamp() - make_interval(mins => i) "
            "from generate_series(1, 119) as i, unnest(array['shop', 'other']) as c"
        )
        hour = Inbox("shop", keep=timedelta(minutes=60, seconds=30))
        assert hour.purge(conn) == 59
        assert hour.purge(conn) == 0
        assert conn.execute("select count(*) from relay.inbox").fetchone() == (179,)
        with hour.once(conn, "60") as first:
            assert not first
        with hour.once(conn, "61") as first:
            assert first


def test_the_schema_is_installed_again_and_removed(dsn: str) -> None:
    with psycopg.connect(dsn) as conn:
        conn.execute(install_inbox().encode())
        conn.execute(remove_inbox().encode())
        assert conn.execute("select to_regclass('relay.inbox')").fetchone() == (None,)


def test_deliveries_at_once_have_effects_once(dsn: str) -> None:
    """Twenty ids, each delivered by eight sessions, some of which fail after their effects."""
    mine = Inbox("many")

    def work(number: int) -> None:
        with psycopg.connect(dsn, autocommit=True) as conn:
            for each in range(20):
                try:
                    with conn.transaction(), mine.once(conn, each) as first:
                        if first:
                            conn.execute("insert into effects values (%s)", (str(each),))
                        if (number + each) % 3 == 0:
                            raise RuntimeError("the consumer fails")
                except RuntimeError:
                    pass

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert effects(dsn) == sorted(map(str, range(20)))


@pytest.mark.parametrize(
    ("headers", "found"),
    [
        ({"Idempotency-Key": "a", "webhook-id": "b"}, "a"),
        ({"ce_id": b"b"}, "b"),
        ({"CE-ID": "c"}, "c"),
    ],
)
def test_the_key_of_a_delivery_is_in_its_headers(headers: dict[str, Any], found: str) -> None:
    assert key(headers) == found


@pytest.mark.parametrize("event_id", ["", "\0", "\ud800", "a" * 1001])
def test_an_id_that_no_index_takes_is_refused(event_id: str) -> None:
    with pytest.raises(EventInvalid, match="event_id: must have 1 to 1000 bytes"):
        inbox.once(None, event_id)
    with pytest.raises(EventInvalid, match="headers: have none of"):
        key({"content-type": "text"})


def test_a_delivery_without_an_id_is_none_and_not_the_second_of_all_without_one() -> None:
    """`headers.get("webhook-id")` is None: as the id "None", all but the first would have been skipped."""
    with pytest.raises(EventInvalid, match="event_id: is None: the delivery has no id"):
        inbox.once(None, None)


def test_who_asks_once_itself_whether_it_is_the_first_is_told_how() -> None:
    """An object is true: `if inbox.once(…):` would have handled each delivery again."""
    with pytest.raises(TypeError, match=r"`with inbox\.once\(…\) as first`, and ask `first`"):
        bool(inbox.once(None, "a"))


def test_an_id_is_the_same_in_bytes_and_as_text(dsn: str) -> None:
    with psycopg.connect(dsn) as conn:
        with inbox.once(conn, b"a") as first:
            assert first
        with inbox.once(conn, "a") as first:
            assert not first
    with pytest.raises(EventInvalid, match="UTF-8"):
        inbox.once(None, b"\xff")
