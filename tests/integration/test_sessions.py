"""What relay's sessions in the target have: nothing of what handlers left there, and commits that survive a crash."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from functools import partial
from itertools import product
from threading import Thread

import psycopg
import pytest
from psycopg.conninfo import make_conninfo
from psycopg_pool import PoolTimeout

from relay.faults import FaultAction, RelayError, action_for
from relay.model.events import Lsn
from relay.spark.session import Session
from relay.store import connections, session_settings, trips
from relay.store.connections import (
    Pool,
    asking,
    asking_both,
    close_asked,
    connect,
    new_pool,
    open_pool,
    sessions_with,
)
from relay.store.handler_sessions import HandlerPool
from relay.store.positions import offsets
from relay.store.positions.offsets import PartitionPosition
from relay.store.positions.unflushed import require_kept
from relay.store.session_settings import SessionKind
from tests.outbox import Outbox, event, host, relaying, wait_until
from tests.roles import Role


def nothing(_: psycopg.Connection[object]) -> None:
    """No handler to prepare a session for."""


def test_a_pool_without_a_connection_says_why() -> None:
    """At once, not when the time is over."""
    with (
        open_pool("postgresql://postgres@127.0.0.1:1/x", 1) as pool,
        pytest.raises(psycopg.OperationalError, match="port 1 failed: Connection refused"),
        pool.connection(timeout=3600.0),
    ):
        pass


def test_a_pool_whose_connections_are_in_use_says_so(outbox: Outbox) -> None:
    with (
        open_pool(outbox.relay_dsn, 1) as pool,
        pool.connection(),
        pytest.raises(PoolTimeout, match="couldn't get a connection"),
        pool.connection(timeout=0.1),
    ):
        pass


def test_who_gets_no_new_session_waits_for_one_that_is_lent(outbox: Outbox) -> None:
    tried: list[int] = []
    got: list[psycopg.Connection[object]] = []

    def refuse_more(conn: psycopg.Connection[object]) -> None:
        tried.append(conn.info.backend_pid)
        if len(tried) > 1:
            conn.execute("select 1 / 0")

    with open_pool(outbox.relay_dsn, 2, refuse_more) as pool:

        def take() -> None:
            with pool.connection(timeout=3600.0) as conn:
                got.append(conn)

        waiting = Thread(target=take)
        with pool.connection() as lent:
            waiting.start()
            wait_until(lambda: len(tried) > 2)
        waiting.join()
        assert got == [lent]
        with (
            pool.connection(),
            pytest.raises(psycopg.errors.DivisionByZero),
            pool.connection(timeout=0.1),
        ):
            pass


def _pid(pool: Pool) -> int:
    with pool.connection() as conn:
        ((pid,),) = conn.execute("select pg_backend_pid()").fetchall()
    return int(pid)


def test_a_pool_lends_the_session_again_unless_the_server_has_ended_it(outbox: Outbox) -> None:
    """It was lent as it was, and the first statement of a task after a restart of the server failed."""
    with open_pool(outbox.relay_dsn, 2) as pool:
        first = _pid(pool)
        assert _pid(pool) == first
        outbox.conn.execute("select pg_terminate_backend(%s, 10000)", (first,))
        assert _pid(pool) != first


def test_a_fault_of_a_session_replaces_those_that_others_have(outbox: Outbox) -> None:
    with open_pool(outbox.relay_dsn, 2) as pool:
        with pool.connection() as lent:
            with pytest.raises(psycopg.errors.ReadOnlySqlTransaction), pool.connection() as other:
                other.execute("set transaction_read_only = on; create temporary table t ()")
            assert other.closed
            assert not lent.closed
        assert lent.closed


def test_those_who_wait_for_a_session_get_it_in_their_order(outbox: Outbox) -> None:
    got: list[int] = []
    with open_pool(outbox.relay_dsn, 1) as lending:

        def take(number: int) -> None:
            with lending.connection(10.0):
                got.append(number)

        threads = [Thread(target=take, args=(number,)) for number in range(3)]
        with lending.connection():
            for waiting, thread in enumerate(threads, 1):
                thread.start()
                wait_until(partial(_are_waiting, lending, waiting))
        for thread in threads:
            thread.join()
    assert got == [0, 1, 2]


def _are_waiting(pool: Pool, number: int) -> bool:
    return pool._sessions is not None and pool._sessions.get_stats()["requests_waiting"] == number


def test_what_a_block_leaves_open_is_no_part_of_the_next(outbox: Outbox) -> None:
    with open_pool(outbox.relay_dsn, 1) as pool:
        with pytest.raises(psycopg.errors.DivisionByZero), pool.connection() as conn:
            conn.execute("begin; create temporary table t (); select 1 / 0")
        with pool.connection() as conn:
            assert conn.execute("select to_regclass('pg_temp.t')").fetchall() == [(None,)]
            conn.execute("begin; create temporary table t ()")
        with pool.connection() as conn:
            assert conn.execute("select to_regclass('pg_temp.t')").fetchall() == [("t",)]


def test_sessions_that_nobody_needs_are_closed(outbox: Outbox) -> None:
    session = session_settings.statements(SessionKind.OWN)
    with new_pool(outbox.relay_dsn, 2, session, max_idle=0.2) as pool:
        with pool.connection() as one, pool.connection() as other:
            pass
        wait_until(lambda: one.closed and other.closed)
        assert _pid(pool)


def test_who_asks_a_moment_later_gets_the_same_session(
    outbox: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each question had a session of its own: a run of half a second opened two dozen."""
    access = outbox.settings().target_dsn
    with asking(access) as first:
        first.execute("select 1")
    with asking(access) as again, asking(access) as other:
        assert again is first
        assert other is not first
    with sessions_with({"lock_timeout": "2s"}), asking(access) as bounded:
        assert bounded in (first, other)
        assert bounded.execute("show lock_timeout").fetchall() == [("2s",)]
    assert bounded.execute("show lock_timeout").fetchall() == [("30s",)]
    monkeypatch.setattr(connections, "_FRESH_SECONDS", 0.0)
    with sessions_with({"lock_timeout": "2s"}), asking(access) as fresh:
        assert fresh not in (first, other)
    with asking_both(access, outbox.settings().source_dsn) as (source, target):
        assert source is target
    close_asked(access)
    assert first.closed
    assert other.closed
    assert fresh.closed


