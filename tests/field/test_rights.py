"""What works only as superuser: rights that a role of relay needs and does not have."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence
from contextlib import closing
from datetime import UTC, datetime
from typing import Any

import psycopg
import pytest
from psycopg.types.json import Jsonb

from relay.admin.check import examine
from relay.admin.findings import Severity
from relay.config.settings import Settings
from relay.faults import ConfigurationError
from relay.retention.schedule import Schedule
from relay.store import migrations, own_rights
from relay.store.connections import connect
from relay.store.migrations import Side
from tests.outbox import Outbox, event, host, initialise, relaying, wait_until
from tests.postgres import EmbeddedServer, Server
from tests.roles import Role, join_roles


def test_retention_removes_done_messages_as_the_role_relay(outbox: Outbox) -> None:
    """Locking rows needs the right to update them, which the role relay does not have.

    cockroachdb/cockroach#57282, fireworq/fireworq#98
    """
    outbox.conn.execute(
        """
        select relay.declare_queue('mail', null, keep_done => '1 hour');
        select relay.enqueue('mail', '{}', host_id => 'h') from generate_series(1, 3);
        select from relay.take('mail', 3);
        update relay.queue_done set done_at = done_at - interval '2 hours'
         where id <> (select min(id) from relay.queue_done)
        """
    )
    with outbox.limited_role() as (_, dsn), closing(connect(dsn)) as conn:
        retention = Schedule(outbox.settings(), lambda: None, lambda _: datetime.now(UTC))
        retention.retain(conn, conn)
    assert retention.condition.fault is None
    assert outbox.value("select count(*) from relay.queue_done") == 1


PRINTED = """
    select case when kind in ('function', 'procedure') then to_regprocedure(name)::text
                when kind = 'schema' then to_regnamespace(name)::text
                     else to_regclass(name)::text end
      from (select %s::text as kind, %s::text as name) as of_object
"""
GRANTED = """
    select grantee::regrole::text, name, lower(privilege_type)
      from (select oid::regclass::text, relowner, relacl from pg_class where relnamespace <> 'pg_catalog'::regnamespace
             union all select attrelid::regclass::text, 0, attacl from pg_attribute
             union all select oid::regprocedure::text, proowner, proacl from pg_proc
             union all select oid::regnamespace::text, 0, nspacl from pg_namespace) as of_object (name, owner, acl),
           aclexplode(acl)
     where grantee <> 0 and grantee::regrole::text like 'relay%' and grantee <> owner
"""
SIDES: tuple[Side, ...] = ("source", "outbox", "target")


def test_the_rights_that_are_checked_are_those_that_were_granted(outbox: Outbox) -> None:
    """Of each role, on each kind of object."""
    checked = {
        (each.role, outbox.value(PRINTED, (each.kind, each.name)), each.privilege)
        for each in own_rights.granted(SIDES)
    }
    # What PUBLIC has.
    implied = {
        ("public", "relay.offsets", "usage"),
        ("public", "relay.this_call()", "execute"),
        *((role, "public", "usage") for role in ("relay", "relay_publisher", "relay_owner")),
    }
    assert checked - implied == set(outbox.conn.execute(GRANTED).fetchall())
    assert list(own_rights.lacking(outbox.conn, SIDES)) == []


def lost(outbox: Outbox) -> list[str]:
    """What `relay check` says of rights, as relay."""
    return [
        each.text
        for each in examine(outbox.settings())
        if each.subject == "rights" and each.level is not Severity.OK
    ]


def publish(outbox: Outbox) -> None:
    with psycopg.connect(outbox.dsn_of(Role.PUBLISHER)) as conn:
        conn.execute("select relay.publish(%s, null, %s)", (host(1), Jsonb([event()])))


def work(outbox: Outbox) -> None:
    with psycopg.connect(outbox.dsn_of(Role.WORKER)) as conn:
        conn.execute("select relay.declare_queue('mail', null)")
        conn.execute("select relay.enqueue('mail', '{}', host_id => 'h')")
        assert len(conn.execute("select from relay.take('mail', 9)").fetchall()) == 1


def read(outbox: Outbox) -> None:
    with psycopg.connect(outbox.dsn_of(Role.READER)) as conn:
        conn.execute("select relay.declare_reader('billing', start => 'beginning')")
        conn.execute("select from relay.read('billing')")


def work_all(outbox: Outbox) -> None:
    """Publish, work and read, each as the role that may."""
    publish(outbox)
    work(outbox)
    read(outbox)


MADE_AGAIN = """
    create table made_again (like outbox_message_t including all);
    drop table outbox_message_t cascade;
    alter table made_again rename to outbox_message_t;
    alter table outbox_message_t owner to app_owner;
