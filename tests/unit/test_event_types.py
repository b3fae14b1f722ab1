"""Event types: chains of upcasters, what is refused and how it is told, and that nothing published changes."""

from __future__ import annotations

import json
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, Field, field_validator
from pydantic_core import PydanticCustomError

import relay
from relay.config.loading import load
from relay.config.settings import Settings
from relay.event_types.event_type import EventType
from relay.event_types.registry import registered
from relay.event_types.upcasting import Upcasting
from relay.faults import (
    ConfigurationError,
    FaultAction,
    InvalidEvent,
    TransientFault,
    action_for,
    describe,
    exception_text,
)
from relay.model import exact_json
from relay.model.events import Event
from tests.event_types import EVENTS, OrderPlaced, registry
from tests.sinks import make_event

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


def order(payload: Any, version: Any = None) -> Event:
    """An event as it was published."""
    event = make_event(1, payload=json.dumps(payload))
    metadata = None if version is None else json.dumps({"version": version})
    return Event(event.with_texts({"metadata": metadata}))


def upcasting(*types: EventType) -> Upcasting:
    return Upcasting(types)


def refused(event: Event, *types: EventType) -> str:
    """Why an event is not valid."""
    with pytest.raises(InvalidEvent) as raised:
        upcasting(*types).current(event)
    assert action_for(raised.value) is FaultAction.DEAD_LETTER
    assert describe(raised.value) == f"InvalidEvent: {raised.value}"
    which = f"order.placed {event.text('id')}: "
    assert str(raised.value).startswith(which)
    return str(raised.value).removeprefix(which)


def counting(version: int) -> Callable[[Any], Any]:
    """An upcaster that notes in the payload that it was called."""

    def upcaster(payload: Any) -> Any:
        payload.setdefault("steps", []).append(version)
        return payload

    return upcaster


@given(st.integers(1, 8), st.data())
def test_each_step_of_the_chain_runs_once_and_in_order(current: int, data: st.DataObject) -> None:
    oldest = data.draw(st.integers(1, current))
    version = data.draw(st.integers(oldest, current))
    found = EventType(
        "order.placed", current, upcasters={each: counting(each) for each in range(oldest, current)}
    )
    assert not list(found.problems())
    event = upcasting(found).current(order({}, version))
    assert event.payload.get("steps", []) == list(range(version, current))
    assert event.metadata == {"version": current}


@given(JSON, st.dictionaries(st.text(), JSON, max_size=3), st.sampled_from([1, 2, 3]))
def test_upcasting_is_deterministic_and_leaves_the_published_event(
    value: Any, more: dict[str, Any], version: int
) -> None:
    def change(payload: Any) -> Any:
        payload["value"] = [payload.pop("value"), 1]
        return payload

    found = upcasting(EventType("order.placed", upcasters={1: change, 2: deepcopy}))
    payload = json.dumps({"value": value, "deep": {"value": value}})
    published = make_event(1, payload=payload, metadata=json.dumps({**more, "version": version}))
    before = tuple(published.row)
    first, second = found.current(published), found.current(published)
    assert first.row == second.row
    assert published.row == before
    expected = [value, 1] if version == 1 else value
    assert first.payload == {"value": expected, "deep": {"value": value}}
    assert first.metadata == {**more, "version": 3}


@given(
    st.from_regex(r"-?(0|[1-9][0-9]{0,40})(\.[0-9]{1,40})?([eE][+-]?[0-9]{1,3})?", fullmatch=True)
)
def test_numbers_keep_every_digit(number: str) -> None:
    assume(number != "-0")  # which PostgreSQL does not have either
    text = f'{{"a": [{number}, "{number}"], "b": {{"c": {number}}}}}'
    assert exact_json.dumps(exact_json.loads(text), "payload") == text
    assert exact_json.dumps(deepcopy(exact_json.loads(text)), "payload") == text
    assert type(exact_json.loads("0.10") * 1) is float


def test_a_number_of_many_digits_is_kept() -> None:
    digits = "7" * 10_000
    assert exact_json.dumps(exact_json.loads(f"[{digits}]"), "payload") == f"[{digits}]"


@given(JSON)
def test_json_is_written_as_it_was(value: Any) -> None:
    assert json.loads(exact_json.dumps(value, "payload")) == value


def test_what_is_current_is_as_it_was_published() -> None:
    event = make_event(1, payload='{"b":1.10,  "a": 2}', metadata='{"version":  2}')
    found = upcasting(EventType("order.placed", 2)).current(event)
    assert found.row == event.row
    assert found.model is None
    assert event.model is None


def test_the_model_is_that_of_the_upcast_payload() -> None:
    (placed,) = registry
    found = upcasting(placed).current(order({"amount": 7})).model
    assert isinstance(found, OrderPlaced)
    assert found.items[0].price == 7


