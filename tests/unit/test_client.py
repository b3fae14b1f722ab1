"""What `relay.client` does before a database is asked."""

from __future__ import annotations

import json
import subprocess
import sys
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, date, datetime, time
from decimal import Decimal
from enum import Enum
from typing import Any

import msgspec
import pydantic
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider

import relay
from relay.client import Event, EventInvalid, Outbox
from relay.client import testing as recording
from relay.client.payloads import encode
from tests.process import ROOT

HOST = uuid.UUID(int=1)


def encoded(payload: Any) -> Any:
    return json.loads(encode([{"payload": payload}]))[0]["payload"]


class Color(Enum):
    RED = "red"


@dataclass
class Line:
    sku: str
    amount: Decimal


class Model(pydantic.BaseModel):
    line: str
    amount: Decimal


class Struct(msgspec.Struct):
    at: datetime
    amount: Decimal


NOON = datetime(2026, 11, 24, 12, 0, 0, 123456, UTC)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (HOST, "00000000-0000-0000-0000-000000000001"),
        (Decimal("1234567890123456789.0100"), "1234567890123456789.0100"),
        (NOON, "2026-11-24T12:00:00.123456+00:00"),
        (date(2026, 11, 24), "2026-11-24"),
        (time(12, 30), "12:30:00"),
        (Color.RED, "red"),
        ([Line("a", Decimal("0.10"))], [{"sku": "a", "amount": "0.10"}]),
        (Model(line="b", amount=Decimal("2.50")), {"line": "b", "amount": "2.50"}),
        ({"a": (Struct(NOON, Decimal("0.1")),)}, {"a": [{"at": "2026-11-24T12:00:00.123456Z", "amount": "0.1"}]}),
        ({"ü": "☃", 1: None}, {"ü": "☃", "1": None}),
        (2**80, 2**80),
        (r"back\u0000slash", r"back\u0000slash"),
    ],
)  # fmt: skip
def test_values_have_an_exact_form(given: object, expected: object) -> None:
    assert encoded(given) == expected


def endless() -> list[Any]:
    found: list[Any] = []
    found.append(found)
    return found


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"items": [{"image": b"s3cret"}]}, r"events\[0\]\.payload\.items\[0\]\.image: bytes cannot be represented"),
        ({"x": float("nan")}, r"payload\.x: nan is not a JSON number"),
        ([Decimal("Infinity")], r"payload\[0\]: Infinity is not a JSON number"),
        ({"a": {"b": {HOST: 1}}}, r"payload\.a\.b: has a key of the type UUID"),
        ({"text": "a\0b"}, r"payload\.text: has a NUL character"),
        ({"a\0b": 1}, r"has a NUL character"),
        ({"text": "\ud800"}, r"payload\.text: has a lone surrogate"),
        (Line("a", Decimal("NaN")), r"payload\.amount: NaN"),
        (endless(), "nested too deeply"),
        ({1, 2}, r"payload: set cannot be represented"),
    ],
)  # fmt: skip
def test_what_json_cannot_hold_is_named(given: object, message: str) -> None:
    with pytest.raises(EventInvalid, match=message) as raised:
        encode([{"payload": given}])
    assert "s3cret" not in str(raised.value)


@pytest.mark.parametrize(
    ("event", "message"),
    [
        (Event("a", payload=None), r"events\[0\]\.payload: must not be None"),
        (Event("a", payload=1, event_ts=datetime(2026, 1, 1)), "event_ts: has no time zone"),  # noqa: DTZ001
        (Event("a", payload=1, deliver_at=datetime(2026, 1, 1)), "deliver_at: has no time zone"),  # noqa: DTZ001
    ],
)
def test_a_bad_event_is_refused(event: Event, message: str) -> None:
    with recording.collect(Outbox()), pytest.raises(EventInvalid, match=message):
        Outbox().publish(object(), event, host_id=HOST)


@pytest.mark.parametrize(
    ("events", "number"),
    [({"event_type": "x"}, 0), (Event, 0), (relay.Event, 0), ([Event("a", payload=1), "b"], 1)],
)
def test_what_is_no_event_is_refused(events: Any, number: int) -> None:
    with pytest.raises(EventInvalid, match=rf"events\[{number}\]: is not a relay\.client\.Event"):
        Outbox().publish(object(), events, host_id=HOST)


def test_a_field_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match="columns: name is not a field; the fields are id, "):
        Outbox(columns={"name": "x"})


def test_a_test_collects_what_is_published() -> None:
    outbox = Outbox()
    placed, paid = Event("placed", payload={}), Event("paid", payload={})
    with recording.collect(outbox) as published:
        transaction = outbox.publish(object(), [placed, paid], host_id=HOST)
        outbox.publish(object(), paid, host_id=HOST, user_id=HOST, transaction_id=transaction)
        with pytest.raises(EventInvalid):
            outbox.publish(object(), Event("bad", payload=b""), host_id=HOST)
    assert recording.events(published) == [placed, paid, paid]
    assert recording.events(published, "placed") == [placed]
    assert [each.transaction_id for each in published] == [transaction, transaction]
    assert published[1].user_id == HOST
    assert outbox.recorded is None


@pytest.fixture
def provider() -> Iterator[TracerProvider]:
    found = TracerProvider()
    yield found
    found.shutdown()


def test_the_current_trace_goes_along(provider: TracerProvider) -> None:
    """What the caller says of it wins."""
    outbox = Outbox()
    with provider.get_tracer("test").start_as_current_span("checkout") as span:
        rows = _rows(
            outbox, Event("a", payload=1), Event("b", payload=1, metadata={"traceparent": "mine"})
        )
        context = span.get_span_context()
    ids = f"{trace.format_trace_id(context.trace_id)}-{trace.format_span_id(context.span_id)}"
    assert rows[0]["metadata"]["traceparent"].startswith(f"00-{ids}-")
    assert rows[1]["metadata"] == {"traceparent": "mine"}
    assert "metadata" not in _rows(outbox, Event("a", payload=1))[0]


def _rows(outbox: Outbox, *events: Event) -> list[dict[str, Any]]:
    from relay.client.outbox import Published

    return outbox._rows(Published(events, HOST, None, HOST))


def test_the_client_is_light() -> None:
    """It imports nothing but the standard library and itself."""
    program = (
        "import sys; before = set(sys.modules); import relay.client, relay.client.testing; "
        "print(*sorted({name.partition('.')[0] for name in set(sys.modules) - before}))"
    )
    found = subprocess.run(
        [sys.executable, "-S", "-c", program],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    )
    assert set(found.stdout.split()) - sys.stdlib_module_names == {"relay"}


def test_the_command_without_the_service_says_what_it_needs() -> None:
    """In a Python that has relay's wheel and no more."""
    found = subprocess.run(
        [sys.executable, "-S", "-m", "relay", "check"],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert found.returncode == 2
    assert found.stderr.startswith("relay: the service needs ")
    assert found.stderr.endswith(": pip install 'relay-outbox[service]'\n")
    assert found.stderr.count("\n") == 1