"""
LOSSES: dict[str, tuple[str, Callable[[Outbox], None], str]] = {
    "a publisher's right": (
        "revoke execute on function relay.publish(uuid, uuid, jsonb, uuid) from relay_publisher",
        publish,
        "source.dsn: relay.publish: the role relay_publisher has no right to execute on function relay.publish",
    ),
    "a publisher's schema": (
        "revoke usage on schema relay from relay_publisher",
        publish,
        "source.dsn: the service: the role relay_publisher has no right to usage on schema relay",
    ),
    "a worker's right": (
        "revoke execute on function relay.take(text, int, relay.call) from relay_worker",
        work,
        "source.dsn: work queues: the role relay_worker has no right to execute on function relay.take",
    ),
    "a right of the functions of queues": (
        "revoke insert on relay.queue_messages from relay_owner",
        work,
        "source.dsn: work queues: the role relay_owner has no right to insert on relay.queue_messages",
    ),
    "a right of the functions of readers": (
        "revoke select on public.outbox_message_t from relay_owner",
        read,
        "source.dsn: readers: the role relay_owner has no right to select on public.outbox_message_t",
    ),
}


@pytest.mark.parametrize("loss", LOSSES)
def test_a_right_that_was_lost_is_found_and_given_again(outbox: Outbox, loss: str) -> None:
    """`relay.publish` was refused to everybody, `relay check` was clean, and `relay init` said that all is there.

    graphile/worker#151, #25: which rights a worker and who enqueues need is found out one refusal after the other.
    """
    change, refused, said = LOSSES[loss]
    assert lost(outbox) == []
    outbox.conn.execute(change.encode())
    with pytest.raises(psycopg.errors.InsufficientPrivilege):
        refused(outbox)
    (found, *_) = [each for each in lost(outbox) if each.startswith(said)]
    assert "run `relay init`, which grants it again, or `grant " in found
    done = initialise(outbox.settings())
    assert [each for each in done if each.startswith("rights of the role relay_")]
    assert initialise(outbox.settings()) == []
    assert lost(outbox) == []
    work_all(outbox)


def test_the_printed_cure_gives_the_right(outbox: Outbox) -> None:
    outbox.conn.execute("revoke insert on relay.queue_messages from relay_owner")
    (found,) = lost(outbox)
    (_, _, cure, *_) = found.split("`")[1:]
    outbox.conn.execute(cure.encode())
    assert lost(outbox) == []


def test_relay_runs_on_an_outbox_that_was_made_again(outbox: Outbox) -> None:
    """With the command that `relay check` names; events go on after those of the former table."""
    # As PostgreSQL 15 and later have it by default.
    outbox.conn.execute("revoke create on schema public from public")
    settings = outbox.settings()
    outbox.publish(host(1), event(1))
    outbox.drain(settings)
    outbox.conn.execute(MADE_AGAIN.encode())
    with psycopg.connect(outbox.installer_dsn, autocommit=True) as administrator:
        (cure,) = [
            each.text.split("`")[1] for each in examine(settings) if each.subject == "publication"
        ]
        administrator.execute(cure.encode())
    with pytest.raises(psycopg.errors.InsufficientPrivilege):
        publish(outbox)
    of_owner = (
        "relay.publish: the role relay_owner has no right to insert on public.outbox_message_t"
    )
    assert any(of_owner in each for each in lost(outbox))
    initialise(settings)
    assert [each.text for each in examine(settings) if each.level is not Severity.OK] == []
    with relaying(settings):
        publish(outbox)
        wait_until(lambda: outbox.value("select count(*) from projection") == 2)


def test_a_retained_table_of_another_owner_is_found(outbox: Outbox) -> None:
    """Functions of retention run with the rights of the table's owner, who may change."""
    keep: dict[str, Any] = {"retention": {"keep": "7d"}}
    initialise(outbox.settings(**keep))
    owner = f"{outbox.slot}_shop"
    outbox.conn.execute(
        f"create role {owner}; grant {owner} to app_owner; grant create on schema public to {owner};"
        f"alter table outbox_message_t owner to {owner}".encode()
    )
    try:
        (found,) = lost(outbox)
        assert found == (
            f"source.dsn: retention: its functions do not run with the rights of {owner}, who owns "
            f"public.outbox_message_t: run `relay init` as {owner}, or as a member of it"
        )
        assert "rights of retention to public.outbox_message_t" in initialise(
            outbox.settings(**keep)
        )
        assert lost(outbox) == []
        work_all(outbox)
    finally:
        outbox.conn.execute(
            f"reassign owned by {owner} to app_owner; drop owned by {owner}".encode()
        )
        outbox.conn.execute(f"drop role {owner}".encode())


