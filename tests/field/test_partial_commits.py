"""The stream brings a part of a commit, or of the outbox: nothing that is published is left out without a word.

timescale/timescaledb#8628 and #2073 (chunks are not in the publication), spiceai/spiceai#11290 (partitions come under
their own names), supabase/etl#905 and triggerdotdev/trigger.dev#2736 (the publication changes under a running stream),
supabase/etl#410 (a partition is added or detached), electric-sql/electric#3322 (a server of PostgreSQL 18 goes on
without the publication), amelielabs/amelie#64 (rows of unlogged tables), 2ndQuadrant/pglogical#278 (row filters).
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from typing import Any

import psycopg
import pytest
from psycopg.types.json import Jsonb

from relay.admin import check
from relay.admin.findings import Severity
from relay.config.settings import Settings
from relay.faults import ConfigurationError
from relay.source import hybrid
from relay.source.stream.lost_slot import Recovery
from relay.source.walsender import open_replication
from tests.outbox import Outbox, event, host, relaying, relaying_until_it_ends, wait_until

COLUMNS = """(id uuid default gen_random_uuid(), host_id uuid not null, event_type text default 'e', payload jsonb,
              part text not null default 'a', c_xid xid8 default pg_current_xact_id(), c_offset bigserial)"""
PLAIN = f"create table own {COLUMNS}"
PARTITIONED = f"""
    create table own {COLUMNS} partition by list (part);
    create table own_a partition of own for values in ('a');
"""
INTO_T = "insert into t values (%(id)s, (%(payload)s->>'n')::int)"


@pytest.fixture
def own(database: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Outbox]:
    """A database with a table `t` for effects; the test creates the outbox `own`."""
    monkeypatch.setattr(hybrid, "AUDIT_SECONDS", 0.1)
    with Outbox(database) as opened:
        opened.conn.execute("create table t (id uuid, n int)")
        yield opened


def settings_of(outbox: Outbox, mode: str = "auto", **more: Any) -> Settings:
    source = {
        "dsn": outbox.relay_dsn,
        "slot": outbox.slot,
        "publication": outbox.slot,
        "table": "public.own",
        "mode": mode,
        **more,
    }
    return outbox.settings(
        source=source, handlers={"projection": {"type": "sql", "statement": INTO_T}}
    )


def publish(outbox: Outbox, number: int, part: str = "a", table: str = "own") -> None:
    outbox.conn.execute(
        f"insert into {table} (host_id, payload, part) values (%s, %s, %s)".encode(),
        (host(1), Jsonb({"n": number}), part),
    )


def applied(outbox: Outbox) -> list[int]:
    return sorted(outbox.column("select n from t"))


def wait_applied(outbox: Outbox, *numbers: int) -> None:
    wait_until(lambda: len(applied(outbox)) >= len(numbers))
    assert applied(outbox) == sorted(numbers)


CHILD = "create table child () inherits (own)"
UNLOGGED = "create unlogged table own_u partition of own for values in ('u')"
FOREIGN = """
    create extension postgres_fdw;
    create server elsewhere foreign data wrapper postgres_fdw;
    create foreign table own_f partition of own for values in ('f') server elsewhere
