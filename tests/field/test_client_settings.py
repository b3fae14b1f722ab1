"""Settings passed on to a client: none that would cut a body, give all events one identity, or confirm nothing."""

from __future__ import annotations

import asyncio
import json

import pytest
from pydantic import ValidationError

from relay.config.handlers import HttpHandler, KafkaHandler
from relay.handlers.http import Http
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
    headers = {"Content-Type": "application/json", "authorization": "Bearer x", "ce-extra": "y"}
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