@pytest.mark.parametrize(
    ("version_from", "payload", "metadata", "expected"),
    [
        ("metadata.version", {}, None, 1),
        ("metadata.version", {}, {}, 1),
        ("metadata.version", {}, {"version": None}, 1),
        ("metadata.version", {}, {"version": "2"}, 2),
        ("metadata.version", {}, ["x"], 1),
        ("metadata.schema.version", {}, {"schema": {"version": 2}}, 2),
        ("metadata.schema.version", {}, {}, 1),
        ("payload.v", {"v": 2}, {"version": 7}, 2),
        ("payload.v", {}, {"version": 7}, 1),
    ],
)
def test_where_the_version_comes_from(
    version_from: str, payload: Any, metadata: Any, expected: int
) -> None:
    found = EventType("order.placed", 3, None, {1: counting(1), 2: counting(2)}, version_from)
    event = make_event(1, payload=json.dumps(payload))
    if metadata is not None:
        event = make_event(1, payload=json.dumps(payload), metadata=json.dumps(metadata))
    current = upcasting(found).current(event)
    assert current.payload["steps"] == list(range(expected, 3))
    if metadata != ["x"]:
        head, *path = version_from.split(".")
        value = getattr(current, head)
        for step in path:
            value = value[step]
        assert value == 3


@pytest.mark.parametrize("version", [0, -1, 4, 10**30, "4", True, 1.5, "x", "²", [], {}])
def test_an_unknown_version_is_refused(version: Any) -> None:
    found = EventType("order.placed", 3, None, {2: counting(2)})
    text = refused(order({}, version), found)
    assert text in (
        "metadata.version: an unknown version; known are 2 to 3",
        "metadata.version: is not a version, a whole number from 1",
    )
    assert refused(order({}, 1), found) == "metadata.version: an unknown version; known are 2 to 3"


class Card(BaseModel):
    kind: Literal["card"]


class Cash(BaseModel):
    kind: Literal["cash"]


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", val_json_bytes="hex")

    count: int = 1
    prices: dict[str, int] = {}
    paid: Annotated[Card | Cash, Field(discriminator="kind")] = Card(kind="card")
    checked: str = ""
    custom: str = ""
    lines: list[Card] = []
    named: Annotated[int, Field(alias="theName")] = 1
    coded: bytes = b""

    @field_validator("checked")
    @classmethod
    def _check(cls, value: str) -> str:
        raise ValueError(f"{value} is bad")

    @field_validator("custom")
    @classmethod
    def _custom(cls, value: str) -> str:
        if value == "outage":
            raise ConnectionError(value)
        raise PydanticCustomError("odd", "{value} is odd", {"value": value})


@pytest.mark.parametrize(
    ("payload", "said"),
    [
        ({"count": "SECRET"}, "payload.count: Input should be a valid integer"),
        ({"prices": {"SECRET@x": "SECRET"}}, "payload.prices.*: Input should be a valid integer"),
        ({"prices": {"SECRET": "SECRET"}}, "payload.prices.*: Input should be a valid integer"),
        ({"paid": {"kind": "SECRET"}}, "payload.paid: Input should have one of the expected tags"),
        ({"checked": "SECRET"}, "payload.checked: is refused by a validator of the model"),
        ({"custom": "SECRET"}, "payload.custom: is refused by a validator of the model"),
        (
            {"lines": [{"kind": "card"}, {"kind": "SECRET"}]},
            "payload.lines.1.kind: Input should be 'card'",
        ),
        ({"theName": "SECRET"}, "payload.theName: Input should be a valid integer"),
        ({"coupon": "SECRET"}, "payload.coupon: Extra inputs are not permitted"),
        ({"a SECRET": 1}, "payload.*: Extra inputs are not permitted"),
        ({"SECRET[0]": 1}, "payload.*: Extra inputs are not permitted"),
        ({"coded": "SECRET!"}, "payload.coded: Input should be encoded validly"),
        ("SECRET", "payload: Input should be an object"),
        (None, "payload: Input should be an object"),
    ],
)
def test_a_fault_names_the_field_and_never_the_value(payload: Any, said: str) -> None:
    event = order(payload)
    text = refused(event, EventType("order.placed", model=Strict))
    assert text.startswith(said)
    with pytest.raises(InvalidEvent) as raised:
        upcasting(EventType("order.placed", model=Strict)).current(event)
    assert "SECRET" not in exception_text(raised.value)


def test_many_faults_are_counted() -> None:
    text = refused(order({"lines": [{}] * 12}), EventType("order.placed", model=Strict))
    assert text.startswith("payload.lines.0.kind: Field required; payload.lines.1.kind")
    assert text.endswith("; and 2 more")


def _raise(error: BaseException) -> Callable[[Any], Any]:
    def upcaster(_: Any) -> Any:
        raise error

    return upcaster


@pytest.mark.parametrize("error", [ValueError("SECRET"), KeyError("SECRET"), SystemExit("SECRET")])
def test_what_an_upcaster_raises_is_shown_with_its_line_and_no_words(error: BaseException) -> None:
    found = EventType("order.placed", upcasters={1: _raise(error)})
    with pytest.raises(InvalidEvent) as raised:
        upcasting(found).current(order({}))
    assert f"raised {type(error).__name__}" in str(raised.value)
    text = exception_text(raised.value)
    assert "SECRET" not in text
    assert f"  at {__file__}:" in text


