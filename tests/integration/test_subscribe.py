"""Readers in Python: `subscribe` yields each transaction once or again as promised, in order, and one process reads."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from datetime import timedelta
from threading import Event, Thread
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import make_conninfo
from psycopg.types.json import Jsonb
from pydantic import BaseModel

import relay
from relay.client import claimed_reader
from relay.client.log_pages import LogPage
from relay.client.reader import (
    AsyncReadTransaction,
    ReaderError,
    ReaderMoved,
    ReadTransaction,
    Subscription,
    subscribe,
)
from tests.client_sessions import parameters
from tests.outbox import Outbox, relaying, wait_until
from tests.pgbouncer import pooled

_HOST = uuid.uuid4()
_READERS = """
    select pid from pg_stat_activity
     where application_name = 'relay reader r' and datname = current_database()
"""
_END_READERS = f"select pg_terminate_backend(pid) from ({_READERS}) as readers"


def _publish(outbox: Outbox, *numbers: int, event_type: str = "order.placed") -> None:
    """One transaction."""
    events = [
        {
            "event_type": event_type,
            "aggregate_type": "Order",
            "aggregate_id": str(number),
            "payload": {"number": number},
        }
        for number in numbers
    ]
    outbox.publisher.execute("select relay.publish(%s, null, %s)", (_HOST, Jsonb(events)))


def _rows(outbox: Outbox, query: str) -> list[Any]:
    return outbox.reader.execute(query.encode()).fetchall()


def _numbers(transaction: relay.Transaction) -> list[int]:
    return [event.payload["number"] for event in transaction.events]


def _take(subscription: Subscription, count: int) -> Iterator[ReadTransaction]:
    """The next transactions; the reader is left when the caller leaves."""
    iterator = iter(subscription)
    for _ in range(count):
        yield next(iterator)


def _reader(outbox: Outbox, **options: Any) -> Subscription:
    given: dict[str, Any] = {"poll": 0.05, "start": "beginning", **options}
    return subscribe(outbox.reader_dsn, "r", **given)


def test_a_reader_goes_on_after_what_is_done(outbox: Outbox) -> None:
    """Also in the middle of a page, for whoever reads next; what was not done comes again."""
    for number in range(5):
        _publish(outbox, 10 * number, 10 * number + 1)
    first = []
    for transaction in _take(_reader(outbox), 4):
        first.append(_numbers(transaction))
        if len(first) == 2:
            transaction.done()
    assert first == [[0, 1], [10, 11], [20, 21], [30, 31]]
    second = []
    for transaction in _take(_reader(outbox), 3):
        second.append(_numbers(transaction))
        transaction.done()
    assert second == [[20, 21], [30, 31], [40, 41]]
    _publish(outbox, 50)
    assert [_numbers(each) for each in _take(_reader(outbox), 1)] == [[50]]


async def _read_async(
    subscription: Subscription, count: int, handle: Callable[[AsyncReadTransaction], Any]
) -> list[list[int]]:
    found: list[list[int]] = []
    async for transaction in subscription:
        await handle(transaction)
        found.append(_numbers(transaction))
        if len(found) == count:
            subscription.stop()
    return found


def test_an_asynchronous_reader_waits_for_what_comes(outbox: Outbox) -> None:
    """`stop` ends the iteration after the transaction in flight."""

    async def run() -> list[list[int]]:
        reader = _reader(outbox)
        reading = asyncio.create_task(_read_async(reader, 4, lambda each: each.done()))
        for number in range(6):
            await asyncio.to_thread(_publish, outbox, number)
        return await reading

    assert asyncio.run(run()) == [[0], [1], [2], [3]]
    assert [_numbers(each) for each in _take(_reader(outbox), 2)] == [[4], [5]]


def test_a_cancelled_task_leaves_the_reader(outbox: Outbox) -> None:
    """While it waits: the next process reads, although nobody has called `stop`. GreptimeTeam/greptimedb#7670."""

    async def run() -> None:
        async def read() -> None:
            async for _ in _reader(outbox, start="now"):
                pass

        task = asyncio.create_task(read())
        await asyncio.to_thread(
            wait_until,
            lambda: bool(outbox.column("select 1 from relay.log_readers where name = 'r'")),
        )
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())
    _publish(outbox, 1)
    assert [_numbers(each) for each in _take(_reader(outbox), 1)] == [[1]]


