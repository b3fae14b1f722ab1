"""What `relay init` and `relay uninstall` do, and how other schemas and other installations are recognised."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import psycopg
import psycopg.conninfo
import pytest
from typer.testing import CliRunner, Result

from relay.admin import install
from relay.admin.check import require
from relay.cli.app import app
from relay.config.loading import load
from relay.faults import ConfigurationError
from relay.model.events import FIELDS
from relay.store import migrations
from tests.outbox import (
    PROJECTION,
    Outbox,
    as_installer,
    event,
    host,
    initialise,
    relaying,
    uninstall,
    wait_until,
)
from tests.postgres import EmbeddedServer, Server, start_server
from tests.process import ROOT
from tests.roles import join_roles

COMMANDS = (
    ["status"],
    ["dlq", "list"],
    ["dlq", "export"],
    ["dlq", "replay", "--all"],
    ["offsets", "show"],
    ["offsets", "seek", "--to", "end"],
    ["offsets", "repartition", "--partitions", "4"],
)


def invoked(config: Path, *command: str, said: str | None = None) -> Result:
    """The result of a command, with the administrator whom `relay init` and `relay uninstall` need."""
    environment = {"RELAY_ADMIN_DSN": as_installer(load(config).source_dsn)}
    arguments = [*command, "--config", str(config)]
    return CliRunner().invoke(app, arguments, input=said, env=environment)


def refusal(config: Path, *command: str) -> str:
    """What a command that is refused for its configuration or surroundings says."""
    result = invoked(config, *command)
    assert isinstance(result.exception, ConfigurationError), result.output
    return str(result.exception)


def checked(config: Path) -> str:
    """The errors that `relay check` prints, and that `relay run` refuses to start with."""
    result = CliRunner().invoke(app, ["check", "--config", str(config)])
    assert result.exit_code == 2, result.output
    with pytest.raises(ConfigurationError) as refused:
        require(load(config))
    assert all(line in result.stderr for line in str(refused.value).splitlines())
    return result.stderr


@pytest.fixture
def config(outbox: Outbox, tmp_path: Path) -> Path:
    return outbox.config_file(tmp_path / "relay.yaml")


def edition_with_one_more_file(directory: Path) -> Path:
    """The folder `sql` of a later program, which has one more file for the target."""
    shutil.copytree(migrations.sql_directory(), directory)
    (directory / "target" / "002_more.sql").write_text(
        "alter table relay.groups add column more text;"
        "insert into relay.migrations (name) values ('target/002_more.sql');"
    )
    return directory


def test_a_database_without_relay_is_recognised_by_every_command(
    database: str, tmp_path: Path
) -> None:
    with Outbox(database) as outbox:
        config = outbox.config_file(tmp_path / "relay.yaml")
        words = f"source.dsn: relay is not installed in the database '{outbox.slot}'"
        for command in (*COMMANDS, ["publish", "--generate", "1"]):
            said = refusal(config, *command)
            assert "relay is not installed in the database" in said, command
            assert "run `relay init`" in said, command
        assert words in checked(config)


def test_an_older_schema_is_recognised_by_every_command_and_migrated(
    config: Path, outbox: Outbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = edition_with_one_more_file(tmp_path / "sql")
    monkeypatch.setattr(migrations, "sql_directory", lambda: directory)
    for command in COMMANDS:
        said = refusal(config, *command)
        assert "is older than this program" in said, command
        assert "(target/002_more.sql is missing): stop relay and run `relay init`" in said
    assert "is older than this program" in checked(config)
    assert initialise(outbox.settings()) == ["schema file target/002_more.sql"]
    assert CliRunner().invoke(app, ["check", "--config", str(config)]).exit_code == 0


def test_a_newer_schema_is_recognised_by_every_command(config: Path, outbox: Outbox) -> None:
    outbox.conn.execute(
        "insert into relay.migrations (name) values ('source/002_future.sql'), ('target/002_future.sql')"
    )
    for command in (*COMMANDS, ["publish", "--generate", "1"], ["init"]):
        said = refusal(config, *command)
        assert "is newer than this program" in said, command
        assert "002_future.sql): install the relay that it belongs to" in said
    assert "is newer than this program" in checked(config)


def test_an_edition_of_a_newer_program_is_left_alone(config: Path, outbox: Outbox) -> None:
    """Whoever rolls relay back must not be told to uninstall."""
    outbox.conn.execute(
        "update relay.migrations set digest = 'another' where name = 'target/001_target.sql'"
    )
    for command in (["status"], ["dlq", "list"], ["init"]):
        said = refusal(config, *command)
        assert "has an edition of target/001_target.sql that this program" in said, command
        assert "go back to the relay that installed it, or install a later one" in said
        assert "uninstall" not in said
    assert "go back to the relay that installed it" in checked(config)


def test_an_unreleased_schema_is_not_migrated(config: Path, outbox: Outbox) -> None:
    """Its files have other names than those of today."""
    outbox.conn.execute(
        "update relay.migrations set name = 'target/008_lock_partitions.sql' where name ~ 'target/001'"
    )
    outbox.conn.execute("alter table relay.migrations drop column digest")
    for command in (["status"], ["dlq", "list"], ["init"]):
        said = refusal(config, *command)
        assert "unreleased edition" in said, command
        assert "see docs/how-to/upgrade.md" in said
    assert "unreleased edition" in checked(config)


def test_a_role_that_may_not_see_the_schema_is_told_so(outbox: Outbox, tmp_path: Path) -> None:
    outbox.conn.execute(f"create role {outbox.slot}_weak login password 'x'".encode())
    dsn = outbox.dsn_as(f"{outbox.slot}_weak", "x")
    config = outbox.config_file(
        tmp_path / "relay.yaml", source={**outbox.config()["source"], "dsn": dsn}
    )
    try:
        for command in (["status"], ["dlq", "list"]):
            assert f"run `grant relay to {outbox.slot}_weak`" in refusal(config, *command)
        assert f"run `grant relay to {outbox.slot}_weak`" in checked(config)
    finally:
        outbox.conn.execute(
            f"drop owned by {outbox.slot}_weak; drop role {outbox.slot}_weak".encode()
        )


def test_publish_on_an_outbox_that_was_there_before_says_what_to_do(
    outbox: Outbox, tmp_path: Path
) -> None:
    outbox.conn.execute("create schema shop; create table shop.events ()")
    source = {**outbox.config()["source"], "table": "shop.events"}
    config = outbox.config_file(tmp_path / "relay.yaml", source=source)
    said = refusal(config, "publish", "--generate", "1")
    assert said.startswith("source.table: `relay publish` and relay.publish write to")
    assert "insert into shop.events with your own statements" in said


def planted(outbox: Outbox) -> bool:
    """Whether anything of relay is in the database."""
    return bool(
        outbox.value(
            "select to_regnamespace('relay') is not null"
            " or exists (select from pg_publication) or exists (select from pg_indexes where indexname ~ '_relay_')"
            " or exists (select from pg_replication_slots where database = current_database())"
        )
    )


OUTBOX = """
    create table public.outbox_message_t (
        id uuid primary key default gen_random_uuid(), host_id uuid not null, user_id uuid, aggregate_id varchar(64),
        aggregate_version bigint default 1, aggregate_type text, event_type text not null,
        event_ts timestamptz not null default current_timestamp, payload jsonb not null, metadata jsonb,
        c_offset bigint unique check (c_offset >= 0), transaction_id uuid, transaction_ordinal int,
        transaction_count int, note varchar(10) default 'x' check (length(note) < 11)
    );
