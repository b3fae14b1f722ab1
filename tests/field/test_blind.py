"""What an operator sees while a database is away or stalls: what can be read, the last known of the rest, and why.

Public reports: confluentinc/kafka-connect-jdbc#964 (the status is not the state), PostgREST/postgrest#1850,
spiceai/spiceai#11084 (when an outage began and ended is nowhere), automagik-dev/omni#581, zitadel/zitadel#10737,
thake/logminer-kafka-connect#11 (the log is flooded meanwhile), bart-oz/solid_observer#105, flynn/flynn#3594,
trimble-oss/dba-dash#573 (pages are errors, or old without saying so), cockroachdb/cockroach#70534 and
kubestellar/console#6113 (what is not known is shown as 0), ICTU/quality-time#10328 (pages differ in what they know).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from relay.admin import check, connections, sinks, status
from relay.config.settings import ObserveSettings
from relay.faults import Unreachable
from relay.observe import databases
from relay.retention import schedule
from relay.runtime import parts
from relay.store import presence
from tests.console import Visitor, console_of, served
from tests.outbox import Outbox, event, host, relaying, wait_until
from tests.postgres import Server
from tests.process import relay


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """The parts work often, and are impatient."""
    monkeypatch.setattr(presence, "CHECK_SECONDS", 0.2)
    monkeypatch.setattr(schedule, "NOTE_SECONDS", 0.2)
    monkeypatch.setattr(status, "LOCK_SECONDS", 0.2)


@pytest.fixture
def apart(outbox: Outbox, server: Server) -> Iterator[SimpleNamespace]:
    """An outbox whose target is another database, which can be closed and opened."""
    name = f"{outbox.slot}_target"
    target = server.create_database(name)
    settings = outbox.settings(
        source={**outbox.config()["source"], "slot": f"{outbox.slot}_apart"},
        target={"dsn": target},
        handlers={"none": {"type": "sql", "statement": "select 1"}},
        routes=[{"handlers": ["none"]}],
    )
    outbox.install_again(settings)

    def allow(allowed: bool) -> None:
        outbox.conn.execute(f"alter database {name} allow_connections {allowed}".encode())
        if not allowed:
            outbox.conn.execute(
                "select pg_terminate_backend(pid) from pg_stat_activity where datname = %s", (name,)
            )

    yield SimpleNamespace(settings=settings, allow=allow, target=target)
    allow(True)
    server.drop_database(name)


def test_status_shows_what_the_source_knows_while_the_target_is_away(
    outbox: Outbox, apart: SimpleNamespace, tmp_path: Path
) -> None:
    settings = apart.settings
    with relaying(settings):
        outbox.publish(host(1), event(1))
        wait_until(
            lambda: bool(outbox.column("select 1 from relay.readers where snapshot is not null"))
        )
        wait_until(lambda: status.read(settings).lag is not None)
        known = status.read(settings)
        assert known.lag is not None
        assert known.faults == {}
        apart.allow(False)
        for number in range(7):
            outbox.publish(host(number), event(1))
        seen = status.read(settings)
        assert set(seen.faults) == {"target.dsn"}
        assert "not currently accepting connections" in seen.faults["target.dsn"]
        assert seen.slot is not None
        assert seen.slot.name == settings.source.slot
        (target,) = seen.noted
        assert target.backlog is not None
        assert target.backlog.events >= 7
        # One that has read before still knows the rest.
        later = status.read(settings, known)
        assert later.dead_letters == 0
        assert later.partitions == known.partitions
        assert later.read_at["target.dsn"] == known.read_at["target.dsn"]
        apart.allow(True)


def test_the_commands_print_what_can_be_read(
    outbox: Outbox, apart: SimpleNamespace, tmp_path: Path
) -> None:
    path = outbox.config_file(
        tmp_path / "relay.yaml",
        source={**outbox.config()["source"], "slot": apart.settings.source.slot},
        target={"dsn": apart.target},
    )
    apart.allow(False)
    shown = relay("status", "--config", str(path))
    assert shown.returncode == 2
    assert "slot" in shown.stdout
    assert apart.settings.source.slot in shown.stdout
    assert shown.stderr.startswith("relay: target.dsn: cannot connect: ")
    document = json.loads(relay("status", "--json", "--config", str(path)).stdout)
    assert document["slot"]["name"] == apart.settings.source.slot
    assert document["dead_letters"] is None
    assert list(document["faults"]) == ["target.dsn"]
    apart.allow(True)


def test_an_outage_of_the_target_is_logged_again_and_its_end_too(
    outbox: Outbox,
    apart: SimpleNamespace,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(parts, "SOON_SECONDS", 0.5)
    monkeypatch.setattr(presence, "SOON_SECONDS", 0.5)
    caplog.set_level("INFO")
    with relaying(apart.settings):
        outbox.publish(host(1), event(1))
        wait_until(lambda: "streaming" in caplog.messages)
        apart.allow(False)
        wait_until(lambda: caplog.messages.count("the target cannot be used") > 2)
        apart.allow(True)
        wait_until(lambda: "the target can be used again" in caplog.messages)


def test_a_locked_table_of_the_target_is_named(outbox: Outbox) -> None:
    settings = outbox.settings()
    with (
        relaying(settings),
        psycopg.connect(outbox.superuser_dsn, application_name="report of March") as other,
    ):
        outbox.publish(host(1), event(1))
        outbox.wait_handled()
        other.execute("lock table projection in access exclusive mode")
        outbox.publish(host(1), event(2))
        wait_until(lambda: bool(status.read(settings).waits))
        seen = status.read(settings)
        assert seen.lag is not None
        assert seen.lag.events == 1
        assert seen.lag.oldest_seconds is not None
        (wait,) = seen.waits
        assert "projection" in wait.waits_for
        assert wait.blocked_by is not None
        assert "report of March" in wait.blocked_by
        other.rollback()
        outbox.wait_handled()


def test_a_locked_table_of_relay_hangs_no_command(
    outbox: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = outbox.settings()
    with psycopg.connect(outbox.superuser_dsn) as other:
        other.execute("lock table relay.positions in access exclusive mode")
        seen = status.read(settings)
        assert "locked by another session" in seen.faults["target.dsn"]
        assert seen.slot is not None
        monkeypatch.setattr(connections, "_BOUNDED", b"set lock_timeout = '100ms'")
        with pytest.raises(Unreachable, match="a table is locked by another session"):
            sinks.listed(settings)


def test_pages_show_what_was_read_before(outbox: Outbox, apart: SimpleNamespace) -> None:
    settings = apart.settings.model_copy(
        update={"observe": ObserveSettings.model_validate(console_of())}
    )
    pages = ("", "sinks", "dead-letters", "deferred", "partitions", "actions")
    with served(settings) as address:
        visitor = Visitor(address)
        for page in pages:
            visitor.page(f"/groups/default/{page}")
        apart.allow(False)
        overview, *others = [visitor.page(f"/groups/default/{page}") for page in pages]
        assert all("these values are of" in page for page in others)
        assert "What is shown of target.dsn is of" in overview
        apart.allow(True)
        assert "these values are of" not in visitor.page("/groups/default/sinks")


def test_a_console_that_begins_while_the_target_is_away_shows_no_zeros(
    apart: SimpleNamespace,
) -> None:
    """It said 0 instances, 0 sinks with 0 faults and 0 partitions of a group of which it knew nothing."""
    settings = apart.settings.model_copy(
        update={"observe": ObserveSettings.model_validate(console_of())}
    )
    apart.allow(False)
    with served(settings) as address:
        page = Visitor(address).page("/groups/default/")
    assert_unknown(page, "Source", "Instances", "Sinks", "Dead letters", "Deferred", "Partitions")


def test_a_console_that_begins_while_the_source_is_away_says_so(outbox: Outbox) -> None:
    """It said "WAL read from the slot", and that events could not be counted within two seconds."""
    source = {**outbox.config()["source"], "dsn": make_conninfo(outbox.relay_dsn, port=1)}
    settings = outbox.settings(
        source=source, target={"dsn": outbox.relay_dsn}, observe=console_of()
    )
    with served(settings) as address:
        visitor = Visitor(address)
        assert_unknown(visitor.page("/groups/default/"), "Source", "Slot", "Unconfirmed WAL")
        positions = visitor.page("/groups/default/partitions")
    assert "could not be counted: source.dsn: cannot connect" in positions


def assert_unknown(overview: str, *tiles: str) -> None:
    """What a database would say that cannot be read is no zero."""
    for tile in tiles:
        shown = overview[overview.index(f"<h2>{tile}</h2>") :].partition("</section>")[0]
        assert "unknown" in shown, tile
        assert ">0<" not in shown, tile


def test_a_lag_that_cannot_be_counted_is_not_zero(
    outbox: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A table of relay is locked, nothing is applied, and the last count of 0 stayed: no alert came."""
    monkeypatch.setattr(databases, "COUNT_SECONDS", 0.0)
    monkeypatch.setattr(databases, "COUNTING_SHARE", 1e9)
    settings = outbox.settings()
    with relaying(settings):
        outbox.publish(host(1), event(1))
        outbox.wait_handled()
    found = databases.Databases(settings)

    def lag() -> int | None:
        found.probe([], True)
        return found.counted.target.events if found.counted and found.counted.target else None

    try:
        wait_until(lambda: lag() == 0)
        with psycopg.connect(outbox.superuser_dsn) as other:
            other.execute("lock table relay.positions in access exclusive mode")
            wait_until(lambda: lag() is None)
    finally:
        found.close()


