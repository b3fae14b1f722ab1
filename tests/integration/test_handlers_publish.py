"""Handlers that publish into the outbox of their own database: rights, modes, tables, and kills of relay."""

from __future__ import annotations

import json
import random
import uuid
from pathlib import Path
from typing import Any

import psycopg
import pytest

from relay.admin.check import examine
from relay.admin.findings import Severity
from relay.client import Event
from relay.client import Outbox as Client
from relay.model.events import Transaction
from relay.spark.session import Session
from tests.outbox import LONG_SECONDS, Outbox, event, host, initialise, relaying, wait_until
from tests.process import running
from tests.published import HANDLERS, chain, loop, next_step

TABLE = "public.outbox_message_t"
GRANTED = f"right of the role relay to publish into {TABLE}"


def errors(settings: Any) -> list[str]:
    return [each.text for each in examine(settings) if each.level is Severity.ERROR]


def published(outbox: Outbox) -> int:
    return int(outbox.value("select count(*) from outbox_message_t"))


def assert_each_caused_one(outbox: Outbox, chains: int) -> None:
    """Assert that each event but the last of a chain caused one, with the next count, and nothing else is there."""
    assert outbox.conn.execute(
        "select event_type, coalesce((metadata ->> 'hop_count')::int, 0), count(*),"
        "       count(distinct coalesce(metadata ->> 'correlation_id', id::text)),"
        "       count(distinct coalesce(metadata ->> 'causation_id', id::text))"
        "  from outbox_message_t group by 1, 2 order by 1"
    ).fetchall() == [(f"step.{n}", n, chains, chains, chains) for n in range(4)]


def test_init_grants_just_the_right_to_publish_and_takes_it_back(outbox: Outbox) -> None:
    with outbox.limited_role() as (name, dsn):
        source = {**outbox.config()["source"], "dsn": dsn}
        handlers = {kind: HANDLERS[kind] for kind in ("python", "sql")}
        limited = outbox.settings(source=source, **{**chain("python", "sql"), "handlers": handlers})
        administrator = outbox.settings(**chain("python", "sql"))
        refused = [
            f"handlers.{kind}.publishes: the role {name} may not publish into {TABLE} of the database "
            f"{outbox.slot!r}: run `relay init --handlers-publish` with it as the source, and connect as a "
            "member of relay"
            for kind in handlers
        ]
        assert set(refused) <= set(errors(limited))
        assert initialise(administrator, handlers_publish=True) == [GRANTED]
        assert initialise(administrator, handlers_publish=True) == []
        assert initialise(administrator) == []
        assert errors(limited) == []
        with relaying(limited):
            outbox.publish(host(1), event(1, "step.0"))
            wait_until(lambda: published(outbox) == 3)
        with psycopg.connect(dsn, autocommit=True) as conn:
            for forbidden in (
                "update outbox_message_t set payload = '{}'",
                "delete from outbox_message_t",
                "insert into outbox_message_t (host_id, event_type, payload, c_offset) "
                "values (gen_random_uuid(), 'a', '{}', 1)",
            ):
                with pytest.raises(psycopg.errors.InsufficientPrivilege):
                    conn.execute(forbidden.encode())
        assert initialise(administrator, handlers_publish=False) == [f"{GRANTED}, revoked"]
        assert initialise(administrator, handlers_publish=False) == []
        assert set(refused) <= set(errors(limited))
        with psycopg.connect(dsn, autocommit=True) as conn:
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                conn.execute("select relay.publish(gen_random_uuid(), null, '[]')")
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                conn.execute(
                    "insert into outbox_message_t (host_id, event_type, payload) "
                    "values (gen_random_uuid(), 'a', '{}')"
                )