"""
FUNCTION = (
    "create function public.evil() returns trigger language plpgsql as 'begin return new; end';"
)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            FUNCTION
            + "create trigger t before insert on outbox_message_t for each row execute function evil()",
            "has the trigger t",
        ),
        ("create rule r as on insert to outbox_message_t do also select 1", "has the rule r"),
        (
            "create policy p on outbox_message_t using (true)",
            "has the row security policy p",
        ),
        ("alter table outbox_message_t enable row level security", "has row level security"),
        (
            "alter table outbox_message_t add more text default query_to_xml('select 1', true, true, '')::text",
            "the default or generated value of more calls query_to_xml",
        ),
        (
            "create function f(jsonb) returns int immutable language sql as 'select 1';"
            "alter table outbox_message_t add more int generated always as (f(payload)) stored",
            "the default or generated value of more calls public.f",
        ),
        (
            "alter table outbox_message_t add constraint c check (pg_read_file(event_type) is not null)",
            "the constraint c calls pg_read_file",
        ),
        (
            """
            create function "F'"(jsonb) returns boolean language sql as 'select true';
            alter table outbox_message_t add constraint c check ("F'"(payload) and event_type <> 'x')
            """,
            """the constraint c calls public."F'\"""",
        ),
        (
            "create table base (id uuid not null); alter table outbox_message_t inherit base",
            "has the parent public.base",
        ),
        (
            "create domain d as text; alter table outbox_message_t add more d",
            "of the type public.d",
        ),
    ],
)
def test_an_outbox_with_code_of_somebody_else_is_not_adopted(
    database: str, change: str, words: str
) -> None:
    with Outbox(database) as outbox:
        outbox.conn.execute((OUTBOX + change).encode())
        outbox.give("outbox_message_t")
        with pytest.raises(ConfigurationError) as said:
            initialise(outbox.settings())
        assert words in str(said.value)
        assert not planted(outbox)


