"""`relay init` turns a former schema into the current one, and publishers, relay and its sinks go on."""

from __future__ import annotations

from threading import Event, Thread
from typing import Any

import psycopg
import pytest

from relay.admin import sinks as admin_sinks
from relay.faults import ConfigurationError
from relay.store import locks, migrations
from relay.store.connections import connect
from tests.outbox import APPEND, Outbox, event, host, initialise, relaying, wait_until
from tests.webhook import Webhook

LANDED = {
    "source/001_source.sql": "27b79b2c1d8eb53526a19a34a6a9a7079c51866759041612a5ca619648432daa",
    "source/002_retention.sql": "2dcb5934c3453cd1dfde42b473314f1198a159cdc64bd5a382995cdfab9190c6",
    "both/001_calls.sql": "ec2934fb89db7d136f48bf531f4bcab47cbaa80f5c3ed956a086383bb9020061",
    "outbox/001_outbox.sql": "f95c3a75f53a5318d603b8f61a6b949a7e275e71714961ca32d162562a0d2f44",
    "outbox/002_schedules.sql": "fdcfa77cd2a0d302dac3779a59a43b70e21146e446a61c6b3439c3038ec44425",
    "outbox/003_readers.sql": "1b84608bdefc1e83ecbd93e18d888edaef2ea0453ce86f66ec54612c27e2778d",
    "outbox/004_subscribers.sql": "e06f7c204ab00a3e4bdf515bc8b3d53cee0bd06c790ecc200a7718befc8e53ae",
    "target/001_target.sql": "32be4b67b8321aeda29e338ac36074af0585a4548680ab6eabff2e75f5034cd4",
    "target/002_retention.sql": "b297bddc2124091b683d7c9c11754067c52c59639051196144ff6777847b9124",
    "target/004_queues.sql": "f063a1825dc42d5e30d427d02f9dae6fc48b83b7bc44f974d0d8b3196d21f4c3",
    "target/005_scheduled.sql": "e699fd3a1eec43440accd88740563e50ff686f44939738db671353080bf2d5b8",
    "target/006_dead_letters.sql": "c56bac2752cbb7b46ea9dae6a934d142bc2a0e808f9487722789154f90fdee84",
    "target/007_attempts.sql": "ec3ddb760462bb72afd53c586b5e1dd8a229662129e630e6f6fb5221c7f7dcbd",
}
"""The editions of the files in the relay that landed before, each of which has changed since."""


def test_the_editions_that_landed_before_are_migrated() -> None:
    """A file that is changed without a word of its former edition makes `relay init` refuse every installed schema."""
    for name, digest in LANDED.items():
        assert digest in migrations.FORMER[name], name


@pytest.mark.parametrize(
    "name", [*(pytest.param(each, marks=pytest.mark.rare) for each in LANDED), "all"]
)
def test_publishers_go_on_after_a_migration(outbox: Outbox, name: str) -> None:
    """A file of the source that was applied again took from PUBLIC a function that `relay.publish` calls."""
    settings = outbox.settings()
    outbox.conn.execute("alter table relay.sink_claims alter column state set default 'caught up'")
    outbox.begin_sink("unworked")
    names = list(LANDED) if name == "all" else [name]
    for each in names:
        outbox.conn.execute(
            "update relay.migrations set digest = %s where name = %s", (LANDED[each], each)
        )
    assert initialise(settings) == [f"schema file {each}" for each in names]
    role = f"{outbox.slot}_publishes"
    outbox.conn.execute(f"create role {role} login password 'p' in role relay_publisher".encode())
    try:
        with (
            relaying(settings),
            psycopg.connect(outbox.dsn_as(role)) as publisher,
        ):
            publisher.execute(
                "select relay.publish(%s, %s, %s::jsonb)",
                (host(1), host(2), psycopg.types.json.Jsonb([event(1)])),
            )
            publisher.commit()
            outbox.wait_handled()
    finally:
        outbox.conn.execute(f"drop role {role}".encode())
    outbox.assert_exact()
    if "target/001_target.sql" in names:
        # One that nobody has worked yet may begin in mode wal.
        assert outbox.column("select state from relay.sinks") == ["new"]


