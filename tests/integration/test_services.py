"""Several outboxes in one process: two tables of one database, two databases, one target."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest
import yaml

from relay.config.settings import Settings
from relay.demo.embedded import free_port
from relay.retention.schedule import Schedule
from relay.store.connections import connect
from tests.observing import Scrape, ask, is_good
from tests.outbox import LONG_SECONDS, Outbox, initialise, relaying, uninstall, wait_until
from tests.postgres import Server
from tests.process import Running, administer, relay, running
from tests.roles import Role, dsn_of, prepare

TABLE = """
    create table {0}_outbox (id uuid primary key default gen_random_uuid(), host_id uuid not null,
        transaction_id uuid default gen_random_uuid(), event_type text not null, payload jsonb not null)
"""
VIEW = "create table {0}_view (seq bigserial, id uuid, host_id uuid, n int)"


@dataclass
class Shop:
    """Groups that one process relays into one target: the source of each, and its file."""

    sources: dict[str, psycopg.Connection[Any]]
    target: psycopg.Connection[Any]
    files: dict[str, Path]

    @property
    def options(self) -> list[str]:
        """The options that name all files but the first one."""
        return [text for file in list(self.files.values())[1:] for text in ("--config", str(file))]

    @property
    def first(self) -> Path:
        """The first file."""
        return next(iter(self.files.values()))

    def publish(self, group: str, first: int, count: int) -> None:
        """Insert events of three hosts, each in a commit of its own."""
        for number in range(first, first + count):
            self.sources[group].execute(
                f"insert into {group}_outbox (host_id, event_type, payload) values "
                "(('00000000-0000-4000-8000-' || lpad((%(n)s::int %% 3)::text, 12, '0'))::uuid, 'e', "
                "jsonb_build_object('n', %(n)s::int))".encode(),
                {"n": number},
            )

    def seen(self, group: str) -> list[tuple[str, int]]:
        """What the target has of a group, in the order of application."""
        return self.target.execute(
            f"select id::text, n from {group}_view order by seq".encode()
        ).fetchall()

    def wait_seen(self, group: str, count: int) -> None:
        """Wait until the target has so many events of a group."""
        wait_until(lambda: len(self.seen(group)) >= count, LONG_SECONDS)

    def assert_exact(self, group: str) -> None:
        """Every event once, each host's in the order of publishing."""
        published = self.sources[group].execute(
            f"select id::text, (payload->>'n')::int from {group}_outbox".encode()
        )
        seen = self.seen(group)
        assert sorted(seen) == sorted(published.fetchall())
        for host in range(3):
            numbers = [n for _, n in seen if n % 3 == host]
            assert numbers == sorted(numbers)


def made(outbox: Outbox, sources: dict[str, str], folder: Path) -> Shop:
    """Tables, views and files of groups; the outbox's database is their target."""
    shop = Shop({}, outbox.conn, {})
    for group, dsn in sources.items():
        conn = psycopg.connect(dsn, autocommit=True)
        prepare(conn)
        conn.execute(TABLE.format(group).encode())
        conn.execute(f"alter table {group}_outbox owner to app_owner".encode())
        outbox.conn.execute(VIEW.format(group).encode())
        name = f"{outbox.slot}_{group}"
        content = {
            "group": group,
            "source": {
                **{
                    "dsn": dsn_of(Role.RELAY, dsn),
                    "table": f"public.{group}_outbox",
                    "slot": name,
                    "publication": name,
                }
            },
            "target": {"dsn": outbox.relay_dsn},
            "handlers": {
                "view": {
                    "type": "sql",
                    "statement": f"insert into {group}_view (id, host_id, n) "
                    "values (%(id)s, %(host_id)s, (%(payload)s->>'n')::int)",
                }
            },
            "routes": [{"handlers": ["view"]}],
            "batch": {"inline_max_events": 1_000_000_000},
            "retention": {"keep": "7d"},
        }
        file = folder / f"{group}.yaml"
        file.write_text(yaml.safe_dump(content))
        shop.sources[group], shop.files[group] = conn, file
    if len(set(sources.values())) == 1:
        done = administer(outbox, "init", "--config", str(shop.first), *shop.options)
        assert done.returncode == 0, done.stderr
    else:
        # `--admin-dsn` is that of one database.
        for file in shop.files.values():
            initialise(Settings(**yaml.safe_load(file.read_text())))
    return shop