def test_an_outbox_that_was_there_before_is_taken_over(database: str) -> None:
    with Outbox(database) as outbox:
        outbox.conn.execute(OUTBOX.encode())
        outbox.give("outbox_message_t")
        outbox.install()
        outbox.publish(host(1), event(1))
        outbox.drain(outbox.settings())
        assert initialise(outbox.settings()) == []


@pytest.fixture
def mallory(database: str) -> Iterator[str]:
    """A role that may create tables and schemas, and would like to be more."""
    with Outbox(database) as outbox:
        name = f"{outbox.slot}_mallory"
        outbox.conn.execute(
            f"create role {name}; grant create on schema public to {name};"
            f"grant create on database {outbox.slot} to {name}".encode()
        )
        yield name
        outbox.conn.execute(f"drop owned by {name} cascade; drop role {name}".encode())


@pytest.mark.parametrize(
    ("statements", "words"),
    [
        (OUTBOX, "the table public.outbox_message_t belongs to {}"),
        ("create schema relay", "the schema relay belongs to {}"),
        (
            "reset role; create schema relay; grant create on schema relay to {0}; set role {0};"
            "create function relay.reserve_offsets(bigint) returns bigint language sql as 'select 1'",
            "the function relay.reserve_offsets(bigint) belongs to {}",
        ),
        (
            "reset role; create schema relay; grant create on schema relay to {0}",
            "{} may create objects in the schema relay: run `revoke create on schema relay from {}`",
        ),
    ],
    ids=["outbox", "schema", "function", "right to create"],
)
def test_what_somebody_else_owns_is_not_adopted(
    database: str, mallory: str, statements: str, words: str
) -> None:
    with Outbox(database) as outbox:
        outbox.conn.execute(
            f"set role {mallory}; {statements.format(mallory)}; reset role".encode()
        )
        outbox.conn.execute("create table before as select oid from pg_class")
        with pytest.raises(ConfigurationError) as said:
            initialise(outbox.settings())
        assert words.format(mallory, mallory) in str(said.value)
        outbox.conn.execute("drop table before")
        assert outbox.value("select to_regclass('relay.migrations') is null")
        outbox.conn.execute("drop schema if exists relay cascade")


def test_a_schema_of_that_name_that_is_not_relays_is_not_adopted(database: str) -> None:
    with Outbox(database) as outbox:
        outbox.conn.execute("create schema relay; create table relay.race ()")
        with pytest.raises(ConfigurationError, match="it holds race, but no table migrations"):
            initialise(outbox.settings())


