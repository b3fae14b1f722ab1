"""Statements that go to the server together with others: reports of pipelines and of prepared statements."""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest

from relay.faults import ConfigurationError
from tests.chaos.proxy import through_proxy
from tests.outbox import Outbox, event, host, relaying, wait_until

PUBLISHED = "select count(*) from outbox_message_t"
DEAD = "select exception from relay.dead_letter_queue"


def sql_handler(statement: str, **more: Any) -> dict[str, Any]:
    return {
        "handlers": {"s": {"type": "sql", "statement": statement, **more}},
        "routes": [{"handlers": ["s"]}],
    }


def wait_handled(outbox: Outbox) -> None:
    done = "select (select count(*) from seen) + (select count(*) from relay.dead_letter_queue)"
    wait_until(lambda: outbox.value(done) >= outbox.value(PUBLISHED), 15)


def publish_one_by_one(outbox: Outbox, count: int) -> None:
    for number in range(count):
        outbox.publish(host(number), event(number))
        wait_handled(outbox)


@pytest.mark.parametrize("change", ["add column note text", "alter column payload type text"])
def test_a_statement_that_returns_rows_of_a_table_that_changes(outbox: Outbox, change: str) -> None:
    """psycopg/psycopg#511, jackc/pgx#1797."""
    outbox.conn.execute("create table seen (id uuid, payload jsonb)")
    insert = "insert into seen (id, payload) values (%(id)s, %(payload)s) returning *"
    with relaying(outbox.settings(**sql_handler(insert))):
        publish_one_by_one(outbox, 3)
        outbox.conn.execute(f"alter table seen {change}".encode())
        publish_one_by_one(outbox, 3)
    assert not outbox.column(DEAD)
    assert outbox.value("select count(*) from seen") == 6


def test_a_deferred_constraint_that_one_event_violates(outbox: Outbox) -> None:
    """OCA/queue#142, doctrine/dbal#5967."""
    outbox.conn.execute("create table seen (n int unique deferrable initially deferred)")
    insert = "insert into seen values ((%(payload)s->>'amount')::int)"
    with relaying(outbox.settings(**sql_handler(insert))):
        for amount in (1, 2, 2, 3):
            outbox.publish(host(amount), event(amount))
            wait_handled(outbox)
    assert len(outbox.column(DEAD)) == 1
    assert outbox.column("select n from seen order by n") == [1, 2, 3]


@pytest.mark.parametrize("each", ["event", "batch"])
@pytest.mark.parametrize(
    "statement",
    ["copy seen to stdout", "/* all */ COPY seen\nFROM STDIN", "; commit", ";; -- x\nend"],
)
def test_a_statement_that_copies_or_ends_the_transaction(
    outbox: Outbox, statement: str, each: str
) -> None:
    """postgresql-interfaces/psqlodbc#200, duckdb/duckdb-postgres#258: the session was cut, again and again."""
    with pytest.raises(ConfigurationError, match=r"handlers\.s\.statement: (COPY|COMMIT|END)"):
        outbox.drain(outbox.settings(**sql_handler(statement, each=each)))


def test_payloads_of_many_megabytes(outbox: Outbox) -> None:
    """psycopg/psycopg#685, pgjdbc/pgjdbc#194, dimitri/pgcopydb#880."""
    outbox.conn.execute("create table seen (length int)")
    insert = (
        "insert into seen select length(%(payload)s->>'text') returning %(payload)s, %(payload)s"
    )
    large = event()
    large["payload"] = {"text": "x" * 6_000_000}
    with relaying(outbox.settings(**sql_handler(insert))):
        outbox.publish(host(1), *[large] * 4)
        wait_handled(outbox)
    assert outbox.column("select distinct length from seen") == [6_000_000]
    assert not outbox.column(DEAD)


def test_a_trigger_that_changes_settings_of_its_transaction(outbox: Outbox) -> None:
    outbox.conn.execute(
        """
        create table seen (id uuid);
        create function change() returns trigger language plpgsql as $$
        begin
            perform set_config('search_path', 'nowhere', false), set_config('client_encoding', 'latin1', false),
                    set_config('standard_conforming_strings', 'off', false), set_config('datestyle', 'German', false),
                    set_config('row_security', 'off', false), set_config('bytea_output', 'escape', false);
            raise notice '%', repeat('x', 100000);
            return null;
        end $$;
        create trigger t after insert on seen for each row execute function change();
        """
    )
    insert = "insert into public.seen values (%(id)s)"
    with relaying(outbox.settings(**sql_handler(insert))):
        publish_one_by_one(outbox, 5)
        outbox.publish(host(9), *(event() for _ in range(45)))
        wait_handled(outbox)
    assert not outbox.column(DEAD)
    assert outbox.value("select count(*) from seen") == 50


@pytest.mark.parametrize("handler", [None, "tests.callables:record"], ids=["sql", "python"])
def test_the_answer_to_a_batchs_commit_is_lost(outbox: Outbox, handler: str | None) -> None:
    """matomo-org/matomo#17511: what was applied is recognised, and applied once."""
    more: dict[str, Any] = {}
    if handler is not None:
        more = {
            "handlers": {"python": {"type": "python", "callable": handler}},
            "routes": [{"handlers": ["python"]}],
        }
    commits = count(1)
    with through_proxy(outbox.relay_dsn) as proxy:
        proxy.cut_after = lambda data: b"; commit; " in data and next(commits) % 4 == 0
        with relaying(outbox.settings(target={"dsn": proxy.dsn}, **more)):
            for number in range(20):
                outbox.publish(host(number), event())
                wait_until(lambda: outbox.handled() > number)  # noqa: B023
        assert proxy.cuts > 2
    assert not outbox.column(DEAD)
    outbox.assert_exact()


@pytest.mark.parametrize("act", ["cancel", "terminate"])
def test_a_session_that_is_ended_in_the_middle_of_a_trip(outbox: Outbox, act: str) -> None:
    """psycopg/psycopg#604: the statements before it are undone, those behind it do not run."""
    outbox.conn.execute(
        f"""
        create table seen (n int);
        create function act() returns trigger language plpgsql security definer as $$
        begin
            if new.n % 5 = 0 and nextval('acts') < 4 then
                perform pg_{act}_backend(pg_backend_pid());
            end if;
            return null;
        end $$;
        create sequence acts;
        create trigger act after insert on seen for each row execute function act();
        """.encode()
    )
    insert = "insert into seen values ((%(payload)s->>'amount')::int)"
    with relaying(outbox.settings(**sql_handler(insert))):
        for first in range(0, 40, 10):
            outbox.publish(host(1), *(event(first + number) for number in range(10)))
            wait_handled(outbox)
    assert not outbox.column(DEAD)
    assert outbox.column("select n from seen order by n") == list(range(40))


def test_a_session_of_psycopg_that_deallocates_all_on_a_rollback(outbox: Outbox) -> None:
    """psycopg/psycopg#1105, #1408."""
    settings = outbox.settings(
        handlers={"python": {"type": "python", "callable": "tests.callables:rolling_back"}},
        routes=[{"handlers": ["python"]}],
    )
    with relaying(settings):
        for number in range(12):
            outbox.publish(host(number), event(number))
            outbox.wait_handled()
    assert not outbox.column(DEAD)
    outbox.assert_exact()