def test_what_is_everybodys_stays_so_after_a_migration(outbox: Outbox) -> None:
    """Files of the source took from PUBLIC the functions of other files, too, such as those of witnesses."""
    outbox.conn.execute(
        "grant select on outbox_message_t to public; select relay.let_keep_positions('outbox_message_t')"
    )
    everybodys = (
        "select p.oid::regprocedure::text from pg_proc as p, aclexplode(p.proacl) as a"
        " where p.pronamespace = 'relay'::regnamespace and a.grantee = 0 order by 1"
    )
    before = outbox.column(everybodys)
    assert {"relay.this_call()", "relay.holds_witness(uuid)"} <= set(before)
    for name in ("source/001_source.sql", "source/002_retention.sql"):
        outbox.conn.execute((migrations.sql_directory() / name).read_bytes())
    assert outbox.column(everybodys) == before


FORMER_SINKS = """
    create temporary table sinks as select * from relay.sinks;
    create temporary table done as select * from relay.sink_commits;
    drop view relay.sink_commits, relay.sinks, relay.consumer_offsets, relay.applied_commits;
    drop function relay.store_sinks;
    drop table relay.sink_claims;
    delete from relay.positions where owner <> '';
    alter table relay.positions drop constraint positions_pkey, drop column owner, drop column snapshot,
                                drop column following, drop column delivered_lsn, drop column notes_from,
                                add primary key (group_id, topic_id, partition_id, number);
    create view relay.consumer_offsets as
    select p.group_id, p.topic_id, p.partition_id, n.applied_lsn, n.snapshot_id, n.polled_offset, n.next_offset,
           n.updated_at, n.number
      from relay.group_partitions as p
     cross join lateral (
           select s.applied_lsn, s.snapshot_id, s.polled_offset, s.next_offset, s.updated_at, s.number
             from relay.positions as s
            where s.group_id = p.group_id and s.topic_id = p.topic_id and s.partition_id = p.partition_id
            order by s.number desc limit 1) as n;
    create view relay.applied_commits as
    select p.group_id, n.partitions, n.xids, n.rows
      from relay.group_partitions as p
     cross join lateral (
           select coalesce((select s.notes_from[p.partition_id + 1] from relay.snapshots as s
                             where s.group_id = p.group_id order by s.id desc, s.version desc limit 1), 0) as number
           offset 0) as first
     cross join lateral (
           select s.partitions, s.xids, s.rows
             from relay.positions as s
            where s.group_id = p.group_id and s.topic_id = p.topic_id and s.partition_id = p.partition_id
              and s.number >= first.number and s.xids is not null
           offset 0) as n;
    create table relay.sinks (
        group_id text not null, sink text not null, snapshot pg_snapshot, following pg_snapshot,
        polled_offset bigint not null default -9223372036854775808, applied_lsn pg_lsn not null default '0/0',
        delivered_lsn pg_lsn not null default '0/0', state text not null default 'new', epoch int not null default 0,
        series uuid not null default gen_random_uuid(), claim bigint not null default 0, paused_at timestamptz,
        paused_by text, reason text, fault text, fault_since timestamptz, instance text,
        updated_at timestamptz not null default now(), primary key (group_id, sink));
    insert into relay.sinks
    select group_id, sink, snapshot, following, polled_offset, applied_lsn, delivered_lsn, state, epoch, series, claim,
           paused_at, paused_by, reason, fault, fault_since, instance, updated_at
      from sinks;
    create table relay.sink_commits (group_id text not null, sink text not null, xids xid8[] not null);
    create index sink_commits_sink on relay.sink_commits (group_id, sink);
    insert into relay.sink_commits select * from done;
    grant select on relay.sinks, relay.sink_commits to pg_monitor;
    grant select, insert, update, delete on relay.sinks, relay.sink_commits to relay;
    alter table relay.sinks owner to app_owner;
    alter table relay.sink_commits owner to app_owner;
    alter view relay.consumer_offsets owner to app_owner;
    alter view relay.applied_commits owner to app_owner;
    drop table sinks, done;
"""
"""The target of the edition that updated sinks in place, with what is stored now."""
FORMER_COUNTER = """
    drop trigger relay_fill_offset on outbox_message_t;
    drop function relay.count_offsets;
    alter table relay.log_counter drop column outbox;
    do $$ begin
        execute format('create trigger relay_fill_offset before insert on outbox_message_t for each row'
                       ' execute function relay.fill_offset(%L, ''c_offset'')', (select id from relay.log_counter));
    end $$
"""
"""Numbers without gaps of the edition in which each event took one, with what is counted now."""


