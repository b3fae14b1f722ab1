"""What of the relation `batch` a statement reads, as PostgreSQL understands it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from relay.events import EVENT_FIELDS, SQL_TYPES
from relay.handlers import relation
from tests.outbox import Outbox, event, host


@pytest.fixture
def conn(outbox: Outbox) -> Iterator[psycopg.Connection[Any]]:
    """A session of the target with the relation, a table, and functions of the user's own."""
    outbox.conn.execute("create table effects (id uuid primary key, payload jsonb)")
    outbox.conn.execute(
        "create function events() returns bigint language plpgsql as"
        " $$ begin return (select count(payload) from pg_temp.batch); end $$"
    )
    outbox.conn.execute(
        "create procedure apply_all() language plpgsql as"
        " $$ begin insert into effects select id, payload from pg_temp.batch; end $$"
    )
    with psycopg.connect(outbox.dsn, autocommit=True) as made:
        relation.create(made)
        yield made


@pytest.mark.parametrize(
    ("statement", "columns"),
    [
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
    ],
)
def test_the_columns_that_a_statement_reads(
    conn: psycopg.Connection[Any], statement: str, columns: set[str]
) -> None:
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


@pytest.mark.parametrize("kinds", [*([kind] for kind in ODD), list(ODD), ["nulls", "usual"]])
def test_what_is_loaded_is_what_the_server_reads(
    conn: psycopg.Connection[Any], kinds: list[str]
) -> None:
    rows = [{**BASE, **ODD[kind]} for kind in kinds]
    columns = {
        field: [None if (value := row[field]) is None else value.encode() for row in rows]
        for field in EVENT_FIELDS
    }
    with conn.transaction():
        relation.fill(conn, columns, len(rows))
        loaded = conn.execute("select to_jsonb(batch) from batch").fetchall()
    texts = ", ".join(f"(%({field})s::{SQL_TYPES[field]}) as {field}" for field in EVENT_FIELDS)
    for row, (found,) in zip(rows, loaded, strict=True):
        query = f"select to_jsonb(typed) from (select {texts}) as typed"
        assert conn.execute(query.encode(), row).fetchone() == (found,)
