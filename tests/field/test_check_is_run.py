"""What `relay check` passes, `relay run` can do: what would fail later is found by both."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import make_conninfo
from pydantic import TypeAdapter, ValidationError

from relay.admin.check import examine, require
from relay.admin.findings import Severity
from relay.config.fields import Template
from relay.config.handlers import HandlerSettings
from relay.config.imports import load
from relay.config.settings import Route, Settings
from relay.faults import ConfigurationError, Rejected, RelayError, Unreachable
from relay.pipeline.routing import shadowed
from relay.sinks.brokers import Message, Publishing
from relay.store import (
    connections,
    locks,
)
from relay.store.positions import sinks
from relay.store.presence import instances
from tests.outbox import (
    Outbox,
    event,
    host,
    initialise,
    relaying,
    relaying_until_it_ends,
    wait_until,
)
from tests.process import relay
from tests.sinks import make_event, transaction
from tests.webhook import Webhook


def one(event: Any) -> None:
    """Takes one argument."""


def two(a: Any, b: Any) -> None:
    """Takes too much for a transform."""


def many(*arguments: Any, **options: Any) -> None:
    """Takes all."""


def test_a_callable_that_cannot_be_called_as_relay_does(outbox: Outbox) -> None:
    """`run` requires what `check` finds."""
    handlers = {"projection": {"type": "python", "callable": "tests.field.test_check_is_run:one"}}
    with pytest.raises(ConfigurationError, match=r"relay calls it with \(transaction, cursor\)"):
        require(outbox.settings(handlers=handlers))


@pytest.mark.parametrize("path", ["tests.field.test_check_is_run:many", "builtins:print"])
def test_callables_that_take_more_are_called(path: str) -> None:
    assert callable(load("handlers.x.callable", path, "transaction", "cursor"))


def route(match: dict[str, Any], goes_on: bool = False) -> Route:
    """A route to one handler."""
    return Route(match=match, handlers=["projection"], **{"continue": goes_on})


@pytest.mark.parametrize(
    ("earlier", "later", "covered"),
    [
        ({}, {"event_type": "a"}, True),
        ({"event_type": "order.*"}, {"event_type": ["order.placed", "order.paid"]}, True),
        ({"event_type": "order.*"}, {"event_type": ["order.placed", "paid"]}, False),
        ({"event_type": "a"}, {"event_type": "a", "aggregate_type": "Order"}, True),
        ({"event_type": "a", "aggregate_type": "Order"}, {"event_type": "a"}, False),
        ({"event_type": "o*"}, {"event_type": "order.*"}, True),
        ({"event_type": "order.?"}, {"event_type": "order.*"}, False),
        ({"payload.amount": 1}, {"payload.amount": 1}, True),
        ({"payload.amount": 1}, {"payload.amount": True}, False),
    ],
)
def test_a_route_that_never_applies(
    earlier: dict[str, Any], later: dict[str, Any], covered: bool
) -> None:
    assert list(shadowed([route(earlier), route(later)])) == ([(1, 0)] if covered else [])
    assert not list(shadowed([route(earlier, goes_on=True), route(later)]))


def test_a_route_that_never_applies_is_an_error_of_check_and_run(outbox: Outbox) -> None:
    routes = [
        {"handlers": ["projection"]},
        {"match": {"event_type": "a"}, "handlers": ["projection"]},
    ]
    with pytest.raises(ConfigurationError, match=r"routes.1: never applies, since routes.0"):
        require(outbox.settings(routes=routes))


def test_a_name_that_is_none_has_a_suggestion() -> None:
    with pytest.raises(ValueError, match=r"did you mean aggregate_type\?"):
        Template("shop.{agregate_type}")
    with pytest.raises(ValueError, match=r"did you mean payload.customer\?"):
        Template("{paylod.customer}")
    with pytest.raises(ValidationError, match=r"did you mean event_type\?"):
        route({"event_typ": "a"})


SERVERS: dict[str, dict[str, Any]] = {
    "nats": {"servers": ["nats://127.0.0.1"]},
    "rabbitmq": {"url": "amqp://127.0.0.1", "exchange": ""},
    "kafka": {"bootstrap": ["127.0.0.1:9092"]},
}


class Recording:
    """A broker that takes everything."""

    def __init__(self) -> None:
        self.topics: list[str] = []

    async def send(self, messages: Sequence[Message]) -> None:
        self.topics += [each.topic for each in messages]

    async def close(self) -> None:
        """Nothing is open."""


def send(kind: str, template: str, event_type: str) -> list[str]:
    """Send an event to a broker that takes everything; returns the topic."""
    broker = Recording()
    settings: Any = TypeAdapter(HandlerSettings).validate_python(
        {"type": kind, **SERVERS[kind], "topic": template}
    )
    sink = Publishing("x", settings, broker)
    asyncio.run(sink.deliver(transaction(make_event(1, event_type=event_type))))
    return broker.topics


@pytest.mark.parametrize(
    ("kind", "topic"),
    [
        ("nats", "$JS.API.STREAM.DELETE.ORDERS"),
        ("nats", "_INBOX.x"),
        ("rabbitmq", "amq.gen-x"),
        ("kafka", "__consumer_offsets"),
        # The registry of schemas reads all of it at its start.
        ("kafka", "_schemas"),
        ("kafka", "_confluent-command"),
    ],
)
def test_a_publisher_does_not_reach_what_controls_the_broker(kind: str, topic: str) -> None:
    with pytest.raises(Rejected, match="control the broker"):
        send(kind, "{event_type}", topic)
    assert send(kind, "shop.{event_type}", topic) == [f"shop.{topic}"]


@pytest.mark.parametrize(
    ("kind", "template", "rest"),
    [
        # As a shell, or a template of JavaScript, would have it.
        ("nats", "${event_type}", "JS.API.STREAM.DELETE.ORDERS"),
        ("nats", "_INBOX.{event_type}", "x"),
        ("kafka", "_{event_type}", "_consumer_offsets"),
        ("kafka", "_{event_type}", "schemas"),
        ("kafka", "__{event_type}", "consumer_offsets"),
        ("rabbitmq", "amq.{event_type}", "rabbitmq.reply-to.x"),
    ],
)
def test_the_first_sign_alone_does_not_make_a_topic_the_operators(
    kind: str, template: str, rest: str
) -> None:
    """Subjects with $ are the server's: nats-io/nats.docs#464, rchiofalo/rustgate#616."""
    with pytest.raises(Rejected, match="control the broker"):
        send(kind, template, rest)


