"""Servers that are not quite PostgreSQL's defaults: managed ones, poolers, new versions, rights that were taken away.

debezium/debezium#1948, debezium/debezium#3206, toluaina/pgsync#16, supabase/supautils#70, neondatabase/neon#6291,
estuary/flow#2670, databasus/databasus#46, pgbouncer/pgbouncer#382, timescale/timescaledb#8628.
"""

from __future__ import annotations

from collections.abc import Iterable

import psycopg
import pytest

from relay.admin.check import examine, require
from relay.admin.findings import Severity
from relay.config.settings import Settings
from relay.faults import ConfigurationError
from relay.source.server import decodes
from tests.outbox import PROJECTION, Outbox, event, host, initialise, relaying, wait_until
from tests.pgbouncer import pooled
from tests.postgres import start_server

RDS = "rds_replication"


def texts(settings: Settings, *subjects: str) -> list[str]:
    """The findings of `relay check` that are not ok, of these subjects."""
    found: Iterable[str] = (
        each.text
        for each in examine(settings)
        if each.level is not Severity.OK and (not subjects or each.subject in subjects)
    )
    return list(found)


@pytest.mark.parametrize(
    ("version", "level", "effective", "possible"),
    [
        (180000, "logical", None, True),
        (180000, "replica", None, False),
        # PostgreSQL 19: the first slot raises the level.
        (190000, "replica", "replica", True),
        (190000, "replica", "logical", True),
        (190000, "minimal", "minimal", False),
        (190000, "logical", "logical", True),
    ],
)
def test_what_a_server_can_decode(
    version: int, level: str, effective: str | None, possible: bool
) -> None:
    assert decodes(version, level, effective) is possible


def test_a_managed_server_gets_its_own_cures() -> None:
    """RDS grants the right by a role, and sets the level in its parameter group; others by flags."""
    with (
        start_server({"wal_level": "replica"}) as server,
        Outbox(server.create_database("managed")) as outbox,
    ):
        outbox.conn.execute(PROJECTION)
        outbox.conn.execute(
            f"create role {RDS} nologin; grant {RDS} to app_owner with admin option;"
            "create role app login password 'p';"
            "alter database managed set \"rds.logical_replication\" = '0'".encode()
        )
        outbox.reconnect()
        done = initialise(outbox.settings())
        assert "right of the role relay to replicate" in done
        assert outbox.value("select pg_has_role('relay', %s, 'member')", (RDS,))
        assert not outbox.value("select rolreplication from pg_roles where rolname = 'relay'")
        source = {
            **outbox.config()["source"],
            "dsn": outbox.dsn_as("app"),
        }
        settings = outbox.settings(source=source, target={"dsn": outbox.relay_dsn})
        (level,) = texts(settings, "wal_level")
        assert "set rds.logical_replication to 1 in the parameter group" in level
        (role,) = texts(settings, "role")
        assert f"grant {RDS} to app" in role
        outbox.conn.execute(b"grant relay to app")
        assert not texts(settings, "role")
        for setting, cure in (
            ("cloudsql.logical_decoding", "flag cloudsql.logical_decoding"),
            ("azure.extensions", "server parameter wal_level"),
            ("neon.timeline_id", "settings of the project"),
        ):
            outbox.conn.execute(
                f"alter database managed reset all; alter database managed set \"{setting}\" = 'x'".encode()
            )
            (level,) = texts(settings, "wal_level")
            assert cure in level


@pytest.mark.parametrize(
    "function",
    ["pg_control_system()", "pg_current_wal_insert_lsn()", "pg_drop_replication_slot(name)"],
)
def test_a_function_that_is_revoked_is_named(outbox: Outbox, function: str) -> None:
    outbox.conn.execute(f"revoke execute on function {function} from public".encode())
    with outbox.limited_role() as (_, dsn):
        source = {**outbox.config()["source"], "dsn": dsn}
        (text,) = texts(outbox.settings(source=source), "functions")
    assert function.partition("(")[0] in text
    assert "grant" in text


def test_polling_needs_no_function_of_slots(outbox: Outbox) -> None:
    """A hardened server may give them to nobody: `run` refused what polling never calls."""
    outbox.conn.execute(
        "revoke execute on function pg_create_logical_replication_slot, pg_drop_replication_slot from public"
    )
    with outbox.limited_role() as (_, dsn):
        settings = outbox.settings(source={"dsn": dsn, "mode": "poll"})
        assert texts(settings, "functions") == []
        with relaying(settings):
            outbox.publish(host(1), event())
            outbox.wait_handled()


def test_a_pooler_before_the_source_is_named_and_polled_through(outbox: Outbox) -> None:
    """Neon's -pooler host and PgBouncer answer a replication connection with a syntax error, or refuse it."""
    with pooled(outbox.relay_dsn, "session") as dsn:
        with psycopg.connect(dsn) as conn:
            assert conn.info.backend_pid
        source = {**outbox.config()["source"], "dsn": dsn}
        streams = outbox.settings(
            source={**source, "mode": "wal"}, target={"dsn": outbox.relay_dsn}
        )
        with pytest.raises(ConfigurationError, match="the host without -pooler"):
            require(streams)
        settings = outbox.settings(source=source, target={"dsn": outbox.relay_dsn})
        require(settings)
        assert texts(settings, "pooler")
        assert texts(settings, "replication")
        with relaying(settings):
            outbox.publish(host(1), event(1))
            outbox.wait_handled()
            wait_until(
                lambda: (
                    "startup parameter"
                    in str(outbox.value("select source_reason from relay.groups"))
                )
            )
    outbox.assert_exact()