def test_a_handler_of_another_database_publishes_into_the_outbox_there(
    outbox: Outbox, database: str
) -> None:
    """In one commit with its position. The chain goes on with the relay of that outbox, and so does its count."""
    source = {**outbox.config()["source"], "slot": f"{outbox.slot}_far"}
    with Outbox(database) as other:
        first = outbox.settings(
            source=source, target={"dsn": other.relay_dsn}, group="far", **chain("sql", "batch")
        )
        initialise(first)
        assert [
            f"may not publish into {TABLE} of the database {other.slot!r}" in each
            for each in errors(first)
        ].count(True) == 2
        second = other.settings(**loop("batch"))
        other.conn.execute("create table projection ()")
        initialise(second, handlers_publish=True)
        assert errors(first) == []
        second = second.model_copy(
            update={"source": second.source.model_copy(update={"max_hops": 5})}
        )
        with relaying(first), relaying(second):
            outbox.publish(host(1), event(1, "step.0"))
            wait_until(lambda: other.value("select count(*) from relay.dead_letter_queue") == 1)
        assert published(outbox) == 1
        assert other.conn.execute(
            "select event_type, (metadata ->> 'hop_count')::int from outbox_message_t order by c_offset"
        ).fetchall() == [(f"step.{n}", n) for n in range(1, 6)]
    outbox.conn.execute("select pg_drop_replication_slot(%s)", (source["slot"],))


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param({"source": {"mode": "wal"}}, id="wal"),
        pytest.param({"source": {"mode": "poll"}, "poll": {"wait_period_ms": 50}}, id="poll"),
        pytest.param(
            {"source": {"mode": "poll"}, "poll": {"wait_period_ms": 20_000, "listen": True}},
            id="listen",
        ),
        pytest.param({"source": {"offsets": "gapless"}, "partitions": 8}, id="gapless"),
    ],
)
def test_what_is_published_is_read_in_every_mode(outbox: Outbox, overrides: dict[str, Any]) -> None:
    """With NOTIFY, relay's own commit wakes it. The counter without gaps is one row, for which tasks take turns."""
    chains = 40
    source = {**outbox.config()["source"], **overrides.pop("source")}
    settings = outbox.settings(source=source, **chain("python", "sql", "batch"), **overrides)
    initialise(settings, handlers_publish=True)
    with relaying(settings):
        for number in range(chains):
            outbox.publish(host(number), event(number, "step.0"))
        wait_until(lambda: published(outbox) >= 4 * chains, 120)
    assert_each_caused_one(outbox, chains)


def test_each_call_of_publish_is_a_business_transaction(outbox: Outbox) -> None:
    """Whatever transactions relay commits together. The id of the handled transaction may be used again."""
    settings = outbox.settings(
        handlers={
            "pair": {"type": "python", "callable": f"{__name__}:publish_pair", "publishes": True},
            "note": {"type": "python", "callable": f"{__name__}:note", "publishes": False},
        },
        routes=[
            {"match": {"event_type": "step.0"}, "handlers": ["pair"]},
            {"match": {"event_type": "step.1"}, "handlers": ["note"]},
        ],
    )
    outbox.conn.execute("create table noted (transaction_id uuid, events int)")
    outbox.let_handlers_publish()
    for number in range(30):
        outbox.publish(host(number), event(number, "step.0"))
    with relaying(settings):
        wait_until(lambda: outbox.value("select coalesce(sum(events), 0) from noted") == 30 * 3)
    assert outbox.conn.execute(
        "select events, count(*), count(distinct transaction_id) from noted group by 1 order by 1"
    ).fetchall() == [(1, 30, 30), (2, 30, 30)]
    assert (
        outbox.value(
            "select count(*) from outbox_message_t as a join outbox_message_t as b using (transaction_id)"
            " where a.event_type = 'step.0' and b.event_type = 'step.1'"
        )
        == 30
    )


def publish_pair(transaction: Transaction, cursor: psycopg.Cursor[Any]) -> None:
    client = Client()
    for each in transaction.events:
        assert each.host_id is not None
        following = [Event("step.1", payload={"amount": n}) for n in range(3)]
        client.publish(cursor, following[:2], host_id=each.host_id)
        same = transaction.transaction_id
        assert same is not None
        client.publish(cursor, following[2], host_id=each.host_id, transaction_id=uuid.UUID(same))