@pytest.fixture(params=["two tables", pytest.param("two databases", marks=pytest.mark.rare)])
def shop(
    request: pytest.FixtureRequest, server: Server, database: str, tmp_path: Path
) -> Iterator[Shop]:
    """The groups orders and payments."""
    with Outbox(database) as outbox:
        if request.param == "two tables":
            yield made(outbox, dict.fromkeys(("orders", "payments"), database), tmp_path)
            return
        other = f"{outbox.slot}_b"
        dsn = server.create_database(other)
        shop = made(outbox, {"orders": database, "payments": dsn}, tmp_path)
        yield shop
        shop.sources["payments"].close()
        server.drop_database(other)


def groups_of(relayed: Running, message: str) -> list[Any]:
    return sorted(line.get("group") for line in relayed.lines() if line["message"] == message)


def test_one_process_relays_several_outboxes_exactly(shop: Shop) -> None:
    checked = relay("check", "--config", str(shop.first), *shop.options)
    assert checked.returncode == 0, checked.stderr
    assert f"group payments ({shop.files['payments']})" in checked.stdout.splitlines()
    with running(shop.first, *shop.options) as relayed:
        for group in shop.files:
            shop.publish(group, 0, 30)
        for group in shop.files:
            shop.wait_seen(group, 15)
        relayed.kill()
    for group in shop.files:
        shop.publish(group, 30, 30)
    with running(shop.first, *shop.options) as relayed:
        for group in shop.files:
            shop.wait_seen(group, 60)
        health = relay("status", "--check", "--config", str(shop.first), *shop.options)
        assert health.returncode == 0, health.stderr
        assert relayed.terminate(signal.SIGTERM) == 0
        assert groups_of(relayed, "stopped") == ["orders", "payments"]
    for group in shop.files:
        shop.assert_exact(group)
    down = relay("status", "--check", "--config", str(shop.first), *shop.options)
    assert down.returncode == 1
    assert any(
        line.startswith("relay: group payments: no instance") for line in down.stderr.splitlines()
    )


@pytest.mark.rare
@pytest.mark.parametrize("shop", ["two tables"], indirect=True)
def test_a_group_that_fails_is_named_and_ends_the_process(shop: Shop) -> None:
    with running(shop.first, *shop.options) as relayed:
        for group in shop.files:
            shop.publish(group, 0, 3)
            shop.wait_seen(group, 3)
        # Retention gives the group up, which ends it.
        shop.sources["payments"].execute(
            "update relay.readers set given_up_at = now() where group_id = 'payments'"
        )
        assert relayed.process.wait(40) == 2
        last = relayed.lines()[-1]
        assert (last["level"], last["message"]) == ("error", "ended by an error")
        assert last["fault"].startswith(
            f"group payments ({shop.files['payments']}): group: 'payments' was given up"
        )
        assert groups_of(relayed, "stopped") == ["orders"]
    shop.assert_exact("orders")


@pytest.mark.parametrize("shop", ["two databases"], indirect=True)
def test_a_database_that_is_away_keeps_no_other_group(shop: Shop) -> None:
    content = yaml.safe_load(shop.files["payments"].read_text())
    content["source"]["dsn"] = "postgresql://localhost:1/nowhere"
    shop.files["payments"].write_text(yaml.safe_dump(content))
    with running(shop.first, *shop.options) as relayed:
        relayed.wait_said("waiting for the database")
        shop.publish("orders", 0, 6)
        shop.wait_seen("orders", 6)
        assert groups_of(relayed, "waiting for the database") == ["payments"]
        assert relayed.terminate() == 0
    shop.assert_exact("orders")


