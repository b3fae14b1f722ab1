"""Retention: what all readers are past is removed, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from threading import Event, Thread
from typing import Any

import psycopg
import pytest
from psycopg.types.json import Jsonb
from pyspark.errors import StreamingQueryException

from relay.admin.check import examine
from relay.admin.findings import Severity
from relay.admin.offsets import plan_seek, seek
from relay.admin.retention import erase, partition, partition_new
from relay.client import schema
from relay.config.settings import Settings
from relay.config.source import OWN_OUTBOX
from relay.faults import ConfigurationError
from relay.model.snapshots import Snapshot
from relay.retention.partitions import partitions
from relay.retention.schedule import Schedule
from relay.service import Service
from relay.spark.data_source import register
from relay.spark.session import Session
from relay.store import completeness, locks, migrations
from relay.store.completeness import Completeness
from relay.store.connections import connect
from tests.outbox import Copied, Outbox, event, host, initialise, relaying, wait_until
from tests.pages import blocks
from tests.postgres import Server
from tests.process import ROOT, administer, relay
from tests.roles import Role, join_roles

KEEP: dict[str, Any] = {"retention": {"keep": "7d", "ahead": "3d"}}


def turn(settings: Settings, days: float = 0.0, dsn: str | None = None) -> None:
    """One turn of retention, at a time in some days."""
    moment = datetime.now(UTC) + timedelta(days=days)
    with (
        closing(connect(dsn or settings.source_dsn)) as source,
        closing(connect(dsn or settings.target_dsn)) as target,
    ):
        Schedule(settings, lambda: None, lambda _: moment).retain(source, target)


def install(outbox: Outbox) -> None:
    outbox.install(**KEEP)


@pytest.fixture
def kept(copied: Copied) -> Any:
    """An outbox with retention."""
    with copied("retention", install) as made:
        yield made


def relayed(outbox: Outbox, **more: Any) -> Settings:
    """Publish and relay until the group's snapshot sees it."""
    settings = outbox.settings(**KEEP, **more)
    outbox.fill(10)
    with relaying(settings):
        outbox.wait_drained()
        outbox.wait_compared()
    return settings


def test_deletes_what_is_read_and_old(kept: Outbox) -> None:
    settings = relayed(kept)
    kept.fill(1, events=3)
    turn(settings)
    assert kept.value("select count(*) from outbox_message_t") == 53
    turn(settings, days=8)
    assert kept.value("select count(*) from outbox_message_t") == 3
    with relaying(settings):
        kept.wait_drained()
    assert kept.value("select count(*) from projection") == 53


@pytest.fixture
def rotated(kept: Outbox) -> Outbox:
    """An outbox that is partitioned from the start."""
    partition_new(kept.settings(**KEEP), "1d", kept.installer_dsn)
    return kept


def ranges(outbox: Outbox) -> list[str]:
    """The names of the partitions, oldest first."""
    return [
        each.name.removeprefix("public.outbox_message_t_")
        for each in partitions(outbox.conn, OWN_OUTBOX)
    ]


def test_partitions_are_created_and_dropped(rotated: Outbox) -> None:
    assert ranges(rotated)[0] == "before"
    assert ranges(rotated)[-1] == "default"
    settings = relayed(rotated)
    turn(settings, days=7)
    today = datetime.now(UTC)
    assert "before" in ranges(rotated)
    turn(settings, days=9)
    assert "before" not in ranges(rotated)
    ahead = today + timedelta(days=12)
    assert ranges(rotated)[-2:] == [f"p{ahead:%Y%m%d}", "default"]
    assert rotated.value("select count(*) from outbox_message_t") == 0
    rotated.fill(5)
    with relaying(settings):
        rotated.wait_drained()
    assert rotated.value("select count(*) from projection") == 75