def note(transaction: Transaction, cursor: psycopg.Cursor[Any]) -> None:
    cursor.execute(
        "insert into noted values (%s, %s)", (transaction.transaction_id, len(transaction))
    )


ADOPTED = """
    create table shop_outbox (
        id bigint generated always as identity primary key, tenant text not null, kind text not null,
        body jsonb not null, meta jsonb
    )
"""


def test_a_table_of_ones_own_gets_what_handlers_publish(outbox: Outbox) -> None:
    """The client inserts the cause; a statement writes it with relay.caused_by, whatever the type of the ids."""
    outbox.conn.execute(ADOPTED)
    outbox.give("shop_outbox")
    columns = {"host_id": "tenant", "event_type": "kind", "payload": "body", "metadata": "meta"}
    absent = dict.fromkeys(
        (
            *("user_id", "aggregate_type", "aggregate_id", "aggregate_version", "event_ts"),
            *("transaction_id", "transaction_ordinal", "transaction_count", "deliver_at"),
        )
    )
    insert = (
        "insert into shop_outbox (tenant, kind, body, meta) "
        "values (%(host_id)s, 'step.2', '{}', relay.caused_by(%(id)s, %(metadata)s))"
    )
    with outbox.limited_role() as (_, dsn):
        source = {
            **outbox.config()["source"],
            "table": "public.shop_outbox",
            "columns": {**columns, **absent},
            "types": {"id": "bigint", "host_id": "text"},
            "slot": f"{outbox.slot}_shop",
            "publication": f"{outbox.slot}_shop",
        }
        more: dict[str, Any] = {
            "group": "shop",
            "handlers": {
                "first": {"type": "python", "callable": f"{__name__}:adopted", "publishes": True},
                "second": {"type": "sql", "statement": insert, "publishes": True},
            },
            "routes": [
                {"match": {"event_type": "step.0"}, "handlers": ["first"]},
                {"match": {"event_type": "step.1"}, "handlers": ["second"]},
            ],
            "unrouted": "ignore",
        }
        administrator = outbox.settings(source=source, **more)
        assert "right of the role relay to publish into public.shop_outbox" in initialise(
            administrator, handlers_publish=True
        )
        limited = outbox.settings(source={**source, "dsn": dsn}, **more)
        assert errors(limited) == []
        with relaying(limited):
            outbox.conn.execute(
                "insert into shop_outbox (tenant, kind, body) values ('a', 'step.0', '{}')"
            )
            wait_until(lambda: outbox.value("select count(*) from shop_outbox") == 3)
        assert outbox.conn.execute("select kind, meta from shop_outbox order by id").fetchall() == [
            ("step.0", None),
            ("step.1", {"hop_count": 1, "causation_id": "1", "correlation_id": "1"}),
            ("step.2", {"hop_count": 2, "causation_id": "2", "correlation_id": "1"}),
        ]
        assert initialise(administrator, handlers_publish=False) != []
        assert (
            sum("may not publish into public.shop_outbox" in each for each in errors(limited)) == 2
        )
    outbox.conn.execute("select pg_drop_replication_slot(%s)", (f"{outbox.slot}_shop",))


def adopted(transaction: Transaction, cursor: psycopg.Cursor[Any]) -> None:
    names = ("id", "user_id", "transaction_id", "transaction_ordinal", "transaction_count")
    columns = {"host_id": "tenant", "event_type": "kind", "payload": "body", "metadata": "meta"}
    client = Client("public.shop_outbox", {**columns, **dict.fromkeys(names)})
    for each in transaction.events:
        assert each.event_type is not None
        client.publish(cursor, Event(next_step(each.event_type), payload={}), host_id="a")


PREFIX = "shop.outbox"


