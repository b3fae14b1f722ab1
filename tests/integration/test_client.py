"""Services publish with `relay.client` in their own transactions, whatever their driver."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from threading import Thread
from typing import Any

import asyncpg
import psycopg
import pytest
import sqlalchemy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from relay.client import (
    DuplicateEvent,
    Event,
    EventInvalid,
    EventTooLarge,
    NotInTransaction,
    OutboxError,
    OutboxForbidden,
    OutboxMismatch,
    OutboxMissing,
    UnknownSession,
)
from relay.client import Outbox as Client
from relay.client.enqueueing import enqueue, enqueue_async
from relay.client.inbox import Inbox
from relay.client.outbox import FIELDS
from relay.client.scheduled import cancel
from relay.service import Service
from tests.client_sessions import DRIVERS, KINDS, Opened, django_connection, parameters
from tests.outbox import Outbox, host, wait_until

HOST = host(1)
CLIENT = Client()
every_driver = pytest.mark.parametrize("driver", DRIVERS)


def order(number: int, **more: Any) -> Event:
    return Event("order.placed", aggregate=("Order", number), payload={"order": number}, **more)


def scenario(outbox: Outbox, driver: str, act: Callable[[Opened], Awaitable[Any]]) -> Any:
    """Act in a session of a driver."""

    async def run() -> Any:
        async with DRIVERS[driver](outbox.publisher_dsn) as opened:
            return await act(opened)

    return asyncio.run(run())


def stored(outbox: Outbox) -> list[str]:
    return outbox.column("select aggregate_id from outbox_message_t order by c_offset")


@every_driver
def test_events_belong_to_the_transaction(outbox: Outbox, driver: str) -> None:
    """Invisible before the commit, gone after a rollback, to a savepoint as well."""

    async def act(opened: Opened) -> None:
        await opened.publish(CLIENT, order(1), host_id=HOST)
        assert stored(outbox) == []
        await opened.run(lambda: opened.execute("savepoint before"))
        await opened.publish(CLIENT, [order(2), order(3)], host_id=HOST)
        await opened.run(lambda: opened.execute("rollback to savepoint before"))
        await opened.publish(CLIENT, [order(4), order(5)], host_id=HOST)
        await opened.run(opened.commit)

    scenario(outbox, driver, act)
    assert stored(outbox) == ["1", "4", "5"]

    async def fail(opened: Opened) -> None:
        await opened.publish(CLIENT, order(6), host_id=HOST)
        with pytest.raises(Exception, match="division by zero"):
            await opened.run(lambda: opened.execute("select 1 / 0"))
        await opened.run(opened.rollback)

    scenario(outbox, driver, fail)
    assert stored(outbox) == ["1", "4", "5"]


@every_driver
def test_a_business_transaction_has_its_columns(outbox: Outbox, driver: str) -> None:
    tomorrow = datetime.now(UTC) + timedelta(days=1)
    user, identity = uuid.uuid4(), uuid.uuid4()
    events = [
        order(1, version=7, metadata={"by": "me"}, id=identity, deliver_at=tomorrow),
        order(2, event_ts=tomorrow),
    ]

    async def act(opened: Opened) -> uuid.UUID:
        found = await opened.publish(CLIENT, events, host_id=HOST, user_id=user)
        await opened.run(opened.commit)
        return found

    transaction = scenario(outbox, driver, act)
    rows = outbox.conn.execute(
        """
        select id, host_id, user_id, aggregate_type, aggregate_id, aggregate_version, event_type, payload, metadata,
               transaction_id, transaction_ordinal, transaction_count, deliver_at, c_xid is not null
          from outbox_message_t order by c_offset
        """
    ).fetchall()
    ours = (transaction, 1, 2, tomorrow, True)
    assert rows[0] == (
        *(identity, HOST, user, "Order", "1", 7, "order.placed", {"order": 1}, {"by": "me"}),
        *ours,
    )
    assert rows[1][1:] == (
        *(HOST, user, "Order", "2", None, "order.placed", {"order": 2}, None),
        *(transaction, 2, 2, None, True),
    )
    assert outbox.column("select event_ts from outbox_message_t order by c_offset")[1] == tomorrow


@pytest.mark.parametrize("driver", KINDS)
def test_ten_thousand_events_in_one_call(outbox: Outbox, driver: str) -> None:
    async def act(opened: Opened) -> None:
        await opened.publish(CLIENT, (order(number) for number in range(10_000)), host_id=HOST)
        await opened.run(opened.commit)

    scenario(outbox, driver, act)
    assert stored(outbox) == [str(number) for number in range(10_000)]
    assert outbox.column(
        "select transaction_ordinal from outbox_message_t order by c_offset"
    ) == list(range(1, 10_001))


@contextmanager
def role(outbox: Outbox, *grants: str) -> Iterator[str]:
    """A role that a service connects with."""
    name = f"{outbox.slot}_service"
    outbox.conn.execute(f"create role {name} login password 'p'".encode())
    for grant in grants:
        outbox.conn.execute(f"grant {grant} to {name}".encode())
    try:
        yield outbox.dsn_as(name)
    finally:
        outbox.conn.execute(f"drop owned by {name}; drop role {name}".encode())


@every_driver
def test_a_publisher_needs_no_more_than_its_role(outbox: Outbox, driver: str) -> None:
    with role(outbox, "relay_publisher") as dsn:

        async def run() -> None:
            async with DRIVERS[driver](dsn) as opened:
                await opened.publish(CLIENT, order(1), host_id=HOST)
                await opened.run(opened.commit)

        asyncio.run(run())
    assert stored(outbox) == ["1"]


@every_driver
def test_faults_have_types(outbox: Outbox, driver: str) -> None:
    taken = uuid.uuid4()
    outbox.publish(HOST, {"id": str(taken), **order_row(0)})
    outbox.conn.execute("create table other (id uuid, payload jsonb, shop text not null)")
    outbox.conn.execute("grant insert on other to app_publisher")
    kept = ("id", "payload")
    nothing = {name: None for name in FIELDS if name not in kept}
    cases: list[tuple[type[OutboxError], Client, Event]] = [
        (OutboxMissing, Client("public.nothing"), order(1)),
        (OutboxMismatch, Client("public.other"), order(1)),
        (OutboxMismatch, Client("public.other", nothing), order(1)),
        (EventTooLarge, CLIENT, Event("big", payload={"text": "x" * 17_000_000})),
        (DuplicateEvent, CLIENT, order(1, id=taken)),
        # With columns of its own it may have ids of any type.
        (EventInvalid, Client(columns={"metadata": None}), order(1, id="no uuid, but s3cret")),
    ]
    for kind, client, event in cases:

        async def act(
            opened: Opened,
            kind: type[OutboxError] = kind,
            client: Client = client,
            event: Event = event,
        ) -> None:
            with pytest.raises(kind) as raised:
                await opened.publish(client, event, host_id=HOST)
            assert type(raised.value) is kind
            assert raised.value.__cause__ is not None
            assert "s3cret" not in str(raised.value)
            # Of those that are not there, or must have a value.
            assert kind is not OutboxMismatch or ": column " in str(raised.value)
            await opened.run(opened.rollback)

        scenario(outbox, driver, act)
    with role(outbox) as dsn:

        async def forbidden() -> None:
            async with DRIVERS[driver](dsn) as opened:
                with pytest.raises(OutboxForbidden):
                    await opened.publish(CLIENT, order(1), host_id=HOST)
                await opened.run(opened.rollback)

        asyncio.run(forbidden())
    assert outbox.value("select count(*) from outbox_message_t") == 1


def order_row(number: int) -> dict[str, Any]:
    return {
        "event_type": "order.placed",
        "aggregate_type": "Order",
        "aggregate_id": str(number),
        "payload": {},
    }


def test_what_commits_by_itself_is_refused(outbox: Outbox) -> None:
    """There the events would not stand or fall with what they tell of."""
    with psycopg.connect(outbox.publisher_dsn, autocommit=True) as conn:
        with pytest.raises(NotInTransaction, match="autocommit"):
            CLIENT.publish(conn, order(1), host_id=HOST)
        with conn.transaction():
            CLIENT.publish(conn, order(2), host_id=HOST)
    engine = sqlalchemy.create_engine(
        "postgresql+psycopg://",
        creator=lambda: psycopg.connect(outbox.publisher_dsn),
        isolation_level="AUTOCOMMIT",
    )
    with engine.connect() as session, pytest.raises(NotInTransaction, match="AUTOCOMMIT"):
        CLIENT.publish(session, order(1), host_id=HOST)
    engine.dispose()
    connection = django_connection(outbox.publisher_dsn)
    with pytest.raises(NotInTransaction, match="atomic"):
        CLIENT.publish(connection, order(1), host_id=HOST)
    connection.close()

    async def asynchronous() -> None:
        conn = await asyncpg.connect(**parameters(outbox.publisher_dsn))
        with pytest.raises(NotInTransaction):
            await CLIENT.publish_async(conn, order(1), host_id=HOST)
        await conn.close()
        pool = await asyncpg.create_pool(**parameters(outbox.publisher_dsn), min_size=1, max_size=1)
        async with pool.acquire() as pooled, pooled.transaction():
            await CLIENT.publish_async(pooled, order(3), host_id=HOST)
        await pool.close()

    asyncio.run(asynchronous())
    assert stored(outbox) == ["2", "3"]


def test_the_wrong_kind_of_session_is_said(outbox: Outbox) -> None:
    """By all that take one, with the form that takes it."""
    inbox = Inbox("c")
    with pytest.raises(UnknownSession, match=r"builtins\.object is not a supported session"):
        CLIENT.publish(object(), order(1), host_id=HOST)

    async def asynchronous() -> None:
        async with await psycopg.AsyncConnection.connect(outbox.publisher_dsn) as conn:
            for call in (
                lambda: CLIENT.publish(conn, order(1), host_id=HOST),
                lambda: enqueue(conn, "mail", {}),
                lambda: cancel(conn, "x"),
                lambda: inbox.purge(conn),
                lambda: inbox.once(conn, "1").__enter__(),
            ):
                with pytest.raises(UnknownSession, match=r"whose name ends with _async.*`async w"):
                    call()
        with psycopg.connect(outbox.publisher_dsn) as sync:
            for awaited in (
                CLIENT.publish_async(sync, order(1), host_id=HOST),
                enqueue_async(sync, "mail", {}),
                inbox.once(sync, "1").__aenter__(),
            ):
                with pytest.raises(UnknownSession, match=r"without _async.*`with`"):
                    await awaited

    asyncio.run(asynchronous())


def test_faults_that_are_not_the_outboxs_stay_the_drivers(outbox: Outbox) -> None:
    with psycopg.connect(outbox.publisher_dsn) as conn:
        with pytest.raises(psycopg.errors.DivisionByZero):
            conn.execute("select 1 / 0")
        with pytest.raises(psycopg.errors.InFailedSqlTransaction):
            CLIENT.publish(conn, order(1), host_id=HOST)


TEXTS = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]))
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXTS | st.floats(allow_nan=False, allow_infinity=False)
    # jsonb's numbers reach so far.
    | st.decimals(allow_nan=False, allow_infinity=False) | st.uuids() | st.datetimes(timezones=st.just(UTC)),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=12,
)  # fmt: skip


def as_read(value: Any) -> Any:
    """What comes back for a value."""
    if isinstance(value, dict):
        return {key: as_read(each) for key, each in value.items()}
    if isinstance(value, list):
        return [as_read(each) for each in value]
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, float):
        # jsonb has the very decimals.
        return Decimal(repr(value))
    return str(value) if isinstance(value, Decimal | uuid.UUID) else value


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(payload=st.dictionaries(TEXTS, VALUES, max_size=4), metadata=st.dictionaries(TEXTS, TEXTS))
def test_values_come_back_exactly(
    outbox: Outbox, payload: dict[str, Any], metadata: dict[str, Any]
) -> None:
    event = Event("any", payload=payload, metadata=metadata)
    # Of a superuser, who may look at it before the rollback.
    with psycopg.connect(outbox.superuser_dsn) as conn:
        CLIENT.publish(conn, event, host_id=HOST)
        row = conn.execute(
            "select payload::text, metadata::text from outbox_message_t where id = %s", (event.id,)
        ).fetchone()
        conn.rollback()
    assert row is not None
    assert json.loads(row[0], parse_float=Decimal) == as_read(payload)
    assert json.loads(row[1] or "{}") == metadata


def test_a_table_of_ones_own(outbox: Outbox) -> None:
    """Debezium's names, an id that the table makes, a column of its own, and names that need quotes."""
    outbox.conn.execute(
        """
        create schema "Shop: 100%";
        create table "Shop: 100%"."Outbox" (
            id bigint generated always as identity primary key,
            aggregatetype varchar(255) not null, aggregateid varchar(255) not null, type varchar(255) not null,
            payload text, tenant uuid not null, "trace:id" text default 'none', at timestamptz default now());
        grant usage on schema "Shop: 100%" to app_publisher;
        grant insert on "Shop: 100%"."Outbox" to app_publisher;
        """
    )
    client = Client(
        "Shop: 100%.Outbox",
        dict.fromkeys(FIELDS)
        | {
            "aggregate_type": "aggregatetype",
            "aggregate_id": "aggregateid",
            "event_type": "type",
            "host_id": "tenant",
            "payload": "payload",
        },
    )
    for driver in DRIVERS:

        async def act(opened: Opened) -> None:
            events = [order(1, extra={"trace:id": "abc"}), order(2)]
            await opened.publish(client, events, host_id=HOST)
            await opened.run(opened.commit)

        scenario(outbox, driver, act)
    rows = outbox.conn.execute(
        'select aggregatetype, aggregateid, type, payload::jsonb, tenant, "trace:id" from "Shop: 100%"."Outbox" '
        "order by id"
    ).fetchall()
    first = ("Order", "1", "order.placed", {"order": 1}, HOST, "abc")
    second = ("Order", "2", "order.placed", {"order": 2}, HOST, None)
    assert rows == [first, second] * len(DRIVERS)


def test_what_was_published_is_relayed(outbox: Outbox) -> None:
    @dataclass
    class Line:
        sku: str
        amount: Decimal

    with psycopg.connect(outbox.publisher_dsn) as conn:
        for number in range(50):
            CLIENT.publish(
                conn,
                [
                    Event(
                        "order.placed",
                        aggregate=("Order", number),
                        payload={"amount": Decimal("19.99"), "lines": [Line("a", Decimal("0.10"))]},
                    )
                    for _ in range(3)
                ],
                host_id=host(number % 5),
            )
            conn.commit()
    service = Service(outbox.settings())
    thread = Thread(target=service.run)
    thread.start()
    try:
        wait_until(lambda: outbox.handled() == 150)
    finally:
        service.stop()
        thread.join(30)
    outbox.assert_exact()