@pytest.mark.parametrize("mode", ["auto", "poll"])
def test_a_live_table_is_converted(kept: Outbox, mode: str) -> None:
    settings = kept.settings(**KEEP, source={**kept.config()["source"], "mode": mode})
    published = 0
    stopping = Event()

    def publish() -> None:
        nonlocal published
        with psycopg.connect(kept.publisher_dsn, autocommit=True) as conn:
            while not stopping.is_set():
                conn.execute(
                    "select relay.publish(%s, null, %s)", (host(published % 7), Jsonb([event()]))
                )
                published += 1

    with relaying(settings):
        kept.fill(200)
        publisher = Thread(target=publish)
        publisher.start()
        try:
            wait_until(lambda: published > 50)
            done = partition(settings, "1d", kept.installer_dsn)
            after = published
            wait_until(lambda: published > after + 50)
        finally:
            stopping.set()
            publisher.join()
        assert done[0] == "partitions of public.outbox_message_t, one for each 1d"
        kept.wait_handled()
    kept.assert_exact()
    assert ranges(kept)[0] == "before"
    assert kept.value("select count(*) from outbox_message_t") == 1000 + published
    assert partition(settings, "1d", kept.installer_dsn) == []


def test_a_lagging_sink_and_a_paused_one_hold_their_events(rotated: Outbox) -> None:
    settings = relayed(rotated)
    rotated.begin_sink("mail", "'3:3:'")
    rotated.conn.execute("update relay.sink_claims set paused_at = now()")
    turn(settings, days=30)
    assert rotated.value("select count(*) from outbox_message_t") == 50
    rotated.set_sinks("pg_current_snapshot()")
    # One of two tables was restored without the other.
    rotated.conn.execute(
        "insert into relay.sink_claims (group_id, sink) values ('default', 'lost')"
    )
    turn(settings, days=30)
    assert rotated.value("select count(*) from outbox_message_t") == 50
    rotated.conn.execute("delete from relay.sink_claims where sink = 'lost'")
    turn(settings, days=30)
    assert rotated.value("select count(*) from outbox_message_t") == 0


def test_an_event_that_only_the_outbox_has_holds_its_row(kept: Outbox) -> None:
    settings = relayed(kept)
    kept.conn.execute(
        """
        insert into relay.dead_letter_queue (group_id, c_offset, exception, by_reference)
        select 'default', max(c_offset), 'too large', true from outbox_message_t
        """
    )
    turn(settings, days=30)
    assert kept.value("select count(*) from outbox_message_t") == 1
    kept.conn.execute("update relay.dead_letter_queue set status = 'discarded'")
    turn(settings, days=30)
    assert kept.value("select count(*) from outbox_message_t") == 0


def test_a_group_that_has_not_noted_its_position_holds_everything(kept: Outbox) -> None:
    settings = relayed(kept)
    kept.conn.execute("insert into relay.streams values ('other', 'other', null)")
    turn(settings, days=30)
    assert kept.value("select count(*) from outbox_message_t") == 50


def test_rows_beyond_all_partitions_get_one(rotated: Outbox) -> None:
    settings = relayed(rotated)
    rotated.conn.execute(
        "alter table outbox_message_t alter c_ts set default now() + interval '20 days'"
    )
    rotated.fill(4)
    assert rotated.value("select count(*) from outbox_message_t_default") == 20
    turn(settings, days=20)
    assert rotated.value("select count(*) from outbox_message_t_default") == 0
    assert rotated.value("select count(*) from outbox_message_t") == 20
    assert rotated.value("select count(*) from pg_constraint where conname = 'relay_range'") == 0
    with relaying(settings):
        rotated.wait_drained()
    assert rotated.value("select count(distinct id) from projection") == 70
    assert rotated.value("select count(*) from projection") == 70


def test_the_role_relay_suffices(rotated: Outbox) -> None:
    settings = relayed(rotated)
    with rotated.limited_role() as (_, dsn):
        turn(settings, days=30, dsn=dsn)
        assert rotated.value("select count(*) from outbox_message_t") == 0
        with psycopg.connect(dsn, autocommit=True) as conn:
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                conn.execute("delete from outbox_message_t")
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                conn.execute("update relay.retained set every = '1 minute'")
            # Only an outbox that is given to retention, and only its old partitions.
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                conn.execute(
                    "select relay.drop_partition('public.projection', 'public.projection', now())"
                )
            row = conn.execute(
                "select relay.drop_partition('public.outbox_message_t', 'public.projection', now())"
            ).fetchone()
            assert row == (False,)