def program(server: Server, name: str) -> str:
    """A program of the server, which containers do not have outside."""
    if not isinstance(server, EmbeddedServer) or not server.has(name):
        pytest.skip(f"{name} is not here")
    return str(server.cluster._bin / name)


def restored(server: Server, of: Outbox, options: Sequence[str]) -> Outbox:
    """A copy of an outbox on another server, by pg_dump and pg_restore, as who may create roles."""
    dump, restore = program(server, "pg_dump"), program(server, "pg_restore")
    made = Outbox(server.create_database("restored"))
    # What the superuser has created in the schema public is for handlers.
    made.conn.execute("alter schema public owner to app_owner")
    dumped = subprocess.run([dump, "-Fc", "-d", of.superuser_dsn], check=True, capture_output=True)
    subprocess.run(
        [restore, *options, "-d", made.installer_dsn],
        input=dumped.stdout,
        # It says that roles are not there.
        check=False,
        capture_output=True,
    )
    return made


@pytest.mark.parametrize("options", [["-x", "-O"], []])
def test_a_dump_is_restored_where_the_roles_are_not(
    outbox: Outbox, killable_server: Server, options: list[str]
) -> None:
    """Roles belong to the server, and no dump of a database has them.

    pgadmin-org/pgadmin4#1977, supabase/cli#3531, cloudnative-pg/cloudnative-pg#5004
    """
    with restored(killable_server, outbox, options) as copy:
        settings = copy.settings()
        source = copy.config()["source"] | {"mode": "poll"}
        settings = copy.settings(source=source)
        done = initialise(settings)
        join_roles(copy.conn)
        assert "role relay_owner" in done
        assert "functions of relay's are not for everybody" in done
        assert lost(copy) == []
        work_all(copy)
        definers = "select distinct proowner::regrole::text from pg_proc where prosecdef"
        assert copy.column(definers) == ["relay_owner"]
        for name in ("take(text, int, relay.call)", "prune_history(text, timestamptz, int)"):
            assert not copy.value(
                "select has_function_privilege('public', %s, 'execute')", (f"relay.{name}",)
            )


