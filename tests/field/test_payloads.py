"""A payload is parsed or quoted before it is part of an envelope, and nothing is null, not the four letters.

Reports: debezium/debezium#2710 (DBZ-1297), debezium/debezium#5294 (DBZ-7512), eventuate-foundation/eventuate-cdc#52
(payloads of text); debezium/debezium#919 (DBZ-1320), debezium/debezium.github.io#328 (tombstones).
"""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from pydantic import TypeAdapter
from pydantic_core import from_json

from relay.config.fields import Template
from relay.config.handlers import HandlerSettings
from relay.faults import Rejected
from relay.model import exact_json
from relay.model.events import EVENT_FIELDS, Event
from relay.sinks import build_sinks, cloudevents
from tests.brokers import TYPE, KafkaCluster, started
from tests.jetstream import jetstream
from tests.outbox import Outbox, relaying, wait_until
from tests.sinks import make_event, transaction
from tests.webhook import Webhook

FORGED = '1, "id": "spoofed", "type": "admin.grant"'
NO_JSON = ["hello", FORGED, "", "{", '{"a": 1} {"a": 2}', "NaN", "'a'", "[1,]", '"a\n"', "01"]
DEEP = "[" * 5_000 + "]" * 5_000


@pytest.mark.parametrize("payload", NO_JSON)
@pytest.mark.parametrize("encode", [cloudevents.structured, cloudevents.data])
def test_a_payload_that_is_no_json_is_not_sent_as_json(encode: Any, payload: str) -> None:
    arguments = ("s",) if encode is cloudevents.structured else ()
    with pytest.raises(Rejected, match="payload: is not JSON"):
        encode(make_event(1, payload=payload), *arguments)


@pytest.mark.parametrize("payload", [*NO_JSON, '{"a": 1}', "é"])
def test_a_payload_may_be_sent_as_text(payload: str) -> None:
    event = make_event(1, payload=payload)
    sent = json.loads(cloudevents.structured(event, "s", as_text=True))
    assert (sent["data"], sent["id"]) == (payload, event.text("id"))
    assert sent["datacontenttype"] == "text/plain; charset=utf-8"
    assert cloudevents.data(event, as_text=True) == payload.encode()


@pytest.mark.parametrize(
    "payload", [DEEP, f"1{'0' * 5_000}", "1e999999", "-0.0", '"\\ud800"', " 1 "]
)
def test_whatever_postgresql_stores_as_json_is_sent(payload: str) -> None:
    assert cloudevents.structured(make_event(1, payload=payload), "s").endswith(
        f'"data": {payload}}}'.encode()
    )


def test_nothing_is_json_for_the_fast_parser_alone() -> None:
    generator = random.Random(28)
    pieces = [
        *'[]{},:"',
        '"a"',
        "1",
        "-",
        "null",
        " ",
        "NaN",
        "1.",
        "1e5",
        "01",
        "\x01",
        "\\",
        "\x0b",
        "é",
    ]
    for _ in range(20_000):
        text = "".join(generator.choices(pieces, k=generator.randrange(1, 7)))
        try:
            from_json(text, allow_inf_nan=False)
        except ValueError:
            continue
        exact_json.loads(text)


def a_sink(**settings: Any) -> Any:
    found: Any = TypeAdapter(HandlerSettings).validate_python(settings)
    ((sink, _),) = build_sinks({"sink": found}).values()
    return sink


async def deliver(sink: Any, *events: Event) -> list[Any]:
    try:
        return await asyncio.gather(
            *(sink.deliver(transaction(event)) for event in events), return_exceptions=True
        )
    finally:
        await sink.close()


@pytest.mark.parametrize("mode", ["structured", "binary"])
def test_a_forged_event_is_refused_alone(mode: str) -> None:
    with jetstream() as stream:
        sink = a_sink(type="nats", servers=[stream.url], topic="t", mode=mode)
        events = [make_event(1), make_event(2, payload=FORGED), make_event(3)]
        first, forged, last = asyncio.run(deliver(sink, *events))
        assert first is last is None
        assert isinstance(forged, Rejected)
        assert len(stream.stored) == 2


def test_a_text_in_binary_mode_says_that_it_is_one() -> None:
    with jetstream() as stream:
        sink = a_sink(type="nats", servers=[stream.url], topic="t", mode="binary", payload="text")
        assert asyncio.run(deliver(sink, make_event(1, payload="hello"))) == [None]
        (message,) = stream.stored
        assert message.body == b"hello"
        assert message.headers["content-type"] == "text/plain; charset=utf-8"