def test_a_locked_outbox_hides_no_slot(outbox: Outbox) -> None:
    settings = outbox.settings(retention={"keep": "7d"})
    outbox.install_again(settings)
    with psycopg.connect(outbox.superuser_dsn) as other:
        other.execute("lock table outbox_message_t in access exclusive mode")
        seen = status.read(settings)
    assert seen.faults == {}
    assert seen.slot is not None
    assert seen.lag is None


def test_a_read_only_target_is_no_target(outbox: Outbox, apart: SimpleNamespace) -> None:
    """After a failover an address leads to a standby: sessions open, and nothing can be stored."""
    found = databases.Databases(apart.settings)
    name = conninfo_to_dict(apart.target)["dbname"]

    def is_up() -> bool:
        found.probe([], False)
        return found.target.is_up(20)

    try:
        assert is_up()
        outbox.conn.execute(
            f"alter database {name} set default_transaction_read_only = on".encode()
        )
        outbox.conn.execute(
            "select pg_terminate_backend(pid) from pg_stat_activity where datname = %s", (name,)
        )
        # The first one finds its session ended.
        wait_until(lambda: not is_up() and "ReadOnly" in (found.target.fault or ""))
        assert "read-only" in status.read(apart.settings).faults["target.dsn"]
    finally:
        outbox.conn.execute(f"alter database {name} reset default_transaction_read_only".encode())
        found.close()


def test_relay_waits_at_its_start_for_a_table_of_a_handler_that_is_locked(
    outbox: Outbox, tmp_path: Path
) -> None:
    """A start beside a long `lock table` ended with "canceling statement due to lock timeout: grant what it needs"."""
    settings = outbox.settings(
        target={"dsn": make_conninfo(outbox.relay_dsn, options="-c lock_timeout=100ms")}
    )
    with psycopg.connect(outbox.superuser_dsn) as other:
        other.execute("lock table projection in access exclusive mode")
        with pytest.raises(
            Unreachable, match=r"handlers\.projection: .* lock timeout: end the session"
        ):
            check.require(settings)
        outbox.publish(host(1), event(1))
        with relaying(settings):
            wait_until(lambda: bool(outbox.column("select 1 from pg_locks where not granted")))
            other.rollback()
            outbox.wait_handled()
