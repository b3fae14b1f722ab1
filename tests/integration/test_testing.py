"""relay.testing runs handlers of every type against a real database."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from typing import Any
from uuid import UUID

import psycopg
import pytest
from psycopg.rows import dict_row

from relay import Delivery, Fail, Transaction
from relay.faults import ConfigurationError, Rejected, TransactionAborted
from relay.testing import deliver, deliver_async, handle, run
from tests.webhook import Answer, Webhook

SCHEMA = """
    create schema shop;
    create table shop.orders (
        id text primary key, amount numeric check (amount > 0),
        part_of text references shop.orders deferrable initially deferred
    );
    set search_path = shop
"""


@pytest.fixture
def conn(database: str) -> Iterator[psycopg.Connection[Any]]:
    """A connection of a test: its rows are dictionaries, and its path leads to the schema of the test."""
    with psycopg.connect(database, autocommit=True, row_factory=dict_row) as made:
        made.execute(SCHEMA)
        yield made


def insert(transaction: Transaction, cursor: psycopg.Cursor[Any]) -> None:
    for event in transaction.events:
        cursor.execute(
            "insert into orders values (%s, %s) returning id",
            (event.aggregate_id, event.payload["amount"]),
        )
        # As relay's own cursors have them.
        assert cursor.fetchone() == (event.aggregate_id,)
        if event.payload["amount"] == 13:
            raise KeyError("thirteen")


def ends(transaction: Transaction, cursor: psycopg.Cursor[Any]) -> None:
    cursor.execute("rollback")


def goes_on(transaction: Transaction, cursor: psycopg.Cursor[Any]) -> None:
    with suppress(psycopg.Error):
        cursor.execute("select 1 / 0")


async def waits(transaction: Transaction, cursor: psycopg.Cursor[Any]) -> None:
    """Do nothing."""


def insert_part(transaction: Transaction, cursor: psycopg.Cursor[Any]) -> None:
    for event in transaction.events:
        cursor.execute(
            "insert into orders values (%s, 1, %s)", (event.aggregate_id, event.payload["of"])
        )


def goes_on_in_block(delivery: Delivery) -> None:
    with delivery.transaction() as conn, suppress(psycopg.Error):
        conn.execute("select 1 / 0")


def ends_block(delivery: Delivery) -> None:
    with delivery.transaction() as conn:
        conn.execute("rollback")


def enters_two_blocks(delivery: Delivery) -> None:
    with delivery.transaction():
        pass
    with suppress(Fail), delivery.transaction():
        pass


def rows_are_relays(delivery: Delivery) -> None:
    with delivery.transaction() as conn:
        assert conn.execute("select 1").fetchone() == (1,)


async def complete(delivery: Delivery) -> None:
    async with delivery.transaction() as conn:
        for event in delivery.events:
            await conn.execute("insert into orders values (%s, 1)", (event.aggregate_id,))
    if delivery.attempt == 2:
        raise RuntimeError("too late: it is committed")


def insert_first(delivery: Delivery) -> None:
    with delivery.transaction() as conn:
        for event in delivery.events:
            conn.execute("insert into orders values (%s, 1)", (event.aggregate_id,))
        if delivery.attempt == 2:
            raise RuntimeError("nothing is committed")


def handler(kind: str, **more: Any) -> dict[str, Any]:
    return {
        "handlers": {"orders": {"type": kind, **more}},
        "routes": [{"handlers": ["orders"]}],
    }


def of_module(function: str) -> str:
    return f"tests.integration.test_testing:{function}"


VALUES = "(%(aggregate_id)s, (%(payload)s->>'amount')::numeric, %(payload)s->>'of')"
KINDS = {
    "event": handler("sql", statement=f"insert into orders values {VALUES}"),
    "batch": handler(
        "sql",
        each="batch",
        statement="insert into orders select aggregate_id, (payload->>'amount')::numeric, payload->>'of' from batch",
    ),
    "python": handler("python", callable=of_module("insert")),
}


def order(number: int, amount: int = 1, **more: Any) -> dict[str, Any]:
    return {
        "event_type": "order.placed",
        "aggregate_id": str(number),
        "payload": {"amount": amount, **more},
    }


def ids(conn: psycopg.Connection[Any]) -> list[str]:
    return [row["id"] for row in conn.execute("select id from orders order by id")]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("in_transaction", [False, True])
def test_a_handler_writes_to_the_database(
    kind: str, in_transaction: bool, conn: psycopg.Connection[Any]
) -> None:
    if in_transaction:
        conn.execute("begin")
    (got,) = run(KINDS[kind], "orders", order(1), order(2), conn=conn)
    assert [event.aggregate_id for event in got.events] == ["1", "2"]
    with pytest.raises(psycopg.errors.CheckViolation):
        run(KINDS[kind], "orders", order(3), order(4, -1), conn=conn)
    assert ids(conn) == ["1", "2"]
    run(KINDS[kind], "orders", order(5), conn=conn)
    if in_transaction:
        conn.rollback()
        assert ids(conn) == []
    else:
        assert ids(conn) == ["1", "2", "5"]


def test_many_events_take_the_way_of_many(conn: psycopg.Connection[Any]) -> None:
    for kind in ("event", "batch"):
        run(KINDS[kind], "orders", *(order(number) for number in range(200)), conn=conn)
        assert len(ids(conn)) == 200
        conn.execute("delete from orders")


def test_a_deferred_constraint_fails_at_once(conn: psycopg.Connection[Any]) -> None:
    with conn.transaction(force_rollback=True):
        run(KINDS["event"], "orders", order(1, of="2"), order(2), conn=conn)
        with pytest.raises(psycopg.errors.ForeignKeyViolation):
            run(KINDS["event"], "orders", order(3, of="9"), conn=conn)
        assert ids(conn) == ["1", "2"]


def test_what_python_must_not_do_is_refused_as_relay_does(conn: psycopg.Connection[Any]) -> None:
    with pytest.raises(KeyError, match="thirteen"):
        run(KINDS["python"], "orders", order(1, 13), conn=conn)
    with pytest.raises(TransactionAborted):
        run(handler("python", callable=of_module("goes_on")), "orders", order(1), conn=conn)
    with pytest.raises(ConfigurationError, match="transaction"):
        run(handler("python", callable=of_module("ends")), "orders", order(1), conn=conn)
    assert ids(conn) == []


def test_a_python_handler_alone_is_called_as_relay_does(conn: psycopg.Connection[Any]) -> None:
    """Its cursor has relay's rows, and a function that relay would refuse fails the test."""
    assert len(handle(insert, conn, order(1), order(2))) == 2
    with pytest.raises(KeyError, match="thirteen"):
        handle(insert, conn, order(3, 13))
    with pytest.raises(TransactionAborted):
        handle(goes_on, conn, order(4))
    with pytest.raises(ConfigurationError, match="transaction"):
        handle(ends, conn, order(4))
    with pytest.raises(ConfigurationError, match="a coroutine, which nobody runs"):
        handle(waits, conn, order(4))
    with conn.transaction(force_rollback=True), pytest.raises(psycopg.errors.ForeignKeyViolation):
        handle(insert_part, conn, order(5, of="9"))
    assert ids(conn) == ["1", "2"]