def emit(transaction: Transaction, cursor: psycopg.Cursor[Any]) -> None:
    client = Client(message_prefix=PREFIX)
    for each in transaction.events:
        assert each.event_type is not None
        assert each.host_id is not None
        following = Event(next_step(each.event_type), payload={})
        client.publish(cursor, following, host_id=each.host_id)


def test_messages_in_place_of_a_table_have_causes_too(database: str) -> None:
    """A handler emits them in relay's transaction, whose commit relay then reads."""
    emitted = (
        f"select pg_logical_emit_message(true, '{PREFIX}', jsonb_build_object('host_id', %(host_id)s, 'id', "
        "gen_random_uuid(), 'event_type', 'step.2', 'payload', '{}'::jsonb, "
        "'metadata', relay.caused_by(%(id)s, %(metadata)s))::text)"
    )
    with Outbox(database) as outbox:
        outbox.conn.execute("create table seen (event_type text, hops int)")
        source = {**outbox.config()["source"], "mode": "wal", "message_prefix": PREFIX}
        seen = "insert into seen values (%(event_type)s, (%(metadata)s ->> 'hop_count')::int)"
        settings = outbox.settings(
            source=source,
            handlers={
                "first": {"type": "python", "callable": f"{__name__}:emit", "publishes": True},
                "second": {"type": "sql", "statement": emitted, "publishes": True},
                "seen": {"type": "sql", "statement": seen},
            },
            routes=[
                {"match": {"event_type": "step.0"}, "handlers": ["first"]},
                {"match": {"event_type": "step.1"}, "handlers": ["second", "seen"]},
                {"match": {"event_type": "step.2"}, "handlers": ["seen"]},
            ],
        )
        initialise(settings, handlers_publish=True)
        assert errors(settings) == []
        with relaying(settings):
            with outbox.conn.transaction():
                Client(message_prefix=PREFIX).publish(
                    outbox.conn, Event("step.0", payload={}), host_id=host(1)
                )
            wait_until(lambda: outbox.value("select count(*) from seen") == 2)
        assert outbox.conn.execute("select * from seen order by hops").fetchall() == [
            ("step.1", 1),
            ("step.2", 2),
        ]


@pytest.mark.rare
def test_chains_of_handlers_on_spark(outbox: Outbox, spark_session: Session) -> None:
    """Executors know the cause as relay's own process does."""
    chains = 30
    kinds = ("python", "sql", "batch")
    outbox.let_handlers_publish()
    with relaying(outbox.settings("spark", **chain(*kinds)), spark_session):
        for number in range(chains):
            outbox.publish(host(number), event(number, "step.0"))
        wait_until(lambda: published(outbox) >= 4 * chains, LONG_SECONDS)
        outbox.wait_drained(LONG_SECONDS)
    assert_each_caused_one(outbox, chains)


@pytest.mark.chaos
def test_chains_are_exact_and_complete_however_often_relay_is_killed(
    outbox: Outbox, tmp_path: Path
) -> None:
    """Three hops, by a function, a statement for each event and one for many; killed when it has got a bit further."""
    chains, kills = 300, 3
    outbox.let_handlers_publish()
    config = outbox.config_file(
        tmp_path / "relay.yaml",
        batch={"max_events": 50, "inline_max_events": 1_000_000_000},
        **chain("python", "sql", "batch"),
    )
    for number in range(chains):
        outbox.publish(host(number % 64), event(number, "step.0"))
    chance = random.Random()
    goals = sorted(chance.sample(range(chains + 20, 4 * chains - 100), kills))
    for goal in goals:
        with running(config) as service:
            wait_until(lambda goal=goal: published(outbox) >= goal, 120)  # type: ignore[misc]
            service.kill()
    with running(config) as service:
        wait_until(lambda: published(outbox) >= 4 * chains, 120)
        outbox.wait_drained(120)
        assert service.terminate() == 0
    assert_each_caused_one(outbox, chains)
    assert outbox.value("select count(*) from relay.dead_letter_queue") == 0, json.dumps(goals)