def test_numbers_without_gaps_go_on_after_a_migration(outbox: Outbox) -> None:
    """Also those of a publisher who is in the middle of a transaction when it begins."""
    gapless = outbox.settings(source={**outbox.config()["source"], "offsets": "gapless"})
    initialise(gapless)
    outbox.publish(host(1), event(1), event(2))
    outbox.conn.execute(FORMER_COUNTER)
    names = ["source/001_source.sql", "outbox/001_outbox.sql"]
    for name in names:
        outbox.conn.execute(
            "update relay.migrations set digest = %s where name = %s", (LANDED[name], name)
        )
    insert = "insert into outbox_message_t (host_id, event_type, payload) values (%s, 'x', '1')"
    done: list[list[str]] = []
    with psycopg.connect(outbox.publisher_dsn) as publisher:
        publisher.execute(insert, (host(1),))
        thread = Thread(target=lambda: done.append(initialise(gapless)))
        thread.start()
        wait_until(
            lambda: bool(
                outbox.column(
                    "select 1 from pg_locks where relation = 'relay.log_counter'::regclass and not granted"
                )
            )
        )
        publisher.commit()
    thread.join(30)
    assert done == [[f"schema file {name}" for name in names]]
    outbox.publish(host(1), event(4), event(5))
    outbox.publisher.execute(insert, (host(1),))
    assert outbox.column("select c_offset from outbox_message_t order by 1") == [*range(1, 7)]
    with outbox.conn.transaction():
        outbox.publish(host(1), *(event() for _ in range(100)))
        assert outbox.value(UPDATES) == 1
    assert initialise(gapless) == []


UPDATES = (
    "select n_tup_upd from pg_stat_xact_user_tables where relid = 'relay.log_counter'::regclass"
)
"""How often the transaction has updated a counter."""

FORMER_POSITIONS = """
    create temporary table state as select * from relay.consumer_offsets;
    create temporary table notes as select * from relay.applied_commits;
    drop view relay.consumer_offsets, relay.applied_commits;
    drop table relay.positions, relay.group_partitions;
    drop function relay.lock_positions, relay.claim_positions, relay.chain, relay.notes_after;
    alter table relay.snapshots drop constraint snapshots_pkey, drop column version, drop column notes_from,
                                add primary key (group_id, id);
    create table relay.consumer_offsets (
        group_id text not null, topic_id int not null, partition_id int not null,
        applied_lsn pg_lsn not null default '0/0', snapshot_id bigint,
        polled_offset bigint not null default -9223372036854775808, next_offset bigint not null default 1,
        updated_at timestamptz not null default now(), primary key (group_id, topic_id, partition_id));
    insert into relay.consumer_offsets
    select group_id, topic_id, partition_id, applied_lsn, snapshot_id, polled_offset, next_offset, updated_at
      from state;
    create table relay.applied_commits (
        group_id text not null, partitions int[] not null, xids xid8[] not null, rows int[]);
    insert into relay.applied_commits select * from notes;
    grant select on relay.consumer_offsets to pg_monitor;
    create function relay.lock_partitions(text, int, int[], text[]) returns int language sql as 'select 1';
    alter table relay.consumer_offsets owner to app_owner;
    alter table relay.applied_commits owner to app_owner;
    alter function relay.lock_partitions owner to app_owner;
"""
"""The target of the edition that updated positions in place, with what is stored now."""

MIGRATED = [
    "schema file target/001_target.sql",
    # Its tables are made again: timescale/timescaledb#5121
    "rights of the role relay_owner for work queues",
]
STATE = "select to_jsonb(o) - 'number' from relay.consumer_offsets as o order by partition_id"
NOTES = "select to_jsonb(a) from relay.applied_commits as a order by 1"


SINKS = "select to_jsonb(s) - 'number' - 'notes_from' from relay.sinks as s order by sink"
DONE = """
    select jsonb_build_object(sink, array_agg(xid order by xid)) from relay.sink_commits, unnest(xids) as xid
     group by sink order by sink
"""