def test_a_lent_connection_has_the_rows_of_relay(conn: psycopg.Connection[Any]) -> None:
    deliver(rows_are_relays, order(1), conn=conn)
    run(handler("function", callable=of_module("rows_are_relays")), "orders", order(1), conn=conn)
    assert ids(conn) == []


@pytest.mark.parametrize("in_transaction", [False, True])
@pytest.mark.parametrize(
    ("function", "error"),
    [
        ("goes_on_in_block", psycopg.errors.InFailedSqlTransaction),
        ("ends_block", ConfigurationError),
        ("enters_two_blocks", Fail),
    ],
)
def test_a_block_that_relay_would_not_commit_fails_the_test(
    function: str, error: type[Exception], in_transaction: bool, conn: psycopg.Connection[Any]
) -> None:
    config = handler("function", callable=of_module(function))
    for call in (
        lambda: deliver(globals()[function], order(1), conn=conn),
        lambda: run(config, "orders", order(1), conn=conn),
    ):
        outer = conn.transaction(force_rollback=True) if in_transaction else nullcontext()
        with outer, pytest.raises(error):
            call()


async def goes_on_in_awaited_block(delivery: Delivery) -> None:
    async with delivery.transaction() as conn:
        with suppress(psycopg.Error):
            await conn.execute("select 1 / 0")