def test_after_the_end_nothing_is_done_any_more(outbox: Outbox) -> None:
    """A program that has ended its iteration is told so, and can tell it from a fault of its own."""
    _publish(outbox, 1)
    ended = r"reader r: its iteration has ended"
    reader = iter(_reader(outbox))
    kept = next(reader)
    reader.close()  # type: ignore[attr-defined]
    with pytest.raises(ReaderError, match=ended):
        kept.done()

    async def run() -> None:
        awaiting = aiter(_reader(outbox))
        left = await anext(awaiting)
        await awaiting.aclose()  # type: ignore[attr-defined]
        await asyncio.to_thread(wait_until, lambda: not outbox.column(_READERS))
        with pytest.raises(ReaderError, match=ended):
            await left.done()
        async with await psycopg.AsyncConnection.connect(outbox.reader_dsn) as conn:
            with pytest.raises(ReaderError, match=ended):
                async with left.commit(conn):
                    pass

    asyncio.run(run())


def test_the_events_are_those_that_handlers_get(outbox: Outbox) -> None:
    """Every field, in the session's own settings whatever the role's; in the current version of their types."""
    outbox.conn.execute(
        f"alter database {outbox.slot} set timezone = 'Asia/Tokyo'; "
        f"alter database {outbox.slot} set datestyle = 'German'".encode()
    )
    types = relay.EventTypes()

    @types.model("order.placed", version=2)
    class _Placed(BaseModel):
        number: int
        currency: str

    @types.upcast("order.placed", from_version=1)
    def _with_currency(payload: Any) -> Any:
        return payload | {"currency": "EUR"}

    _publish(outbox, 1, 2)
    _publish(outbox, 3, event_type="other")
    placed, other = _take(_reader(outbox, upcast=types.current), 2)
    assert isinstance(placed, relay.Transaction)
    first, second = placed.events
    assert (first.model.currency, first.payload["number"], second.model.number) == ("EUR", 1, 2)
    assert str(first.transaction_id) == placed.transaction_id
    assert (second.transaction_ordinal, second.transaction_count) == (2, 2)
    ((at, xid),) = outbox.conn.execute(
        "select event_ts, c_xid::text from outbox_message_t where payload->>'number' = '1'"
    )
    assert (first.event_ts, first.xid, placed.commit.xid) == (at, int(xid), int(xid))
    assert first.host_id == _HOST
    (last,) = other.events
    assert (last.model, last.payload) == (None, {"number": 3})


def test_a_match_passes_over_other_events(outbox: Outbox) -> None:
    """The position passes over them as well."""
    reader = _reader(outbox, match={"event_type": "wanted"})
    _publish(outbox, 1)
    _publish(outbox, 2, event_type="wanted")
    _publish(outbox, 3)
    _publish(outbox, 4, 5, event_type="wanted")
    found = []
    for transaction in _take(reader, 2):
        found.append(_numbers(transaction))
        transaction.done()
    assert found == [[2], [4, 5]]
    assert not _rows(outbox, "select * from relay.read('r')")


def test_effects_and_position_commit_together(outbox: Outbox) -> None:
    """A rollback undoes both, and the transaction comes again; a second commit of one transaction is refused."""
    for number in range(3):
        _publish(outbox, number)
    outbox.conn.execute("create table effects (number int)")
    with psycopg.connect(outbox.reader_dsn) as conn:

        def handle(transaction: ReadTransaction) -> None:
            with conn.transaction(), transaction.commit(conn):
                conn.execute("insert into effects values (%s)", (_numbers(transaction)[0],))

        iterator = iter(_reader(outbox))
        first = next(iterator)
        handle(first)
        with pytest.raises(ReaderMoved):
            handle(first)
        second = next(iterator)
        with suppress(ZeroDivisionError), conn.transaction():
            with second.commit(conn):
                conn.execute("insert into effects values (%s)", (_numbers(second)[0],))
            raise ZeroDivisionError
        third = next(iterator)
        assert _numbers(third) == [2]
        with pytest.raises(ReaderMoved):
            handle(third)
        for _ in range(2):
            handle(next(iterator))
        _publish(outbox, 3)
        left = next(iterator)
        iterator.close()  # type: ignore[attr-defined]
        with pytest.raises(ReaderError, match="has ended"):
            handle(left)
    assert outbox.column("select number from effects order by number") == [0, 1, 2]