@pytest.fixture
def in_sql(database: str) -> Iterator[Outbox]:
    """An outbox that is read in SQL alone, with what the page on retention says of one."""
    with Outbox(database) as made:
        installer = made.login(Role.INSTALLER)
        for script in schema.install():
            installer.execute(script.encode())
        join_roles(made.conn)
        page = (ROOT / "docs/how-to/retention.md").read_text()
        scheduled, given = (each.text for each in blocks(page) if each.language == "sql")
        installer.execute(given.encode())
        made.conn.execute(
            """
            create schema cron;
            create table cron.job (schedule text, command text);
            create function cron.schedule(job_name text, schedule text, command text) returns void language sql
                as 'insert into cron.job values ($2, $3)';
            """
        )
        made.conn.execute(scheduled.encode())
        yield made


def maintain(outbox: Outbox) -> list[str]:
    """Run the job as pg_cron does; returns what it warns of."""
    said: list[str] = []
    ((command,),) = outbox.conn.execute("select command from cron.job")
    with psycopg.connect(outbox.relay_dsn, autocommit=True) as conn:
        conn.add_notice_handler(lambda each: said.append(str(each.message_primary)))
        conn.execute(command)
    return said


def test_upkeep_of_a_log_that_is_read_in_sql_alone(in_sql: Outbox) -> None:
    outbox, old = in_sql, "update outbox_message_t set c_ts = now() - interval '8 days'"
    outbox.reader.execute("select relay.declare_reader('r', start => 'beginning')")
    outbox.reader.execute("select relay.declare_reader('gone', expires => '1 hour')")
    outbox.fill(100)
    # More of one transaction than are deleted at once.
    outbox.publish(host(1), *map(event, range(12_000)))
    outbox.conn.execute(old)
    assert maintain(outbox) == []
    assert outbox.value("select count(*) from outbox_message_t") == 12_500
    # Nobody has given a sign of life, and a reader notes its position for retention with its first one.
    outbox.conn.execute("update relay.readers set noted_at = now() - interval '2 hours'")
    position, *_ = outbox.reader.column("select position from relay.read('r', 20000)")
    outbox.reader.execute("select relay.advance('r', %s)", (position,))
    outbox.publish(host(1), event(1))
    assert maintain(outbox) == []
    assert outbox.value("select count(*) from outbox_message_t") == 1
    with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState, match="given up"):
        outbox.reader.execute("select from relay.read('gone')")
    with pytest.raises(psycopg.errors.InsufficientPrivilege):
        outbox.publisher.execute("call relay.maintain(keep => '1 day')")


def test_upkeep_in_sql_does_what_a_running_relay_does(rotated: Outbox) -> None:
    """It creates partitions ahead, gives one to the rows of the default partition, and drops those that are read."""
    settings = relayed(rotated)
    rotated.conn.execute(
        "alter table outbox_message_t alter c_ts set default now() - interval '20 days'"
    )
    names = "select partition::text from relay.partitions('outbox_message_t') order by upper"
    before = set(rotated.column(names))
    rotated.conn.execute("insert into relay.streams values ('another', 'away')")
    rotated.login(Role.RELAY).execute("call relay.maintain('1 day', '9 days')")
    made = set(rotated.column(names)) - before
    assert len(made) == 6
    rotated.conn.execute("delete from relay.streams where slot = 'another'")
    rotated.conn.execute(
        "alter table outbox_message_t alter c_ts set default now() + interval '20 days'"
    )
    rotated.fill(4)
    assert rotated.value("select count(*) from outbox_message_t_default") == 20
    with psycopg.connect(rotated.superuser_dsn) as other:
        # What does not get its lock is left for the next call.
        other.execute("lock table outbox_message_t in row exclusive mode")
        rotated.login(Role.RELAY).execute("call relay.maintain(ahead => '21 days')")
        assert rotated.value("select count(*) from outbox_message_t_default") == 20
    rotated.login(Role.RELAY).execute("call relay.maintain(ahead => '21 days')")
    assert rotated.value("select count(*) from outbox_message_t_default") == 0
    assert rotated.value("select count(*) from pg_constraint where conname = 'relay_range'") == 0
    with relaying(settings):
        rotated.wait_drained()
        rotated.wait_compared()
    turn(settings)
    everything = set(rotated.column(names))
    rotated.login(Role.RELAY).execute("call relay.maintain(keep => '-40 days')")
    assert set(rotated.column(names)) < everything
    assert rotated.value("select count(*) from outbox_message_t") == 0
    # A relay that runs has its turn.
    with closing(connect(settings.source_dsn)) as running:
        assert locks.try_lock(running, locks.retention(OWN_OUTBOX))
        here = set(rotated.column(names))
        rotated.login(Role.RELAY).execute("call relay.maintain(ahead => '40 days')")
        assert set(rotated.column(names)) == here


