"""Readers of the log while everything happens that may: each event once with `commit`, at least once with `done`."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from threading import Event, Lock, Thread
from typing import Any

import psycopg
import pytest

from relay.client.reader import ReaderError, ReaderMoved, Subscription, subscribe
from relay.retention import reader_positions
from tests.api import API, ResumingClient, new_token, served
from tests.chaos.test_failover import Pair, streaming_pair
from tests.integration.test_subscribe import insert_number
from tests.outbox import Outbox, wait_until

pytestmark = [pytest.mark.chaos, pytest.mark.rare, pytest.mark.timeout(300)]

_IN_ORDER, _PREPARING = range(1, 4), 9
"""The publishers whose events come in the order of their numbers, and one whose transactions are prepared."""
_OF_APP = {"slot": "app", "publication": "app"}


_EFFECT = "insert into effects (reader, number) values (%s, %s)"


def _read_in_sql(dsn: str, ended: Event) -> None:
    """Read and advance in SQL, in the transaction of the effects."""
    while not ended.is_set():
        with suppress(psycopg.Error), psycopg.connect(dsn) as conn:
            while not ended.wait(0.01):
                with conn.transaction():
                    rows = conn.execute(
                        "select position, payload from relay.read('sql', 11)"
                    ).fetchall()
                    for _, payload in rows:
                        conn.execute(_EFFECT, ("sql", payload["number"]))
                    if rows:
                        conn.execute("select relay.advance('sql', %s)", (rows[0][0],))


def _publish(dsn: str, publisher: int, ended: Event) -> None:
    """Publish at random: savepoints, rollbacks, long and prepared transactions, wherever the server may be.

    The table `published` has what was committed. A number whose commit is not certain is not used again.
    """
    choose = random.Random(publisher)
    number = 0
    while not ended.is_set():
        with suppress(psycopg.Error), psycopg.connect(dsn) as conn:
            while not ended.wait(0.005):
                conn.execute("select pg_current_xact_id()")
                with suppress(ZeroDivisionError), conn.transaction():
                    insert_number(conn, -1)
                    raise ZeroDivisionError
                if publisher == _PREPARING:
                    conn.commit()
                    conn.tpc_begin(str(number))
                for _ in range(choose.randint(1, 3)):
                    number += 1
                    insert_number(conn, publisher * 10_000 + number)
                    conn.execute(
                        "insert into published values (%s)", (publisher * 10_000 + number,)
                    )
                if choose.random() < 0.05:
                    time.sleep(0.3)
                if publisher != _PREPARING:
                    if choose.random() < 0.15:
                        conn.rollback()
                    else:
                        conn.commit()
                    continue
                conn.tpc_prepare()
                if choose.random() < 0.7:
                    # `_end_prepared` commits it.
                    break
                conn.tpc_commit()


def _end_prepared(conn: psycopg.Connection[Any]) -> None:
    """Commit what is prepared, also what a publisher left at the failover."""
    for (name,) in conn.execute(
        "select gid from pg_prepared_xacts where database = current_database()"
    ):
        # Its publisher may be about to commit it.
        with suppress(
            psycopg.errors.UndefinedObject,
            psycopg.errors.ObjectInUse,
            psycopg.errors.ObjectNotInPrerequisiteState,
        ):
            conn.execute(f"commit prepared '{name}'".encode())


def _stop_at_the_end(reader: Subscription, ended: Event) -> None:
    def wait() -> None:
        ended.wait()
        reader.stop()

    Thread(target=wait, daemon=True).start()


def _read_once(dsn: str, ended: Event) -> None:
    """Read with `async for`, and commit each transaction together with its effects."""

    async def run() -> None:
        reader = subscribe(dsn, "once", start=None, poll=0.02, page=7)
        _stop_at_the_end(reader, ended)
        async with await psycopg.AsyncConnection.connect(dsn) as conn:
            async for transaction in reader:
                async with conn.transaction(), transaction.commit(conn):
                    for event in transaction.events:
                        await conn.execute(_EFFECT, ("once", event.payload["number"]))

    while not ended.is_set():
        with suppress(psycopg.Error, ReaderError):
            asyncio.run(run())


class _Elsewhere:
    """Effects outside the database, of readers that say `done` after them, in the order in which they came."""

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self._lock = Lock()

    def read(self, dsn: str, ended: Event) -> None:
        """Read with `for`; a transaction is done only after its effects."""
        while not ended.is_set():
            reader = subscribe(dsn, "least", start=None, poll=0.02, page=20)
            _stop_at_the_end(reader, ended)
            with suppress(psycopg.Error, ReaderMoved):
                for transaction in reader:
                    with self._lock:
                        self.numbers += [event.payload["number"] for event in transaction.events]
                    with suppress(ReaderMoved):
                        transaction.done()


@contextmanager
def _running(targets: list[Callable[[], None]], ended: Event) -> Iterator[list[Thread]]:
    threads = [Thread(target=each) for each in targets]
    for each in threads:
        each.start()
    try:
        yield threads
    finally:
        ended.set()
        for each in threads:
            each.join()


def _synchronise_commits(pair: Pair) -> None:
    """No commit that anybody sees is lost in a failover."""
    pair.source.conn.execute("alter system set synchronous_standby_names = '*'")
    pair.source.conn.execute("select pg_reload_conf()")
    wait_until(lambda: pair.source.column("show synchronous_standby_names") == ["*"])


def _disturb(server: Outbox, choose: random.Random, rounds: int) -> None:
    """Kill sessions of readers and publishers, delete what every reader has read, and end prepared transactions."""
    for _ in range(rounds):
        time.sleep(0.1)
        pids = server.column(
            "select pid from pg_stat_activity where datname = current_database() and pid <> pg_backend_pid() "
            "and backend_type = 'client backend'"
        )
        if pids:
            server.conn.execute("select pg_terminate_backend(%s)", (choose.choice(pids),))
        server.conn.execute(
            "select relay.delete_portion('public.outbox_message_t', now() + interval '1 hour', 50, '0')"
        )
        _end_prepared(server.conn)


def test_each_event_is_read_as_promised_across_a_failover() -> None:
    """By readers of each kind, beside publishers of each kind, kills, retention, and a promoted standby."""
    ended, silent, elsewhere = Event(), Event(), _Elsewhere()
    choose = random.Random(1)
    with ExitStack() as stack:
        pair = stack.enter_context(streaming_pair(settings={"max_prepared_transactions": "20"}))
        pair.source.install()
        reader_positions.retain(
            pair.source.conn, pair.source.settings(retention={"keep": "1d"}).source
        )
        pair.source.conn.execute(
            "create table effects (seq bigserial, reader text, number int); create table published (number int)"
        )
        for name in ("once", "sql", "least", "stream"):
            pair.source.reader.execute("select relay.declare_reader(%s)", (name,))
        settings = pair.source.settings(source={"dsn": pair.either(), **_OF_APP}, api=API)
        token = new_token(settings)
        pair.replicate()
        _synchronise_commits(pair)
        dsn = pair.either()

        def publisher(number: int) -> Callable[[], None]:
            return lambda: _publish(dsn, number, silent)

        def reader(read: Callable[[str, Event], None]) -> Callable[[], None]:
            return lambda: read(dsn, ended)

        client = ResumingClient(stack.enter_context(served(settings)), token)
        kinds = (_read_once, _read_in_sql, elsewhere.read)
        readers = [reader(client.read), *(reader(read) for read in kinds for _ in range(2))]
        publishers = [publisher(each) for each in (*_IN_ORDER, _PREPARING)]
        with _running(readers, ended):
            with _running(publishers, silent):
                _disturb(pair.source, choose, 20)
                # A commit whose session is ended while it waits for the standby is seen before the standby has it.
                pair.replicate()
                pair.fail_over()
                wait_until(lambda: not pair.copy.value("select pg_is_in_recovery()"), 60)
                _disturb(pair.copy, choose, 20)
            _end_prepared(pair.copy.conn)
            published = pair.copy.column("select number from published")

            def missing() -> set[tuple[str, int]]:
                found = set(pair.copy.conn.execute("select reader, number from effects"))
                found |= {("least", number) for number in list(elsewhere.numbers)}
                found |= {("stream", number) for number in list(client.numbers)}
                names = ("once", "sql", "least", "stream")
                return {(name, number) for name in names for number in published} - found

            wait_until(lambda: not missing(), 120)
        effects = {
            name: pair.copy.column(
                "select number from effects where reader = %s order by seq", (name,)
            )
            for name in ("once", "sql")
        }
    assert len(published) > 200
    assert not client.refused
    effects["stream"] = client.numbers
    effects["first of least"] = list(dict.fromkeys(elsewhere.numbers))
    for name, numbers in effects.items():
        assert sorted(numbers) == sorted(published), name
        for each in _IN_ORDER:
            own = [number for number in numbers if number // 10_000 == each]
            assert own == sorted(own), name


def test_what_a_failover_has_lost_is_not_skipped_in_what_follows() -> None:
    """A reader has read more than the standby has, and new transactions get the ids of those that were lost."""
    with streaming_pair() as pair:
        pair.source.install()
        pair.source.reader.execute("select relay.declare_reader('r', start => 'beginning')")
        pair.source.fill(2, events=1)
        pair.cut()
        pair.source.fill(40, events=1)
        with closing(iter(subscribe(pair.either(), "r", start=None, poll=0.05))) as reader:  # type: ignore[type-var]
            read = [next(reader) for _ in range(42)]
            pair.fail_over()
            wait_until(lambda: not pair.copy.value("select pg_is_in_recovery()"), 60)
            pair.copy.fill(100, events=1)
            with pytest.raises(ReaderMoved):
                read[-1].done()
            again = [event.id for _ in range(102) for event in next(reader).events]
        everything = pair.copy.column("select id from outbox_message_t order by c_offset")
    assert again == everything