def test_a_run_opens_few_sessions_and_few_threads(outbox: Outbox) -> None:
    """Each costs the server a process and a cold cache: two dozen were most of what a short run cost."""
    opened = "select sessions from pg_stat_database where datname = current_database()"
    of_relay = "select from pg_stat_activity where usename = %s and datname = current_database()"
    outbox.publish(host(1), event(1))
    before = outbox.value(opened)
    others = set(threading.enumerate())
    with relaying(outbox.settings()):
        outbox.wait_drained()
        threads = [each.name for each in set(threading.enumerate()) - others]
    wait_until(lambda: outbox.conn.execute(of_relay, (Role.RELAY,)).rowcount == 0)
    # Two of each of the pools of sessions, of which there are three.
    assert len(threads) <= 18, sorted(threads)
    # Under load more questions are asked at the same time.
    assert outbox.value(opened) - before <= 15


CHANGES = [
    ("set search_path = nowhere", "show search_path"),
    ("set role pg_monitor", "select current_user"),
    ("set session authorization pg_monitor", "select session_user"),
    ("select set_config('work_mem', '64kB', false)", "show work_mem"),
    ("set synchronous_commit = off", "show synchronous_commit"),
    ("set lock_timeout = 0", "show lock_timeout"),
    ("set tcp_keepalives_idle = 7200", "show tcp_keepalives_idle"),
    ("set default_transaction_read_only = on", "show default_transaction_read_only"),
    ("select pg_advisory_lock(7)", "select count(*) from pg_locks where locktype = 'advisory'"),
    ("listen something", "select count(*) from pg_listening_channels()"),
    ("declare c cursor with hold for select 1", "select count(*) from pg_cursors"),
]