def test_functions_run_as_a_role_that_can_do_just_what_they_do(outbox: Outbox) -> None:
    assert outbox.column(
        "select proname::text from pg_proc where pronamespace = 'relay'::regnamespace and prosecdef order by 1"
    ) == [
        *("advance", "advance_saga", "begin_saga", "cancel", "cancel_messages", "claim"),
        *("claim_reader", "complete"),
        *("declare_queue", "declare_reader", "declare_schedule", "declare_subscriber"),
        *(
            "drop_queue",
            "drop_reader",
            "drop_schedule",
            "drop_subscriber",
            "edit_message",
            "enqueue",
        ),
        *(
            "expire_readers",
            "expire_subscribers",
            "extend",
            "fail",
            "history",
            "hold_event",
            "holds_witness",
        ),
        *("keep_reader", "lease", "log_is_quiet", "move_messages", "note_message", "pause_queue"),
        "pause_schedule",
        *(
            "prune_history",
            "publish",
            "purge_queue",
            "queue_watchers",
            "read",
            "read_log",
        ),
        *(
            "rebuild_queue",
            "recent_witness",
            "release",
            "remove_orphans",
            "remove_witnesses",
            "requeue",
            "reschedule",
        ),
        *(
            "retry",
            "run_schedule",
            "seek",
            "share_lanes",
            "steer_saga",
            "subscribers_of",
            "take",
            "take_witness",
        ),
        *("tick", "watch_log", "watch_queue"),
    ]
    assert outbox.column(
        "select distinct pg_get_userbyid(proowner)::text from pg_proc"
        " where pronamespace = 'relay'::regnamespace and prosecdef"
    ) == ["relay_owner"]
    assert not outbox.value(
        "select rolcanlogin or rolsuper or rolreplication from pg_roles where rolname = 'relay_owner'"
    )
    with psycopg.connect(outbox.superuser_dsn, autocommit=True) as conn:
        conn.execute("set role relay_owner")
        for forbidden in (
            "update outbox_message_t set payload = '{}'",
            "delete from outbox_message_t",
            "select setval('relay.offsets', 1)",
            "create table relay.more ()",
            "select * from relay.dead_letter_queue",
        ):
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                conn.execute(forbidden.encode())


def test_who_acted_on_a_dead_letter_cannot_be_forged(outbox: Outbox) -> None:
    with outbox.limited_role() as (name, dsn), psycopg.connect(dsn, autocommit=True) as conn:
        for forged in ("acted_by", "acted_at"):
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                conn.execute(
                    f"insert into relay.dead_letter_actions (group_id, letters, action, {forged})"
                    " values ('default', '{1}', 'discard', '2000-01-01')".encode()
                )
        conn.execute("set role relay")
        conn.execute(
            "insert into relay.dead_letter_actions (group_id, letters, action) values ('default', '{1}', 'discard')"
        )
        acted = outbox.column("select acted_by from relay.dead_letter_actions")
        assert acted == [f"relay (in a session of {name})"]
        for more in (
            "update relay.dead_letter_actions set acted_by = 'x'",
            "delete from relay.dead_letter_actions",
        ):
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                conn.execute(more.encode())


def test_roles_have_what_the_mode_needs_and_installing_works_without_a_superuser(
    killable_server: Server,
) -> None:
    with psycopg.connect(killable_server.dsn(), autocommit=True) as conn:
        conn.execute("create role installer login createrole password 'p'")
        conn.execute("create role humble login password 'p'")
    killable_server.create_database("first")
    killable_server.create_database("second")

    def install(database: str, user: str | None, mode: str) -> str:
        admin = killable_server.dsn(database)
        dsn = psycopg.conninfo.make_conninfo(admin, user=user, password="p") if user else admin
        with Outbox(admin) as outbox:
            outbox.conn.execute(
                f"alter database {database} owner to {user or 'current_user'}".encode()
            )
            source = {"dsn": dsn, "slot": database, "publication": database, "mode": mode}
            initialise(outbox.settings(source=source))
            with outbox.conn.transaction():
                # Where nobody may make the roles, there are no publishers but the owner.
                outbox.publish(host(1), event(1))
            assert outbox.column("select c_offset from outbox_message_t") == [1]
            (owner,) = outbox.column(
                "select distinct pg_get_userbyid(proowner)::text from pg_proc"
                " where pronamespace = 'relay'::regnamespace and prosecdef"
            )
        return str(owner)

    def replicates() -> bool:
        with psycopg.connect(killable_server.dsn()) as conn:
            row = conn.execute(
                "select rolreplication from pg_roles where rolname = 'relay'"
            ).fetchone()
            return bool(row and row[0])

    assert install("first", "installer", "poll") == "relay_owner"
    assert install("second", "humble", "poll") == "humble"
    assert not replicates()
    killable_server.create_database("third")
    assert install("third", None, "auto") == "relay_owner"
    assert replicates()


