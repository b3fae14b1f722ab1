"""relay.testing: handlers are called with events of plain dictionaries."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import pytest
from pydantic import BaseModel

from relay import Deliveries, Delivery, EventTypes, Fail
from relay.faults import ConfigurationError, DestinationRefused, InvalidEvent
from relay.testing import deliver, deliver_async, deliver_batch, handle, transaction


def test_a_transaction_has_what_is_given_and_what_is_left_out() -> None:
    moment = datetime(2026, 11, 26, 12, 30, 0, 500_000, UTC)
    found = transaction(
        {"event_type": "a", "payload": {"n": 1.5}, "event_ts": moment, "headers": {"region": "eu"}},
        {"event_type": "b", "host_id": UUID(int=7), "metadata": {"k": "ü"}},
        attempt=2,
    )
    first, second = found.events
    assert (first.event_type, first.payload, first.event_ts) == ("a", {"n": 1.5}, moment)
    assert first.headers == {"region": "eu"}
    assert (second.host_id, second.metadata) == (UUID(int=7), {"k": "ü"})
    assert (second.c_offset, second.transaction_ordinal, second.transaction_count) == (2, 2, 2)
    assert second.payload is None
    assert isinstance(first.id, UUID)
    assert first.id != second.id
    assert str(first.transaction_id) == found.transaction_id
    assert (len(found), found.attempt) == (2, 2)
    with pytest.raises(ValueError, match="an event has no type; it has aggregate_id"):
        transaction({"type": "a"})
    with pytest.raises(ValueError, match="event 1 is a list"):
        transaction([{}])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="more than one transaction_id"):
        transaction({"transaction_id": "a"}, {"transaction_id": "b"})


def test_events_are_in_the_current_version() -> None:
    types = EventTypes()

    @types.model("placed", version=2)
    class Placed(BaseModel):
        amount: int

    @types.upcast("placed", from_version=1)
    def renamed(payload: Any) -> Any:
        return {"amount": payload["sum"]}

    (event,) = transaction({"event_type": "placed", "payload": {"sum": 3}}, types=types).events
    assert event.model == Placed(amount=3)
    with pytest.raises(InvalidEvent):
        transaction({"event_type": "placed", "payload": {"sum": "x"}}, types=types)


async def awaited(delivery: Delivery) -> None:
    await asyncio.sleep(0)
    delivery.resource.append((delivery.attempt, delivery.key, delivery.seconds_left <= 5))
    if delivery.attempt == 3:
        raise Fail("too often")


def test_a_function_is_called() -> None:
    seen: list[Any] = []
    delivery = deliver(awaited, {"host_id": "h"}, attempt=2, resource=seen, timeout=5)
    assert seen == [(2, "h", True)]
    assert not delivery.is_completed
    assert delivery.trace == {}
    with pytest.raises(Fail):
        deliver(awaited, {}, attempt=3, resource=seen)
    deliver(lambda each: seen.append(len(each)), {}, {})
    asyncio.run(deliver_async(awaited, {}, resource=seen))
    assert seen[2:] == [2, (1, str(UUID(int=1)), False)]


def test_a_transaction_needs_a_connection() -> None:
    def write(delivery: Delivery) -> None:
        with delivery.transaction():
            pass

    with pytest.raises(RuntimeError, match="conn="):
        deliver(write, {})


class Connection:
    """A connection that notes its transactions."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def transaction(self) -> Connection:
        return self

    def cursor(self) -> Connection:
        return self

    def __enter__(self) -> Connection:
        self.notes.append("begin")
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.notes.append("rollback" if kind else "commit")


def test_handlers_run_in_transactions() -> None:
    conn: Any = Connection()

    def write(delivery: Delivery) -> None:
        with delivery.transaction() as lent:
            assert lent is conn
            if delivery.attempt == 2:
                raise KeyError

    assert deliver(write, {}, conn=conn).is_completed
    with pytest.raises(KeyError):
        deliver(write, {}, conn=conn, attempt=2)
    assert conn.notes == ["begin", "commit", "begin", "rollback"]


NONE: Any = "dbname=shop"
"""No connection."""


def plain(*_: Any) -> None:
    """Do nothing."""


def generates(delivery: Delivery) -> Any:
    yield delivery


async def returns_work(delivery: Any) -> Any:
    return awaited(delivery)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda: deliver(generates, {}), "returned a generator, which nobody runs"),
        (lambda: deliver(returns_work, {}), "returned a coroutine, which nobody runs"),
        (lambda: deliver(plain, {"payloud": 1}), "did you mean payload"),
        (lambda: deliver(plain, {}, attempt=0), "attempt is 0, and the first one is 1"),
        (lambda: deliver(plain, {}, conn=NONE), "conn is of type str: give a psycopg.Connection"),
        (lambda: deliver_batch(plain, {}, conn=NONE), "conn is of type str: give a psycopg.Conn"),
        (lambda: handle(plain, NONE, {}), "conn is of type str: give a psycopg.Connection"),
        (lambda: deliver_batch(list, {}), "returned a list, and relay does not know whether"),
        (lambda: deliver_batch(plain), "give at least one transaction"),
    ],
)
def test_a_call_that_would_test_nothing_is_refused_in_one_line(
    call: Callable[[], object], error: str
) -> None:
    with pytest.raises((ValueError, ConfigurationError, DestinationRefused), match=error) as raised:
        call()
    assert "\n" not in str(raised.value)


@pytest.mark.filterwarnings("error")
def test_in_an_event_loop_a_call_says_what_to_do() -> None:
    async def test() -> None:
        deliver(plain, {})
        with pytest.raises(RuntimeError, match=r"await deliver_async\("):
            deliver(awaited, {})
        with pytest.raises(RuntimeError, match=r"await asyncio.to_thread\(deliver_batch"):
            deliver_batch(returns_work, {})
        with pytest.raises(RuntimeError, match="no async def: call it with deliver"):
            await deliver_async(plain, {})  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="conn is of type str: give a psycopg"):
            await deliver_async(awaited, {}, conn=NONE)

    asyncio.run(test())


def test_a_batch_has_what_is_named_and_what_is_completed() -> None:
    conn: Any = Connection()
    given: list[dict[str, Any]] = [
        {"host_id": UUID(int=number % 2), "payload": {"n": number}} for number in range(5)
    ]
    seen: list[int] = []

    def write(deliveries: Deliveries) -> None:
        for each in deliveries:
            (event,) = each.events
            seen.append(event.payload["n"])
            if event.payload["n"] == 1:
                deliveries.fail(each, Fail("one"))
        with deliveries.transaction() as lent:
            assert lent is conn

    deliveries = deliver_batch(write, *given, conn=conn)
    # 3 follows 1.
    assert seen == [0, 1, 2, 4]
    assert list(map(str, deliveries.failed.values())) == ["one"]
    assert list(deliveries.failed) == [1]
    assert deliveries.completed == [0, 2, 4]
    assert conn.notes == ["begin", "commit"]

    async def read(deliveries: Deliveries) -> None:
        seen[:] = [len(each) for each in deliveries]

    deliver_batch(read, {}, [{}, {}])
    assert seen == [1, 2]
    with pytest.raises(RuntimeError, match="conn="):
        deliver_batch(lambda deliveries: deliveries.transaction(), {})
