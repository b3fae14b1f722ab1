"""One host, one partition: in the WAL, in the table, and after an update of host_id.

citusdata/citus#2907 (the hash of a nondeterministic collation), aws/pgactive#134 (rows in other partitions under
another collation), IvorySQL/IvorySQL#1599.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import psycopg
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from psycopg.types.json import Jsonb

from relay.config.settings import Settings
from relay.model.keys import hashes
from relay.pipeline.plan import partition_of
from relay.source import hybrid
from relay.source.outbox.table import partition_of as sql_partition_of
from relay.source.polling import Poller
from tests.outbox import Outbox, event, host, relaying, wait_until
from tests.postgres import Server

TEXTS = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=80)


@pytest.fixture(scope="module")
def conn(server: Server) -> Iterator[psycopg.Connection[Any]]:
    with psycopg.connect(server.dsn(), autocommit=True) as connected:
        yield connected


@settings(max_examples=30, deadline=None)
@given(st.lists(TEXTS, max_size=40))
@example(["é" * length + "x" * (length % 3) for length in range(70)] + ["y" * 100_000])
def test_the_hash_is_postgresql_s(conn: psycopg.Connection[Any], texts: list[str]) -> None:
    asked = conn.execute(
        "select hashtext(host) from unnest(%s::text[]) with ordinality as t (host, n) order by n",
        (texts,),
    )
    assert hashes([text.encode() for text in texts]).tolist() == [value for (value,) in asked]


VALUES = ["", "a", "a  ", "Tenant-1", "tenant-1", "é", "00000000-0000-4000-8000-000000000001", "42"]


@pytest.mark.parametrize(
    ("kind", "accepted"),
    [
        ("text", VALUES),
        ("varchar(60)", VALUES),
        ("char(60)", VALUES),
        ("name", VALUES),
        ('text collate "C"', VALUES),
        ("uuid", VALUES[-2:-1]),
        ("bigint", VALUES[-1:]),
        ("numeric(10, 3)", VALUES[-1:]),
    ],
)
@pytest.mark.parametrize("wrapped", [False, True], ids=["type", "domain"])
def test_the_table_and_the_stream_agree_for_every_type(
    conn: psycopg.Connection[Any], kind: str, accepted: list[str], wrapped: bool
) -> None:
    """The stream has the text of a type's output function."""
    with conn.transaction(force_rollback=True):
        if wrapped:
            conn.execute(f"create domain of_host as {kind}".encode())
        conn.execute(f"create table hosts (host {'of_host' if wrapped else kind})".encode())
        conn.cursor().executemany("insert into hosts values (%s)", [(each,) for each in accepted])
        by_sql = [
            partition
            for (partition,) in conn.execute(
                psycopg.sql.SQL("select {} from hosts").format(sql_partition_of("host", 64))
            )
        ]
        with conn.cursor() as cursor, cursor.copy("copy hosts to stdout") as copy:
            copy.set_types(["text"])
            sent = [row[0] for row in copy.rows()]
    assert by_sql == [
        partition_of(value, 64) for value in hashes([text.encode() for text in sent]).tolist()
    ]


def test_a_host_that_is_null_has_the_partition_of_no_host(conn: psycopg.Connection[Any]) -> None:
    query = psycopg.sql.SQL("select {} from (values (null::text)) as t (host)")
    (row,) = conn.execute(query.format(sql_partition_of("host", 64)))
    assert row[0] == partition_of(int(hashes([b""])[0]), 64)


TABLE = """
    {prepare};
    create table own (id uuid primary key default gen_random_uuid(), host_id {kind} not null,
                      event_type text not null default 'order.placed', payload jsonb not null)
"""
INTO_T = "insert into t values (%(id)s, %(host_id)s, (%(payload)s->>'amount')::int)"
ICU = """
    create collation ci (provider = icu, locale = 'und-u-ks-level2', deterministic = false)
"""


