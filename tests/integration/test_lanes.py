"""Lanes of a reader: each key in one of them, in order, each lane read by one process, all of them by some."""

from __future__ import annotations

import asyncio
import json
import select
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from threading import Event, Thread, Timer
from typing import Any

import psycopg
import pytest
from psycopg.types.json import Jsonb

from relay.client import claimed_reader
from relay.client.log_session import LaneSession, ReaderSession
from relay.client.outages import OutageLog
from relay.client.reader import ReaderError, ReadTransaction, subscribe
from tests.outbox import Outbox, host, wait_until
from tests.process import relay

_Connection = psycopg.Connection[Any]
_CLAIMS = """
    select count(*) from pg_locks
     where locktype = 'advisory' and classid = x'72647263'::int::oid and granted
       and database = (select oid from pg_database where datname = current_database())
"""


def _publish(
    conn: _Connection, number: int, of: uuid.UUID, aggregate: str = "1", event_type: str = "placed"
) -> None:
    event = {
        "event_type": event_type,
        "aggregate_type": "Order",
        "aggregate_id": aggregate,
        "payload": {"number": number},
    }
    conn.execute("select relay.publish(%s, null, %s)", (of, Jsonb([event])))


def _declare(conn: _Connection, lanes: int | None, key: str = "host", **more: Any) -> None:
    conn.execute(
        "select relay.declare_reader('r', %s, %s, lanes => %s, lane_key => %s)",
        (Jsonb(more.get("match", {})), more.get("start", "now"), lanes, key),
    )


def _lanes(conn: _Connection, count: int) -> list[list[int]]:
    """The numbers of the events of each lane."""
    return [
        [
            payload["number"]
            for event, payload in conn.execute(
                "select id, payload from relay.read(%s)", (f"r/{n}",)
            )
            if event is not None
        ]
        for n in range(1, count + 1)
    ]


@pytest.mark.parametrize("key", ["host", "aggregate"])
def test_each_key_is_in_one_lane(outbox: Outbox, key: str) -> None:
    _declare(outbox.reader, 5, key, match={"event_type": "placed"})
    keys: dict[int, object] = {}
    for number in range(60):
        of, aggregate = host(number % 7), str(number % 11)
        _publish(outbox.publisher, number, of, aggregate)
        _publish(outbox.publisher, -1, of, aggregate, "other")
        keys[number] = of if key == "host" else (of, aggregate)
    found = _lanes(outbox.reader, 5)
    assert sorted(number for each in found for number in each) == list(range(60))
    assert all(each == sorted(each) for each in found)
    holders: dict[object, set[int]] = defaultdict(set)
    for index, each in enumerate(found):
        for number in each:
            holders[keys[number]].add(index)
    assert all(len(each) == 1 for each in holders.values())
    assert len({index for each in holders.values() for index in each}) > 1


def test_lanes_are_moved_and_dropped_together(outbox: Outbox) -> None:
    conn = outbox.reader
    _declare(conn, 3)
    for number in range(20):
        _publish(outbox.publisher, number, host(number))
    conn.execute("select relay.seek('r', 'now')")
    assert _lanes(conn, 3) == [[], [], []]
    conn.execute("select relay.seek('r', 'beginning')")
    assert sum(map(len, _lanes(conn, 3))) == 20
    with pytest.raises(psycopg.errors.InvalidParameterValue, match="'r/2' is a lane"):
        conn.execute("select relay.drop_reader('r/2')")
    with pytest.raises(psycopg.errors.InsufficientPrivilege, match="there is no reader 'r'"):
        conn.execute("select * from relay.read('r')")
    conn.execute("select relay.drop_reader('r')")
    assert outbox.value("select count(*) from relay.log_readers") == 0
    assert (
        outbox.value("select count(*) from relay.readers where target = 'relay.declare_reader'")
        == 0
    )


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        ((4, "host"), (5, "host"), "the reader 'r' has 4 lanes by host: to change that, drop it"),
        ((4, "host"), (4, "aggregate"), "the reader 'r' has 4 lanes by host: to change that, drop it"),
        ((4, "host"), (None, "host"), "the reader 'r' has 4 lanes by host: to change that, drop it"),
        ((None, "host"), (4, "host"), "the reader 'r' has no lanes: to change that, drop it"),
        ((None, "host"), (0, "host"), "lanes must be 1 to 256, or null"),
        ((None, "host"), (4, "user"), "lane_key must be host or aggregate"),
    ],
)  # fmt: skip
def test_lanes_are_not_changed(
    outbox: Outbox, first: tuple[int | None, str], second: tuple[int | None, str], words: str
) -> None:
    """Positions differ: events would be lost, or come in another order."""
    _declare(outbox.reader, *first)
    _declare(outbox.reader, *first)
    with pytest.raises(
        psycopg.errors.InvalidParameterValue, match=f"^relay.declare_reader: .*{words}"
    ):
        _declare(outbox.reader, *second)


def _numbers(transaction: Any) -> list[int]:
    return [event.payload["number"] for event in transaction.events]