"""
HAS_FOREIGN_TABLES = "select count(*) from pg_available_extensions where name = 'postgres_fdw'"


@pytest.mark.parametrize(
    ("table", "added", "why"),
    [
        (PLAIN, CHILD, "lie in public.child, which inherits from it"),
        (PARTITIONED, UNLOGGED, "lie in public.own_u, which is unlogged"),
        (PARTITIONED, FOREIGN, "lie in public.own_f, which is a foreign table"),
        (PLAIN.replace("create table", "create unlogged table"), "select", "is unlogged"),
    ],
    ids=["inherits", "unlogged part", "foreign part", "unlogged"],
)
def test_what_the_stream_cannot_have_whole_is_refused(
    own: Outbox, table: str, added: str, why: str
) -> None:
    if added is FOREIGN and not own.value(HAS_FOREIGN_TABLES):
        pytest.skip("this build of the server has no postgres_fdw; Debian's has")
    own.conn.execute(table.encode())
    own.conn.execute(added.encode())
    for mode in ("auto", "wal"):
        with pytest.raises(ConfigurationError, match=re.escape(why)):
            own.install_again(settings_of(own, mode))


@pytest.mark.parametrize("mode", ["auto", pytest.param("wal", marks=pytest.mark.rare)])
def test_check_and_run_refuse_children(own: Outbox, mode: str) -> None:
    own.conn.execute(PLAIN)
    settings = settings_of(own, mode)
    own.install_again(settings)
    own.conn.execute(CHILD)
    errors = [each for each in check.examine(settings) if each.level is Severity.ERROR]
    assert "parts" in {each.subject for each in errors}
    with pytest.raises(ConfigurationError, match="inherits from it"):
        check.require(settings)
    own.install_again(settings_of(own, "poll"))


def test_children_that_come_while_relay_streams_are_polled(own: Outbox) -> None:
    own.conn.execute(PLAIN)
    settings = settings_of(own)
    own.install_again(settings)
    with relaying(settings) as service:
        publish(own, 1)
        wait_applied(own, 1)
        own.conn.execute(CHILD)
        publish(own, 2, table="child")
        publish(own, 3)
        wait_applied(own, 1, 2, 3)
        wait_until(lambda: "child, which inherits" in (service._source.state().reason or ""))
        publish(own, 4, table="child")
        wait_applied(own, 1, 2, 3, 4)


SWAP = """
    begin;
    alter table own rename to former;
    create table own (like former including all);
    commit
