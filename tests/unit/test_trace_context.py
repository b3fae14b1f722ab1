"""The trace context in the metadata of events: what is valid, what is carried on, and what a hostile one cannot do."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.trace import get_current_span
from pydantic import TypeAdapter

from relay.config.handlers import HandlerSettings, NatsHandler
from relay.model.events import Event
from relay.model.trace_context import MOST_BYTES, TraceContext, carrying, headers, parse, trace_id
from relay.observe.spans import parent
from relay.sinks import cloudevents, kafka, nats, rabbitmq, redis
from relay.sinks.brokers import Message, Publishing, SendWindow, Unanswered
from tests.sinks import make_event, transaction

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PARENT = f"00-{TRACE}-{SPAN}-01"


def test_a_context_is_read_from_metadata() -> None:
    found = parse(json.dumps({"traceparent": PARENT, "tracestate": "a=1,b=2"}).encode())
    assert found == TraceContext(TRACE, SPAN, 1, "a=1,b=2")
    assert found.sampled
    assert found.headers == {"traceparent": PARENT, "tracestate": "a=1,b=2"}


@pytest.mark.parametrize(
    "parent",
    [
        "",
        PARENT.upper(),
        f"{PARENT}\n",
        f" {PARENT}",
        f"{PARENT}-more",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE}-{SPAN}-1",
        f"00-{TRACE[:-1]}٣-{SPAN}-01",
        [PARENT],
        {"traceparent": PARENT},
        None,
        1,
    ],
)
def test_what_is_no_traceparent_is_none(parent: Any) -> None:
    assert parse(json.dumps({"traceparent": parent})) is None


@pytest.mark.parametrize(
    "metadata",
    [
        None,
        "",
        "traceparent",
        '{"traceparent"',
        '"traceparent"',
        "[" * 50_000 + '"traceparent"',
        b'{"traceparent": "\xff"}',
        '{"traceparent": "\udcff"}',
        json.dumps({"traceparent": PARENT, "more": "x" * MOST_BYTES}),
    ],
)
def test_metadata_that_are_no_object_or_too_large_have_none(metadata: Any) -> None:
    assert parse(metadata) is None


@pytest.mark.parametrize("state", ["a=1\nx: y", "a=1\r\nx: y", "a=é", "a" * 513, 7, ["a=1"]])
def test_a_state_that_may_not_be_a_header_is_left_out(state: Any) -> None:
    found = parse(json.dumps({"traceparent": PARENT, "tracestate": state}))
    assert found is not None
    assert found.headers == {"traceparent": PARENT}


@given(st.text(max_size=80), st.text(max_size=80))
def test_nothing_but_printable_ascii_gets_into_headers(parent: str, state: str) -> None:
    for each in (parent, PARENT):
        found = parse(json.dumps({"traceparent": each, "tracestate": state}))
        if found is not None:
            assert all(value.isascii() and value.isprintable() for value in found.headers.values())


@given(st.text(st.characters(min_codepoint=0x20, max_codepoint=0x7E), max_size=100))
def test_any_state_can_be_the_parent_of_a_span(state: str) -> None:
    context = TraceContext(TRACE, SPAN, 1, state)
    found = get_current_span(parent(context)).get_span_context()
    assert (found.trace_id, found.span_id) == (int(TRACE, 16), int(SPAN, 16))


def test_the_first_event_says_in_which_trace_a_transaction_was_published() -> None:
    traced = make_event(1, metadata=json.dumps({"traceparent": PARENT}))
    assert trace_id([traced, make_event(2)]) == TRACE
    assert trace_id([make_event(2), traced]) is None
    assert trace_id([]) is None


class _Broker:
    def __init__(self) -> None:
        self.messages: list[Message] = []

    async def send(self, messages: Sequence[Message]) -> None:
        self.messages += messages

    async def close(self) -> None:
        pass


@pytest.mark.parametrize("mode", ["structured", "binary"])
def test_messages_carry_the_context_beside_the_cloud_event(mode: str) -> None:
    settings: Any = TypeAdapter(HandlerSettings).validate_python(
        {"type": "nats", "servers": ["nats://localhost"], "topic": "t", "mode": mode}
    )
    assert isinstance(settings, NatsHandler)
    broker = _Broker()
    sink = Publishing("broker", settings, broker)

    def of(event: Event) -> dict[str, str]:
        return {"traceparent": f"of {event.text('c_offset')}"}

    async def deliver() -> None:
        with carrying(of):
            await sink.deliver(transaction(make_event(1), make_event(2)))
        await sink.deliver(transaction(make_event(3)))

    asyncio.run(deliver())
    assert [dict(each.trace) for each in broker.messages] == [
        {"traceparent": "of 1"},
        {"traceparent": "of 2"},
        {},
    ]
    first = broker.messages[0]
    assert ("traceparent", "of 1") in kafka._headers(first)
    assert nats._headers(first)["traceparent"] == "of 1"
    assert not any("traceparent" in key for key in first.attributes)
    assert headers(make_event(1)) == {}


class _Said:
    """Stands for a client: notes what it is called with."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def pipeline(self, transaction: bool) -> _Said:
        return self

    def execute_command(self, *words: Any) -> None:
        pass

    def xadd(self, *words: Any, **_: Any) -> None:
        self.calls.append(words)

    def basic_publish(self, *words: Any, **_: Any) -> None:
        self.calls.append(words)

    async def execute(self, raise_on_error: bool) -> list[Any]:
        return []


def test_entries_of_redis_and_messages_of_rabbitmq_carry_the_context() -> None:
    message = Message("t", None, "1", "s/1/1", "x/y", {"type": "t"}, b"{}", {"traceparent": PARENT})
    said = _Said()

    async def send() -> None:
        stream = redis.Redis.__new__(redis.Redis)
        client: Any = said
        stream._max_length = None
        await stream._execute(client, [redis._Append([message])])
        channel = rabbitmq._Channel.__new__(rabbitmq._Channel)
        channel._fault, channel._exchange, channel._number = None, "", 0
        channel._channel, channel.unanswered = client, Unanswered()
        window = SendWindow(1.0)
        await channel.publish(window.sending([message]), 0)

    asyncio.run(send())
    (_, fields), (*_, properties) = said.calls
    assert fields["traceparent"] == PARENT
    assert properties.headers == {"cloudEvents:type": "t", "traceparent": PARENT}


def test_a_cloud_event_is_the_same_with_a_context() -> None:
    one = make_event(1, metadata=json.dumps({"traceparent": PARENT}))
    assert b"traceparent" not in cloudevents.structured(one, "s")