def _subscribe(outbox: Outbox, **options: Any) -> Any:
    given: dict[str, Any] = {"lanes": 4, "poll": 0.05, "start": "beginning", **options}
    return subscribe(outbox.reader_dsn, "r", **given)


def test_one_process_reads_all_lanes(outbox: Outbox) -> None:
    """What is done does not come again, whatever the other lanes are at; what is not done does."""
    for number in range(30):
        _publish(outbox.publisher, number, host(number))
    found: list[int] = []
    left: list[int] = []
    with closing(iter(_subscribe(outbox))) as reader:
        for transaction in reader:
            (number,) = _numbers(transaction)
            if number % 3 or left:
                left.append(number)
            else:
                transaction.done()
                found.append(number)
            if len(found) + len(left) == 30:
                break
    again: list[int] = []
    with closing(iter(_subscribe(outbox))) as reader:
        for transaction in reader:
            again += _numbers(transaction)
            transaction.done()
            if set(again) >= set(left):
                break
    assert not set(again) & set(found)


def test_an_asynchronous_reader_has_lanes(outbox: Outbox) -> None:
    async def run() -> list[int]:
        reader, found = _subscribe(outbox), list[int]()
        async for transaction in reader:
            found += _numbers(transaction)
            await transaction.done()
            if len(found) == 20:
                reader.stop()
        return found

    for number in range(20):
        _publish(outbox.publisher, number, host(number % 3))
    found = asyncio.run(run())
    assert sorted(found) == list(range(20))
    for each in range(3):
        assert [number for number in found if number % 3 == each] == list(range(each, 20, 3))


@contextmanager
def _running(
    outbox: Outbox, handle: Callable[[ReadTransaction], None], **options: Any
) -> Iterator[Any]:
    """A subscription whose transactions are handled in a thread, until the end of the block."""
    reader = _subscribe(outbox, **options)

    def work() -> None:
        with closing(iter(reader)) as transactions:
            for transaction in transactions:
                handle(transaction)

    thread = Thread(target=work, daemon=True)
    thread.start()
    try:
        yield reader
    finally:
        reader.stop()
        thread.join(60)
        assert not thread.is_alive()


def test_processes_share_lanes(outbox: Outbox) -> None:
    """One that comes gets its share; one that ends gives its lanes back; no key is read by two at a time."""
    by: dict[str, list[int]] = {"a": [], "b": [], "c": []}

    def handler(name: str) -> Callable[[ReadTransaction], None]:
        def handle(transaction: ReadTransaction) -> None:
            transaction.done()
            by[name] += _numbers(transaction)

        return handle

    numbers = iter(range(100_000))

    def reads(name: str, every: bool = False) -> bool:
        """Whether the process gets something of what is published now."""
        before, others = len(by[name]), sum(map(len, by.values())) - len(by[name])
        sent = [next(numbers) for _ in range(16)]
        for number in sent:
            _publish(outbox.publisher, number, host(number % 16))
        wait_until(lambda: set(sent) <= {each for found in by.values() for each in found})
        mine = len(by[name]) - before
        others = sum(map(len, by.values())) - len(by[name]) - others
        return mine > 0 and (not every or others == 0)

    with _running(outbox, handler("a")):
        wait_until(lambda: int(outbox.value(_CLAIMS)) == 4)
        assert reads("a", every=True)
        with _running(outbox, handler("b")):
            wait_until(lambda: reads("b") and reads("a"))
            # None of the four lanes is too many for two of the three.
            with _running(outbox, handler("c")):
                wait_until(lambda: all(map(reads, "abc")))
        wait_until(lambda: reads("a", every=True))
    everything = by["a"] + by["b"] + by["c"]
    assert sorted(everything) == list(range(len(everything)))
    wait_until(lambda: int(outbox.value(_CLAIMS)) == 0)


def test_a_lane_is_given_back_when_it_is_done(outbox: Outbox) -> None:
    """Not while a handler works: what the process has in flight is done, and comes nowhere again."""
    working, go_on = Event(), Event()
    failed: list[Exception] = []
    found: dict[str, list[int]] = {"a": [], "b": []}

    def slow(transaction: ReadTransaction) -> None:
        working.set()
        go_on.wait(60)
        try:
            transaction.done()
        except ReaderError as error:
            failed.append(error)
        found["a"] += _numbers(transaction)

    def quick(transaction: ReadTransaction) -> None:
        transaction.done()
        found["b"] += _numbers(transaction)

    for number in range(40):
        _publish(outbox.publisher, number, host(number))
    with _running(outbox, slow):
        assert working.wait(60)
        members = "select max(members) from relay.share_lanes('r')"
        with _running(outbox, quick):
            wait_until(lambda: int(outbox.value(members)) == 2)
            go_on.set()
            wait_until(lambda: len(found["a"]) + len(found["b"]) >= 40)
            wait_until(lambda: int(outbox.value(_CLAIMS)) == 4)
    assert not failed
    assert sorted(found["a"] + found["b"]) == list(range(40))


