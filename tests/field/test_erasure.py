"""A host that is erased is nowhere, and does not come back.

Each table of both databases is searched for a planted name, so that a table that is added later is searched too.
"""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import sql
from psycopg.types.json import Jsonb

from relay.admin.offsets import plan_seek, seek
from relay.admin.retention import erase
from relay.faults import ConfigurationError
from tests.outbox import Outbox, event, host, relaying, wait_until

NAME = "Wilhelmina Zaphod-Öztürk"
PERSON = host(77)
LATER = "2999-01-01T00:00:00+00:00"


def publish(outbox: Outbox, count: int = 1, amount: int = 1, **more: object) -> None:
    """Publish events of the person, with the name in payload and metadata."""
    for _ in range(count):
        outbox.conn.execute(
            """
            insert into outbox_message_t (id, host_id, user_id, aggregate_type, aggregate_id, event_type, payload,
                                          metadata, transaction_id, transaction_ordinal, transaction_count, deliver_at)
            values (%s, %s, %s, 'Order', %s, 'order.placed', %s, %s, %s, 1, 1, %s)
            """,
            (
                *(uuid.uuid4(), PERSON, PERSON, NAME),
                Jsonb({"amount": amount, "name": NAME}),
                Jsonb({"by": NAME}),
                *(uuid.uuid4(), more.get("deliver_at")),
            ),
        )


def tables_with(conn: psycopg.Connection[Any], *texts: str) -> set[str]:
    """The tables, and materialised views, with a row that has one of the texts in any column."""
    tables = conn.execute(
        """
        select n.nspname, c.relname from pg_class as c join pg_namespace as n on n.oid = c.relnamespace
         where c.relkind in ('r', 'm') and n.nspname !~ '^pg_' and n.nspname <> 'information_schema'
        """
    ).fetchall()
    found = set()
    for schema, table in tables:
        name = sql.Identifier(schema, table)
        row = conn.execute(
            sql.SQL(
                "select exists (select from {} as t where exists (select from unnest(%s::bytea[]) as text"
                " where position(text in convert_to(t::text, 'UTF8')) > 0"
                "    or position(encode(text, 'hex') in t::text) > 0))"
            ).format(name),
            ([each.encode() for each in texts],),
        ).fetchone()
        if row == (True,):
            found.add(f"{schema}.{table}")
    return found


def test_a_planted_name_is_nowhere_after_the_erasure(outbox: Outbox, tmp_path: Path) -> None:
    """Subscribers that match the host, and requests to cancel of it, were left."""
    outbox.conn.execute(
        "select relay.declare_queue('mail', '{}', keep_done => '1 day'), relay.declare_reader('feed')"
    )
    declared = "select relay.declare_subscriber('feed', %s, %s, %s, %s)"
    by_match = Jsonb({"host_id": str(PERSON)})
    where, params = "$.payload.name == $name", Jsonb({"name": NAME, "host": [str(PERSON)]})
    outbox.conn.execute(declared, ("s1", by_match, None, None))
    outbox.conn.execute(declared, ("s2", Jsonb({}), where, params))
    outbox.conn.execute(declared, ("s3", Jsonb({"host_id": str(host(1))}), None, None))
    listed = Jsonb({"host_id": [str(PERSON), str(host(1))]})
    outbox.conn.execute(declared, ("s4", listed, None, None))
    literal = f'$.payload.host == "{PERSON}"'
    outbox.conn.execute(declared, ("s5", Jsonb({}), literal, None))
    settings = outbox.settings(batch={"spool_directory": str(tmp_path)})
    with relaying(settings):
        publish(outbox, 3)
        publish(outbox, amount=-1)
        publish(outbox, deliver_at=LATER)
        wait_until(lambda: outbox.handled() == 4)
        wait_until(lambda: outbox.value("select count(*) from relay.deferred") == 1)
        wait_until(lambda: outbox.value("select count(*) from relay.dead_letter_queue") == 1)
        outbox.wait_compared()
    outbox.conn.execute(
        """
        with taken as (
            delete from relay.queue_messages where id = (select min(id) from relay.queue_messages) returning *
        )
        insert into relay.queue_dead_letters (id, queue_id, key, attempts, enqueued_at, event_id, event_type, host_id,
                                              payload)
        select id, queue_id, key, 1, enqueued_at, event_id, event_type, host_id, payload from taken
        """
    )
    outbox.conn.execute(
        "select relay.cancel(id::text, host_id::text) from outbox_message_t where deliver_at is null limit 1"
    )
    before = tables_with(outbox.conn, NAME, str(PERSON))
    assert {
        *("public.outbox_message_t", "relay.dead_letter_queue", "relay.deferred"),
        *("relay.queue_messages", "relay.queue_dead_letters", "relay.log_subscribers"),
    } <= before
    erase(settings, str(PERSON), True, outbox.installer_dsn)
    # The record of the erasure names the host; what handlers have written is told as not removed.
    assert tables_with(outbox.conn, NAME, str(PERSON)) - {"public.projection"} == {"relay.actions"}
    assert outbox.column("select name from relay.log_subscribers") == ["s3"]
    for file in tmp_path.rglob("*"):
        assert not file.is_file() or NAME.encode() not in file.read_bytes()
    with relaying(settings):
        outbox.publish(host(1), event(1))
        wait_until(lambda: outbox.value("select count(*) from projection") == 4)
    assert tables_with(outbox.conn, NAME, str(PERSON)) - {"public.projection"} == {"relay.actions"}