def test_publishers_cannot_choose_the_time(rotated: Outbox) -> None:
    with pytest.raises(psycopg.errors.InsufficientPrivilege):
        rotated.conn.execute(
            """
            set role relay_publisher;
            insert into outbox_message_t (host_id, event_type, payload, c_ts)
            values (gen_random_uuid(), 'a', '{}', '2000-01-01')
            """
        )
    rotated.conn.execute("reset role")


def test_another_interval(rotated: Outbox) -> None:
    settings = relayed(rotated)
    assert (
        partition(settings, "6h", rotated.installer_dsn)[0]
        == "interval of 6h for the next partitions of public.outbox_message_t"
    )
    turn(settings, days=3)
    last = partitions(rotated.conn, OWN_OUTBOX)[-2]
    assert last.lower is not None
    assert last.upper is not None
    assert last.upper - last.lower == timedelta(hours=6)
    assert last.name.endswith(f"_p{last.lower:%Y%m%d%H}")


def test_a_reader_is_given_up_only_when_told(kept: Outbox) -> None:
    settings = relayed(kept)
    kept.fill(3)
    turn(settings, days=30)
    assert kept.value("select count(*) from outbox_message_t") == 15
    # Another group, which is past all events.
    of = {**kept.config()["source"], "mode": "poll"}
    output = kept.settings(group="other", source=of, retention={"keep": "7d", "max_lag": "20d"})
    kept.install_again(output)
    turn(output, days=10)
    assert kept.value("select count(*) from outbox_message_t") == 15
    turn(output, days=30)
    assert kept.value("select count(*) from outbox_message_t") == 15
    turn(output, days=30)
    assert kept.value("select count(*) from outbox_message_t") == 0
    assert kept.column("select action from relay.actions") == ["give up"]
    with pytest.raises(ConfigurationError, match=r"was given up by retention \(max_lag\)"):
        Service(settings).run()
    move = plan_seek(settings, "end", None)
    seek(settings, move, None)
    with relaying(settings):
        kept.fill(1)
        kept.wait_drained()
    assert kept.value("select count(*) from projection") == 55


def test_a_host_is_erased(rotated: Outbox, tmp_path: Path) -> None:
    settings = relayed(rotated)
    rotated.publish(host(1), event(-1))
    with pytest.raises(ConfigurationError, match="not applied yet"):
        erase(settings, str(host(1)), False, rotated.installer_dsn)
    with relaying(settings):
        rotated.wait_handled()
        rotated.wait_compared()
    assert rotated.value("select count(*) from relay.dead_letter_queue") == 1
    turn(settings)
    config = rotated.config_file(tmp_path / "relay.yaml", **KEEP)
    shown = administer(
        rotated, "erase", "--config", str(config), "--host", str(host(1)), "--yes"
    ).stdout
    assert "removed: 6 events in the outbox" in shown
    assert "removed: 1 dead letters" in shown
    assert "not removed: the WAL, until the server recycles it" in shown
    assert (
        rotated.value("select count(*) from outbox_message_t where host_id = %s", (host(1),)) == 0
    )
    assert rotated.value("select count(*) from outbox_message_t") == 45
    (action,) = rotated.column("select detail from relay.actions where action = 'erase'")
    assert action["host"] == str(host(1))
    rotated.fill(2)
    with relaying(settings):
        rotated.wait_drained()
    assert rotated.value("select count(distinct id) from projection") == 60


@pytest.mark.parametrize(
    ("statement", "line"),
    [
        (
            "create view recent as select * from outbox_message_t",
            "the view public.recent, which would go on",
        ),
        (
            "create unique index u on outbox_message_t (c_offset)",
            "the unique index public.u, which cannot hold",
        ),
        (
            "create table child (of uuid references outbox_message_t)",
            "the foreign key child_of_fkey of public.child",
        ),
        (
            "create rule r as on delete to outbox_message_t do instead nothing",
            "the rule r: drop it",
        ),
        (
            "alter table outbox_message_t enable row level security",
            "row level security: disable it",
        ),
    ],
)
def test_conversion_refuses_what_it_cannot_carry_over(
    kept: Outbox, statement: str, line: str
) -> None:
    kept.conn.execute(statement.encode())
    with pytest.raises(ConfigurationError, match=line):
        partition(kept.settings(**KEEP), "1d", kept.installer_dsn)
    assert (
        kept.value("select relkind::text from pg_class where relname = 'outbox_message_t'") == "r"
    )