"""


def spoil_filter(outbox: Outbox) -> str:
    return f"""alter publication "{outbox.slot}" set table own where (part = 'b')"""


def spoil_publish(outbox: Outbox) -> str:
    return f"""alter publication "{outbox.slot}" set (publish = 'update')"""


def spoil_table(outbox: Outbox) -> str:
    return f"""alter publication "{outbox.slot}" drop table own"""


def drop(outbox: Outbox) -> str:
    return f'drop publication "{outbox.slot}"'


def swap(outbox: Outbox) -> str:
    return SWAP


@pytest.mark.parametrize(
    ("mode", "spoil", "why"),
    [
        ("wal", swap, "does not publish public.own"),
        ("wal", spoil_table, "does not publish public.own"),
        ("wal", drop, "there is no publication|does not publish|does not exist"),
        pytest.param("wal", spoil_publish, "does not publish inserts", marks=pytest.mark.rare),
        pytest.param("wal", spoil_filter, "has a row filter", marks=pytest.mark.server(15)),
        ("auto", swap, ""),
        pytest.param("auto", spoil_filter, "", marks=[pytest.mark.rare, pytest.mark.server(15)]),
    ],
    ids=[
        "swapped",
        "left out",
        "dropped",
        "not inserts",
        "filtered",
        "swapped, auto",
        "filtered, auto",
    ],
)
def test_a_publication_that_changes_under_the_stream_is_noticed(
    own: Outbox, mode: str, spoil: Any, why: str
) -> None:
    """In mode wal 3 of 13 events came, and relay was ready."""
    own.conn.execute(PLAIN)
    settings = settings_of(own, mode)
    own.install_again(settings)
    with ExitStack() as stack:
        if mode == "wal":
            stack.enter_context(relaying_until_it_ends(settings, why))
        else:
            stack.enter_context(relaying(settings))
        publish(own, 1)
        wait_applied(own, 1)
        own.conn.execute(spoil(own).encode())
        for number in range(2, 7):
            publish(own, number)
        if mode == "auto":
            wait_applied(own, *range(1, 7))


def test_an_outbox_that_was_taken_out_and_put_back_ends_mode_wal(own: Outbox) -> None:
    own.conn.execute(PLAIN)
    settings = settings_of(own, "wal")
    own.install_again(settings)
    with relaying_until_it_ends(settings, "was taken out of .* and put back") as service:
        publish(own, 1)
        wait_applied(own, 1)
        source = service._source
        assert isinstance(source, hybrid.StreamSource)
        wait_until(lambda: source._audit.membership is not None)
        own.conn.execute(spoil_table(own).encode())
        publish(own, 2)
        own.conn.execute(f'alter publication "{own.slot}" add table own'.encode())
        publish(own, 3)
    assert 2 not in applied(own)


def test_partitions_that_come_under_their_own_names_are_noticed(own: Outbox) -> None:
    own.conn.execute(PARTITIONED)
    settings = settings_of(own)
    own.install_again(settings)
    alter = f'alter publication "{own.slot}" set (publish_via_partition_root = false)'
    with relaying(settings):
        publish(own, 1)
        wait_applied(own, 1)
        own.conn.execute(alter.encode())
        publish(own, 2)
        wait_applied(own, 1, 2)


def attach_within(outbox: Outbox, before: bool, hosts: tuple[int, int]) -> None:
    """Publish within a transaction that attaches a partition which has a row already."""
    with psycopg.connect(outbox.installer_dsn) as conn:
        insert = "insert into {} (host_id, payload, part) values (%s, %s, %s)"
        if before:
            conn.execute(insert.format("own").encode(), (host(hosts[0]), Jsonb({"n": 2}), "a"))
        conn.execute("create table own_b (like own including all)")
        conn.execute(insert.format("own_b").encode(), (host(hosts[1]), Jsonb({"n": 3}), "b"))
        conn.execute("alter table own attach partition own_b for values in ('b')")


@pytest.mark.parametrize(
    ("before", "hosts", "came"), [(False, (1, 1), [3]), (True, (1, 2), [2, 3])], ids=["all", "part"]
)
def test_a_partition_that_is_attached_with_rows_is_polled(
    own: Outbox, before: bool, hosts: tuple[int, int], came: list[int]
) -> None:
    """With what of the commit came from the WAL, where another partition has that."""
    own.conn.execute(PARTITIONED)
    settings = settings_of(own)
    own.install_again(settings)
    with relaying(settings):
        publish(own, 1)
        wait_applied(own, 1)
        attach_within(own, before, hosts)
        wait_applied(own, 1, *came)
        publish(own, 4, part="b")
        wait_applied(own, 1, *came, 4)


def test_a_commit_of_which_a_part_came_is_named_and_can_be_repaired(own: Outbox) -> None:
    """The rows before `attach partition` are not in the stream of the publication, those through the outbox are."""
    own.conn.execute(PARTITIONED)
    settings = settings_of(own)
    own.install_again(settings)
    with relaying_until_it_ends(settings, "only a part of transaction [0-9]+"):
        publish(own, 1)
        wait_applied(own, 1)
        attach_within(own, True, (1, 1))
    assert applied(own) == [1, 2]
    own.conn.execute(
        """
        with missing as (delete from own where payload->>'n' = '3' returning *)
        insert into own (id, host_id, event_type, payload, part)
        select id, host_id, event_type, payload, part from missing
        """
    )
    with relaying(settings):
        wait_applied(own, 1, 2, 3)
        own.wait_drained()
        own.wait_compared()
    assert applied(own) == [1, 2, 3]


@pytest.mark.parametrize("is_seen", [True, False])
def test_rows_that_were_committed_before_their_table_was_attached_are_polled_unless_they_are_seen(
    own: Outbox, is_seen: bool
) -> None:
    """What a position sees when it becomes a part of the outbox cannot be told from what was restored."""
    own.conn.execute(PARTITIONED)
    settings = settings_of(own)
    own.install_again(settings)
    own.conn.execute("create table own_b (like own including all)")
    with relaying(settings):
        if is_seen:
            publish(own, 2, part="b", table="own_b")
        publish(own, 1)
        wait_applied(own, 1)
        own.wait_compared()
    if not is_seen:
        publish(own, 2, part="b", table="own_b")
    own.conn.execute("alter table own attach partition own_b for values in ('b')")
    expected = [1, 3] if is_seen else [1, 2, 3]
    with relaying(settings):
        publish(own, 3, part="b")
        wait_until(lambda: set(expected) <= set(applied(own)))
        own.wait_drained()
        own.wait_compared()
    assert applied(own) == expected


@pytest.mark.parametrize("mode", [pytest.param("auto", marks=pytest.mark.rare), "wal", "poll"])
def test_an_outbox_that_is_renamed_away_ends_relay_in_one_line(own: Outbox, mode: str) -> None:
    own.conn.execute(PLAIN)
    settings = settings_of(own, mode)
    own.install_again(settings)
    text = "does not publish public.own" if mode == "wal" else "there is no table public.own"
    with relaying_until_it_ends(settings, text):
        publish(own, 1)
        wait_applied(own, 1)
        own.conn.execute("alter table own rename to former")


def test_what_a_savepoint_hides_is_said(own: Outbox, caplog: pytest.LogCaptureFixture) -> None:
    """A row's xmin is the savepoint's then, so that it cannot be told from a copy."""
    own.conn.execute(PARTITIONED)
    settings = settings_of(own)
    own.install_again(settings)
    with relaying(settings):
        publish(own, 1)
        wait_applied(own, 1)
        with own.conn.transaction():
            publish(own, 2)
            with own.conn.transaction():
                own.conn.execute("create table own_b (like own including all)")
                publish(own, 3, part="b", table="own_b")
                own.conn.execute("alter table own attach partition own_b for values in ('b')")
        wait_until(lambda: "a table was attached within a savepoint" in caplog.text)


def test_a_copy_with_the_xid_of_another_commit_makes_none_partial(own: Outbox) -> None:
    """Whoever may insert into the outbox can forge a c_xid; relay must not end for it."""
    own.conn.execute(PLAIN)
    settings = settings_of(own)
    own.install_again(settings)
    with relaying(settings):
        for number in range(1, 6):
            publish(own, number)
            own.conn.execute(
                "insert into own (host_id, payload, c_xid)"
                " select host_id, payload, c_xid from own order by c_offset desc limit 1"
            )
        wait_until(lambda: len(applied(own)) >= 5)
        own.wait_drained()
        own.wait_compared()
    assert applied(own) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("mode", ["auto", "wal", "poll"])
@pytest.mark.parametrize("column", ["payload", pytest.param("event_type", marks=pytest.mark.rare)])
def test_a_column_that_is_renamed_ends_relay_before_its_field_is_null(
    own: Outbox, mode: str, column: str
) -> None:
    own.conn.execute(PLAIN.encode())
    settings = settings_of(own, mode)
    own.install_again(settings)
    with relaying_until_it_ends(settings, f"no longer has the column '{column}'"):
        publish(own, 1)
        wait_applied(own, 1)
        own.conn.execute(f"alter table own rename column {column} to renamed".encode())
        own.conn.execute("insert into own (host_id) values (%s)", (host(1),))
    assert applied(own) == [1]


def of_owner(outbox: Outbox) -> Settings:
    """Settings of a relay that logs in as who owns the outbox: others may not make a publication again."""
    outbox.conn.execute(
        "grant insert on projection to app_owner; grant usage on sequence projection_seq_seq to app_owner"
    )
    return outbox.settings(source=outbox.config()["source"] | {"dsn": outbox.installer_dsn})


@contextmanager
def streaming_without_publication(
    outbox: Outbox, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """In a commit that is open during the block, with an event before and one after it; all is applied at the end."""
    monkeypatch.setattr(hybrid, "AUDIT_SECONDS", 1_000.0)
    with relaying(settings) as service:
        outbox.publish(host(1), event(1))
        outbox.wait_drained()
        source = service._source
        assert isinstance(source, hybrid.StreamSource)
        # The comparison after the stream's begin is over, and the next one is far.
        wait_until(lambda: source._audit.due > time.monotonic() + 500)
        outbox.conn.execute(f"drop publication {outbox.slot}".encode())
        with outbox.conn.transaction():
            outbox.publish(host(1), event(2))
            yield
            outbox.publish(host(1), event(3))
        monkeypatch.setattr(hybrid, "AUDIT_SECONDS", 0.1)
        source._audit.due = 0.0
        outbox.wait_handled()
        outbox.wait_drained()
    outbox.assert_exact()


@pytest.mark.server(18)
def test_a_publication_is_not_made_again_under_a_stream(
    outbox: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PostgreSQL 18 streams on without the publication, and of a commit that is open when it is back, the rest.

    A standby made the publication again before it found that the slot is read. electric-sql/electric#3322.
    """
    settings = of_owner(outbox)
    with (
        streaming_without_publication(outbox, settings, monkeypatch),
        closing(open_replication(settings)) as standby,
        pytest.raises(psycopg.errors.ObjectInUse),
    ):
        Recovery(settings).restore(standby, False, lambda _: None)


@pytest.mark.server(18)
def test_init_does_not_make_a_publication_again_under_a_stream(
    outbox: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As above, by an operator."""
    settings = of_owner(outbox)
    with (
        streaming_without_publication(outbox, settings, monkeypatch),
        pytest.raises(ConfigurationError, match=r"is missing while process \d+ .* stop"),
    ):
        outbox.install_again(settings)