def test_an_operator_may_write_to_a_bucket_of_nats() -> None:
    assert send("nats", "$KV.orders.{event_type}", "a") == ["$KV.orders.a"]


def errors(settings: Settings, accept_configuration: bool = False) -> list[str]:
    """The texts of the errors that `relay check` finds."""
    found = examine(settings, accept_configuration)
    return [each.text for each in found if each.level is Severity.ERROR]


def with_source(outbox: Outbox, **source: Any) -> Settings:
    return outbox.settings(source={**outbox.config()["source"], **source})


def refusal(call: Callable[[], object]) -> list[str]:
    """The lines of the error that a call raises."""
    with pytest.raises(RelayError) as raised:
        call()
    return str(raised.value).splitlines()


NOT_CALLABLE: list[tuple[dict[str, Any], str]] = [
    (
        {"type": "python", "callable": "tests.field.test_check_is_run:one"},
        "handlers.it.callable: 'tests.field.test_check_is_run:one' takes (event), but relay calls it with "
        "(transaction, cursor): too many positional arguments",
    ),
    (
        {"type": "spark", "callable": "tests.field.test_check_is_run:one"},
        "handlers.it.callable: 'tests.field.test_check_is_run:one' takes (event), but relay calls it with "
        "(frame, batch): too many positional arguments",
    ),
    (
        {"type": "spark", "path": "/tmp/x", "transform": "tests.field.test_check_is_run:two"},
        "handlers.it.transform: 'tests.field.test_check_is_run:two' takes (a, b), but relay calls it with (frame): "
        "missing a required argument: 'b'",
    ),
    (
        {
            "type": "spark",
            "path": "/tmp/x",
            "transform": "tests.field.test_check_is_run:missing",
        },
        "handlers.it.transform: 'tests.field.test_check_is_run' has no 'missing'",
    ),
]