def test_conversion_carries_everything_over(kept: Outbox, server: Server) -> None:
    published = "(id, payload) where (event_type = 'a')" if server.major >= 15 else ""
    kept.conn.execute(
        f"""
        comment on table outbox_message_t is 'events';
        create index of_host on outbox_message_t (host_id) where user_id is not null;
        create table seen (id uuid);
        create function note_event() returns trigger language plpgsql security definer as
            $$ begin insert into public.seen values (new.id); return new; end $$;
        create trigger noted before insert on outbox_message_t for each row execute function note_event();
        create statistics kinds on host_id, event_type from outbox_message_t;
        create publication of_others for table outbox_message_t {published};
        alter publication of_others owner to app_owner;
        """.encode()
    )
    kept.fill(3)
    before = described(kept)
    partition(kept.settings(**KEEP), "1d", kept.installer_dsn)
    assert described(kept) == before
    assert kept.column("select pubviaroot from pg_publication") == [True, True]
    kept.fill(1)
    assert kept.value("select count(*) from seen") == 20
    assert kept.value("select count(*) from outbox_message_t") == 20


def described(outbox: Outbox) -> dict[str, list[Any]]:
    """What belongs to the table, but for its key, which gets c_ts."""
    questions = {
        "columns": """
            select (attname, atttypid::regtype, attnotnull, pg_get_expr(adbin, adrelid), attacl,
                    col_description(attrelid, attnum))::text
              from pg_attribute left join pg_attrdef on adrelid = attrelid and adnum = attnum
             where attrelid = 'outbox_message_t'::regclass and attnum > 0 and attname <> 'c_ts' order by 1
        """,
        "table": """
            select (relowner::regrole, relacl, obj_description(oid, 'pg_class'))::text
              from pg_class where oid = 'outbox_message_t'::regclass
        """,
        "constraints": """
            select (conname, convalidated, pg_get_constraintdef(oid))::text from pg_constraint
             where conrelid = 'outbox_message_t'::regclass and contype = 'c' order by 1
        """,
        "indexes": """
            select replace(pg_get_indexdef(indexrelid), ' ONLY ', ' ') from pg_index
             where indrelid = 'outbox_message_t'::regclass and not indisunique order by 1
        """,
        "triggers": """
            select (tgname, tgenabled, pg_get_triggerdef(oid))::text from pg_trigger
             where tgrelid = 'outbox_message_t'::regclass and not tgisinternal order by 1
        """,
        "publications": """
            select to_jsonb(p)::text from pg_publication_tables p
             where tablename = 'outbox_message_t' and pubname = 'of_others'
        """,
        "statistics": """
            select stxkeys::text from pg_statistic_ext where stxrelid = 'outbox_message_t'::regclass
        """,
    }
    return {name: outbox.column(question) for name, question in questions.items()}


def test_a_killed_conversion_is_reported_and_continued(kept: Outbox) -> None:
    settings = kept.settings(**KEEP)
    kept.fill(2)
    kept.conn.execute(
        """
        alter table outbox_message_t add column if not exists c_ts timestamptz not null default now();
        create unique index outbox_message_t_relay_key on outbox_message_t (id, c_ts);
        alter table outbox_message_t add constraint relay_before check (c_ts < '2030-01-01 00:00:00+00') not valid
        """
    )
    output = [finding.text for finding in examine(settings) if finding.subject == "retention"]
    assert output == [
        "source.table: public.outbox_message_t refuses events from 2030-01-01 00:00:00+00 on, because a command was "
        "killed: run `relay partition` again"
    ]
    partition(settings, "1d", kept.installer_dsn)
    assert [finding for finding in examine(settings) if finding.subject == "retention"] == []
    assert kept.value("select count(*) from outbox_message_t") == 10


