"""What a server, a database, a role or a connection string can set, and whose code a name means, changes nothing."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from typing import Any

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import make_conninfo

from relay.admin import check, status
from relay.admin.findings import Severity
from relay.client import schema
from relay.config.handlers import JdbcSettings
from relay.config.settings import Settings
from relay.faults import ConfigurationError
from relay.model.events import Transaction
from relay.retention.schedule import Schedule
from relay.spark.writers.jdbc import JdbcWriter
from relay.store import session_settings
from relay.store.connections import connect
from relay.store.session_settings import SessionKind
from tests.outbox import APPEND, PROJECTION, Outbox, event, host, initialise, relaying, wait_until
from tests.postgres import Server
from tests.webhook import Answer, Webhook

TIMES = {
    "transaction_timeout": "300ms",
    "idle_session_timeout": "300ms",
    "idle_in_transaction_session_timeout": "300ms",
    "statement_timeout": "250ms",
    "lock_timeout": "1ms",
    "tcp_user_timeout": "1ms",
}
FORMS = {
    "datestyle": "SQL, DMY",
    "timezone": "Asia/Kathmandu",
    "intervalstyle": "iso_8601",
    "bytea_output": "escape",
    "extra_float_digits": "-15",
    "xmlbinary": "hex",
    "quote_all_identifiers": "on",
    "client_encoding": "latin1",
    "standard_conforming_strings": "off",
    "backslash_quote": "off",
    "array_nulls": "off",
    "transform_null_equals": "on",
    "client_min_messages": "debug5",
}
TRANSACTIONS = {
    "default_transaction_isolation": "serializable",
    "default_transaction_deferrable": "on",
    "synchronous_commit": "off",
    "session_replication_role": "replica",
    "search_path": "nowhere, pg_catalog",
    "plan_cache_mode": "force_generic_plan",
    "enable_seqscan": "off",
    "enable_indexscan": "off",
    "jit_above_cost": "0",
    "check_function_bodies": "off",
    "plpgsql.extra_errors": "all",
}
GROUPS = {"times": TIMES, "forms": FORMS, "transactions": TRANSACTIONS}


def absent(outbox: Outbox) -> set[str]:
    """The settings that came with a later version of PostgreSQL."""
    return {"transaction_timeout"} if outbox.conn.info.server_version < 170_000 else set()


@contextmanager
def role_with(outbox: Outbox, settings: Mapping[str, str]) -> Iterator[str]:
    """The DSN of a role that may do everything and has these settings."""
    name = sql.Identifier(f"{outbox.slot}_set")
    outbox.conn.execute(sql.SQL("create role {} superuser login password 'p'").format(name))
    try:
        for setting, value in settings.items():
            if setting in absent(outbox):
                continue
            values = sql.SQL(value) if setting == "search_path" else sql.Literal(value)
            outbox.conn.execute(
                sql.SQL("alter role {} set {} = {}").format(name, sql.Identifier(setting), values)
            )
        yield outbox.dsn_as(f"{outbox.slot}_set")
    finally:
        outbox.conn.execute(
            sql.SQL("reassign owned by {0} to postgres; drop owned by {0}; drop role {0}").format(
                name
            )
        )


def job(outbox: Outbox, webhook: Webhook, dsn: str, mode: str) -> Settings:
    """Settings with all kinds of sessions."""
    return outbox.settings(
        source={"dsn": dsn, "slot": outbox.slot, "publication": outbox.slot, "mode": mode},
        target={"dsn": dsn},
        poll={"wait_period_ms": 20},
        handlers={
            "projection": {
                "type": "sql",
                "statement": APPEND.replace("projection", "public.projection"),
            },
            "counted": {
                "type": "sql",
                "each": "batch",
                "statement": "insert into public.counted select count(*) from batch",
            },
            "hook": {"type": "http", "url": webhook.url, "retry": {"wait": 0.1, "max_wait": 0.1}},
        },
        routes=[{"handlers": ["projection", "counted", "hook"]}],
        retention={"keep": "1d"},
    )


@pytest.mark.parametrize(
    ("group", "mode"),
    [
        ("times", "auto"),
        pytest.param("times", "poll", marks=pytest.mark.rare),
        ("forms", "poll"),
        ("transactions", "auto"),
    ],
)
def test_what_a_role_sets_changes_nothing(
    database: str, group: str, mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    with Outbox(database) as outbox, ExitStack() as stack:
        outbox.conn.execute(PROJECTION + "; create table counted (events bigint)")
        dsn = stack.enter_context(role_with(outbox, GROUPS[group]))
        answers = iter([Answer(503)])
        webhook = stack.enter_context(Webhook(lambda headers, body: next(answers, Answer())))
        settings = job(outbox, webhook, dsn, mode)
        # Longer than any of the times.
        outbox.conn.execute(
            "create function slow() returns event_trigger language plpgsql as"
            " $$ begin perform pg_catalog.pg_sleep(0.4); end $$;"
            "create event trigger slow on ddl_command_end when tag in ('CREATE SCHEMA')"
            " execute function slow()"
        )
        initialise(settings)
        assert not [each for each in check.examine(settings) if each.level is Severity.ERROR]
        with relaying(settings):
            outbox.publish(host(1), event(1))
            outbox.wait_handled()
            time.sleep(0.5)
            outbox.publish(host(1), event(-1))
            outbox.publish(
                host(3),
                event(3, deliver_at=outbox.value("select (now() + interval '0.3 s')::text")),
            )
            outbox.publish(host(1), event(4))
            outbox.publish(host(2), event(5))
            outbox.wait_handled()
            wait_until(lambda: len(set(webhook.ids())) == 5)
            status.read(settings)
        outbox.assert_exact()
        assert outbox.column(
            "select amount from projection where host_id = %s order by seq", [host(1)]
        ) == [1, 4]
        with closing(connect(dsn)) as source, closing(connect(dsn)) as target:
            Schedule(settings, lambda: None).retain(source, target)
        told = {
            record.getMessage()
            for record in caplog.records
            if record.levelno >= logging.WARNING and record.name.startswith("relay")
        }
        assert told <= {"dead letter", "deferred"}


_ARRAYS = ("text", "bigint", "int", "uuid", "xid8", "pg_lsn", "name", "oid", "bytea")
_EXACT = {
    "set_config(text, text, boolean)": "text",
    "current_setting(text)": "text",
    "current_setting(text, boolean)": "text",
    "now()": "timestamptz",
    "clock_timestamp()": "timestamptz",
    "pg_current_snapshot()": "pg_snapshot",
    "pg_is_in_recovery()": "boolean",
    "to_regclass(text)": "regclass",
    "pg_backend_pid()": "int",
    "pg_try_advisory_lock(int, int)": "boolean",
    "pg_try_advisory_lock_shared(int, int)": "boolean",
    "pg_advisory_unlock_all()": "void",
    "hashtext(text)": "int",
    "current_database()": "name",
    "jsonb_object_agg(text, jsonb)": "jsonb",
    "concat_ws(text, text, text)": "text",
    "format(text, name, name)": "text",
    "pg_column_size(jsonb)": "int",
    "pg_column_compression(jsonb)": "text",
    "to_jsonb(pg_replication_slots)": "jsonb",
    "btrim(text, text)": "text",
    "pg_visible_in_snapshot(xid8, pg_snapshot)": "boolean",
}
_COMPARED = ("text", "bigint", "int", "oid", "name", "xid8", "uuid", "pg_lsn", "boolean", '"char"')


def planted(name: str) -> Iterator[str]:
    """Objects that whoever may create some in public creates there, each of which notes who runs it."""
    yield f"create role {name}; grant create, usage on schema public to {name}"
    yield "create table public.caught (who name, application text, what text)"
    yield "grant insert on public.caught to public"
    yield f"set role {name}"
    yield """
        create function public.spring(what text) returns void language plpgsql as $$
        begin
            insert into public.caught
            values (session_user, pg_catalog.current_setting('application_name'), what);
        exception when read_only_sql_transaction then
            raise exception '% was run', what;
        end $$
    """
    for element in _ARRAYS:
        yield _function(
            f"unnest({element}[])", f"setof {element}", "return query select pg_catalog.unnest($1)"
        )
        yield _function(f"cardinality({element}[])", "int", "return pg_catalog.cardinality($1)")
        yield _function(f"to_jsonb({element})", "jsonb", "return pg_catalog.to_jsonb($1)")
        yield _operator("=", f"{element}[]")
    for kind in _COMPARED:
        yield _operator("=", kind)
        yield _operator("<>", kind)
    yield _function("concat(text)", "text", "return $1")
    yield _function("concat(uuid)", "text", "return $1::text")
    yield _function("format(text, text)", "text", "return pg_catalog.format($1, $2)")
    for signature, result in _EXACT.items():
        called, _, kinds = signature.partition("(")
        arguments = ", ".join(
            f"${n}" for n, kind in enumerate(kinds.rstrip(")").split(","), 1) if kind
        )
        if result == "void":
            yield _function(signature, result, f"perform pg_catalog.{called}()")
        elif called != "jsonb_object_agg":
            yield _function(signature, result, f"return pg_catalog.{called}({arguments})")
    yield "reset role"


def _function(signature: str, result: str, body: str) -> str:
    return (
        f"create function public.{signature} returns {result} language plpgsql as"
        f" $$ begin perform public.spring('{signature}'); {body}; end $$"
    )


def _operator(name: str, kind: str) -> str:
    called = f'"{name} {kind.replace(chr(34), "")}"'
    signature = f"{called}({kind}, {kind})"
    body = f"return $1 operator(pg_catalog.{name}) $2"
    return (
        f"{_function(signature, 'boolean', body)};"
        f" create operator public.{name} (leftarg = {kind}, rightarg = {kind}, function = public.{called})"
    )


@pytest.mark.parametrize(
    ("path", "mode"),
    [
        ('"$user", public', "auto"),
        ("public, pg_catalog", "poll"),
        pytest.param('"$user", public', "poll", marks=pytest.mark.rare),
        pytest.param("public, pg_catalog", "auto", marks=pytest.mark.rare),
    ],
)
def test_no_code_of_another_role_runs_as_relay(outbox: Outbox, path: str, mode: str) -> None:
    """A function `unnest(text[])` in the schema public ran as relay, and as the superuser that ran `relay init`."""
    outbox.conn.execute("set application_name = 'the test'; create table counted (events bigint)")
    planter = f"{outbox.slot}_planter"
    with ExitStack() as stack:
        _, dsn = stack.enter_context(outbox.limited_role())
        stack.callback(
            outbox.conn.execute,
            f"reset role; drop owned by {planter} cascade; drop role {planter}".encode(),
        )
        outbox.conn.execute("grant insert on counted to relay")
        answers = iter([Answer(503)])
        webhook = stack.enter_context(Webhook(lambda headers, body: next(answers, Answer())))
        for statement in planted(planter):
            outbox.conn.execute(statement.encode())
        outbox.conn.execute(f"alter database {outbox.slot} set search_path = {path}".encode())
        settings = job(outbox, webhook, dsn, mode)
        initialise(settings, source_dsn=outbox.superuser_dsn, target_dsn=outbox.superuser_dsn)
        assert not [each for each in check.examine(settings) if each.level is Severity.ERROR]
        with relaying(settings):
            outbox.publish(host(1), event(1))
            outbox.publish(host(1), event(-1))
            outbox.publish(host(2), event(5))
            outbox.wait_handled()
            wait_until(lambda: len(set(webhook.ids())) == 3)
            status.read(settings)
        outbox.assert_exact()
        with (
            closing(connect(outbox.relay_dsn)) as source,
            closing(connect(outbox.relay_dsn)) as target,
        ):
            Schedule(settings, lambda: None).retain(source, target)
        found = outbox.conn.execute(
            "select distinct who::text, what from caught where application <> 'the test'"
        )
        assert found.fetchall() == []


@pytest.mark.server(17)
def test_a_transaction_timeout_does_not_end_the_stream_of_a_large_commit(
    outbox: Outbox, caplog: pytest.LogCaptureFixture
) -> None:
    """ankane/strong_migrations#302, vitabaks/pg_auto_reindexer#19: the walsender decodes it in one transaction."""
    with role_with(outbox, {"transaction_timeout": "100ms"}) as dsn:
        source = {"dsn": dsn, "slot": outbox.slot, "publication": outbox.slot}
        settings = outbox.settings(source=source, target={"dsn": outbox.relay_dsn})
        with relaying(settings):
            outbox.fill(1, events=20_000)
            outbox.wait_handled()
            outbox.wait_drained()
    outbox.assert_exact()
    assert "transaction timeout" not in caplog.text