def test_an_asynchronous_session_moves_the_reader(outbox: Outbox) -> None:
    """Of psycopg, asyncpg and SQLAlchemy."""
    import asyncpg
    from sqlalchemy.ext.asyncio import create_async_engine

    for number in range(3):
        _publish(outbox, number)

    outbox.conn.execute("create table effects (number int)")

    async def run() -> None:
        iterator = aiter(_reader(outbox))
        async with (
            await psycopg.AsyncConnection.connect(outbox.reader_dsn) as conn,
            (await anext(iterator)).commit(conn),
        ):
            await conn.execute("insert into effects values (1)")
        plain = await asyncpg.connect(**parameters(outbox.reader_dsn))
        with pytest.raises(ReaderMoved):
            async with plain.transaction(), (second := await anext(iterator)).commit(plain):
                outbox.reader.execute("select relay.seek('r', %s)", (second.position,))
        await plain.close()
        engine = create_async_engine(
            "postgresql+asyncpg://",
            async_creator=lambda: asyncpg.connect(**parameters(outbox.reader_dsn)),
        )
        async with engine.begin() as session, (await anext(iterator)).commit(session):
            pass
        await engine.dispose()
        await iterator.aclose()  # type: ignore[attr-defined]

    asyncio.run(run())
    assert not _rows(outbox, "select * from relay.read('r')")


def test_one_process_reads_and_another_stands_by(outbox: Outbox) -> None:
    """It takes over when the first one is gone, from what that one has done."""
    for number in range(4):
        _publish(outbox, number)
    first = iter(_reader(outbox))
    next(first).done()
    found: list[list[int]] = []

    async def run() -> None:
        second = _reader(outbox)

        async def handle(transaction: AsyncReadTransaction) -> None:
            found.append(_numbers(transaction))
            await transaction.done()

        reading = asyncio.create_task(_read_async(second, 2, handle))
        await asyncio.to_thread(
            wait_until,
            lambda: bool(
                outbox.column(
                    "select 1 from pg_stat_activity where application_name = 'relay reader r' "
                    "and query ~ 'claim_reader' and datname = current_database()"
                )
            ),
        )
        next(first).done()
        assert found == []
        first.close()  # type: ignore[attr-defined]
        await reading

    asyncio.run(run())
    assert found == [[2], [3]]


def test_a_lost_connection_is_opened_again(outbox: Outbox) -> None:
    """What is in flight is done on the next one, and comes once."""
    for number in range(3):
        _publish(outbox, number)
    found = []
    with closing(iter(_reader(outbox))) as iterator:  # type: ignore[type-var]
        for _ in range(3):
            transaction = next(iterator)
            found += _numbers(transaction)
            outbox.conn.execute(_END_READERS.encode())
            transaction.done()
            outbox.conn.execute(_END_READERS.encode())
        _publish(outbox, 3)
        found += _numbers(next(iterator))
    assert found == [0, 1, 2, 3]


_FROZEN = """
import sys
from relay.client.reader import ReaderMoved, subscribe
for transaction in subscribe(sys.argv[1], "r", start="beginning", poll=0.1, lease=1):
    print("read", flush=True)
    sys.stdin.readline()
    try:
        transaction.done()
        print("done", flush=True)
    except ReaderMoved:
        print("moved", flush=True)
    break
"""