@pytest.mark.rare
def test_groups_share_one_spark_session(outbox: Outbox, tmp_path: Path) -> None:
    shop = made(outbox, dict.fromkeys(("orders", "payments"), outbox.superuser_dsn), tmp_path)
    for file in shop.files.values():
        content = yaml.safe_load(file.read_text())
        spark = {"batch": {"inline_max_events": 0}, "spark": {"master": "local[2]"}}
        file.write_text(yaml.safe_dump(content | spark))
    for group in shop.files:
        shop.publish(group, 0, 30)
    with running(shop.first, *shop.options) as relayed:
        for group in shop.files:
            shop.wait_seen(group, 30)
        said = [line["message"] for line in relayed.lines()]
        assert said.count("the Spark session is ready") == 1
        assert relayed.terminate() == 0
    for group in shop.files:
        shop.assert_exact(group)
        engines = "select distinct engine from relay.engines where group_id = %s"
        assert outbox.column(engines, (group,)) == ["spark"]


def test_retention_of_a_table_does_not_wait_for_the_readers_of_another(
    outbox: Outbox, tmp_path: Path
) -> None:
    shop = made(outbox, dict.fromkeys(("orders", "payments"), outbox.superuser_dsn), tmp_path)
    content = yaml.safe_load(shop.files["orders"].read_text())
    settings = Settings(**content | {"retention": {"keep": "7d", "max_lag": "8d"}})
    shop.publish("payments", 0, 3)
    shop.publish("orders", 0, 3)
    with relaying(settings):
        shop.wait_seen("orders", 3)
        wait_until(lambda: not outbox.column("select 1 from relay.applied_commits limit 1"))
    later = datetime.now(UTC) + timedelta(days=9)
    with (
        closing(connect(outbox.relay_dsn)) as source,
        closing(connect(outbox.relay_dsn)) as target,
    ):
        Schedule(settings, lambda: None, lambda _: later).retain(source, target)
    assert outbox.value("select count(*) from orders_outbox") == 0
    assert outbox.value("select count(*) from payments_outbox") == 3
    assert not outbox.column("select 1 from relay.readers where given_up_at is not null")


def test_uninstalling_leaves_nothing_of_two_tables(outbox: Outbox, tmp_path: Path) -> None:
    shop = made(outbox, dict.fromkeys(("orders", "payments"), outbox.superuser_dsn), tmp_path)
    settings = Settings(**yaml.safe_load(shop.files["orders"].read_text()))
    uninstall(settings)
    assert not outbox.column(
        "select slot_name from pg_replication_slots where database = current_database()"
    )
    assert not outbox.column("select pubname from pg_publication")
    assert not outbox.column("select relname from pg_class where relname ~ 'relay_c_xid$'")
    shop.publish("payments", 0, 1)
    initialise(settings)


@pytest.mark.rare
def test_groups_of_a_process_share_one_address_for_metrics_and_health(
    outbox: Outbox, tmp_path: Path
) -> None:
    shop = made(
        outbox, {"orders": outbox.superuser_dsn, "payments": outbox.superuser_dsn}, tmp_path
    )
    port = free_port()
    for file in shop.files.values():
        content = yaml.safe_load(file.read_text())
        content["observe"] = {"listen": f"127.0.0.1:{port}"}
        file.write_text(yaml.safe_dump(content))
    with running(shop.first, *shop.options) as service:
        for group in shop.files:
            shop.publish(group, 0, 3)
            shop.wait_seen(group, 3)
        wait_until(lambda: is_good(port, "/readyz"))
        for group in shop.files:
            applied = {"group": group, "outcome": "applied"}
            wait_until(
                lambda applied=applied: Scrape(port).value("relay_events_total", **applied) == 3  # type: ignore[misc]
            )
            assert f"{group}: source: ok: reads the WAL" in ask(port, "/healthz").text
        assert service.terminate() == 0
