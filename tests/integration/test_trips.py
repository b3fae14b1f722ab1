"""Statements that go to the server in one round trip."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import psycopg
import pytest

from relay.store import trips
from relay.store.trips import BoundStatement
from tests.outbox import Outbox, event, host, relaying

LARGE = b"x" * 1_000_000


@pytest.fixture(autouse=True)
def _own_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trips, "_sessions", trips._Sessions())


def number(text: bytes, *values: str | int | None) -> BoundStatement:
    return BoundStatement.of(b"insert into numbers values (" + text + b")", *values)


@pytest.fixture
def conn(outbox: Outbox) -> Iterator[psycopg.Connection[Any]]:
    """A session that begins its transactions by itself."""
    outbox.conn.execute("create table numbers (n int)")
    with closing(psycopg.connect(outbox.superuser_dsn)) as conn:
        yield conn


def test_what_follows_a_statement_that_fails_does_not_run(
    outbox: Outbox, conn: psycopg.Connection[Any]
) -> None:
    for _ in range(2):
        with pytest.raises(trips.TripFailed) as failed:
            trips.run_all(conn, [number(b"1"), number(b"1 / $1", 0), number(b"2")])
        assert failed.value.index == 1
        assert isinstance(failed.value.error, psycopg.errors.DivisionByZero)
        conn.rollback()
    trips.run_each(conn, [BoundStatement(b"commit")])
    assert not outbox.column("select n from numbers")


def test_a_commit_behind_a_statement_that_fails_commits_nothing(
    outbox: Outbox, conn: psycopg.Connection[Any]
) -> None:
    """Behind a Sync it would answer ROLLBACK without an error."""
    with pytest.raises(trips.TripFailed):
        trips.run_all(conn, [number(b"1"), number(b"1 / $1", 0), BoundStatement(b"commit")])
    assert conn.info.transaction_status == psycopg.pq.TransactionStatus.INERROR
    conn.rollback()
    assert not outbox.column("select n from numbers")


def test_large_values_and_answers_do_not_wait_for_each_other(
    conn: psycopg.Connection[Any],
) -> None:
    statements = [BoundStatement(b"select $1::text", [LARGE])] * 30
    results = trips.run_all(conn, statements)
    assert [result.get_value(0, 0) for result in results] == [LARGE] * 30


def test_nulls_and_texts_of_an_answer(conn: psycopg.Connection[Any]) -> None:
    asked = BoundStatement.of(b"select $1::int, $2::text, $3::int", 1, "ä", None)
    assert trips.run(conn, asked) == [("1", "ä", None)]


def test_a_statement_that_the_session_has_lost(
    outbox: Outbox, conn: psycopg.Connection[Any]
) -> None:
    trips.run_each(conn, [number(b"$1", 1)])
    conn.execute("deallocate all")
    with pytest.raises(psycopg.errors.InvalidSqlStatementName):
        trips.run_each(conn, [number(b"$1", 2)])
    conn.rollback()
    for each in (3, 4):
        conn.execute("deallocate all")
        trips.run_each(conn, [number(b"$1", each)])
    conn.commit()
    assert outbox.column("select n from numbers") == [3, 4]


def test_why_the_server_ended_the_session_is_told(
    outbox: Outbox, conn: psycopg.Connection[Any]
) -> None:
    ending = BoundStatement(b"select pg_terminate_backend(pg_backend_pid())")
    with pytest.raises(psycopg.errors.AdminShutdown):
        trips.run_each(conn, [number(b"1"), ending, number(b"2")])
    assert conn.broken
    assert not outbox.column("select n from numbers")


def test_a_handler_that_deallocates_all_of_its_session(outbox: Outbox) -> None:
    settings = outbox.settings(
        handlers={"python": {"type": "python", "callable": "tests.callables:deallocating"}},
        routes=[{"handlers": ["python"]}],
    )
    with relaying(settings):
        for each in range(3):
            outbox.publish(host(each), event(each))
            outbox.wait_handled()
    assert not outbox.column("select exception from relay.dead_letter_queue")
    outbox.assert_exact()