def test_missing_columns_are_named_at_once_and_nothing_is_left(
    database: str, tmp_path: Path
) -> None:
    with Outbox(database) as outbox:
        outbox.conn.execute("create schema shop; create table shop.events (id uuid, payload jsonb)")
        outbox.give("shop.events")
        source = {**outbox.config()["source"], "table": "shop.events"}
        config = outbox.config_file(tmp_path / "relay.yaml", source=source)
        said = refusal(config, "init").splitlines()
        assert [line.split("no column ")[1].split(" for")[0] for line in said] == [
            "'host_id'",
            "'event_type'",
        ]
        assert not planted(outbox)
        outbox.conn.execute("create table outbox_message_t (id uuid, c_offset bigint)")
        outbox.give("outbox_message_t")
        own = outbox.config_file(tmp_path / "relay.yaml")
        assert len(refusal(own, "init").splitlines()) == len(FIELDS) - 3
        assert not planted(outbox)


@pytest.mark.parametrize("column", ["bigserial", "bigint generated always as identity"])
def test_a_sequence_that_does_not_give_the_order_of_insertion_is_refused(
    database: str, tmp_path: Path, column: str
) -> None:
    with Outbox(database) as outbox:
        outbox.conn.execute(
            "create schema shop; create table shop.events (id uuid default gen_random_uuid(), host_id uuid,"
            f" event_type text, payload jsonb, number {column})".encode()
        )
        outbox.conn.execute("alter sequence shop.events_number_seq cache 20")
        outbox.give("shop.events")
        config = outbox.config_file(
            tmp_path / "relay.yaml",
            source={
                **outbox.config()["source"],
                "table": "shop.events",
                "columns": {"c_offset": "number"},
            },
        )
        said = refusal(config, "init")
        assert "run `alter sequence shop.events_number_seq increment 1 cache 1`" in said
        assert not planted(outbox)
        outbox.conn.execute("alter sequence shop.events_number_seq increment 1 cache 1")
        initialise(load(config))
        outbox.conn.execute("alter sequence shop.events_number_seq cache 20")
        assert "shop.events_number_seq" in checked(config)


def test_the_advice_to_run_it_again_repeats_the_options(database: str, tmp_path: Path) -> None:
    with Outbox(database) as outbox:
        outbox.conn.execute(
            (
                OUTBOX + "insert into outbox_message_t (host_id, event_type, payload)"
                " values (gen_random_uuid(), 'x', '{}')"
            ).encode()
        )
        config = outbox.config_file(tmp_path / "relay.yaml")
        said = refusal(config, "init", "--from", "beginning", "--admin-dsn", database)
        assert f"`relay init --config {config} --admin-dsn … --from beginning` again" in said
        assert not planted(outbox)