def test_what_the_slot_still_brings_is_not_said_to_be_erased(outbox: Outbox) -> None:
    """With --force the rows went, `never applied`; the slot brought them all, to the handler and to the queue."""
    outbox.worker.execute("select relay.declare_queue('mail', '{}')")
    settings = outbox.settings()
    publish(outbox, 2)
    with pytest.raises(ConfigurationError, match=r"still brings events of .* to the target"):
        erase(settings, str(PERSON), True, outbox.installer_dsn)
    assert outbox.value("select count(*) from outbox_message_t") == 2
    # As the error says.
    seek(settings, plan_seek(settings, "end", None), None)
    erase(settings, str(PERSON), True, outbox.installer_dsn)
    with relaying(settings):
        outbox.publish(host(1), event(1))
        outbox.wait_handled()
    assert outbox.value("select count(*) from projection") == 1
    assert not tables_with(outbox.conn, NAME)


def test_what_others_declare_for_the_host_is_named(outbox: Outbox) -> None:
    """A schedule went on publishing events of the host; a queue and a reader had it in their conditions."""
    by_host = Jsonb({"host_id": str(PERSON)})
    literal = f'$.payload.host == "{PERSON}"'
    outbox.conn.execute("select relay.declare_queue('mail', %s)", (by_host,))
    outbox.conn.execute("select relay.declare_reader('feed', \"where\" => %s)", (literal,))
    events = {"host_id": str(PERSON), **event(1)}
    outbox.conn.execute(
        "select relay.declare_schedule('daily', cron => '0 0 * * *', publish => %s)",
        (Jsonb(events),),
    )
    outbox.conn.execute("select relay.declare_queue('other')")
    report = erase(outbox.settings(), str(PERSON), True, outbox.installer_dsn)
    assert [each for each in report.left if each.startswith("the ") and "WAL" not in each] == [
        "the queue mail, whose match or where names the host",
        "the reader feed, whose match or where names the host",
        "the schedule daily, which publishes events of it: drop it with relay.drop_schedule",
    ]


def test_with_mode_wal_the_slot_passes_what_is_erased(outbox: Outbox) -> None:
    """Nothing said what it still brings: the rows went, and a start applied them all."""
    source = {**outbox.config()["source"], "mode": "wal"}
    settings = outbox.settings(source=source)
    publish(outbox, 2)
    with pytest.raises(ConfigurationError, match="may still bring events of"):
        erase(settings, str(PERSON), True, outbox.installer_dsn)
    assert outbox.value("select count(*) from outbox_message_t") == 2
    with relaying(settings):
        publish(outbox)
        outbox.wait_handled()
        # While relay runs it waits for the slot.
        erase(settings, str(PERSON), True, outbox.installer_dsn)
    assert outbox.value("select count(*) from outbox_message_t") == 0
    with relaying(settings):
        outbox.publish(host(1), event(1))
        wait_until(lambda: outbox.value("select count(*) from projection") == 4)


def test_a_group_that_polls_erases_what_it_has_not_applied(outbox: Outbox) -> None:
    source = {**outbox.config()["source"], "mode": "poll"}
    settings = outbox.settings(source=source)
    publish(outbox, 2)
    erase(settings, str(PERSON), True, outbox.installer_dsn)
    with relaying(settings):
        outbox.publish(host(1), event(1))
        outbox.wait_handled()
    assert outbox.value("select count(*) from projection") == 1
    assert not tables_with(outbox.conn, NAME)