@pytest.mark.parametrize(
    "error", [TransientFault("later"), ConnectionError(), ConfigurationError("stop")]
)
def test_a_fault_that_the_event_is_not_to_blame_for_stays_what_it_is(error: Exception) -> None:
    found = EventType("order.placed", upcasters={1: _raise(error)})
    with pytest.raises(type(error)) as raised:
        upcasting(found).current(order({}))
    assert raised.value is error
    assert error.__cause__ is None
    with pytest.raises(ConnectionError):
        upcasting(EventType("order.placed", model=Strict)).current(order({"custom": "outage"}))


@pytest.mark.parametrize(
    ("result", "said"),
    [
        (None, "returned None: return the payload of the next version"),
        ({"a": [1, {"b": Path()}]}, "payload.a.1.b: JSON cannot represent this"),
        ({"a": float("nan")}, "payload.a: JSON cannot represent this float"),
        ({1: 2}, "payload: a key of an object must be a str, not int"),
        ({"a": "\ud800"}, "payload: has a lone surrogate, which is not a character"),
    ],
)
def test_what_is_no_payload_is_refused(result: Any, said: str) -> None:
    assert said in refused(order({}), EventType("order.placed", upcasters={1: lambda _: result}))


def test_a_payload_that_python_cannot_hold_is_refused() -> None:
    found = EventType("order.placed", upcasters={1: counting(1)})
    deep = make_event(1, payload="[" * 200_000 + "]" * 200_000)
    assert refused(deep, found) == "payload: cannot be read as JSON"
    endless: dict[str, Any] = {}
    endless["a"] = endless
    found = EventType("order.placed", upcasters={1: lambda _: endless})
    assert refused(order({}), found) == "payload: is nested too deeply"


def test_a_registry_refuses_what_is_there_twice() -> None:
    types = relay.EventTypes(version_from="payload.v")
    types.upcast("a", from_version=1)(counting(1))
    types.model("a", version=2, version_from="metadata.v")(OrderPlaced)
    (found,) = types
    assert (found.name, found.current, found.oldest, found.version_from) == (
        "a",
        2,
        1,
        "metadata.v",
    )
    with pytest.raises(ValueError, match="a: has a model already: OrderPlaced"):
        types.model("a")
    with pytest.raises(ValueError, match="a: has an upcaster from version 1 already"):
        types.upcast("a", from_version=1)
    with pytest.raises(ValueError, match="a: 0 is not a version: versions count from 1"):
        types.upcast("a", from_version=0)
    with pytest.raises(ValueError, match="'host_id' is not a path into payload or metadata"):
        relay.EventTypes(version_from="host_id")


def test_file_and_code_give_the_same_types() -> None:
    configured, coded = (
        registered(Settings(events=events).events)
        for events in (EVENTS, "tests.event_types:registry")
    )
    assert configured == coded


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("a: {versoin: 1}", "events.a.versoin: unknown key; did you mean version?"),
        ("a: {version: 0}", "events.a.version: input should be greater than 0"),
        (
            "a: {model: shop}",
            "events.a.model: must be module:name, such as shop.events:OrderPlaced",
        ),
        (
            "a: {version_from: id}",
            "events.a.version_from: 'id' is not a path into payload or metadata, such as metadata.version",
        ),
        (
            "a: {upcast: {1: 2}}",
            "events.a.upcast.1: must be module:name, such as shop.events:OrderPlaced",
        ),
        ("a: 3", "events.a: must be a mapping of keys"),
        ("shop", "events: must be module:name, such as shop.events:OrderPlaced"),
        ("[a]", "events: must be a mapping of keys"),
    ],
)
def test_a_mistake_in_the_file_is_one_line(tmp_path: Path, text: str, line: str) -> None:
    file = tmp_path / "shop.yaml"
    file.write_text(f"events:\n  {text}\n")
    with pytest.raises(ConfigurationError) as raised:
        load(file)
    assert str(raised.value) == f"{file}: {line}"


def test_the_environment_names_a_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RELAY_EVENTS", "shop.events:registry")
    assert load(None).events == "shop.events:registry"


class Unfinished(BaseModel):
    thing: Missing  # type: ignore[name-defined]  # noqa: F821


def test_a_model_with_an_unknown_type_is_a_problem() -> None:
    (problem,) = EventType("a", model=Unfinished).problems()
    assert problem.startswith("events.a.model: Unfinished refers to a type that is not defined")


def test_a_fault_that_wraps_an_outage_stays_one() -> None:
    def upcaster(_: Any) -> Any:
        raise RuntimeError("no answer") from ConnectionError()

    found = EventType("order.placed", upcasters={1: upcaster})
    with pytest.raises(RuntimeError) as raised:
        upcasting(found).current(order({}))
    assert action_for(raised.value) is FaultAction.RETRY