def test_a_slot_that_cannot_be_made_leaves_nothing(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> bool:
        raise psycopg.errors.ConfigurationLimitExceeded("all replication slots are in use")

    with Outbox(database) as outbox:
        with monkeypatch.context() as broken:
            broken.setattr(install, "ensure_slot", fail)
            with pytest.raises(ConfigurationError, match="raise max_replication_slots"):
                initialise(outbox.settings())
            assert not planted(outbox)
            assert outbox.value("select to_regclass('outbox_message_t') is null")
        outbox.install()
        with monkeypatch.context() as broken:
            broken.setattr(install, "ensure_slot", fail)
            other = {"dsn": database, "slot": f"{outbox.slot}_b", "publication": f"{outbox.slot}_b"}
            with pytest.raises(ConfigurationError, match="raise max_replication_slots"):
                initialise(outbox.settings(source=other, group="b", partitions=4))
        assert outbox.column("select distinct group_id from relay.consumer_offsets") == ["default"]
        assert outbox.column("select pubname::text from pg_publication") == [outbox.slot]
        assert outbox.column("select slot from relay.streams") == [outbox.slot]
        outbox.publish(host(1), event(1))


def test_two_groups_cannot_share_a_slot(outbox: Outbox) -> None:
    with pytest.raises(
        ConfigurationError, match="is the slot of the group 'default': name another"
    ):
        initialise(outbox.settings(group="b"))
    assert outbox.column("select distinct group_id from relay.consumer_offsets") == ["default"]


def test_uninstalling_lists_every_group_and_orphans_no_slot(
    outbox: Outbox, tmp_path: Path, server: Server
) -> None:
    second = {
        "dsn": outbox.relay_dsn,
        "slot": f"{outbox.slot}_b",
        "publication": f"{outbox.slot}_b",
    }
    initialise(outbox.settings(source=second, group="b"))
    elsewhere = f"{outbox.slot}_other"
    outbox.conn.execute(b"create publication bystander for table projection")
    config = outbox.config_file(tmp_path / "relay.yaml")
    with Outbox(server.create_database(elsewhere)) as other:
        try:
            other.install()
            asked = invoked(config, "uninstall", said="n\n")
            assert asked.exit_code == 1
            assert asked.output.splitlines()[:7] == [
                "will drop group b: 8 partitions, 0 dead letters",
                "will drop group default: 8 partitions, 0 dead letters",
                f"will drop replication slot {outbox.slot} of the group default",
                f"will drop replication slot {outbox.slot}_b of the group b",
                f"will drop publication {outbox.slot}",
                f"will drop publication {outbox.slot}_b",
                f"will drop schema relay in the database {outbox.slot}",
            ]
            slots = (
                "select slot_name::text from pg_replication_slots where database ~ %s order by 1"
            )
            assert len(outbox.column(slots, (outbox.slot,))) == 3
            with relaying(outbox.settings()):
                outbox.wait_drained()
                assert "is running" in refusal(config, "uninstall", "--yes")
            assert invoked(config, "uninstall", "--yes").exit_code == 0
            assert outbox.column(slots, (outbox.slot,)) == [elsewhere]
            assert outbox.column("select pubname::text from pg_publication") == ["bystander"]
            assert "relay is not installed in" in refusal(config, "uninstall", "--yes")
        finally:
            server.drop_database(elsewhere)


def test_uninstalling_where_relay_never_was_drops_nothing_of_another_database(
    outbox: Outbox, tmp_path: Path, server: Server
) -> None:
    name = f"{outbox.slot}_never"
    source = {**outbox.config()["source"], "dsn": server.create_database(name)}
    config = outbox.config_file(tmp_path / "relay.yaml", source=source)
    try:
        said = refusal(config, "uninstall", "--yes")
        assert f"relay is not installed in '{name}'" in said
    finally:
        server.drop_database(name)
    assert outbox.value(
        "select count(*) from pg_replication_slots where slot_name = %s", (outbox.slot,)
    )


def test_uninstalling_without_the_right_says_how(outbox: Outbox, tmp_path: Path) -> None:
    outbox.conn.execute("create role weak login password 'x'")
    try:
        source = {
            **outbox.config()["source"],
            "dsn": outbox.dsn_as("weak", "x"),
        }
        config = outbox.config_file(tmp_path / "relay.yaml", source=source)
        said = refusal(config, "uninstall", "--yes")
        assert "permission denied for schema relay: connect as an administrator (`relay un" in said
    finally:
        outbox.conn.execute("drop role weak")


def test_offsets_go_on_after_uninstalling(outbox: Outbox) -> None:
    outbox.fill(3)
    settings = outbox.settings()
    assert uninstall(settings)
    initialise(settings)
    outbox.publish(host(1), event(1))
    assert outbox.column("select c_offset from outbox_message_t order by 1") == list(range(1, 17))
    outbox.drain(settings)
    assert outbox.column("select c_offset from projection") == [16]


def test_source_and_target_of_their_own_are_installed_and_uninstalled(
    database: str, server: Server
) -> None:
    with Outbox(database) as outbox, Outbox(server.create_database(f"{outbox.slot}_to")) as target:
        try:
            settings = outbox.settings(target={"dsn": target.relay_dsn})
            initialise(settings)
            assert target.value("select to_regclass('relay.log_counter') is null")
            assert uninstall(settings)[-2:] == [
                f"schema relay in the database {outbox.slot}",
                f"schema relay in the database {target.slot}",
            ]
            assert not planted(outbox)
            assert not planted(target)
            # Two addresses of one database, which an installation must not take for two.
            alias = f"{outbox.relay_dsn}?connect_timeout=9"
            initialise(outbox.settings(target={"dsn": alias}))
        finally:
            server.drop_database(target.slot)


def test_a_low_wal_level_is_the_same_to_init_and_check(tmp_path: Path) -> None:
    with (
        start_server({"wal_level": "replica"}) as server,
        Outbox(server.create_database("plain")) as outbox,
    ):
        outbox.conn.execute(PROJECTION)
        for mode, status in (("wal", 2), ("auto", 0), ("poll", 0)):
            source = {**outbox.config()["source"], "mode": mode}
            config = outbox.config_file(tmp_path / f"{mode}.yaml", source=source)
            for command in ("init", "check"):
                result = invoked(config, command)
                join_roles(outbox.conn)
                said = f"{result.output}{result.exception}"
                assert status == (0 if result.exit_code == 0 else 2), said
                warned = (
                    "wal_level=replica, relay needs logical" in said
                    and "or set source.mode: poll" in said
                )
                assert warned == (mode != "poll"), said
        outbox.publish(host(1), event(1))


def test_the_lines_of_the_documentation_leave_the_role_the_stream_only(
    killable_server: Server,
) -> None:
    if not isinstance(killable_server, EmbeddedServer):
        pytest.skip("needs the server's pg_hba.conf")
    app_dsn = killable_server.create_database("app")
    with Outbox(app_dsn) as outbox:
        outbox.install()
        # Before PostgreSQL 16, who installs may not let it replicate.
        outbox.conn.execute("alter role relay login replication password 'p'")

        def connects(dsn: str, replication: str = "false") -> bool:
            options = {"user": "relay", "password": "p", "replication": replication}
            try:
                psycopg.connect(psycopg.conninfo.make_conninfo(dsn, **options)).close()
            except psycopg.OperationalError:
                return False
            return True

        other = killable_server.dsn()
        assert connects(other)
        assert connects(app_dsn, replication="true")
        section = (ROOT / "docs" / "security.md").read_text().split("pg_hba.conf\n")[1]
        lines = section.split("```")[0].replace("10.0.0.5/32", "127.0.0.1/32")
        file = killable_server.cluster.data / "pg_hba.conf"
        file.write_text(lines + file.read_text())
        outbox.conn.execute("select pg_reload_conf()")
        wait_until(lambda: not connects(other))
        assert connects(app_dsn)
        assert connects(app_dsn, replication="database")
        assert not connects(app_dsn, replication="true")


def test_uninstalling_what_polls_leaves_slots_and_publications_of_others(database: str) -> None:
    with Outbox(database) as outbox:
        settings = outbox.settings(source={**outbox.config()["source"], "mode": "poll"})
        initialise(settings)
        outbox.conn.execute(f"create publication {outbox.slot}".encode())
        outbox.conn.execute(
            "select pg_create_logical_replication_slot(%s, 'pgoutput')", (outbox.slot,)
        )
        assert not {"slot", "publication"} & {
            word for line in uninstall(settings) for word in line.split()
        }
        assert outbox.column(
            "select slot_name::text from pg_replication_slots where database = current_database()"
        )
        assert outbox.column("select pubname::text from pg_publication") == [outbox.slot]


def test_an_unreleased_edition_is_uninstalled_with_the_slot_of_the_configuration(
    outbox: Outbox,
) -> None:
    outbox.conn.execute("drop table relay.streams; drop table relay.suspects")
    settings = outbox.settings()
    assert uninstall(settings)
    assert not planted(outbox)


def at_once(*calls: Callable[[], object]) -> list[object]:
    """Call them side by side; the result of each."""
    with ThreadPoolExecutor(len(calls)) as threads:
        return [each.result(60) for each in [threads.submit(call) for call in calls]]


def test_two_at_once_in_one_database_install_once(database: str) -> None:
    with Outbox(database) as outbox:
        done = at_once(*[partial(initialise, outbox.settings())] * 4)
        assert sorted(map(bool, done)) == [False, False, False, True]


def test_several_databases_of_a_server_are_installed_at_once() -> None:
    """Roles belong to the whole server."""
    with start_server() as server:
        outboxes = [Outbox(server.create_database(f"d{number}")) for number in range(4)]
        at_once(*[partial(initialise, outbox.settings()) for outbox in outboxes])
        for outbox in outboxes:
            with outbox:
                assert not at_once(partial(initialise, outbox.settings()))[0]


def test_source_and_target_may_be_two_databases_of_a_fresh_server() -> None:
    """Neither transaction of the installation may wait for the other to make the role, and a failure leaves none."""
    with (
        start_server() as server,
        Outbox(server.create_database("source")) as outbox,
        Outbox(server.create_database("target")) as target,
    ):
        settings = outbox.settings(target={"dsn": target.relay_dsn})
        target.conn.execute("create schema relay; create view relay.groups as select 1 as group_id")
        with pytest.raises(ConfigurationError):
            initialise(settings)
        target.conn.execute("drop schema relay cascade")
        roles = "select count(*) from pg_roles where rolname like 'relay%%'"
        assert outbox.column(roles) == [0]
        assert "schema file target/001_target.sql" in initialise(settings)
        assert outbox.column(roles) == [5]
        assert initialise(settings) == []
        for each in (outbox, target):
            assert each.column(
                "select distinct proowner::regrole::text from pg_proc"
                " where pronamespace = 'relay'::regnamespace and prosecdef"
            ) == ["relay_owner"]


def test_what_is_undone_is_nothing_that_another_installation_has_built_on(database: str) -> None:
    """The first installation waits for its slot, and is interrupted, while the second runs."""
    slot = "select pg_cancel_backend(pid) from pg_stat_activity where query ~ '^select lsn::text from pg_create_log'"
    waited: list[str] = []
    with Outbox(database) as outbox, psycopg.connect(database) as publisher:
        publisher.execute("select pg_current_xact_id()")
        other = outbox.settings(group="b", source={**outbox.config()["source"], "mode": "poll"})
        with ThreadPoolExecutor(2) as threads:
            first = threads.submit(initialise, outbox.settings())
            wait_until(lambda: bool(outbox.column(slot.replace("cancel_backend", "blocking_pids"))))
            second = threads.submit(initialise, other, warn=waited.append)
            wait_until(lambda: bool(waited))
            outbox.column(slot)
            with pytest.raises(psycopg.errors.QueryCanceled):
                first.result(30)
            assert second.result(30)
        assert waited == [
            f"waiting for another `relay init` or `relay uninstall` of {outbox.slot!r}"
        ]
        outbox.publish(host(1), event(1))
        assert outbox.column("select distinct group_id from relay.consumer_offsets") == ["b"]


ADOPTED = """
    create table public.events (id uuid, host_id uuid, event_type text, payload jsonb, c_offset bigint);
"""


def test_publishers_do_not_wait_for_installing_again(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(install, "LOCK_SECONDS", 0.5)
    published = "insert into events values (gen_random_uuid(), gen_random_uuid(), 'x', '{}')"
    with Outbox(database) as outbox, psycopg.connect(database) as publisher:
        outbox.conn.execute(ADOPTED)
        outbox.give("events")
        settings = outbox.settings(
            source={**outbox.config()["source"], "table": "public.events", "mode": "poll"}
        )
        publisher.execute(published)
        with pytest.raises(ConfigurationError, match=r"run `relay init` again when it has ended"):
            initialise(settings)
        assert not planted(outbox)
        publisher.commit()
        assert initialise(settings)
        publisher.execute(published)
        assert not initialise(settings)


_VOLATILE = (
    *("number", "notes_from", "snapshot", "since", "confirmed_lsn", "polled_lsn"),
    *("id", "witness", "lsn", "c_xid"),
)


def _rows(outbox: Outbox) -> dict[str, list[str]]:
    """What the tables of relay have, with names, times and positions that differ from database to database left out."""
    found: dict[str, list[str]] = {}
    for table in outbox.column(
        "select relid::regclass::text from pg_stat_user_tables where schemaname in ('relay', 'public') order by 1"
    ):
        rows = outbox.column(f"select to_jsonb(t) from {table} as t")
        for row in rows:
            for name in row:
                if row[name] is not None and (name in _VOLATILE or name.endswith("_at")):
                    row[name] = "…"
        found[table] = sorted(json.dumps(row).replace(outbox.slot, "NAME") for row in rows)
    return found


def test_the_outbox_of_a_test_is_as_relay_init_makes_it(outbox: Outbox, database: str) -> None:
    """It is a copy of another, and nothing of what `relay init` writes may be missing in it."""
    about = {
        "slots": "select (plugin, two_phase, wal_status, confirmed_flush_lsn is null)::text"
        " from pg_replication_slots where slot_name = %s",
        "publications": "select (pubinsert, pubupdate, pubdelete, pubtruncate, pubviaroot)::text"
        " from pg_publication where pubname = %s",
        "published": "select (to_jsonb(p) - 'pubname')::text from pg_publication_tables p where pubname = %s",
        "rights": "select datacl::text from pg_database where datname = %s",
    }
    with Outbox(database) as made:
        made.install()
        assert _rows(outbox) == _rows(made)
        for what, query in about.items():
            assert outbox.column(query, (outbox.slot,)) == made.column(query, (made.slot,)), what