@pytest.fixture
def pool(database: str) -> Iterator[HandlerPool]:
    """One session."""
    made = HandlerPool(database, 1, nothing, durable=True, code_of=["python"])
    yield made
    made.close()


def test_what_a_handler_changes_in_its_session_ends_with_its_task(
    pool: HandlerPool, subtests: pytest.Subtests
) -> None:
    for (change, question), fails in product(CHANGES, [False, True]):
        with subtests.test(change, fails=fails):
            with pool.connection() as conn:
                process, before = conn.info.backend_pid, conn.execute(question.encode()).fetchone()
            with suppress(ZeroDivisionError), pool.transaction() as conn:
                conn.execute(change.encode())
                if fails:
                    raise ZeroDivisionError
            with pool.connection() as conn:
                assert conn.execute(question.encode()).fetchone() == before
                assert conn.info.backend_pid == process


@pytest.mark.parametrize("change", ["create temporary table t ()", "prepare p as select 1"])
def test_a_session_that_a_handler_filled_is_not_used_again(pool: HandlerPool, change: str) -> None:
    with pool.transaction() as conn:
        process = conn.info.backend_pid
        conn.execute("create temporary table relay_own ()")
    with pool.transaction() as conn:
        assert conn.info.backend_pid == process
        conn.execute(change.encode())
    with pool.transaction() as conn:
        assert conn.info.backend_pid != process


def test_a_task_is_committed_whole_or_not_at_all(pool: HandlerPool) -> None:
    with pool.connection() as conn:
        conn.execute(
            "create table public.effects (n int primary key deferrable initially deferred)"
        )
    with pool.transaction() as conn:
        conn.execute("insert into public.effects values (1)")
    with pytest.raises(psycopg.errors.UniqueViolation), pool.transaction() as conn:
        conn.execute("insert into public.effects values (2), (1)")
    with pool.transaction() as conn, suppress(psycopg.errors.DivisionByZero), conn.transaction():
        conn.execute("insert into public.effects values (3)")
        conn.execute("select 1 / 0")
    with pool.connection() as conn:
        assert conn.execute("select n from public.effects").fetchall() == [(1,)]


def test_of_two_that_follow_one_position_the_key_refuses_the_second(outbox: Outbox) -> None:
    """A lock keeps other tasks out; of one whose session and lock are lost, the key of the positions remains."""
    moves = [offsets.Advance(1, Lsn(100), 1)]
    with connect(outbox.relay_dsn) as first, connect(outbox.relay_dsn) as second:
        with first.transaction():
            positions = offsets.lock(first, "default", [1], []).positions
        with first.transaction():
            trips.run_each(first, [offsets.advance("default", positions, moves)])
        with pytest.raises(psycopg.errors.UniqueViolation), second.transaction():
            trips.run_each(second, [offsets.advance("default", positions, moves)])


def test_a_connection_that_is_lost_at_the_commit_is_an_outage(pool: HandlerPool) -> None:
    """libpq tells it without SQLSTATE; what blames the statement would stop relay or dead-letter."""

    def lose(conn: psycopg.Connection[object]) -> None:
        conn.execute("select pg_current_xact_id()")
        with socket.socket(fileno=os.dup(conn.fileno())) as connection:
            connection.shutdown(socket.SHUT_RDWR)

    with pytest.raises(psycopg.OperationalError) as lost, pool.transaction() as conn:
        lose(conn)
    assert action_for(lost.value) is FaultAction.RETRY


