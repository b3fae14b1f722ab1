"""An outbox without a table: what pg_logical_emit_message writes is relayed, and nothing else is looked at."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from relay.admin.check import require
from relay.admin.offsets import positions
from relay.admin.publish import require_own_outbox
from relay.admin.retention import partition_new
from relay.admin.status import lag_seconds
from relay.client import Event as Placed
from relay.client import Outbox as Client
from relay.client.errors import EventInvalid
from relay.client.testing import collect
from relay.config.settings import Settings
from relay.faults import ConfigurationError
from relay.retention.erasure import erase
from relay.spark.session import Session
from tests.client_sessions import DRIVERS, KINDS
from tests.outbox import APPEND, Outbox, host, initialise, relaying, stream_and_crash, wait_until
from tests.process import administer, relay
from tests.webhook import Webhook

PREFIX = "shop.outbox"
EMIT = "select pg_logical_emit_message(%s, %s, %s)"
PROJECTION = """
    create table projection (
        seq bigserial, id uuid, host_id uuid, c_offset bigint, transaction_id uuid,
        amount numeric check (amount >= 0))
"""


@pytest.fixture
def shop(database: str) -> Iterator[Outbox]:
    """A database without any outbox."""
    with Outbox(database) as made:
        made.conn.execute(PROJECTION.encode())
        yield made


@pytest.fixture
def webhook() -> Iterator[Webhook]:
    with Webhook() as found:
        yield found


def config(shop: Outbox, webhook: Webhook | None = None, **more: Any) -> dict[str, Any]:
    handlers: dict[str, Any] = {"projection": {"type": "sql", "statement": APPEND}}
    if webhook is not None:
        handlers["hook"] = {"type": "http", "url": webhook.url}
    source = {**shop.config()["source"], "mode": "wal", "message_prefix": PREFIX}
    return {
        "source": source,
        "handlers": handlers,
        "routes": [{"handlers": list(handlers)}],
        **more,
    }


def message(amount: Any, number: int = 1, **more: Any) -> dict[str, Any]:
    return {
        **{"host_id": str(host(number)), "event_type": "order.placed"},
        **{"payload": {"amount": amount}, **more},
    }


def emit(shop: Outbox, *contents: Any, transactional: bool = True) -> None:
    """Messages in one commit."""
    with shop.conn.transaction():
        for content in contents:
            text = content if isinstance(content, str) else json.dumps(content)
            shop.conn.execute(EMIT, (transactional, PREFIX, text))


AMOUNTS = "select amount::int from projection order by seq"


def test_messages_are_relayed_whole_and_in_order(
    shop: Outbox,
    webhook: Webhook,
    engine: str,
    session: Session | None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    settings = shop.settings(engine, **config(shop, webhook))
    initialise(settings)
    require(settings)
    assert shop.value("select to_regclass('public.outbox_message_t')") is None
    with caplog.at_level("WARNING"), relaying(settings, session):
        for number in range(60):
            emit(shop, message(2 * number), [message(2 * number + 1)])
        with shop.conn.transaction(force_rollback=True):
            shop.conn.execute(EMIT, (True, PREFIX, json.dumps(message(-1))))
        for _ in range(2):
            emit(shop, message(-2), transactional=False)
        shop.conn.execute(EMIT, (True, "another", json.dumps(message(-3))))
        shop.wait_drained()
        wait_until(lambda: len(webhook.accepted) == 120)
    assert shop.column(AMOUNTS) == list(range(120))
    assert shop.value("select count(*) from relay.dead_letter_queue") == 0
    said = [each for each in caplog.messages if "non-transactional messages" in each]
    assert len(said) == 1
    sent = {request.event["id"] for request in webhook.accepted}
    assert sent == set(shop.column("select id::text from projection"))


def test_what_was_applied_and_not_confirmed_is_applied_once(shop: Outbox) -> None:
    settings = shop.settings(**config(shop))
    initialise(settings)
    for number in range(30):
        emit(shop, message(number, number % 4))
    stream_and_crash(settings, tasks=1)
    stream_and_crash(settings)
    with relaying(settings):
        emit(shop, message(30))
        shop.wait_drained()
    assert sorted(shop.column(AMOUNTS)) == list(range(31))
    # Whatever comes twice has the ids that it had.
    assert shop.value("select count(distinct id) from projection") == 31


def test_a_message_that_is_no_event_is_a_dead_letter(shop: Outbox) -> None:
    settings = shop.settings(**config(shop))
    initialise(settings)
    with relaying(settings):
        emit(shop, message(1))
        emit(shop, "{no json")
        emit(shop, [message(2), message(3, event_type=None)])
        emit(shop, message(4))
        emit(shop, message(-5))
        shop.wait_drained()
    assert shop.column(AMOUNTS) == [1, 4]
    dead = shop.conn.execute(
        "select payload, split_part(exception, ' (message', 1) from relay.dead_letter_queue order by id"
    ).fetchall()
    assert [payload for payload, _ in dead] == [
        "{no json",
        {"amount": 2},
        {"amount": 3},
        {"amount": -5},
    ]
    assert dead[0][1].endswith("event 1: it is not JSON")
    assert dead[2][1].endswith("event 2: event_type is missing")


def test_a_commit_larger_than_memory_goes_through_a_file(shop: Outbox) -> None:
    settings = shop.settings(**config(shop), batch={"max_bytes": 4096})
    initialise(settings)
    with relaying(settings):
        emit(shop, *(message(number) for number in range(200)))
        shop.wait_drained()
    assert shop.column(AMOUNTS) == list(range(200))


@pytest.mark.rare
def test_commands_know_an_outbox_without_a_table(shop: Outbox, tmp_path: Path) -> None:
    file = str(shop.config_file(tmp_path / "relay.yaml", **config(shop)))
    made = administer(shop, "init", "--config", file)
    assert f"publication {shop.slot} of messages with the prefix 'shop.outbox'" in made.stdout
    settings = Settings(**config(shop))
    assert initialise(settings) == []
    checked = relay("check", "--config", file)
    assert checked.returncode == 0, checked.stderr
    assert "publishes messages with the prefix 'shop.outbox'" in checked.stdout
    assert relay("status", "--config", file).returncode == 0
    with pytest.raises(
        ConfigurationError, match=r"messages with the prefix 'shop\.outbox': without"
    ):
        lag_seconds(settings)
    assert len(positions(settings)) == 8
    with pytest.raises(ConfigurationError, match=r"source\.message_prefix: `relay publish`"):
        require_own_outbox(settings)
    with pytest.raises(ConfigurationError, match=r"but this command needs a table$"):
        partition_new(settings, "1d", shop.installer_dsn)
    shop.conn.execute(f"drop publication {shop.slot}".encode())
    with pytest.raises(ConfigurationError, match="there is no publication"):
        require(settings)
    assert initialise(settings) == [f"publication {shop.slot} of {settings.source.outbox}"]
    assert administer(shop, "uninstall", "--config", file, "--yes").returncode == 0
    slots = "select count(*) from pg_replication_slots where database = current_database()"
    assert shop.value(slots) == shop.value("select count(*) from pg_publication") == 0


def test_a_host_is_erased_where_relay_has_it(shop: Outbox) -> None:
    settings = shop.settings(**config(shop))
    initialise(settings)
    with relaying(settings):
        emit(shop, message(-1, 1), message(-1, 2))
        shop.wait_drained()
        # While relay runs: its slot has to pass all that is committed.
        report = erase(settings, shop.conn, shop.conn, str(host(1)))
    assert report.removed["dead letters"] == 1
    assert "outbox" not in report.removed


@pytest.mark.parametrize("driver", KINDS)
def test_a_service_publishes_messages_in_its_transaction(shop: Outbox, driver: str) -> None:
    settings = shop.settings(**config(shop))
    initialise(settings)
    client = Client(message_prefix=PREFIX)

    async def publish() -> None:
        async with DRIVERS[driver](shop.publisher_dsn) as opened:
            await opened.publish(client, Placed("e", payload={"amount": -1}), host_id=host(1))
            await opened.run(opened.rollback)
        async with DRIVERS[driver](shop.publisher_dsn) as opened:
            some = [Placed("e", ("Order", 1), payload={"amount": n}, version=2) for n in (1, 2)]
            await opened.publish(client, some, host_id=host(1))
            await opened.run(opened.commit)

    asyncio.run(publish())
    with relaying(settings):
        shop.wait_drained()
    assert shop.column(AMOUNTS) == [1, 2]
    assert shop.value("select count(distinct transaction_id) from projection") == 1


def test_messages_have_no_columns() -> None:
    with pytest.raises(ValueError, match="columns: messages have none"):
        Client(columns={"payload": "body"}, message_prefix=PREFIX)
    with collect(Client(message_prefix=PREFIX)), pytest.raises(EventInvalid, match="extra"):
        Client(message_prefix=PREFIX).publish(
            None, Placed("e", payload=1, extra={"region": "eu"}), host_id=1
        )


def test_who_may_emit_is_who_may_call_the_function(shop: Outbox) -> None:
    """Every role that may connect publishes, as security.md says, until the functions are taken from `public`."""
    name = f"{shop.slot}_passer_by"
    shop.conn.execute(f"create role {name}".encode())
    functions = shop.column(
        "select oid::regprocedure::text from pg_proc where proname = 'pg_logical_emit_message'"
    )
    try:
        shop.conn.execute(f"set role {name}".encode())
        shop.conn.execute(EMIT, (True, PREFIX, json.dumps(message(1))))
        shop.conn.execute("reset role")
        for function in functions:
            shop.conn.execute(f"revoke execute on function {function} from public".encode())
        shop.conn.execute(f"set role {name}".encode())
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            shop.conn.execute(EMIT, (True, PREFIX, json.dumps(message(1))))
    finally:
        shop.conn.execute(f"reset role; drop role {name}".encode())