def test_no_code_of_another_role_runs_in_a_services_migration(outbox: Outbox) -> None:
    """A migration runs as the owner of the database; timescale/promscale_extension#223, pgaudit/pgaudit#156."""
    planter = f"{outbox.slot}_planter"
    with ExitStack() as stack:
        stack.callback(
            outbox.conn.execute,
            f"reset role; drop owned by {planter} cascade; drop role {planter}".encode(),
        )
        for statement in planted(planter):
            outbox.conn.execute(statement.encode())
        with psycopg.connect(
            outbox.superuser_dsn, options="-c search_path=public,pg_catalog"
        ) as conn:
            for script in [schema.remove(), *schema.install()]:
                conn.execute(script.encode())
                assert conn.execute("show search_path").fetchone() == ("public,pg_catalog",)
        assert outbox.column("select what from caught") == []


def test_a_migration_where_plpgsql_makes_errors_of_warnings(outbox: Outbox) -> None:
    """A role or database turns them on for its own functions."""
    options = "-c plpgsql.extra_errors=all"
    with psycopg.connect(outbox.superuser_dsn, options=options) as conn:
        for script in [schema.remove(), *schema.install()]:
            conn.execute(script.encode())
            assert conn.execute("show plpgsql.extra_errors").fetchone() == ("all",)