def test_a_function_that_cannot_be_called(outbox: Outbox, subtests: pytest.Subtests) -> None:
    """It fails with every event, and each is retried as it is: calebevans/mulder#170, agronholm/apscheduler#230."""
    for handler, said in NOT_CALLABLE:
        with subtests.test(said):
            settings = outbox.settings(handlers={"it": handler}, routes=[{"handlers": ["it"]}])
            assert errors(settings) == [said]


def test_an_upcaster_and_a_secret_that_cannot_be_called(outbox: Outbox) -> None:
    upcast = {"order.placed": {"upcast": {1: "tests.field.test_check_is_run:two"}}}
    (said,) = errors(outbox.settings(events=upcast))
    assert said.startswith(
        "events.order.placed.upcast.1: 'tests.field.test_check_is_run:two' takes (a, b), "
    )
    assert said.endswith("but relay calls it with (payload): missing a required argument: 'b'")
    with pytest.raises(ValueError, match=r"missing a required argument: 'event'"):
        with_source(outbox, password={"call": "tests.field.test_check_is_run:one"})


def test_a_slot_of_another_database_of_the_server(outbox: Outbox, database: str) -> None:
    """Names of slots belong to the server: estuary/connectors#779, electric-sql/electric#2220, lukashes/outboxx#152."""
    other = Outbox(database)
    with other:
        settings = other.settings(
            source={"dsn": database, "slot": outbox.slot, "publication": "relay"}
        )
        said = (
            f"source.slot: the slot {outbox.slot!r} belongs to the database {outbox.slot!r}, not to {other.slot!r}: "
            "name another slot"
        )
        assert refusal(lambda: initialise(settings)) == [said]
        assert said in errors(settings)


def test_a_group_that_retention_has_given_up(outbox: Outbox) -> None:
    with relaying(outbox.settings()):
        outbox.publish(host(1), event())
        outbox.wait_handled()
    outbox.conn.execute(
        "update relay.readers set given_up_at = now() where group_id = 'default' and reader = ''"
    )
    (said,) = errors(outbox.settings())
    assert said.startswith("group: 'default' was given up by retention (max_lag)")


def test_a_configuration_that_a_running_instance_does_not_have(
    outbox: Outbox, tmp_path: Path
) -> None:
    other = outbox.settings(unrouted="ignore")
    file = outbox.config_file(tmp_path / "relay.yaml", unrouted="ignore")
    with relaying(outbox.settings()):
        outbox.publish(host(1), event())
        outbox.wait_handled()
        (said,) = errors(other)
        assert said.startswith("group: an instance of 'default' runs with another configuration")
        assert said.endswith("--accept-configuration replaces theirs")
        refused = relay("run", "--config", str(file))
        assert (refused.returncode, refused.stderr.strip()) == (2, f"relay: {said}")
        assert errors(other, accept_configuration=True) == []
        accepted = relay("check", "--config", str(file), "--accept-configuration")
        assert accepted.returncode == 0, accepted.stderr


def test_a_source_that_has_lost_what_was_applied(outbox: Outbox) -> None:
    with relaying(outbox.settings()):
        outbox.publish(host(1), event())
        outbox.wait_handled()
    outbox.conn.execute("update relay.positions set applied_lsn = 'FFFFFF/0'")
    (said,) = errors(outbox.settings())
    assert "the source has lost events that group 'default' has applied" in said
    # The end of the WAL moves on.
    said = re.sub(r"0/[0-9A-F]+", "…", said)
    (refused,) = refusal(lambda: require(outbox.settings()))
    assert re.sub(r"0/[0-9A-F]+", "…", refused) == said


def test_an_address_that_is_taken(outbox: Outbox, tmp_path: Path) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        for section in (
            {"listen": address},
            {"console": {"listen": address, "token": "0123456789abcdef"}},
        ):
            file = outbox.config_file(tmp_path / "relay.yaml", observe=section)
            for command in ("check", "run"):
                done = relay(command, "--config", str(file))
                assert done.returncode == 2, (command, done.stdout)
                assert f"cannot listen on {address}" in done.stderr


def test_check_beside_a_relay_that_listens(outbox: Outbox, tmp_path: Path) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    settings = outbox.settings(observe={"listen": address})
    file = outbox.config_file(tmp_path / "relay.yaml", observe={"listen": address})
    with relaying(settings):
        wait_until(lambda: bool(instances(outbox.conn, "default")))
        done = relay("check", "--config", str(file), "--json")
        assert done.returncode == 0, done.stdout
        assert f"{address} is in use, and relay runs on this host" in {
            each["text"] for each in json.loads(done.stdout)
        }