def test_closed_dead_letters_and_old_actions_are_removed(outbox: Outbox) -> None:
    outbox.conn.execute(
        """
        insert into relay.dead_letter_queue (group_id, exception, status, created_dt)
        select 'default', 'x', status, now() - make_interval(days => days)
          from unnest(array['dead', 'replayed', 'discarded']) as status, unnest(array[10, 100]) as days;
        insert into relay.actions (group_id, action, acted_at) values ('default', 'seek', now() - interval '100 days');
        """
    )
    with outbox.limited_role() as (_, dsn):
        turn(outbox.settings(), dsn=dsn)
    assert outbox.value("select count(*) from relay.dead_letter_queue") == 4
    old = "select status from relay.dead_letter_queue where created_dt < now() - interval '90 days'"
    assert outbox.column(old) == ["dead"]
    assert outbox.value("select count(*) from relay.actions") == 0


@pytest.mark.rare
def test_a_spark_query_that_has_a_name_holds_its_events(
    kept: Outbox, spark_session: Session, tmp_path: Path
) -> None:
    spark = spark_session.get(timeout=120)
    assert spark is not None
    register(spark)
    settings = relayed(kept)

    def trigger() -> None:
        query = (
            spark.readStream.format("outbox")
            .option("dsn", kept.relay_dsn)
            .option("reader", "lake")
            .load()
            .writeStream.format("parquet")
            .option("path", str(tmp_path / "lake"))
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()

    trigger()
    turn(settings, days=30)
    kept.fill(2)
    with relaying(settings):
        kept.wait_drained()
        kept.wait_compared()
    turn(settings, days=30)
    unread = int(kept.value("select count(*) from outbox_message_t"))
    assert unread >= 10
    trigger()
    assert spark.read.parquet(str(tmp_path / "lake")).select("id").distinct().count() == 60
    kept.conn.execute("update relay.readers set given_up_at = now() where reader = 'lake'")
    with pytest.raises(StreamingQueryException, match="given up by retention"):
        trigger()


def test_an_archive_holds_everything_until_it_has_written_it(kept: Outbox, tmp_path: Path) -> None:
    relayed(kept)
    archived = kept.settings(
        retention={"keep": "7d", "archive": "lake"},
        handlers={
            **kept.config()["handlers"],
            "lake": {"type": "spark", "path": str(tmp_path / "lake"), "start": "beginning"},
        },
    )
    turn(archived, days=30)
    assert kept.value("select count(*) from outbox_message_t") == 50
    kept.install_again(archived)
    turn(archived, days=30)
    assert kept.value("select count(*) from outbox_message_t") == 50
    kept.set_sinks("pg_current_snapshot()", "lake")
    # What it has written is gone: the outbox has the only copy.
    completeness.expect(kept.conn, "default", ["lake"])
    completeness.withdraw(kept.conn, "default", "lake")
    turn(archived, days=30)
    assert kept.value("select count(*) from outbox_message_t") == 50
    seen = Snapshot.parse(str(kept.value("select pg_current_snapshot()::text")))
    completeness.note(kept.conn, "default", "lake", seen, Completeness(seen, None))
    turn(archived, days=30)
    assert kept.value("select count(*) from outbox_message_t") == 0
    assert not [each for each in examine(archived) if each.subject == "retention"]
    lake = archived.spark_handlers["lake"].model_copy(update={"sql": "select id from events"})
    lacking = archived.model_copy(update={"handlers": {**archived.handlers, "lake": lake}})
    (found,) = [each for each in examine(lacking) if each.subject == "retention"]
    assert found.level is Severity.WARNING
    assert found.text.startswith("retention.archive: handlers.lake: its sql or transform leaves")


def test_the_command_partitions_a_new_outbox(database: str, tmp_path: Path) -> None:
    with Outbox(database) as outbox:
        config = outbox.config_file(tmp_path / "relay.yaml", **KEEP)
        said = administer(outbox, "init", "--config", str(config), "--partition", "1d").stdout
        assert "created partitions of public.outbox_message_t, one for each 1d" in said
        again = administer(outbox, "init", "--config", str(config), "--partition", "1d").stdout
        assert "everything exists already" in again
        said = relay("status", "--config", str(config)).stdout
        assert "reader default" in said
        assert "has read everything" in said


def test_a_constraint_that_a_killed_repair_has_left_is_removed(rotated: Outbox) -> None:
    settings = relayed(rotated)
    rotated.conn.execute(
        "alter table outbox_message_t_default add constraint relay_range check (c_ts < '2100-01-01') not valid"
    )
    turn(settings)
    assert rotated.value("select count(*) from pg_constraint where conname = 'relay_range'") == 0


def test_a_table_of_another_owner_has_retention_too(outbox: Outbox) -> None:
    owner = f"{outbox.slot}_shop"
    outbox.conn.execute(
        f"""
        create role {owner};
        grant {owner} to app_owner;
        create schema shop authorization {owner};
        set role {owner};
        grant usage on schema shop to relay;
        create table shop.events
            (id uuid primary key default gen_random_uuid(), host_id uuid, event_type text, payload jsonb);
        reset role
        """.encode()
    )
    try:
        of = {**outbox.config()["source"], "table": "shop.events", "mode": "poll"}
        settings = outbox.settings(group="shop", source=of, retention={"keep": "7d"})
        outbox.install_again(settings)
        outbox.install_again(settings)
        partition(settings, "1d", outbox.installer_dsn)
        outbox.conn.execute(
            "insert into shop.events (host_id, event_type, payload) select gen_random_uuid(), 'a', '{}'"
        )
        turn(settings, days=30)
        assert outbox.value("select count(*) from shop.events") == 1
        # A reader holds the events of all outboxes of the database.
        outbox.conn.execute("update relay.snapshots set snapshot = pg_current_snapshot()")
        turn(outbox.settings())
        with outbox.limited_role() as (_, dsn):
            turn(settings, days=30, dsn=dsn)
        assert outbox.value("select count(*) from shop.events") == 0
        assert outbox.column(
            "select distinct relowner::regrole::text from pg_class"
            " where relnamespace = 'shop'::regnamespace and relkind in ('r', 'p')"
        ) == [owner]
    finally:
        outbox.conn.execute(f"drop owned by {owner} cascade; drop role {owner}".encode())


def test_a_schema_that_is_migrated_still_removes_events(kept: Outbox) -> None:
    """With the rights of the outbox's owner, whose name needs quotes, for the role relay."""
    settings = relayed(kept)
    owner = f"{kept.slot}_Own-er"
    kept.conn.execute(
        f'create role "{owner}"; grant create on schema public to "{owner}"; grant "{owner}" to app_owner;'
        f'alter table outbox_message_t owner to "{owner}"; delete from relay.retained'.encode()
    )
    try:
        initialise(settings)
        (former, *_) = sorted(migrations.FORMER["source/002_retention.sql"])
        kept.conn.execute(
            "update relay.migrations set digest = %s where name = 'source/002_retention.sql'",
            (former,),
        )
        assert initialise(settings) == ["schema file source/002_retention.sql"]
        with kept.limited_role() as (_, dsn):
            turn(settings, days=30, dsn=dsn)
        assert kept.value("select count(*) from outbox_message_t") == 0
    finally:
        kept.conn.execute(
            f'reassign owned by "{owner}" to current_user; drop owned by "{owner}"; drop role "{owner}"'.encode()
        )


def test_names_that_need_quotes(database: str) -> None:
    with Outbox(database) as shop:
        shop.conn.execute(
            """
            create schema "Shop";
            create table "Shop"."Orders" (id uuid primary key default gen_random_uuid(), host_id uuid, event_type text,
                                          payload jsonb);
            create table seen (id uuid)
            """
        )
        shop.give('"Shop"."Orders"')
        settings = shop.settings(
            **KEEP,
            source={**shop.config()["source"], "table": "Shop.Orders"},
            handlers={"seen": {"type": "sql", "statement": "insert into seen values (%(id)s)"}},
            routes=[{"handlers": ["seen"]}],
        )
        initialise(settings)
        insert = 'insert into "Shop"."Orders" (host_id, event_type, payload) values (gen_random_uuid(), %s, %s)'
        for count in (1, 2):
            with relaying(settings):
                shop.conn.execute(insert, ("e", Jsonb({})))
                wait_until(lambda count=count: shop.value("select count(*) from seen") == count)  # type: ignore[misc]
                shop.wait_drained()
                shop.wait_compared()
            turn(settings, days=30)
            assert shop.value('select count(*) from "Shop"."Orders"') == 0
            partition(settings, "1d", shop.installer_dsn)
        # It is published as before.
        assert shop.value("select count(*) from pg_publication_tables") == 1
