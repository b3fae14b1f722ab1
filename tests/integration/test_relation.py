"""What of the relation `batch` a statement reads, as PostgreSQL understands it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from relay import handlers
from relay.faults import ConfigurationError
from relay.handlers import relation
from relay.model.events import EVENT_FIELDS, SQL_TYPES, Transaction
from tests.outbox import Outbox, event, host


@pytest.fixture
def conn(outbox: Outbox) -> Iterator[psycopg.Connection[Any]]:
    """A session of the target with the relation, a table, and functions of the user's own."""
    outbox.conn.execute("create table effects (id uuid primary key, payload jsonb)")
    outbox.conn.execute(
        "create function events() returns bigint language plpgsql as"
        " $$ begin return (select count(payload) from pg_temp.relay_batch); end $$"
    )
    outbox.conn.execute(
        "create procedure apply_all() language plpgsql as"
        " $$ begin insert into effects select id, payload from pg_temp.relay_batch; end $$"
    )
    with psycopg.connect(outbox.relay_dsn, autocommit=True) as made:
        relation.create(made)
        yield made


READS = [
    ("insert into effects select id, payload from batch", {"id", "payload"}),
    ("insert into effects select b.id, metadata from batch b -- why", {"id", "metadata"}),
    ("insert into effects (id) select id from batch order by c_offset;", {"id", "c_offset"}),
    ("delete from effects using batch where effects.id = user_id", {"user_id"}),
    (
        "merge into effects e using batch b on e.id = b.id when matched and b.event_type = 'x'"
        " then update set payload = b.metadata",
        {"id", "event_type", "metadata"},
    ),
    ("insert into effects (id) select id from batch join effects using (id)", {"id"}),
    (
        "insert into effects (id) select id from batch natural join effects",
        {"id", "payload"},
    ),
    (
        "delete from effects; insert into effects (id) select host_id from batch where xid > 7",
        {"host_id", "xid"},
    ),
    ("select count(*) from batch", set()),
    ("insert into effects select id, to_jsonb(batch) from batch", set(EVENT_FIELDS)),
    ("select (whole).id from (select b as whole from batch b) as w", set(EVENT_FIELDS)),
    ("select * from batch", set(EVENT_FIELDS)),
    ("select events() from batch", set(EVENT_FIELDS)),
    ("call apply_all()", set(EVENT_FIELDS)),
    ("do $$ begin perform events(); end $$", set(EVENT_FIELDS)),
    ("insert into nowhere select id from batch", set(EVENT_FIELDS)),
    ("insert into effects (id) select 'nonsense'::uuid from batch", set(EVENT_FIELDS)),
]
"""Statements, and the columns that they read."""


def test_the_columns_that_a_statement_reads(
    conn: psycopg.Connection[Any], subtests: pytest.Subtests
) -> None:
    for statement, columns in READS:
        if statement.startswith("merge") and conn.info.server_version < 150_000:
            continue
        with subtests.test(statement):
            assert set(relation.columns_read(conn, statement)) == columns
            assert conn.execute("select to_regproc('pg_temp.relay_probe')").fetchone() == (None,)


@pytest.mark.parametrize(
    "statement",
    [
        "call apply_all()",
        "insert into effects select id, payload from batch",
        "insert into effects select id, to_jsonb(b)->'payload' from batch b where c_offset > 0",
    ],
)
@pytest.mark.usefixtures("conn")
def test_what_is_read_is_there(outbox: Outbox, statement: str) -> None:
    outbox.publish(host(1), event(1), event(2))
    handler = {"type": "sql", "each": "batch", "statement": statement}
    outbox.drain(outbox.settings(handlers={"effects": handler}, routes=[{"handlers": ["effects"]}]))
    assert outbox.column("select payload->'amount' from effects order by 1") == [1, 2]


def test_a_statement_may_read_nothing_of_the_rows(outbox: Outbox) -> None:
    outbox.conn.execute("create table counts (events int)")
    outbox.publish(host(1), event(1), event(2))
    statement = "insert into counts select count(*) from batch"
    handler = {"type": "sql", "each": "batch", "statement": statement}
    outbox.drain(outbox.settings(handlers={"counts": handler}, routes=[{"handlers": ["counts"]}]))
    assert outbox.column("select events from counts") == [2]


ODD: dict[str, dict[str, str | None]] = {
    "usual": {},
    "nulls": {"user_id": None, "metadata": None, "deliver_at": None},
    "times": {"event_ts": "infinity", "deliver_at": "0044-03-15 12:00:00.25+00 BC"},
    "uuid": {"user_id": "{A0EEBC99-9C0B-4EF8-BB6D-6BB9BD380A11}"},
    "numbers": {"aggregate_version": "-9223372036854775808", "transaction_count": "-2147483648"},
    "texts": {"aggregate_id": 'tab\tline\nback\\slash\r\\N "ü"', "aggregate_type": ""},
    "json": {"payload": r'{"tab\t": "\\N", "ü": [null, 1e2]}', "metadata": "[]"},
}
BASE: dict[str, str | None] = {
    **{field: str(host(1)) for field in ("id", "host_id", "user_id", "transaction_id")},
    **dict.fromkeys(("aggregate_version", "c_offset", "transaction_ordinal", "xid"), "7"),
    **dict.fromkeys(("event_ts", "deliver_at", "commit_ts"), "2026-11-22 01:02:03.004+00"),
    **dict.fromkeys(("payload", "metadata"), '{"a": 1}'),
    "transaction_count": "8",
    "aggregate_id": "1",
    "aggregate_type": "Order",
    "event_type": "order.placed",
    "commit_lsn": "1A/2B",
}


KINDS: list[list[str]] = [*([kind] for kind in ODD), list(ODD), ["nulls", "usual"]]