def make_former(outbox: Outbox, sinks_only: bool = False) -> None:
    """Turn the target into one of the edition that updated sinks in place, or partitions too."""
    outbox.conn.execute(FORMER_SINKS)
    if not sinks_only:
        outbox.conn.execute(FORMER_POSITIONS)
    outbox.conn.execute(
        "update relay.migrations set digest = %s where name = %s",
        (LANDED["target/001_target.sql"], "target/001_target.sql"),
    )


def test_positions_and_notes_are_migrated(outbox: Outbox) -> None:
    settings = outbox.settings()
    outbox.fill(50)
    outbox.drain(settings)
    make_former(outbox)
    for number in range(4):
        outbox.publish(host(number), event(number))
    # As if the stream had brought all but the last.
    outbox.conn.execute(
        """
        insert into relay.applied_commits (group_id, partitions, xids)
        select 'default', array[mod(abs(hashtext(host_id::text)::bigint), 8)]::int[], array[c_xid]
          from outbox_message_t order by c_offset desc limit 3 offset 1
        """
    )
    state, notes = outbox.column(STATE), outbox.column(NOTES)
    assert initialise(settings) == MIGRATED
    assert (outbox.column(STATE), outbox.column(NOTES)) == (state, notes)
    assert outbox.value(
        "select has_table_privilege('pg_monitor', 'relay.consumer_offsets', 'select')"
    )
    assert initialise(settings) == []
    before = outbox.handled()
    with relaying(outbox.settings(source={**outbox.config()["source"], "mode": "poll"})):
        wait_until(lambda: outbox.handled() > before)
        outbox.publish(host(5), event(5))
        wait_until(lambda: outbox.handled() > before + 1)
    assert outbox.column("select amount from projection order by seq desc limit 2") == [5, 3]
    assert outbox.handled() == before + 2


def posting(webhook: Webhook) -> dict[str, Any]:
    """Every event goes to two sinks, and into the projection."""
    hook = {"type": "http", "url": webhook.url}
    handlers = {"projection": {"type": "sql", "statement": APPEND}, "hook": hook, "other": hook}
    return {"handlers": handlers, "routes": [{"handlers": list(handlers)}]}


def test_positions_of_sinks_are_migrated_while_publishers_go_on(outbox: Outbox) -> None:
    with Webhook() as webhook:
        settings = outbox.settings(**posting(webhook))
        with relaying(settings):
            for number in range(10):
                outbox.publish(host(number), event(number))
            for sink in ("hook", "other"):
                outbox.wait_delivered(sink)
        # One has done a commit that is not the next one, and one stands within a difference.
        outbox.publish(host(1), event(10))
        outbox.publish(host(2), event(11))
        outbox.conn.execute(
            """
            insert into relay.positions (group_id, owner, topic_id, partition_id, number, snapshot, following,
                                         polled_offset, delivered_lsn, notes_from, xids)
            select s.group_id, s.sink, 1, 0, s.number + 1, s.snapshot,
                   case s.sink when 'other' then pg_current_snapshot() end,
                   case s.sink when 'other' then last.c_offset - 1 else s.polled_offset end, s.delivered_lsn,
                   s.notes_from, case s.sink when 'hook' then array[last.c_xid] end
              from relay.sinks as s,
                   (select c_offset, c_xid from outbox_message_t order by c_offset desc limit 1) as last;
            update relay.sink_claims set paused_at = now(), paused_by = 'anna', state = 'lagging' where sink = 'other'
            """
        )
        state, done = outbox.column(SINKS), outbox.column(DONE)
        make_former(outbox, sinks_only=True)
        assert (outbox.column(SINKS), outbox.column(DONE)) == (state, done)
        publishing = Event()

        def publish() -> None:
            number = 12
            while not publishing.is_set():
                outbox.publish(host(number % 5), event(number))
                number += 1

        publisher = Thread(target=publish)
        publisher.start()
        try:
            assert "schema file target/001_target.sql" in initialise(settings)
        finally:
            publishing.set()
            publisher.join()
        assert (outbox.column(SINKS), outbox.column(DONE)) == (state, done)
        assert outbox.value(
            "select has_table_privilege('pg_monitor', 'relay.sinks', 'select')"
            " and has_table_privilege('pg_monitor', 'relay.sink_commits', 'select')"
        )
        assert initialise(settings) == []
        before = len(webhook.accepted)
        with relaying(settings):
            outbox.wait_delivered("hook")
            admin_sinks.resume(settings, "other")
            outbox.wait_delivered("other")
        published = outbox.value("select count(*) from outbox_message_t")
        # What was done, and what comes before the position in the difference, is not delivered again.
        assert len(webhook.accepted) - before == 2 * (published - 10) - 2
        assert set(webhook.ids().values()) == {1, 2}


