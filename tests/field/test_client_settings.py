"""Settings passed on to a client: none that would cut a body, give all events one identity, or confirm nothing."""

from __future__ import annotations

import asyncio
import json

import pytest
from pydantic import ValidationError

from relay.config.handlers import HttpHandler, KafkaHandler
from relay.sinks.http import Http
from tests.sinks import make_event, transaction
from tests.webhook import Webhook


@pytest.mark.parametrize(
    "name",
    [
        "Content-Length",
        "transfer-encoding",
        "content-encoding",
        "Idempotency-Key",
        "ce-id",
        "webhook-id",
    ],
)
def test_a_header_of_a_single_request_is_refused(name: str) -> None:
    """With `content-length: 3` the endpoint read three bytes, and its 200 confirmed the event."""
    with pytest.raises(
        ValidationError, match=f"{name} is set by relay for each request: remove it"
    ):
        HttpHandler.model_validate({"type": "http", "url": "http://h", "headers": {name: "3"}})


def test_other_headers_are_sent_with_the_whole_body() -> None:
    """Those of the configuration replace relay's own."""
    headers = {
        **{"Content-Type": "application/json", "User-Agent": "shop", "Host": "shop.example"},
        **{"authorization": "Bearer x", "ce-extra": "y"},
    }
    with Webhook() as webhook:
        settings = {"type": "http", "url": webhook.url, "headers": headers}
        sink = Http("hook", HttpHandler.model_validate(settings))

        async def send() -> None:
            await sink.deliver(transaction(make_event(1)))
            await sink.close()

        asyncio.run(send())
    (request,) = webhook.accepted
    assert json.loads(request.body)["id"] == request.headers["idempotency-key"]
    for name, value in headers.items():
        assert request.headers[name.lower()] == value


@pytest.mark.parametrize("name", ["transactional.id", "delivery.report.only.error"])
def test_a_setting_of_kafka_that_confirms_nothing_is_refused(name: str) -> None:
    """With the first one the client refuses every message; the second one was a TypeError of the client."""
    kafka = {"type": "kafka", "topic": "t", "bootstrap": ["kafka:9092"], "conf": {name: "true"}}
    with pytest.raises(ValidationError, match=f"with {name} no message would be confirmed"):
        KafkaHandler.model_validate(kafka)


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("bootstrap.servers", "set the key bootstrap"),
        ("metadata.broker.list", "set the key bootstrap"),
        ("enable.idempotence", "its producers are idempotent"),
        ("delivery.timeout.ms", "set the key timeout"),
        ("message.timeout.ms", "set the key timeout"),
    ],
)
def test_a_setting_of_kafka_that_relay_sets_is_refused(name: str, advice: str) -> None:
    """Each was ignored in silence, or took the place of the key."""
    kafka = {"type": "kafka", "topic": "t", "bootstrap": ["kafka:9092"], "conf": {name: "1"}}
    with pytest.raises(ValidationError, match=f"{name} is set by relay: {advice}"):
        KafkaHandler.model_validate(kafka)


@pytest.mark.parametrize("rate", [1e-320, 0.0, -1.0])
def test_a_rate_that_nobody_would_see_the_end_of_is_refused(rate: float) -> None:
    """The second event waited for ever."""
    with pytest.raises(ValidationError, match="rate_limit"):
        HttpHandler.model_validate({"type": "http", "url": "http://h", "rate_limit": rate})