def test_the_log_names_the_session_that_has_the_claim_of_a_sink(
    outbox: Outbox, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A session of a pooler, or of a host that is gone, keeps it: pgbouncer/pgbouncer#418, pgdogdev/pgdog#1407."""
    monkeypatch.setattr(sinks, "HELD_SECONDS", 0.5)
    with (
        Webhook() as webhook,
        psycopg.connect(
            make_conninfo(outbox.superuser_dsn, application_name="left behind")
        ) as leftover,
    ):
        leftover.execute("select pg_advisory_lock(%s, hashtext(%s))", locks.sink("default", "hook"))
        settings = outbox.settings(
            handlers={"hook": {"type": "http", "url": webhook.url}}, routes=[{"handlers": ["hook"]}]
        )
        with caplog.at_level("INFO"), relaying(settings):
            wait_until(lambda: "another session has the claim of a sink" in caplog.text)
            (record,) = (each for each in caplog.records if "claim of a sink" in each.getMessage())
            holder = getattr(record, "holder")  # noqa: B009
            assert f"process {leftover.info.backend_pid} of the server, left behind" in holder


def limited(outbox: Outbox, dsn: str, **more: Any) -> Settings:
    """Settings whose source and target are entered by a role with relay's rights only."""
    source = {"dsn": dsn, "slot": outbox.slot, "publication": outbox.slot}
    return outbox.settings(source=source, **more)


PYTHON = {"projection": {"type": "python", "callable": "tests.field.test_check_is_run:many"}}


@pytest.mark.parametrize("handlers", [PYTHON, None])
def test_a_role_that_may_not_create_temporary_tables(
    outbox: Outbox, handlers: dict[str, Any] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """matomo-org/matomo#15132, databasus/databasus#254: relay retried for ever what counted as an outage."""
    with outbox.limited_role() as (_, dsn):
        settings = limited(outbox, dsn, **({"handlers": handlers} if handlers else {}))
        outbox.conn.execute(
            f"revoke temporary on database {outbox.slot} from public, relay".encode()
        )
        with pytest.raises(ConfigurationError, match="`grant temporary on database"):
            require(settings)
        # The right may be revoked while relay runs.
        monkeypatch.setattr(connections, "POOL_TIMEOUT_SECONDS", 0.3)
        with relaying_until_it_ends(settings, "permission denied to create temporary tables"):
            outbox.publish(host(1), event())


@pytest.mark.parametrize(
    ("change", "cure"),
    [
        ("revoke insert on relay.dead_letter_queue from relay", "grant insert on relay.dead_l"),
        ("revoke usage on sequence relay.dead_transactions from relay", "grant usage on sequence"),
        ("alter table relay.deferred enable row level security", "alter role .* bypassrls"),
    ],
)
def test_rights_on_relays_own_tables(outbox: Outbox, change: str, cure: str) -> None:
    """A dump without privileges, and policies on every table: ansible/awx-operator#2084, jikig-ai/soleur#5809."""
    with outbox.limited_role() as (_, dsn):
        require(limited(outbox, dsn))
        outbox.conn.execute(change.encode())
        with pytest.raises(ConfigurationError, match=cure):
            require(limited(outbox, dsn))


@pytest.mark.parametrize("kind", ["sql", "http"])
def test_relay_waits_at_its_start_for_a_target_that_is_read_only(
    outbox: Outbox, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A provider whose disk is full, a standby before its promotion: citusdata/pg_cron#270, bitnami/charts#23219."""
    with outbox.limited_role() as (name, dsn), Webhook() as webhook:
        hook = {"projection": {"type": "http", "url": webhook.url}}
        settings = limited(outbox, dsn, **({"handlers": hook} if kind == "http" else {}))
        outbox.conn.execute(f"alter role {name} set default_transaction_read_only = on".encode())
        with pytest.raises(Unreachable, match="the database is read-only"):
            require(settings)
        outbox.publish(host(1), event())
        with relaying(settings):
            wait_until(lambda: "the target cannot be used" in caplog.text)
            outbox.conn.execute(f"alter role {name} reset default_transaction_read_only".encode())
            outbox.wait_drained()
        assert outbox.handled() + len(webhook.ids()) == 1