def test_a_running_instance_of_the_former_edition_keeps_sinks_from_being_migrated(
    outbox: Outbox,
) -> None:
    settings = outbox.settings()
    outbox.begin_sink("hook", "'10:10:'")
    make_former(outbox, sinks_only=True)
    state = outbox.column(SINKS)
    with connect(outbox.relay_dsn, application_name="relay elsewhere:7") as running:
        locks.lock_shared(running, locks.instance(settings.group))
        with pytest.raises(
            ConfigurationError, match=r"an instance of relay runs \(relay elsewhere:7\)"
        ):
            initialise(settings)
    assert outbox.column(SINKS) == state
    wait_until(lambda: not outbox.column("select 1 from pg_locks where locktype = 'advisory'"))
    # One that nobody has found stores nothing.
    with psycopg.connect(outbox.superuser_dsn) as former:
        former.execute("select from relay.sinks")
        former.commit()
        initialise(settings)
        for change in (
            "update relay.sinks set snapshot = '20:20:', updated_at = now() where sink = 'hook'",
            "insert into relay.sink_commits (group_id, sink, xids) values ('default', 'hook', '{7}')",
            "delete from relay.sink_commits where sink = 'hook'",
        ):
            with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState, match="cannot"):
                former.execute(change.encode())
            former.rollback()
    assert outbox.column(SINKS) == state


def test_a_running_instance_of_the_former_edition_keeps_positions_from_being_migrated(
    outbox: Outbox,
) -> None:
    settings = outbox.settings()
    outbox.fill(10)
    outbox.drain(settings)
    make_former(outbox)
    state = outbox.column(STATE)
    with connect(outbox.relay_dsn, application_name="relay elsewhere:7") as running:
        locks.lock_shared(running, locks.instance(settings.group))
        with pytest.raises(
            ConfigurationError, match=r"an instance of relay runs \(relay elsewhere:7\)"
        ):
            initialise(settings)
    assert outbox.column(STATE) == state
    wait_until(lambda: not outbox.column("select 1 from pg_locks where locktype = 'advisory'"))
    # One that nobody has found, since the session that shows it was lost: nothing of its tasks is stored.
    with psycopg.connect(outbox.superuser_dsn) as former:
        former.execute("select from relay.consumer_offsets")
        former.commit()
        initialise(settings)
        with pytest.raises(psycopg.errors.UndefinedFunction):
            former.execute("select * from relay.lock_partitions('default', 1, '{0}', '{}')")
        former.rollback()
        for change in (
            "update relay.consumer_offsets set next_offset = 1",
            "insert into relay.applied_commits values ('default', '{0}', '{7}', '{1}')",
            "delete from relay.consumer_offsets",
        ):
            with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState, match="cannot"):
                former.execute(change.encode())
            former.rollback()
    assert outbox.column(STATE) == state


def test_views_on_the_former_tables_are_named(outbox: Outbox) -> None:
    settings = outbox.settings()
    make_former(outbox)
    outbox.conn.execute("create view lags as select * from relay.consumer_offsets")
    with pytest.raises(ConfigurationError, match=r"view public\.lags depends on"):
        initialise(settings)
    outbox.conn.execute("drop view lags")
    assert initialise(settings) == MIGRATED
    make_former(outbox, sinks_only=True)
    outbox.conn.execute("create view lags as select sink, snapshot from relay.sinks")
    with pytest.raises(
        ConfigurationError, match=r"view public\.lags depends on column .*relay\.sinks"
    ):
        initialise(settings)
    outbox.conn.execute("drop view lags")
    assert MIGRATED[0] in initialise(settings)