def test_check_names_a_schema_in_which_everybody_may_create_functions(
    outbox: Outbox, server: Server
) -> None:
    """Handlers' statements run with the user's search_path."""

    def found() -> list[str]:
        return [
            each.text for each in check.examine(outbox.settings()) if each.subject == "search_path"
        ]

    if server.major < 15:
        outbox.conn.execute("revoke create on schema public from public")
    assert not found()
    outbox.conn.execute("grant create on schema public to public")
    (text,) = found()
    assert "revoke create on schema public from public" in text


SHOP = """
    create schema shop;
    create table shop.orders (id uuid, amount numeric);
    create table shop.totals (host_id uuid, events bigint);
    create table shop.audited (amount numeric);
    create function shop.audit() returns trigger language plpgsql as
        $$ begin insert into audited values (new.amount); return null; end $$;
    create constraint trigger audit after insert on shop.orders deferrable initially deferred
        for each row execute function shop.audit();
    grant usage on schema shop to relay; grant insert on all tables in schema shop to relay;
"""


def fill_totals(transaction: Transaction, cursor: psycopg.Cursor[Any]) -> None:
    """A Python handler that names its table without the schema, also after its own change of the path."""
    cursor.execute("set local search_path = pg_catalog")
    cursor.execute("set local search_path to default")
    cursor.execute("insert into totals values (%s, 1)", (next(iter(transaction.events)).host_id,))