@pytest.mark.parametrize(
    ("kind", "prepare"),
    [("char(20)", "select"), ("text collate ci", ICU)],
    ids=["blanks", "nondeterministic"],
)
def test_what_the_stream_brought_is_not_polled_again_in_another_partition(
    database: str, kind: str, prepare: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """20 events had 37 effects, and each comparison said that the stream lacks commits."""
    monkeypatch.setattr(hybrid, "AUDIT_SECONDS", 0.1)
    with Outbox(database) as outbox:
        try:
            outbox.conn.execute(TABLE.format(kind=kind, prepare=prepare).encode())
        except psycopg.errors.FeatureNotSupported as error:
            pytest.skip(f"this server has no ICU: {error}")
        outbox.conn.execute("create table t (id uuid, host_id text, amount int)")
        configured = of_own_table(outbox)
        outbox.install_again(configured)
        lacking = watch_reconnects(monkeypatch)
        with relaying(configured):
            for number in range(20):
                outbox.conn.execute(
                    "insert into own (host_id, payload) values (%s, %s)",
                    (f"Tenant-{number}", Jsonb({"amount": number})),
                )
            wait_until(lambda: outbox.value("select count(*) from t") >= 20)
            outbox.wait_drained()
            outbox.wait_compared()
        assert outbox.value("select count(*) from t") == 20
        assert lacking == []


def of_own_table(outbox: Outbox, **more: Any) -> Settings:
    source = {
        "dsn": outbox.relay_dsn,
        "slot": outbox.slot,
        "publication": outbox.slot,
        "table": "public.own",
        "types": {"host_id": "text"},
    }
    return outbox.settings(
        source=source | more.pop("source", {}),
        handlers={"projection": {"type": "sql", "statement": INTO_T}},
        **more,
    )


def watch_reconnects(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Lists the reconnections because commits are missing in the stream."""
    found: list[str] = []
    monkeypatch.setattr(
        "relay.source.stream.receiver.Receiver.reconnect", lambda self: found.append("reconnect")
    )
    return found


@pytest.mark.parametrize("then", ["compared", "polled"])
def test_a_host_that_changes_after_the_delivery_is_not_delivered_again(
    outbox: Outbox, then: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """30 rows had 57 effects: the commit was not noted in the partition in which its row lies now."""
    monkeypatch.setattr(hybrid, "AUDIT_SECONDS", 0.1)
    settings = outbox.settings()
    lacking = watch_reconnects(monkeypatch)
    moved: list[bool] = []
    adopt = Poller.adopt

    def adopt_later(self: Poller, *arguments: Any) -> bool:
        if not moved:
            raise psycopg.OperationalError("not yet")
        return adopt(self, *arguments)

    monkeypatch.setattr(Poller, "adopt", adopt_later)
    with relaying(settings):
        for number in range(30):
            # Each in a batch of its own, since a note has all partitions of a task.
            outbox.publish(host(number), event(number))
            outbox.wait_handled()
        outbox.conn.execute("update outbox_message_t set host_id = gen_random_uuid()")
        if then == "compared":
            moved.append(True)
            outbox.publish(host(1), event(30))
            outbox.wait_drained()
            outbox.wait_compared()
    if then == "polled":
        # What was noted since the last snapshot is left out, whichever partition has it now.
        source = {"dsn": outbox.relay_dsn, "mode": "poll"}
        with relaying(outbox.settings(source=source)):
            outbox.publish(host(1), event(30))
            wait_until(lambda: outbox.handled() >= 31)
    assert sorted(outbox.column("select amount from projection")) == list(range(31))
    assert lacking == []


def test_a_host_that_changes_between_plan_and_read_is_not_left_out(outbox: Outbox) -> None:
    """Of a commit one partition has applied its part; the host of the other part moves after the plan."""
    from relay.pipeline.ranges import unread
    from relay.source.outbox.differences import Difference
    from relay.source.outbox.rows import OutboxRows
    from relay.source.outbox.selection import select
    from relay.source.server import current_position

    settings = outbox.settings()
    before = current_position(outbox.conn).snapshot
    with outbox.conn.transaction():
        outbox.publish(host(1), event(1))
        outbox.publish(host(2), event(2))
    between = Difference(before, current_position(outbox.conn).snapshot)
    rows = OutboxRows(settings)
    with psycopg.connect(outbox.relay_dsn, autocommit=True) as reading:
        (portion,) = list(rows.plan(reading, between, -(2**63)))
    (share,) = portion.shares
    of_first = partition_of(int(hashes([str(host(1)).encode()])[0]), settings.partitions)
    assert of_first in share.partitions
    assert len(share.partitions) == 2
    bounds = dict.fromkeys(share.partitions, -(2**63))
    elsewhere = next(
        host(number)
        for number in range(3, 100)
        if partition_of(int(hashes([str(host(number)).encode()])[0]), settings.partitions)
        not in share.partitions
    )
    outbox.conn.execute(
        "update outbox_message_t set host_id = %s where host_id = %s", (elsewhere, host(2))
    )
    (wanted,) = select(portion.shares, partial(unread, bounds, {of_first: share.xids}))
    (read,) = list(rows.commits(outbox.conn, wanted))
    assert read.hosts == [(str(elsewhere),)]