async def ends_awaited_block(delivery: Delivery) -> None:
    async with delivery.transaction() as conn:
        await conn.execute("rollback")


async def enters_two_awaited_blocks(delivery: Delivery) -> None:
    async with delivery.transaction():
        pass
    with suppress(Fail):
        async with delivery.transaction():
            pass


async def awaited_rows_are_relays(delivery: Delivery) -> None:
    async with delivery.transaction() as conn, conn.transaction():
        assert await (await conn.execute("select 1")).fetchone() == (1,)


@pytest.mark.parametrize("in_transaction", [False, True])
@pytest.mark.parametrize(
    ("function", "error"),
    [
        (goes_on_in_awaited_block, psycopg.errors.InFailedSqlTransaction),
        (ends_awaited_block, ConfigurationError),
        (enters_two_awaited_blocks, Fail),
        (awaited_rows_are_relays, None),
    ],
)
def test_so_does_a_block_of_a_coroutine(
    function: Any, error: type[Exception] | None, in_transaction: bool, database: str
) -> None:
    """A connection for coroutines is lent as another one is, and is its owner's again at the end."""

    async def test() -> None:
        async with await psycopg.AsyncConnection.connect(
            database, autocommit=True, row_factory=dict_row
        ) as conn:
            outer = conn.transaction(force_rollback=True) if in_transaction else nullcontext()
            async with outer:
                with nullcontext() if error is None else pytest.raises(error):
                    await deliver_async(function, order(1), conn=conn)
                if not in_transaction or error is None:
                    cursor = await conn.execute("select 1 as one")
                    assert await cursor.fetchone() == {"one": 1}

    asyncio.run(test())


def test_a_queue_needs_relays_tables(conn: psycopg.Connection[Any]) -> None:
    with pytest.raises(ValueError, match="no tables of relay: create them with `relay init`"):
        run(handler("queue"), "orders", order(1), conn=conn)


@pytest.mark.parametrize("function", ["complete", "insert_first"])
def test_a_function_writes_through_the_connection(
    function: str, conn: psycopg.Connection[Any]
) -> None:
    config = handler("function", callable=of_module(function))
    run(config, "orders", order(1), conn=conn)
    assert ids(conn) == ["1"]
    if function == "complete":
        run(config, "orders", order(2), conn=conn, attempt=2)
        assert ids(conn) == ["1", "2"]
    else:
        with pytest.raises(RuntimeError, match="nothing is committed"):
            run(config, "orders", order(2), conn=conn, attempt=2)
        assert ids(conn) == ["1"]
    with pytest.raises(psycopg.errors.UniqueViolation):
        run(config, "orders", order(1), conn=conn)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("in_transaction", [False, True])
def test_a_function_alone_writes_through_the_connection(
    in_transaction: bool, conn: psycopg.Connection[Any]
) -> None:
    with conn.transaction() if in_transaction else nullcontext():
        for number, function in enumerate((complete, insert_first)):
            assert deliver(function, order(number), conn=conn).is_completed
        with pytest.raises(RuntimeError, match="nothing is committed"):
            deliver(insert_first, order(3), conn=conn, attempt=2)
        with pytest.raises(psycopg.errors.UniqueViolation):
            deliver(complete, order(1), conn=conn)
        deliver(complete, order(4), conn=conn)
    assert ids(conn) == ["0", "1", "4"]


def test_a_webhook_gets_its_requests() -> None:
    """An event each, then two business transactions at once."""
    with Webhook() as webhook:
        run(handler("http", url=webhook.url), "orders", order(1), order(2))
        assert [each.event["subject"] for each in webhook.requests] == ["1", "2"]
        both = [{**order(number), "transaction_id": UUID(int=number)} for number in (3, 4)]
        run(handler("http", url=webhook.url, each="batch"), "orders", *both)
        assert [each["subject"] for each in json.loads(webhook.requests[2].body)] == ["3", "4"]
        webhook.answers = lambda headers, body: Answer(422)
        with pytest.raises(Rejected):
            run(handler("http", url=webhook.url), "orders", order(1))
