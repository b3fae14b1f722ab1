"""Plans and prepared statements that a session keeps while tables change: the fault is never an event's."""

from __future__ import annotations

from typing import Any

import asyncpg
import psycopg
import pytest

from relay.faults import FaultAction, action_for
from tests.outbox import Outbox, event, host, relaying, wait_until
from tests.webhook import Webhook

QUICK = {"wait_period_ms": 20}
PUBLISHED = "select 1 from outbox_message_t"
SELECT_ALL = """
    create table customers (id int primary key, name text);
    create table sessions_used (pid int);
    insert into customers values (1, 'Ada');
"""


def publish_one_by_one(outbox: Outbox, count: int) -> None:
    """Publish commits of one event each, each once the one before was handled."""
    for number in range(count):
        outbox.publish(host(number), event(number))
        outbox.wait_handled()


def test_the_outbox_gets_a_column_while_it_is_polled(outbox: Outbox) -> None:
    """psycopg/psycopg#511, graphile/worker#175, confluentinc/kafka-connect-jdbc#69."""
    settings = outbox.settings(source={**outbox.config()["source"], "mode": "poll"}, poll=QUICK)
    with relaying(settings):
        publish_one_by_one(outbox, 10)
        outbox.conn.execute("alter table outbox_message_t add column note text")
        publish_one_by_one(outbox, 2)
        outbox.conn.execute("alter table outbox_message_t drop column note")
        publish_one_by_one(outbox, 2)
    outbox.assert_exact()


def test_the_outbox_gets_a_column_while_a_sink_polls_it(outbox: Outbox) -> None:
    with Webhook() as webhook:
        settings = outbox.settings(
            source={**outbox.config()["source"], "mode": "poll"},
            poll=QUICK,
            handlers={"hook": {"type": "http", "url": webhook.url}},
            routes=[{"handlers": ["hook"]}],
        )
        with relaying(settings):
            for number in range(10):
                outbox.publish(host(number), event(number))
                wait_until(lambda: len(webhook.accepted) == len(outbox.column(PUBLISHED)))
            outbox.conn.execute("alter table outbox_message_t add column note text")
            outbox.publish(host(11), event(11))
            wait_until(lambda: len(webhook.accepted) == 11)
    assert set(webhook.ids().values()) == {1}


def test_a_handlers_table_changes_between_two_stale_sessions(outbox: Outbox) -> None:
    """psycopg/psycopg#511: the second attempt meets the second stale session, and an innocent event dies."""
    outbox.conn.execute(SELECT_ALL.encode())
    settings = outbox.settings(
        handlers={"python": {"type": "python", "callable": "tests.callables:with_customers"}},
        routes=[{"handlers": ["python"]}],
        batch={"inline_workers": 2},
    )
    for number in range(2):
        outbox.publish(host(number), *(event() for _ in range(60)))
    with relaying(settings):
        outbox.wait_handled()
        assert outbox.value("select count(distinct pid) from sessions_used") == 2
        outbox.conn.execute("alter table customers add column note text")
        publish_one_by_one(outbox, 4)
    assert not outbox.column("select exception from relay.dead_letter_queue")
    outbox.assert_exact()


STATEMENTS = {
    "sql": {
        "type": "sql",
        "statement": "insert into seen select c.* from customers as c where c.id = 1 and %(payload)s is not null",
    },
    "batch": {
        "type": "sql",
        "each": "batch",
        "statement": "insert into seen select c.* from customers as c, batch",
    },
}


@pytest.mark.parametrize("kind", list(STATEMENTS))
@pytest.mark.parametrize("events", [1, 60])
def test_a_statements_table_changes_its_type(outbox: Outbox, kind: str, events: int) -> None:
    outbox.conn.execute(SELECT_ALL.encode())
    outbox.conn.execute("create table seen (id numeric, name text)")
    settings = outbox.settings(handlers={"s": STATEMENTS[kind]}, routes=[{"handlers": ["s"]}])

    def publish(times: int) -> None:
        for _ in range(times):
            outbox.publish(host(1), *(event() for _ in range(events)))
            wait_until(lambda: outbox.column("select 1 from seen") == outbox.column(PUBLISHED))

    with relaying(settings):
        publish(7)
        outbox.conn.execute("alter table customers alter column id type bigint")
        publish(2)
    assert not outbox.column("select exception from relay.dead_letter_queue")


def provoked(conn: psycopg.Connection[Any], *statements: str, **options: Any) -> psycopg.Error:
    """The error of the last of several statements."""
    *first, last = statements
    for statement in first:
        conn.execute(statement.encode(), **options)
    with pytest.raises(psycopg.Error) as raised:
        conn.execute(last.encode(), **options)
    return raised.value


def test_a_stale_plan_is_told_from_a_feature_that_is_not_supported(outbox: Outbox) -> None:
    outbox.conn.execute(SELECT_ALL.encode())
    outbox.conn.execute("select * from customers", prepare=True)
    with psycopg.connect(outbox.superuser_dsn, autocommit=True) as other:
        other.execute("alter table customers add column note text")
    stale = provoked(outbox.conn, "select * from customers")
    assert stale.sqlstate == "0A000"
    assert action_for(stale) is FaultAction.RETRY
    unsupported = provoked(outbox.conn, "select count(distinct id) over () from customers")
    assert unsupported.sqlstate == "0A000"
    assert action_for(unsupported) is FaultAction.DEAD_LETTER


def test_a_stale_plan_is_recognised_behind_a_pooler_that_drops_fields() -> None:
    """margince/margince#5448."""
    stale = psycopg.errors.FeatureNotSupported("cached plan must not change result type")
    assert action_for(stale) is FaultAction.RETRY


@pytest.mark.parametrize(
    "error", [asyncpg.InvalidCachedStatementError, asyncpg.OutdatedSchemaCacheError]
)
def test_a_stale_statement_of_a_handlers_asyncpg_is_retried(error: type[Exception]) -> None:
    """MagicStack/asyncpg#458: inside a transaction asyncpg cannot prepare the statement again by itself."""
    assert action_for(error("stale")) is FaultAction.RETRY
    assert action_for(asyncpg.FeatureNotSupportedError("no")) is FaultAction.DEAD_LETTER


def test_a_prepared_statement_of_another_client_of_the_pooler(outbox: Outbox) -> None:
    """npgsql and psycopg behind PgBouncer: the name is taken, or gone; neither is the event's fault."""
    outbox.conn.execute("prepare _pg3_0 as select 1")
    taken = provoked(outbox.conn, "prepare _pg3_0 as select 2")
    assert taken.sqlstate == "42P05"
    assert action_for(taken) is FaultAction.RETRY
    own = provoked(outbox.conn, "prepare mine as select 1", "prepare mine as select 2")
    assert action_for(own) is FaultAction.DEAD_LETTER
    gone = provoked(outbox.conn, "execute _pg3_7")
    assert action_for(gone) is FaultAction.RETRY
