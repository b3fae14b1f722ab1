"""relay.testing runs the handlers of a configuration: which events they get, and what is sent."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel

from relay import Deliveries, Delivery, EventTypes, Fail
from relay.faults import ConfigurationError, InvalidEvent, NotRouted, Rejected, Undelivered
from relay.testing import MemorySink, routed, run
from tests.unit.test_testing import Connection

called: list[Any] = []
TYPES = EventTypes()


@TYPES.model("order.placed", version=2)
class Placed(BaseModel):
    amount: int


@TYPES.upcast("order.placed", from_version=1)
def renamed(payload: Any) -> Any:
    return {"amount": payload["sum"]}


@contextmanager
def opened() -> Iterator[str]:
    called.append("open")
    yield "resource"
    called.append("close")


def note(delivery: Delivery) -> None:
    called.append((delivery.key, delivery.attempt, delivery.resource, len(delivery)))
    if delivery.attempt == 3:
        raise Fail("too often")


async def write(delivery: Delivery) -> None:
    async with delivery.transaction():
        called.append("written")


def write_and_wait(delivery: Delivery) -> None:
    with delivery.transaction() as conn:
        called.append(conn)
    with delivery.transaction():
        pass


def index(deliveries: Deliveries) -> None:
    for each in deliveries:
        called.append(each.key)
        if any(event.payload == "bad" for event in each.events):
            deliveries.fail(each, Fail("bad"))


def function(path: str, **more: Any) -> dict[str, Any]:
    return {
        "type": "function",
        "callable": f"tests.unit.test_testing_configured:{path}",
        **more,
    }


CONFIG: dict[str, Any] = {
    "source": {"headers": ["region"]},
    "handlers": {
        "orders": {"type": "sql", "statement": "select 1"},
        "mail": function("note", open="tests.unit.test_testing_configured:opened"),
        "writes": function("write"),
        "twice": function("write_and_wait"),
        "index": function("index", each="batch"),
        "broker": {
            "type": "kafka",
            "bootstrap": ["nowhere:9092"],
            "topic": "{headers.region}.orders",
            "key": "{aggregate_id}",
            "mode": "binary",
        },
        "hook": {"type": "http", "url": "http://127.0.0.1:9/", "timeout": 0.5},
        "lake": {"type": "spark", "format": "parquet", "path": "/nowhere"},
    },
    "routes": [
        {"match": {"headers.region": "eu"}, "handlers": ["broker"], "continue": True},
        {"match": {"event_type": "order.*"}, "handlers": ["orders", "mail"], "continue": True},
        {"match": {"event_type": "order.placed"}, "handlers": ["writes", "index", "twice"]},
        {"match": {"payload.kind": "hook"}, "handlers": ["hook", "lake"]},
    ],
}
PLACED = {"event_type": "order.placed", "host_id": "00000000-0000-0000-0000-000000000007"}
HOOK = {"event_type": "x", "payload": {"kind": "hook"}}


@pytest.fixture(autouse=True)
def _nothing_called() -> None:
    called.clear()


def test_the_handlers_of_each_event_are_known(tmp_path: Path) -> None:
    file = tmp_path / "relay.yaml"
    file.write_text(yaml.safe_dump(CONFIG))
    events: list[dict[str, Any]] = [
        {"event_type": "order.paid", "headers": {"region": "eu"}},
        {"event_type": "other"},
        HOOK,
    ]
    for config in (CONFIG, file, str(file)):
        assert routed(config, *events) == [("broker", "orders", "mail"), (), ("hook", "lake")]


def test_a_function_gets_its_events_as_relay_calls_it() -> None:
    (got,) = run(CONFIG, "mail", PLACED, {**PLACED, "event_type": "order.paid"}, attempt=2)
    assert [event.event_type for event in got.events] == ["order.placed", "order.paid"]
    assert called == ["open", (PLACED["host_id"], 2, "resource", 2), "close"]
    with pytest.raises(Fail, match="too often"):
        run(CONFIG, "mail", PLACED, attempt=3)


def test_a_function_is_lent_the_connection() -> None:
    conn: Any = Connection()
    conn.pgconn = None
    with pytest.raises(Fail, match="second time"):
        run(CONFIG, "twice", PLACED, conn=conn)
    assert called == [conn]
    assert conn.notes == ["begin", "commit"]
    with pytest.raises(RuntimeError, match="conn="):
        run(CONFIG, "writes", PLACED)


def test_a_batch_is_handed_over_at_once() -> None:
    ids = [f"00000000-0000-0000-0000-00000000000{number}" for number in range(3)]
    events = [{**PLACED, "transaction_id": each, "host_id": each} for each in ids]
    assert len(run(CONFIG, "index", *events)) == 3
    assert called == ids
    events[1]["payload"] = "bad"
    with pytest.raises(Fail, match="bad"):
        run(CONFIG, "index", *events)


def test_only_what_is_routed_there_arrives() -> None:
    sink = MemorySink()
    (got,) = run(CONFIG, "hook", HOOK, {"event_type": "order.paid"}, sink=sink)
    assert len(got) == 1
    assert [event.event_type for event in sink.events] == ["x"]
    assert sink.messages == []
    with pytest.raises(NotRouted, match="no route matches the event_type 'other'"):
        run(CONFIG, "hook", HOOK, {"event_type": "other"}, sink=sink)
    with pytest.raises(ValueError, match="routes: no event goes to hook: they go to orders, mail"):
        run(CONFIG, "hook", {"event_type": "order.paid"}, sink=sink)
    assert len(sink.attempts) == 1


def test_the_messages_of_a_broker_are_there_without_it() -> None:
    sink = MemorySink()
    event = {"headers": {"region": "eu"}, "aggregate_id": "7", "payload": {"n": 1}, **PLACED}
    run(CONFIG, "broker", event, sink=sink)
    (message,) = sink.messages
    assert (message.topic, message.key, message.body) == ("eu.orders", "7", b'{"n": 1}')
    controls = {**CONFIG["handlers"]["broker"], "topic": "{event_type}"}
    config = {**CONFIG, "handlers": {**CONFIG["handlers"], "broker": controls}}
    with pytest.raises(Rejected, match="control the broker"):
        run(config, "broker", {**event, "event_type": "__consumer_offsets"}, sink=sink)
    assert isinstance(sink.attempts[-1].error, Rejected)


def test_a_memory_sink_answers_as_it_is_told() -> None:
    sink = MemorySink()
    sink.limit(30, {"host_id": PLACED["host_id"]}, times=1)
    sink.refuse({"payload.bad": True})
    (good, bad) = ({**PLACED, "payload": {"kind": "hook", "bad": each}} for each in (False, True))
    config = {**CONFIG, "routes": [{"handlers": ["hook"]}]}
    with pytest.raises(Undelivered) as limited:
        run(config, "hook", good, sink=sink)
    assert limited.value.after == 30
    with pytest.raises(Rejected):
        run(config, "hook", bad, sink=sink, attempt=2)
    run(config, "hook", good, sink=sink, attempt=2)
    sink.fail()
    with pytest.raises(Undelivered):
        run(config, "hook", good, sink=sink)
    sink.accept()
    run(config, "hook", bad, sink=sink)
    sink.answer(lambda: KeyError("k"))
    with pytest.raises(KeyError):
        run(config, "hook", good, sink=sink)
    assert [(each.number, type(each.error).__name__) for each in sink.attempts] == [
        (1, "Undelivered"),
        (2, "Rejected"),
        (2, "NoneType"),
        (1, "Undelivered"),
        (1, "NoneType"),
        (1, "KeyError"),
    ]
    assert {each.handler for each in sink.attempts} == {"hook"}
    assert set(sink.attempts[0].keys) == {f"{PLACED['host_id']} host"}
    assert [event.payload["bad"] for event in sink.events] == [False, True]
    with pytest.raises(ValueError, match="'tier' is neither a field"):
        sink.refuse({"tier": "gold"})


def test_what_a_memory_sink_is_told_is_checked() -> None:
    sink = MemorySink()
    with pytest.raises(ValueError, match="match is a str, and no mapping such as"):
        sink.refuse("order.placed")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="error is a KeyError: give a function"):
        sink.answer(KeyError("x"))  # type: ignore[arg-type]


def test_a_real_sink_delivers() -> None:
    with pytest.raises(Undelivered):
        run(CONFIG, "hook", HOOK)


def test_events_are_in_the_current_version() -> None:
    config = {**CONFIG, "events": "tests.unit.test_testing_configured:TYPES"}
    sink = MemorySink()
    config["routes"] = [{"handlers": ["hook"]}]
    (got,) = run(config, "hook", {**PLACED, "payload": {"sum": 3}}, sink=sink)
    assert [event.model for event in got.events] == [Placed(amount=3)]
    assert [event.payload for event in sink.events] == [{"amount": 3}]
    with pytest.raises(InvalidEvent):
        run(config, "hook", {**PLACED, "payload": {"sum": "x"}}, sink=sink)
    assert len(sink.attempts) == 1


@pytest.mark.parametrize(
    ("name", "event", "more", "error"),
    [
        ("order", PLACED, {}, "there is no handler 'order'; did you mean orders?"),
        ("ledger", PLACED, {}, "there is no handler 'ledger'; there are "),
        ("orders", PLACED, {"conn": "dbname=x"}, "conn is of type str: give a psycopg.Connection"),
        ("hook", HOOK, {"sink": MemorySink}, "sink is a type, and no MemorySink"),
        ("hook", HOOK, {"conn": Connection()}, "is of type http, which does not use a connection"),
        ("lake", HOOK, {}, "handlers.lake: is of type spark, which reads the outbox by itself"),
        ("orders", PLACED, {}, "handlers.orders: is of type sql, which writes to the target"),
        ("orders", PLACED, {"sink": MemorySink()}, "is of type sql, which a sink cannot replace"),
        ("mail", {"host_id": "h"}, {}, "event 1: host_id is not of type uuid"),
        ("mail", {"host_id": 3}, {}, "event 1: host_id is not of type uuid"),
        (
            "mail",
            {"aggregate_version": "x"},
            {},
            "event 1: aggregate_version is not of type bigint",
        ),
        ("mail", {"event_type": "a\0"}, {}, "event 1: event_type has a zero character"),
        ("mail", {"payload": {"n": float("nan")}}, {}, "event 1: payload.n"),
        ("mail", {"headers": {"tier": "x"}}, {}, "source.headers has no column for headers.tier"),
        ("mail", {"kind": "x"}, {}, "an event has no kind; it has "),
        ("mail", [PLACED], {}, "event 1 is a list, and no mapping of fields"),
        (
            "mail",
            {"headers": ["region"]},
            {},
            "event 1: headers is a list, and no mapping of texts",
        ),
    ],
)
def test_what_cannot_be_run_is_one_line(
    name: str, event: Any, more: dict[str, Any], error: str
) -> None:
    with pytest.raises(ValueError, match=error) as raised:
        run(CONFIG, name, event, **more)
    assert "\n" not in str(raised.value)


def test_a_configuration_is_validated() -> None:
    with pytest.raises(ConfigurationError) as raised:
        run({"handlers": {"x": {"type": "sql", "statemint": "select"}}}, "x", {})
    assert str(raised.value).splitlines() == [
        "configuration: handlers.x.statement: is required",
        "configuration: handlers.x.statemint: unknown key; did you mean statement?",
    ]
    with pytest.raises(ValueError, match="give at least one event"):
        run(CONFIG, "mail")


def test_a_table_of_the_user_has_the_columns_of_the_configuration() -> None:
    config: dict[str, Any] = {
        "source": {"profile": "debezium", "columns": {"user_id": None}},
        "handlers": {"hook": CONFIG["handlers"]["hook"]},
        "routes": [{"handlers": ["hook"]}],
    }
    sink = MemorySink()
    first, second = run(
        config, "hook", {"aggregate_id": "a", "event_type": "x"}, {"host_id": "b"}, sink=sink
    )
    (event,) = first.events
    assert (event.host_id, event.aggregate_id, event.transaction_id) == ("a", "a", None)
    assert second.transaction_id is None
    for given, error in (
        ({"aggregate_id": "a", "host_id": "b"}, "which another field gives another value"),
        ({"user_id": "u"}, "source.columns has no column for user_id"),
    ):
        with pytest.raises(ValueError, match=error):
            run(config, "hook", given, sink=sink)


def test_in_an_event_loop_it_says_what_to_do() -> None:
    async def test() -> None:
        with pytest.raises(RuntimeError, match="to_thread"):
            run(CONFIG, "hook", HOOK, sink=MemorySink())
        sink = MemorySink()
        await asyncio.to_thread(run, CONFIG, "hook", HOOK, sink=sink)
        assert len(sink.events) == 1

    asyncio.run(test())