def test_an_installer_that_may_not_create_roles_is_told_what_is_missing(
    killable_server: Server,
) -> None:
    """On each run, until somebody has created them."""
    with Outbox(killable_server.create_database("humble")) as outbox:
        outbox.conn.execute("alter role app_owner nocreaterole")
        said: list[str] = []
        settings = outbox.settings(source=outbox.config()["source"] | {"mode": "poll"})
        for _ in range(2):
            said.clear()
            initialise(settings, warn=said.append)
            assert {line.partition(" (")[0] for line in said} == {
                f"source.dsn: {who}: the server has no role {name}"
                for name, who in own_rights.ROLES.items()
            }
            assert len(said) == len(own_rights.ROLES)
            assert (
                "run `create role relay nologin` as an administrator, then `relay init`" in said[0]
            )
        for name in own_rights.ROLES:
            outbox.conn.execute(f"create role {name}".encode())
        join_roles(outbox.conn)
        outbox.conn.execute("grant relay_owner to app_owner")
        (denied,) = [each.text for each in examine(settings) if each.subject == "schema"][:1]
        assert denied == (
            "source.dsn: permission denied for schema relay: run `relay init`, which gives the role relay its rights "
            "again"
        )
        said.clear()
        initialise(settings, warn=said.append)
        assert said == []
        assert lost(outbox) == []
        work_all(outbox)


@pytest.mark.server(16)
def test_functions_that_stay_with_an_administrator_are_named(killable_server: Server) -> None:
    """Since PostgreSQL 16 CREATEROLE is no right over roles that another has made.

    cyrilgdn/terraform-provider-postgresql#407, fazer-ai/agents#195
    """
    with Outbox(killable_server.create_database("first")) as outbox:
        for name in own_rights.ROLES:
            outbox.conn.execute(f"create role {name}".encode())
        said: list[str] = []
        initialise(outbox.settings(), warn=said.append)
        join_roles(outbox.conn)
        assert [line for line in said if "the role relay may not replicate (" in line] == [
            "source.dsn: the role relay may not replicate (permission denied to alter role): run "
            "`alter role relay replication` as a superuser, or let relay log in as a role that may"
        ]
        owned = "runs with the rights of its owner, app_owner, and not of relay_owner"
        assert len([line for line in said if owned in line]) == 1
        (found,) = lost(outbox)
        assert owned in found
        assert found.endswith(
            "run `grant relay_owner to app_owner` as a superuser, or as a role with the ADMIN OPTION of relay_owner, "
            "then `relay init` as app_owner"
        )
        work_all(outbox)
        outbox.conn.execute("grant relay_owner to app_owner; alter role relay replication")
        said.clear()
        assert "functions of the role relay_owner" in initialise(
            outbox.settings(), warn=said.append
        )
        assert said == []
        assert lost(outbox) == []
        work_all(outbox)


@pytest.mark.server(15)  # before, the owner of a database does not own its schema public
def test_a_database_that_gives_everybody_nothing(database: str) -> None:
    """What PostgreSQL gives to PUBLIC is taken by who hardens a server: relay and its users need none of it.

    CrunchyData/postgres-operator#3568, NikolayS/PgQue#96
    """
    with Outbox(database) as outbox:
        outbox.conn.execute(
            f"""
            revoke all on database {outbox.slot} from public;
            grant connect on database {outbox.slot} to app_owner, app_relay, app_publisher, app_worker, app_reader;
            revoke all on schema public from public;
            grant usage, create on schema public to app_owner;
            alter default privileges for role app_owner revoke execute on functions from public;
            alter default privileges for role app_owner revoke usage on types from public
            """.encode()
        )
        outbox.install()
        settings = outbox.settings()
        assert [each.text for each in examine(settings) if each.level is not Severity.OK] == []
        with relaying(settings):
            work_all(outbox)
            outbox.wait_handled()
        assert outbox.value("select count(*) from projection") == 1


def errors(settings: Settings) -> list[str]:
    return [each.text for each in examine(settings) if each.level is Severity.ERROR]


@pytest.mark.server(15)  # before, the owner of a database does not own its schema public
def test_a_schema_that_is_taken_from_everybody(outbox: Outbox) -> None:
    outbox.conn.execute("revoke all on schema public from public, relay, relay_owner")
    found = [each.text for each in examine(outbox.settings())]
    assert any("no right to usage on schema public" in each for each in found)
    assert errors(outbox.settings())
    initialise(outbox.settings())
    assert errors(outbox.settings()) == []
    outbox.conn.execute("grant usage on schema public to relay")
    with relaying(outbox.settings()):
        work_all(outbox)
        outbox.wait_handled()