def test_a_frozen_process_is_replaced_and_cannot_advance(outbox: Outbox) -> None:
    """Its session is ended by the server; when it wakes it finds that it no longer reads."""
    _publish(outbox, 1)
    process = subprocess.Popen(
        [sys.executable, "-c", _FROZEN, outbox.reader_dsn],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "read\n"
            process.send_signal(19)
            with closing(iter(_reader(outbox))) as iterator:  # type: ignore[type-var]
                transaction = next(iterator)
                assert _numbers(transaction) == [1]
                process.send_signal(18)
                process.stdin.write("\n")
                process.stdin.flush()
                assert process.stdout.readline() == "moved\n"
                transaction.done()
        finally:
            process.kill()
    assert not _rows(outbox, "select * from relay.read('r')")


def test_a_zombie_is_fenced_before_its_successor_moves(outbox: Outbox) -> None:
    """With a connection of its own it could advance; the claim of the successor alone refuses it."""
    _publish(outbox, 1)
    _publish(outbox, 2)
    zombie = iter(_reader(outbox))
    transaction = next(zombie)
    outbox.conn.execute(_END_READERS.encode())
    with psycopg.connect(outbox.reader_dsn) as conn, closing(iter(_reader(outbox))) as successor:  # type: ignore[type-var]
        begun = transaction.commit(conn)
        assert _numbers(next(successor)) == [1]
        with pytest.raises(ReaderMoved), begun:
            pass
        conn.rollback()
        with pytest.raises(ReaderMoved):
            transaction.done()
        zombie.close()  # type: ignore[attr-defined]


def test_what_was_refused_comes_again(outbox: Outbox) -> None:
    """Also if the one that has read meanwhile has done nothing."""
    _publish(outbox, 1)
    _publish(outbox, 2)
    found = []
    with closing(iter(_reader(outbox))) as reader:  # type: ignore[type-var]
        refused = next(reader)
        outbox.conn.execute(_END_READERS.encode())
        with closing(iter(_reader(outbox))) as other:  # type: ignore[type-var]
            assert _numbers(next(other)) == [1]
            with pytest.raises(ReaderMoved):
                refused.done()
        for transaction in reader:
            with suppress(ReaderMoved):
                transaction.done()
                found += _numbers(transaction)
            if 2 in found:
                break
    assert found == [1, 2]


def test_relay_wakes_readers_that_wait(outbox: Outbox, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that would ask only after ten minutes gets what comes before."""
    monkeypatch.setattr(claimed_reader, "_FIRST_PAUSE_SECONDS", 600.0)
    ended = Event()

    def publish() -> None:
        number = 0
        while not ended.wait(0.3):
            _publish(outbox, number := number + 1)

    with (
        relaying(outbox.settings()),
        closing(iter(_reader(outbox, poll=600, lease=1200))) as reader,  # type: ignore[type-var]
    ):
        publishing = Thread(target=publish)
        publishing.start()
        try:
            read = [_numbers(next(reader)) for _ in range(8)]
        finally:
            ended.set()
            publishing.join()
    assert read == [[number] for number in range(1, 9)]


def test_a_reader_that_cannot_go_on_says_why(outbox: Outbox) -> None:
    """Given up, dropped, or never there: an error at the next read, and no other beginning."""
    with pytest.raises(ReaderError, match="there is no reader 'r'"):
        next(iter(_reader(outbox, start=None)))
    with pytest.raises(ReaderError, match="neither now"):
        next(iter(_reader(outbox, start="tomorrow")))
    with pytest.raises(ReaderError, match="must be a value"):
        next(iter(_reader(outbox, match={"id": None})))
    _publish(outbox, 1)
    with closing(iter(_reader(outbox))) as iterator:  # type: ignore[type-var]
        next(iterator).done()
        outbox.conn.execute("update relay.readers set given_up_at = now() where reader = 'r'")
        with pytest.raises(ReaderError, match="given up by retention"):
            next(iterator)
    outbox.reader.execute("select relay.seek('r', 'beginning')")
    with closing(iter(_reader(outbox))) as iterator:  # type: ignore[type-var]
        next(iterator).done()
        outbox.reader.execute("select relay.drop_reader('r')")
        with pytest.raises(ReaderError, match="there is no reader 'r'"):
            next(iterator)


def insert_number(conn: psycopg.Connection[Any], number: int) -> None:
    conn.execute(
        "insert into public.outbox_message_t (host_id, event_type, payload) values (%s, 'any', %s)",
        (_HOST, Jsonb({"number": number})),
    )


def _note_pages(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of the pages that were read, also ahead, while the test runs."""
    numbers: list[int] = []

    class Noted(LogPage):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            numbers.append(self.number)

    monkeypatch.setattr(claimed_reader, "LogPage", Noted)
    return numbers


def test_the_next_page_is_read_while_a_handler_works(
    outbox: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What commits after it was read comes once, and a lost connection repeats nothing of it."""
    pages = _note_pages(monkeypatch)
    for number in range(6):
        _publish(outbox, number)
    with (
        psycopg.connect(outbox.publisher_dsn) as late,
        psycopg.connect(outbox.reader_dsn) as effects,
        closing(iter(_reader(outbox, page=2))) as iterator,  # type: ignore[type-var]
    ):
        insert_number(late, 100)
        transaction = next(iterator)
        wait_until(lambda: pages == [1, 2])
        late.commit()
        outbox.conn.execute(_END_READERS.encode())
        found = []
        for _ in range(6):
            with effects.transaction(), transaction.commit(effects):
                found += _numbers(transaction)
            transaction = next(iterator)
        transaction.done()
        found += _numbers(transaction)
    assert (sorted(found), found[:4]) == ([0, 1, 2, 3, 4, 5, 100], [0, 1, 2, 3])
    assert not _rows(outbox, "select * from relay.read('r')")


def test_a_handler_that_takes_long_keeps_its_reader_in_use(
    outbox: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """aio-libs/aiokafka#848, dpkp/kafka-python#2422: it was taken for dead, and its message went round for ever.

    Also where its transaction has moved the reader and is still open; it can be committed.
    """
    monkeypatch.setattr(claimed_reader, "_SIGN_SECONDS", 0.0)
    older = "update relay.readers set noted_at = now() - interval '6 minutes' where reader = 'r'"
    recent = (
        "select 1 from relay.readers where reader = 'r' and noted_at > now() - interval '1 minute'"
    )
    for number in range(2):
        _publish(outbox, number)
    options = {"expires": timedelta(minutes=5), "lease": 1.5}
    with (
        psycopg.connect(outbox.reader_dsn) as conn,
        closing(iter(_reader(outbox, **options))) as iterator,  # type: ignore[type-var]
    ):
        transaction = next(iterator)
        outbox.conn.execute(older.encode())
        wait_until(lambda: bool(outbox.column(recent)))
        assert outbox.column("select relay.expire_readers()") == []
        with conn.transaction():
            with transaction.commit(conn):
                pass
            # Longer than several signs of life.
            time.sleep(2)
        next(iterator).done()
    assert not _rows(outbox, "select * from relay.read('r')")


def test_an_outage_is_logged_with_its_cause(
    outbox: Outbox, caplog: pytest.LogCaptureFixture
) -> None:
    """Of a server that refuses the connection only the text tells why."""
    reader = subscribe(make_conninfo(outbox.reader_dsn, dbname="nowhere"), "r", poll=0.05)
    reading = Thread(target=list, args=(reader,))
    reading.start()
    try:
        wait_until(lambda: any("nowhere" in each for each in caplog.messages))
    finally:
        reader.stop()
        reading.join()
    record = next(each for each in caplog.records if each.name == "relay.reader")
    assert record.getMessage().startswith("the database does not answer: OperationalError: ")


def test_an_outage_is_logged_when_it_ends(
    outbox: Outbox, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line, and one more when the reader goes on, however often it has tried."""
    caplog.set_level("INFO", "relay.reader")
    failed: list[Exception] = []

    def counted(error: Exception) -> str:
        failed.append(error)
        return "gone"

    monkeypatch.setattr(claimed_reader, "outage_of", counted)
    outbox.reader.execute("select relay.declare_reader('r')")
    with closing(iter(_reader(outbox, start=None))) as iterator:  # type: ignore[type-var]
        reading = Thread(target=lambda: next(iterator).done())
        reading.start()
        wait_until(lambda: "reading" in caplog.messages)
        name = outbox.conn.info.dbname
        with psycopg.connect(outbox.superuser_dsn, dbname="postgres", autocommit=True) as admin:
            admin.execute(f"alter database {name} allow_connections false".encode())
            outbox.conn.execute(_END_READERS.encode())
            wait_until(lambda: len(failed) >= 3)
            admin.execute(f"alter database {name} allow_connections true".encode())
        _publish(outbox, 1)
        reading.join()
    found = [each for each in caplog.records if "the database" in each.getMessage()]
    assert [each.getMessage() for each in found] == [
        "the database does not answer: gone",
        "the database answers again",
    ]
    assert (found[1].__dict__["reader"], found[1].__dict__["seconds"] >= 0) == ("r", True)


def test_a_connection_string_that_is_none_ends_the_reader_without_quoting_it() -> None:
    with pytest.raises(ReaderError, match=r"reader r: the connection string is not valid") as ended:
        next(iter(subscribe("secret", "r")))
    assert "secret" not in str(ended.value)


@pytest.mark.parametrize("mode", ["session", "transaction"])
def test_a_pooler_is_refused(outbox: Outbox, mode: str) -> None:
    """In one line, whatever its mode: nothing but the server itself tells what a session of it still has."""
    with pooled(outbox.reader_dsn, mode) as dsn, pytest.raises(ReaderError) as refused:
        next(iter(subscribe(dsn, "r", poll=0.05)))
    assert str(refused.value) == (
        "reader r: a pooler is between this process and the server, and a reader needs a session: "
        "give the address of the server"
    )
    assert not outbox.column("select name from relay.log_readers")