def test_a_node_that_lost_power_holds_nothing_for_hours(outbox: Outbox) -> None:
    with connect(outbox.relay_dsn) as conn:
        assert conn.execute("show tcp_keepalives_idle").fetchone() == ("30",)
    outbox.conn.execute("create table seen (name text, setting text)")
    outbox.publish(host(1), event(1))
    handler = {
        "type": "sql",
        "statement": "insert into seen select name, current_setting(name) from"
        " unnest('{tcp_keepalives_idle,tcp_keepalives_interval,tcp_keepalives_count,lock_timeout}'::text[]) as name",
    }
    outbox.drain(outbox.settings(handlers={"h": handler}, routes=[{"handlers": ["h"]}]))
    assert outbox.column("select setting from seen order by name") == ["30s", "3", "30", "10"]


def test_a_lock_that_is_held_too_long_is_waited_for_again(
    outbox: Outbox, caplog: pytest.LogCaptureFixture
) -> None:
    target = {"dsn": make_conninfo(outbox.relay_dsn, options="-c lock_timeout=50ms")}
    # The stream locks these rows when it begins, and that is not the wait which is tested here.
    with relaying(outbox.settings(target=target)), psycopg.connect(outbox.superuser_dsn) as other:
        outbox.publish(host(1), event(1))
        outbox.wait_handled()
        other.execute("select from relay.group_partitions for update")
        outbox.publish(host(1), event(2))
        wait_until(lambda: "a batch failed and is retried" in caplog.text)
        other.rollback()
        outbox.wait_handled()
    outbox.assert_exact()
    assert outbox.value("select count(*) from projection") == 2


@pytest.mark.parametrize("wanted", ["on", "off"])
def test_synchronous_commit_is_what_the_configuration_says(outbox: Outbox, wanted: str) -> None:
    """Whatever is set for the role or the database, in the connection string, or by a handler for its transaction."""
    outbox.conn.execute(
        f"""
        create table seen (at text, setting text);
        create function saw() returns trigger language plpgsql as
            $$ begin insert into seen values ('commit', current_setting('synchronous_commit')); return null; end $$;
        create constraint trigger saw after insert on projection deferrable initially deferred
            for each row execute function saw();
        alter database {outbox.slot} set synchronous_commit = {"off" if wanted == "on" else "on"};
        """.encode()
    )
    handlers = {
        "h": {
            "type": "sql",
            "statement": "insert into seen values ('start', current_setting('synchronous_commit'))",
        },
        "off": {"type": "sql", "statement": "select set_config('synchronous_commit', 'off', true)"},
        **outbox.config()["handlers"],
    }
    target = {
        "dsn": make_conninfo(outbox.relay_dsn, options="-c synchronous_commit=local"),
        "synchronous_commit": wanted == "on",
    }
    outbox.publish(host(1), event(1))
    settings = outbox.settings(
        target=target, handlers=handlers, routes=[{"handlers": list(handlers)}]
    )
    outbox.drain(settings)
    assert outbox.column("select setting from seen order by at") == [wanted, wanted]


def test_a_setting_that_waits_for_more_is_kept(database: str) -> None:
    with connect(database, options="-c synchronous_commit=remote_apply") as conn:
        assert conn.execute("show synchronous_commit").fetchone() == ("remote_apply",)


def test_without_synchronous_commit_everything_is_confirmed_in_the_end(
    outbox: Outbox, engine: str, session: Session | None
) -> None:
    outbox.fill(100)
    settings = outbox.settings(engine, target={"synchronous_commit": "off"})
    outbox.drain(settings, session)
    outbox.drain(settings, session)
    outbox.assert_exact()


@pytest.mark.parametrize(("lsn", "kept"), [(100, True), (101, True), (99, False)])
def test_a_target_that_lost_commits_is_recognised(lsn: int, kept: bool) -> None:
    positions = {2: PartitionPosition(2, 1, Lsn(lsn), 1, 0, 7)}
    with nullcontext() if kept else pytest.raises(RelayError, match="lost commits"):
        require_kept({2: Lsn(100)}, positions)
    with pytest.raises(RelayError, match="lost commits"):
        require_kept({3: Lsn(100)}, positions)