@pytest.mark.parametrize("subject", [" a ", "a b", '50% "x"', "é", "a\r\nce-id: 2"])
def test_an_attribute_arrives_as_it_is_in_a_header(subject: str) -> None:
    """cloudevents/sdk-java#748, cloudevents/sdk-go#1331: blanks at the ends of a header are no part of it."""
    with jetstream() as stream:
        sink = a_sink(type="nats", servers=[stream.url], topic="t", mode="binary")
        assert asyncio.run(deliver(sink, make_event(1, aggregate_id=subject))) == [None]
        (message,) = stream.stored
        assert unquote(message.headers["ce-subject"].strip()) == subject
        assert message.headers["ce-id"] == make_event(1).text("id")


# A table of Debezium's, whose payload is often a text.

TABLE = """
    create table outbox (
        id uuid not null primary key, aggregatetype varchar(255) not null, aggregateid varchar(255) not null,
        type varchar(255) not null, payload text)
"""
INSERT = """
    insert into outbox (id, aggregatetype, aggregateid, type, payload)
    values (gen_random_uuid(), 'Order', %s, 'OrderCreated', %s)
"""


@pytest.mark.parametrize("payload", ["json", "text"])
def test_an_outbox_with_a_payload_of_text(outbox: Outbox, payload: str) -> None:
    outbox.conn.execute(TABLE)
    name = f"{outbox.slot}_other"
    texts = ['{"n": 1}', "hello", FORGED, '{"n": 2}']
    with Webhook() as webhook:
        hook = {"type": "http", "url": webhook.url, "each": "transaction", "payload": payload}
        settings = outbox.settings(
            source={
                "dsn": outbox.relay_dsn,
                "slot": name,
                "publication": name,
                "profile": "debezium",
            },
            group="other",
            handlers={"hook": hook},
            routes=[{"handlers": ["hook"]}],
        )
        outbox.install_again(settings)
        with relaying(settings):
            for number, text in enumerate(texts):
                outbox.conn.execute(INSERT, (f"a{number}", text))
            outcomes = "select count(*) from relay.dead_letter_queue"
            wait_until(lambda: len(webhook.requests) + outbox.value(outcomes) >= 4)
        sent = [each for request in webhook.requests for each in json.loads(request.body)]
    assert all(each["type"] == "OrderCreated" for each in sent)
    data = [each["data"] for each in sent]
    if payload == "text":
        assert sorted(data) == sorted(texts)
    else:
        assert sorted(each["n"] for each in data) == [1, 2]
        exceptions = outbox.column("select exception from relay.dead_letter_queue")
        assert len(exceptions) == 2
        assert all("payload: is not JSON" in each for each in exceptions)


# Kafka's nulls.


def without(event: Event, *names: str) -> Event:
    return event.without(names)


def test_a_null_payload_is_a_tombstone_and_a_null_key_is_null(tmp_path: Path) -> None:
    with started(KafkaCluster, tmp_path / "broker") as cluster:
        sink = a_sink(**cluster.handler, topic="shop.{event_type}", mode="binary")
        results = asyncio.run(
            deliver(
                sink,
                without(make_event(1, host=1), "payload"),
                without(make_event(2, host=2), "host_id"),
                make_event(3, host=3, payload="null"),
            )
        )
        assert results == [None] * 3
        found = {dict(each.headers() or [])["ce_sequence"]: each for each in cluster.messages()}
    assert found[b"1"].value() is None
    assert found[b"1"].key() == (make_event(1).text("host_id") or "").encode()
    assert found[b"2"].key() is None
    assert found[b"2"].value() == b'{"amount": 2}'
    # JSON's null is a value.
    assert found[b"3"].value() == b"null"


@pytest.mark.parametrize("key", ["{host_id}-{user_id}", "{payload.customer}", "h{host_id}"])
def test_a_key_of_several_parts_or_of_json_needs_its_values(key: str) -> None:
    event = without(make_event(1), "host_id", "user_id")
    assert not Template(key).is_null(event)
    with pytest.raises(Rejected):
        Template(key).fill(event)


def test_an_envelope_without_payload_has_no_data() -> None:
    event = Event(tuple("1" if name == "id" else None for name in EVENT_FIELDS))
    assert "data" not in json.loads(cloudevents.structured(event, TYPE))