@pytest.mark.parametrize("poison", [False, True])
def test_handlers_name_their_tables_as_the_user_does(outbox: Outbox, poison: bool) -> None:
    """In statements for each event and for all, in Python, and in triggers that run at the commit."""
    outbox.conn.execute(SHOP)
    handlers = {
        "orders": {
            "type": "sql",
            "statement": "insert into orders values (%(id)s, 1 / (%(payload)s->>'amount')::numeric)",
        },
        "many": {
            "type": "sql",
            "each": "batch",
            "statement": "insert into totals select host_id, count(*) from batch group by 1",
        },
        "python": {"type": "python", "callable": "tests.field.test_session_settings:fill_totals"},
    }
    with outbox.limited_role() as (name, dsn):
        outbox.conn.execute(f"alter role {name} set search_path = shop".encode())
        settings = outbox.settings(
            target={"dsn": dsn}, handlers=handlers, routes=[{"handlers": list(handlers)}]
        )
        check.require(settings)
        with relaying(settings):
            # Few events are sent one by one, many through a function.
            for events in (1, 150):
                outbox.publish(host(1), *(event(number) for number in range(1, events + 1)))
                if poison:
                    outbox.publish(host(2), event(0))
            outbox.wait_drained()
    assert outbox.value("select count(*) from shop.audited") == 151
    assert outbox.value("select sum(events) from shop.totals") == 151 + 2
    assert len(outbox.column("select id from relay.dead_letter_queue")) == 2 * poison


