"""`relay check` looks at the PostgreSQL tables that Spark sinks write, as it does at source and target."""

from __future__ import annotations

from typing import Any

import pytest
from psycopg.conninfo import make_conninfo

from relay.admin.check import examine, require
from relay.admin.findings import Finding, Severity
from relay.demo.embedded import free_port
from tests.outbox import Outbox


def found(outbox: Outbox, **jdbc: Any) -> list[Finding]:
    """What `relay check` finds of a Spark sink's table."""
    handlers = {
        "projection": outbox.config()["handlers"]["projection"],
        "lake": {"type": "spark", "jdbc": {"dsn": outbox.lake_dsn, "table": "lake.events", **jdbc}},
    }
    routes = [{"handlers": ["projection", "lake"]}]
    settings = outbox.settings(handlers=handlers, routes=routes)
    findings = list(examine(settings))
    # It keeps no other handler from starting.
    require(settings)
    assert not [each for each in findings if each.level is Severity.ERROR]
    return [each for each in findings if "lake" in each.text and each.subject == "handler"]


@pytest.fixture
def lake(outbox: Outbox) -> Outbox:
    """A table that the role may write, in a schema of its own."""
    outbox.conn.execute(
        "create schema lake; create table lake.events (id text, amount bigint);"
        "grant usage, create on schema lake to app_lake; grant select, insert on lake.events to app_lake"
    )
    return outbox


def test_a_table_that_can_be_written_is_found_so(lake: Outbox) -> None:
    assert [(each.level, each.text) for each in found(lake)] == [
        (Severity.OK, "the table of lake can be written")
    ]
    # Rights to columns do.
    lake.conn.execute(
        "revoke all on lake.events from app_lake; grant select (id), insert (id) on lake.events to app_lake;"
        "create table lake.relay_batches (application uuid, number bigint, batch text);"
        "grant select, insert on lake.relay_batches to app_lake"
    )
    assert [each.level for each in found(lake)] == [Severity.OK]


@pytest.mark.parametrize(
    ("harm", "says"),
    [
        (
            "drop table lake.events",
            "handlers.lake.jdbc.table: there is no table lake.events: create it",
        ),
        (
            "drop schema lake cascade",
            "handlers.lake.jdbc.table: there is no table lake.events: create it",
        ),
        (
            "revoke usage on schema lake from app_lake",
            "handlers.lake.jdbc.dsn: permission denied for schema lake: grant usage and create on the schema",
        ),
        (
            "revoke create on schema lake from app_lake",
            "handlers.lake.jdbc.dsn: the role app_lake has no right to create on schema lake: "
            "run `grant create on schema lake to app_lake`",
        ),
        (
            "revoke all on lake.events from app_lake",
            "handlers.lake.jdbc.dsn: the role app_lake has no right to select on lake.events (and 1 more): "
            "run `grant select on lake.events to app_lake`",
        ),
        (
            "revoke insert on lake.events from app_lake",
            "handlers.lake.jdbc.dsn: the role app_lake has no right to insert on lake.events: "
            "run `grant insert on lake.events to app_lake`",
        ),
        (
            "create table lake.relay_batches (number int)",
            "handlers.lake.jdbc.dsn: the role app_lake has no right to select on lake.relay_batches (and 1 more): "
            "run `grant select on lake.relay_batches to app_lake`",
        ),
        (
            "create view lake.seen as select 1; drop table lake.events; alter view lake.seen rename to events",
            "handlers.lake.jdbc.table: there is no table lake.events: create it",
        ),
    ],
)
def test_what_a_sink_lacks_is_said_in_a_line(lake: Outbox, harm: str, says: str) -> None:
    """The sink stood still with the server's words, while `relay check` was clean."""
    lake.conn.execute(harm.encode())
    (finding,) = found(lake)
    assert finding.level is Severity.WARNING
    assert finding.text.startswith(says)
    assert "\n" not in finding.text


def test_a_database_that_cannot_be_written_now_is_said(lake: Outbox) -> None:
    """Refused credentials, a server that is away, one that is read-only: by the key of the sink."""
    nowhere = make_conninfo(lake.lake_dsn, port=str(free_port()), connect_timeout="2")
    (away,) = found(lake, dsn=nowhere)
    assert away.level is Severity.WARNING
    assert away.text.startswith("handlers.lake.jdbc.dsn: cannot connect: connection")
    assert "\n" not in away.text
    wrong = make_conninfo(lake.lake_dsn, dbname="nowhere")
    (unknown,) = found(lake, dsn=wrong)
    assert unknown.text.startswith("handlers.lake.jdbc.dsn: cannot connect: ")
    assert 'database "nowhere" does not exist' in unknown.text
    read_only = make_conninfo(lake.lake_dsn, options="-c default_transaction_read_only=on")
    (fenced,) = found(lake, dsn=read_only)
    assert fenced.text.startswith("handlers.lake.jdbc.dsn: the database is read-only")
    assert all("p@" not in each.text for each in (away, unknown, fenced))