def test_stop_ends_done_in_an_outage(outbox: Outbox) -> None:
    for number in range(2):
        _publish(outbox.publisher, number, host(1))
    subscription = _subscribe(outbox)
    with closing(iter(subscription)) as reader:
        transaction = next(reader)
        name = outbox.conn.info.dbname
        with psycopg.connect(outbox.superuser_dsn, dbname="postgres", autocommit=True) as admin:
            admin.execute(f"alter database {name} allow_connections false".encode())
            admin.execute(
                "select pg_terminate_backend(pid) from pg_stat_activity where datname = %s", (name,)
            )
        stopping = Timer(1, subscription.stop)
        stopping.start()
        with pytest.raises(ReaderError, match="the database does not answer"):
            transaction.done()
        stopping.join()


def test_an_outage_of_all_lanes_is_logged_once(
    outbox: Outbox, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At its beginning and at its end, with its length: not by each of the lanes."""
    caplog.set_level("INFO", "relay.reader")
    failed: set[object] = set()
    fails = OutageLog.fails

    def noted(outage: OutageLog, caller: object, cause: str) -> None:
        fails(outage, caller, cause)
        failed.add(caller)

    monkeypatch.setattr(OutageLog, "fails", noted)
    reader = _subscribe(outbox)
    reading = Thread(target=lambda: [each.done() for each in reader])
    reading.start()
    wait_until(lambda: int(outbox.value(_CLAIMS)) == 4)
    name = outbox.conn.info.dbname
    with psycopg.connect(outbox.superuser_dsn, dbname="postgres", autocommit=True) as admin:
        admin.execute(f"alter database {name} allow_connections false".encode())
        admin.execute(
            "select pg_terminate_backend(pid) from pg_stat_activity"
            " where datname = %s and application_name like 'relay reader %%'",
            (name,),
        )
        # The four, and the session that shares them.
        wait_until(lambda: len(failed) == 5)
        admin.execute(f"alter database {name} allow_connections true".encode())
    ended = "the database answers again"
    wait_until(lambda: ended in caplog.messages)
    reader.stop()
    reading.join()
    found = [each for each in caplog.records if "the database" in each.getMessage()]
    assert [each.getMessage().partition(":")[0] for each in found] == [
        "the database does not answer",
        ended,
    ]
    assert all(each.__dict__["reader"] == "r" for each in found)
    assert found[1].__dict__["seconds"] >= 0


def test_the_answer_to_a_beat_is_left_to_it(
    outbox: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever waits for a notification takes nothing from another thread, which would wait until the session ends."""
    taken: list[bool] = []
    execute = ReaderSession.execute

    def slow(self: ReaderSession, statement: str, parameters: tuple[Any, ...] = ()) -> Any:
        if statement == "select" and isinstance(self, LaneSession):
            assert self._conn is not None
            pgconn = self._conn.pgconn
            pgconn.send_query(b"select")
            select.select([pgconn.socket], [], [], 10)
            time.sleep(0.1)
            taken.append(not pgconn.is_busy())
            while pgconn.get_result() is not None:
                pass
        return execute(self, statement, parameters)

    monkeypatch.setattr(ReaderSession, "execute", slow)
    monkeypatch.setattr(claimed_reader, "_BEATS", 60)
    with _running(outbox, lambda transaction: transaction.done(), poll=2):
        wait_until(lambda: len(taken) >= 6)
    assert not any(taken)


def test_what_cannot_be_is_refused(outbox: Outbox) -> None:
    with pytest.raises(ValueError, match=r"^lanes: must be 1 to 256$"):
        _subscribe(outbox, lanes=0)
    with pytest.raises(ValueError, match=r"^lane_key: must be host or aggregate$"):
        _subscribe(outbox, lane_key="user")
    outbox.reader.execute("select relay.declare_reader('r')")
    for start, words in (
        ("now", "the reader 'r' has no lanes"),
        (None, "the reader 'r' has no lanes"),
    ):
        with pytest.raises(ReaderError, match=words):
            next(iter(_subscribe(outbox, start=start)))


def test_relay_reader_shows_lanes_together(outbox: Outbox, tmp_path: Path) -> None:
    file = str(outbox.config_file(tmp_path / "relay.yaml"))
    _declare(outbox.reader, 3)
    outbox.reader.execute("select relay.declare_reader('plain')")
    outbox.reader.execute("select relay.claim_reader('r/2')")
    lines = [each.split("\t") for each in relay("reader", "list", "-c", file).stdout.splitlines()]
    assert [(each[0], each[1]) for each in lines] == [
        ("reader", "lanes"),
        ("plain", "-"),
        ("r", "1 of 3 claimed"),
    ]
    assert len(json.loads(relay("reader", "list", "--json", "-c", file).stdout)) == 4
    shown = json.loads(relay("reader", "show", "r", "--json", "-c", file).stdout)
    assert [each["name"] for each in shown] == ["r/1", "r/2", "r/3"]
    assert "lane\t2 of 3, by host" in relay("reader", "show", "r/2", "-c", file).stdout
    assert "is a lane" in relay("reader", "drop", "r/2", "--yes", "-c", file).stderr
    assert relay("reader", "drop", "r", "--yes", "-c", file).returncode == 0
    assert outbox.column("select name from relay.log_readers") == ["plain"]