@pytest.mark.parametrize("kind", list(SessionKind))
def test_every_setting_of_a_kind_is_pinned_in_one_round_trip(
    outbox: Outbox, kind: SessionKind
) -> None:
    with connect(outbox.relay_dsn, kind) as conn:
        for name, value in session_settings.PINNED[kind].items():
            row = conn.execute("select current_setting(%s, true)", (name,)).fetchone()
            # One of PL/pgSQL does not exist before its first function is called.
            assert row == (value,) or (
                row == (None,) and (name.startswith("plpgsql.") or name in absent(outbox))
            )


def test_a_setting_without_the_right_to_it_is_named_with_its_cure(outbox: Outbox) -> None:
    with outbox.limited_role() as (name, dsn):
        outbox.conn.execute(f"alter role {name} set session_replication_role = replica".encode())
        with pytest.raises(
            ConfigurationError, match=f"session_replication_role.*alter role {name} reset"
        ):
            connect(dsn)


def test_every_function_of_relay_has_a_path_of_its_own(outbox: Outbox) -> None:
    """Also behind pg_temp, where anybody may create a table pg_class: vibhorkum/pg_background#115.

    Those that only relay's functions may call run under the path of these.
    """
    outbox.install_again(
        outbox.settings(source={**outbox.config()["source"], "offsets": "gapless"})
    )
    assert (
        outbox.column(
            """
        select proname from pg_proc as p where pronamespace = 'relay'::regnamespace
           and 'search_path=pg_catalog, pg_temp' <> all (coalesce(proconfig, '{}'))
           -- One that is stored as it was read looks nothing up.
           and prosqlbody is null
           and (proacl is null
                or exists (select from aclexplode(proacl) as a
                            where a.grantee not in (p.proowner, to_regrole('relay_owner'))))
         order by 1
        """
        )
        == [
            "maintain",  # A procedure with settings of its own may not commit; it names what it calls in full.
            "max_event_bytes",  # It returns a number.
        ]
    )


def test_a_table_of_the_jdbc_writer_is_found_as_the_user_names_it(outbox: Outbox) -> None:
    outbox.conn.execute("create schema lake; create table lake.events (id uuid)")
    outbox.conn.execute("grant usage, create on schema lake to app_lake")
    dsn = make_conninfo(outbox.lake_dsn, options="-c search_path=lake")
    writer = JdbcWriter("lake", JdbcSettings.model_validate({"dsn": dsn, "table": "events"}))
    with connect(dsn) as conn:
        assert writer._find(conn)[1:] == ("lake", "events")
        assert conn.execute("show search_path").fetchone() == ("pg_catalog, pg_temp",)
