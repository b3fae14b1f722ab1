"""Whatever JSON PostgreSQL stores, relay reads: long numbers, deep nesting, every digit.

Reports: python/cpython#95778 (integers of more than 4,300 digits), pingcap/tiflow#12064 and airbytehq/airbyte#12057
(numbers that lose digits), serde-rs/json#334 and nextstrain/nextclade#1019 (nesting).
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from typing import Any

import pytest

from relay.config.fields import Template
from relay.config.handlers import NatsHandler
from relay.config.settings import Route
from relay.faults import Rejected
from relay.model import exact_json, trace_context
from relay.pipeline.routing import RouteRules
from relay.sinks import build_sinks
from tests.jetstream import jetstream
from tests.outbox import Outbox, host, relaying
from tests.sinks import make_event, transaction

LONG = "1" + "0" * 5_000
"""What jsonb prints for 1e5000."""
DEEP = "[" * 4_000 + "]" * 4_000
PAYLOADS = {
    "long": f'{{"n": {LONG}, "region": "eu"}}',
    "negative": f'{{"n": -{LONG}, "region": "eu"}}',
    "deep": f'{{"n": {DEEP}, "region": "eu"}}',
    "deep object": '{"n": ' + '{"a": ' * 4_000 + "1" + "}" * 4_000 + ', "region": "eu"}',
    "deep and long": f'{{"n": {"[" * 4_000}{LONG}, "x"{"]" * 4_000}, "region": "eu"}}',
    "infinite": '{"n": 1e999999, "region": "eu"}',
}


@pytest.mark.parametrize("payload", PAYLOADS.values(), ids=PAYLOADS)
def test_a_field_is_read_whatever_stands_beside_it(payload: str) -> None:
    event = make_event(1, payload=payload, metadata=payload)
    assert Template("shop.{payload.region}.{metadata.region}").fill(event) == "shop.eu.eu"
    assert event.payload["region"] == "eu"
    routes = [Route(match={"payload.region": "eu"}, handlers=["a"]), Route(handlers=["b"])]
    assert RouteRules(routes).handlers(event) == ("a",)


def test_what_is_read_without_recursion_is_what_is_read_with_it() -> None:
    generator = random.Random(28)

    def value(levels: int) -> Any:
        kind = generator.randrange(8 if levels else 6)
        if kind == 6:
            return [value(levels - 1) for _ in range(generator.randrange(4))]
        if kind == 7:
            return {f"k\n{n}": value(levels - 1) for n in range(generator.randrange(4))}
        return [None, True, False, 17, -1.5, 'é"\\ '][kind]

    for _ in range(200):
        expected = value(5)
        text = json.dumps(expected, indent=generator.choice([None, 1]))
        assert exact_json._read(text) == expected


@pytest.mark.parametrize("payload", PAYLOADS.values(), ids=PAYLOADS)
def test_whatever_is_read_can_be_written(payload: str) -> None:
    value = exact_json.loads(payload)
    written = exact_json.dumps(value, "payload")
    assert written.replace(" ", "") == payload.replace(" ", "")
    assert "".join(exact_json._written(value)) == written


def test_what_cannot_be_written_is_named_at_any_depth() -> None:
    value: Any = {"n": float("nan")}
    for _ in range(3_000):
        value = [value]
    with pytest.raises(
        ValueError, match=r"^payload(\.0){19}\.n: JSON cannot represent this float$"
    ):
        exact_json.dumps(value, "payload")
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(ValueError, match=r"^payload: is nested too deeply$"):
        exact_json.dumps(endless, "payload")


def test_what_is_no_json_is_refused_with_and_without_recursion() -> None:
    generator = random.Random(28)
    pieces = [*'[]{},:"', '"a"', "1", "-", "null", " ", "NaN", "1.", "01", "\x01", "é"]
    valid = 0
    for _ in range(20_000):
        text = "".join(generator.choices(pieces, k=generator.randrange(1, 7)))
        outcomes = []
        for read in (exact_json._DECODER.decode, exact_json._read):
            try:
                outcomes.append(read(text))
            except ValueError:
                outcomes.append(ValueError)
        assert outcomes[0] == outcomes[1], text
        valid += outcomes[0] is not ValueError
    assert valid > 100


def test_nesting_has_a_limit_that_costs_no_memory() -> None:
    began = time.monotonic()
    with pytest.raises(ValueError, match="nested too deeply"):
        exact_json.loads("[" * 10_000_000)
    assert time.monotonic() - began < 60


@pytest.mark.parametrize("constant", ["NaN", "Infinity", "-Infinity", "[NaN]"])
def test_python_s_constants_are_no_json(constant: str) -> None:
    with pytest.raises(ValueError, match=r"JSON|Expecting"):
        exact_json.loads(constant)


@pytest.mark.parametrize("number", ["1.10", "0.1000000000000000055", "12345678901234567890", LONG])
def test_a_number_in_a_topic_has_every_digit(number: str) -> None:
    event = make_event(1, payload=f'{{"n": {number}}}')
    assert Template("{payload.n}").fill(event) == number
    routes = [Route(match={"payload.n": number.replace("0", "?", 1)}, handlers=["a"])]
    assert RouteRules(routes).handlers(event) == ("a",)


@pytest.mark.parametrize("value", [DEEP, '["\\ud800"]'])
def test_an_array_that_cannot_be_written_matches_no_pattern(value: str) -> None:
    routes = [Route(match={"payload.n": "*x*"}, handlers=["a"]), Route(handlers=["b"])]
    event = make_event(1, payload=f'{{"n": {value}}}')
    assert RouteRules(routes).handlers(event) == ("b",)


def test_a_topic_of_a_payload_that_is_no_json_is_the_events_fault_and_quotes_nothing() -> None:
    with pytest.raises(Rejected, match="payload: is not JSON") as raised:
        Template("{payload.region}").fill(make_event(1, payload="s3cret"))
    assert "s3cret" not in str(raised.value)


def test_a_trace_context_is_found_beside_deep_metadata() -> None:
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    context = trace_context.parse(f'{{"deep": {DEEP}, "traceparent": "{parent}"}}')
    assert context is not None
    assert context.sampled


def test_such_events_arrive_at_a_broker_whose_topic_reads_a_field(outbox: Outbox) -> None:
    for number, payload in enumerate(PAYLOADS.values()):
        if "999999" not in payload:
            outbox.conn.execute(
                """
                select relay.publish(%s, null, jsonb_build_array(jsonb_build_object(
                    'event_type', 'order.placed', 'aggregate_type', 'Order', 'aggregate_id', '1',
                    'payload', %s::jsonb)))
                """,
                (host(number), payload),
            )
    with jetstream(max_payload=100_000) as stream:
        handlers = {
            "sink": {"type": "nats", "servers": [stream.url], "topic": "shop.{payload.region}"}
        }
        routes = [{"match": {"payload.region": "eu"}, "handlers": ["sink"]}]
        with relaying(outbox.settings(handlers=handlers, routes=routes)):
            outbox.wait_delivered("sink")
        assert [each.subject for each in stream.stored] == ["shop.eu"] * 5
    assert outbox.value("select count(*) from relay.dead_letter_queue") == 0


def test_such_an_event_is_delivered_by_a_sink(monkeypatch: pytest.MonkeyPatch) -> None:
    with jetstream(max_payload=100_000) as stream:
        settings = NatsHandler(type="nats", servers=[stream.url], topic="{payload.region}")
        ((sink, _),) = build_sinks({"s": settings}).values()

        async def deliver() -> None:
            try:
                for number, payload in enumerate(PAYLOADS.values()):
                    await sink.deliver(transaction(make_event(number, payload=payload)))
            finally:
                await sink.close()

        asyncio.run(deliver())
        assert len(stream.stored) == len(PAYLOADS)