OWN = """
    create schema shop;
    create table shop.events (id uuid default gen_random_uuid(), host_id uuid, event_type text, payload jsonb)
"""


@pytest.mark.parametrize(
    "change", ["revoke select on shop.events from relay", "revoke usage on schema shop from relay"]
)
def test_a_table_that_is_published_and_not_granted(outbox: Outbox, change: str) -> None:
    """It is in the publication, so the stream brings it: what polls it, fails.

    sequinstream/sequin#316, linuxfoundation/crowd.dev#3326, microsoft/DacFx#658, uktrade/pg-bulk-ingest#113
    """
    outbox.conn.execute(OWN)
    source = outbox.config()["source"] | {"table": "shop.events", "slot": f"{outbox.slot}_shop"}
    source["publication"] = source["slot"]
    settings = outbox.settings(source=source, group="shop")
    outbox.install_again(settings)
    assert errors(settings) == []
    outbox.conn.execute(change.encode())
    (said,) = errors(settings)
    assert "run `relay init`" in said or "grant SELECT on shop.events" in said
    outbox.install_again(settings)
    assert errors(settings) == []
    outbox.conn.execute("select pg_drop_replication_slot(%s)", (source["slot"],))


def test_an_installer_that_does_not_own_the_table_is_told_whose_it_is(outbox: Outbox) -> None:
    """planetscale/pgcopydb#59, risingwavelabs/risingwave#20625, #20689, #8471, debezium/debezium#2163"""
    outbox.conn.execute(OWN)
    outbox.conn.execute("grant usage on schema shop to app_owner")
    source = outbox.config()["source"] | {"table": "shop.events"}
    with pytest.raises(ConfigurationError) as refused:
        initialise(outbox.settings(source=source, group="shop"))
    owner = outbox.value("select current_user")
    assert f"shop.events belongs to {owner}: connect as {owner}, as a member" in str(refused.value)


def test_a_trigger_of_users_that_may_not_publish(outbox: Outbox) -> None:
    """It runs with their rights; with those of its owner, a publisher, it publishes. supabase/supabase#35600"""
    insert = "insert into orders default values"
    outbox.conn.execute(
        """
        create table orders (id uuid default gen_random_uuid());
        grant insert on orders to app_reader;
        create function ordered() returns trigger language plpgsql as $$ begin
            perform relay.publish(new.id, null, jsonb_build_array(jsonb_build_object(
                'event_type', 'order.placed', 'aggregate_type', 'Order', 'aggregate_id', new.id,
                'payload', '{}'::jsonb)));
            return null;
        end $$;
        alter function ordered() owner to app_publisher;
        create trigger ordered after insert on orders for each row execute function ordered()
        """
    )
    with psycopg.connect(outbox.dsn_of(Role.READER), autocommit=True) as user:
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            user.execute(insert)
        outbox.conn.execute("alter function ordered() security definer")
        user.execute(insert)
    assert outbox.value("select count(*) from outbox_message_t") == 1


def test_a_restored_schema_that_belongs_to_another_administrator(outbox: Outbox) -> None:
    """After a restore by the superuser the next migration failed. PlexTrac/plextrac-manager-util#54"""
    outbox.conn.execute(
        """
        do $$
        declare
            each regclass;
        begin
            for each in select oid from pg_class
                         where (relnamespace = 'relay'::regnamespace or relname = 'outbox_message_t')
                           and relkind in ('r', 'p', 'v') loop
                execute format('alter table %s owner to postgres', each);
            end loop;
        end $$
        """
    )
    work_all(outbox)
    (former, *_) = sorted(migrations.FORMER["target/001_target.sql"])
    outbox.conn.execute(
        "update relay.migrations set digest = %s where name = 'target/001_target.sql'", (former,)
    )
    with pytest.raises(
        ConfigurationError, match=r"must be owner of|permission denied for"
    ) as refused:
        initialise(outbox.settings())
    assert "belongs to postgres: connect as postgres" in str(refused.value)
    assert lost(outbox) == []