def test_what_is_loaded_is_what_the_server_reads(
    conn: psycopg.Connection[Any], subtests: pytest.Subtests
) -> None:
    for kinds in KINDS:
        with subtests.test(", ".join(kinds)[:80]):
            rows = [{**BASE, **ODD[kind]} for kind in kinds]
            columns = {
                field: [None if (value := row[field]) is None else value.encode() for row in rows]
                for field in EVENT_FIELDS
            }
            with conn.transaction():
                relation.fill(conn, columns, SQL_TYPES, len(rows))
                loaded = conn.execute("select to_jsonb(b) from pg_temp.relay_batch b").fetchall()
            texts = ", ".join(
                f"(%({field})s::{SQL_TYPES[field]}) as {field}" for field in EVENT_FIELDS
            )
            for row, (found,) in zip(rows, loaded, strict=True):
                query = f"select to_jsonb(typed) from (select {texts}) as typed"
                assert conn.execute(query.encode(), row).fetchone() == (found,)


@pytest.mark.parametrize(
    "statement",
    [
        "with good as (select id from batch where xid > 0) insert into effects (id) select id from good",
        "-- why\n /* how */ WITH RECURSIVE n as (select id, 1 as i from batch union all select id, i + 1 from n"
        " where i < 2) insert into effects (id) select id from n where i = 2",
        "insert into effects (id) with good as (select id from batch) select id from good",
        pytest.param(
            "merge into effects e using batch b on e.id = b.id when not matched then insert (id) values (b.id)",
            marks=pytest.mark.server(15),
        ),
    ],
)
def test_a_statement_may_have_with_queries_of_its_own(outbox: Outbox, statement: str) -> None:
    outbox.conn.execute("create table effects (id uuid primary key)")
    outbox.publish(host(1), event(1), event(2))
    handler = {"type": "sql", "each": "batch", "statement": statement}
    settings = outbox.settings(handlers={"effects": handler}, routes=[{"handlers": ["effects"]}])
    (found,) = handlers.build(settings.handlers, SQL_TYPES).values()
    found.configure(outbox.conn)
    found.check(outbox.conn)
    outbox.drain(settings)
    assert outbox.value("select count(*) from effects") == 2


def insert_into_batch(transaction: Transaction, cursor: psycopg.Cursor[Any]) -> None:
    for each in transaction.events:
        cursor.execute("insert into batch values ('python', %s)", (each.id,))


def test_a_table_batch_of_the_users_stays_what_it_is(outbox: Outbox) -> None:
    """In statements for each event and over a batch, in Python, in functions and in triggers."""
    outbox.conn.execute(
        """
        create table batch (way text, id uuid);
        create table effects (id uuid primary key);
        create function noted() returns trigger language plpgsql set search_path = public as
            $$ begin insert into batch values ('trigger', new.id); return null; end $$;
        create trigger noted after insert on effects for each row execute function noted();
        create function written(uuid) returns uuid language sql as
            $$ insert into batch values ('function', $1) returning id $$;
        """
    )
    outbox.publish(host(1), event(1), event(2))
    handler = {
        "event": {"type": "sql", "statement": "insert into batch values ('event', %(id)s)"},
        "batch": {
            "type": "sql",
            "each": "batch",
            "statement": "insert into batch select 'batch', id from batch",
        },
        "trigger": {
            "type": "sql",
            "each": "batch",
            "statement": "insert into effects select id from batch",
        },
        "function": {
            "type": "sql",
            "each": "batch",
            "statement": "select written(id) from batch",
        },
        "python": {
            "type": "python",
            "callable": "tests.integration.test_relation:insert_into_batch",
        },
    }
    outbox.drain(outbox.settings(handlers=handler, routes=[{"handlers": list(handler)}]))
    ids = sorted(outbox.column("select id from outbox_message_t"))
    for way in handler:
        assert sorted(outbox.column("select id from batch where way = %s", (way,))) == ids


def test_a_table_batch_is_read_by_no_statement_wherever_temporary_relations_are_looked_for(
    outbox: Outbox,
) -> None:
    """A search_path with pg_temp last, as is safe in functions, and comments that nest before the statement."""
    outbox.conn.execute(
        f"create table batch (id uuid, payload jsonb); create table effects (id uuid, payload jsonb);"
        f"alter database {outbox.slot} set search_path = public, pg_temp".encode()
    )
    outbox.publish(host(1), event(1), event(2))
    statement = "/* 1 /* 2 */ */ ; insert into effects select id, payload from batch"
    handler = {"type": "sql", "each": "batch", "statement": statement}
    outbox.drain(outbox.settings(handlers={"effects": handler}, routes=[{"handlers": ["effects"]}]))
    assert outbox.column("select payload->'amount' from effects order by 1") == [1, 2]


@pytest.mark.parametrize(
    "statement",
    [
        "do $$ begin insert into projection (id) values (%(id)s); end $$",
        "insert into projection (id) values ('%(id)s')",
    ],
)
def test_a_field_in_quotes_is_refused(outbox: Outbox, statement: str) -> None:
    settings = outbox.settings(handlers={"h": {"type": "sql", "statement": statement}}, routes=[])
    (found,) = handlers.build(settings.handlers, SQL_TYPES).values()
    with pytest.raises(ConfigurationError, match=r"handlers\.h\.statement: "):
        found.check(outbox.conn)


def test_a_relation_that_relays_own_would_hide_is_refused(outbox: Outbox) -> None:
    outbox.conn.execute("create table relay_batch ()")
    settings = outbox.settings()
    (found,) = handlers.build(settings.handlers, SQL_TYPES).values()
    found.configure(outbox.conn)
    with pytest.raises(ConfigurationError, match=r"would hide public\.relay_batch: rename it"):
        found.check(outbox.conn)
