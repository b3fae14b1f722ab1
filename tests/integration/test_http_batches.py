"""Endpoints that get the events of many transactions in one request, and name those that failed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from pydantic import ValidationError

from relay.config.handlers import HttpHandler
from relay.faults import Rejected, Undelivered
from relay.sinks import Again
from relay.sinks.http_batches import _ANSWER_BYTES, HttpBatches
from tests.outbox import Outbox, event, host, relaying, wait_until
from tests.sinks import make_event, transaction
from tests.webhook import Answer, Request, Webhook

QUICK = {"wait": 0.1, "max_wait": 0.2, "jitter": 0.01, "defer_after": 0.05}


class Endpoint(Webhook):
    """Has `behave` decide which amounts of a request fail, and notes those of each request that it confirms."""

    def __init__(self) -> None:
        super().__init__(self._answer)
        self.calls: list[list[int]] = []
        self.done: list[int] = []
        self.failing: dict[int, dict[str, Any]] = {}
        """What the answer says of an event beside its id, by amount, once for each."""
        self.refused: set[int] = set()
        self.answer_of: list[Answer] = []

    def _answer(self, headers: dict[str, str], body: bytes) -> Answer:
        events = json.loads(body)
        amounts = [each["data"]["amount"] for each in events]
        self.calls.append(amounts)
        if self.answer_of:
            return self.answer_of.pop(0)
        if self.refused & set(amounts):
            return Answer(422)
        failures = []
        for each in events:
            more = self.failing.pop(each["data"]["amount"], None)
            if more is not None:
                failures.append({"itemIdentifier": each["id"], **more})
        named = {each["itemIdentifier"] for each in failures}
        self.done += [each["data"]["amount"] for each in events if each["id"] not in named]
        answer = {"batchItemFailures": failures} if failures else {}
        return Answer(200, body=json.dumps(answer).encode())


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    with Endpoint() as running:
        yield running


def posting(endpoint: Webhook, **more: Any) -> dict[str, Any]:
    retry = {**QUICK, **more.pop("retry", {})}
    handler = {
        "type": "http",
        "url": endpoint.url,
        "each": "batch",
        "max_wait": 0.3,
        "retry": retry,
    }
    return {"handlers": {"shop": {**handler, **more}}, "routes": [{"handlers": ["shop"]}]}


def identities(requests: Sequence[Request]) -> list[str]:
    return [each.headers["idempotency-key"] for each in requests]


def test_many_transactions_are_one_array_of_cloudevents(outbox: Outbox, endpoint: Endpoint) -> None:
    more = {"signing_secret": "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"}
    with relaying(outbox.settings(**posting(endpoint, **more))):
        with outbox.conn.transaction():
            for number in range(5):
                outbox.publish(host(number % 2), event(number), event(number + 10))
        wait_until(lambda: len(endpoint.done) == 10)
        wait_until(lambda: outbox.value("select state = 'attached' from relay.sinks"))
    assert endpoint.calls == [[0, 10, 1, 11, 2, 12, 3, 13, 4, 14]]
    (request,) = endpoint.requests
    assert request.headers["content-type"] == "application/cloudevents-batch+json"
    assert request.headers["idempotency-key"].startswith("batch-")
    assert request.headers["webhook-id"] == request.headers["idempotency-key"]
    ids = outbox.column("select id::text from outbox_message_t order by c_offset")
    assert [each["id"] for each in json.loads(request.body)] == ids


def test_only_those_that_the_answer_names_are_retried(outbox: Outbox, endpoint: Endpoint) -> None:
    endpoint.failing = {1: {}, 2: {"status": 422}, 3: {"status": 503}}
    with relaying(outbox.settings(**posting(endpoint))):
        with outbox.conn.transaction():
            for number in (0, 1, 2, 3, 11, 12):
                outbox.publish(host(number % 10), event(number))
        wait_until(lambda: {0, 1, 3, 11, 12} <= set(endpoint.done))
        wait_until(lambda: outbox.value("select count(*) from relay.deferred") == 0)
        outbox.wait_drained()
    assert endpoint.calls[0] == [0, 1, 2, 3, 11, 12]
    again = [amount for each in endpoint.calls[1:] for amount in each]
    # 11 follows 1, whatever the answer has said of it; 12 follows a dead letter.
    assert sorted(again) == [1, 3, 11]
    assert again.index(1) < again.index(11)
    dead = outbox.column("select payload->>'amount' from relay.dead_letter_queue")
    assert dead == ["2"]
    assert len(set(identities(endpoint.requests))) == len(endpoint.requests)


def test_one_that_the_endpoint_refuses_without_a_name_is_found(
    outbox: Outbox, endpoint: Endpoint
) -> None:
    endpoint.refused = {5}
    with relaying(outbox.settings(**posting(endpoint))):
        with outbox.conn.transaction():
            for number in range(16):
                outbox.publish(host(number), event(number))
        wait_until(lambda: outbox.value("select count(*) from relay.dead_letter_queue") == 1)
        wait_until(lambda: len(endpoint.done) == 15)
        outbox.wait_drained()
    assert outbox.column("select payload->>'amount' from relay.dead_letter_queue") == ["5"]
    assert outbox.value("select count(*) from relay.deferred") == 0
    # 16, 8, 4, 2, 1, and the others of these halves.
    assert len(endpoint.calls) == 9


def results_of(body: bytes) -> Sequence[Exception | None]:
    """What becomes of two transactions whose request is answered so, without a database."""

    async def main(endpoint: Endpoint) -> Sequence[Exception | None]:
        endpoint.answer_of = [Answer(200, body=body)]
        settings = HttpHandler(type="http", url=endpoint.url, each="batch")
        sink = HttpBatches("shop", settings)
        try:
            return await sink.deliver_batch(
                [transaction(make_event(number, number)) for number in (1, 2)]
            )
        finally:
            await sink.close()

    with Endpoint() as endpoint:
        return asyncio.run(main(endpoint))


@pytest.mark.parametrize(
    "body",
    [
        *(
            b'{"batchItemFailures": %s}' % failures
            for failures in (
                b'[{"itemIdentifier": "nobody"}]',
                b'[{"itemIdentifier": ""}]',
                b'[{"itemIdentifier": null}]',
                b'[{"id": "1"}]',
                b'["1"]',
                b'{"itemIdentifier": "1"}',
                b'"1"',
            )
        ),
        b'{"batchItemFailures": [',
        b'{"batchItemFailures": ',
        b'\xef\xbb\xbf{"batchItemFailures": [{"itemIdentifier": "nobody"}]}',
        b'{"x": "' + b"x" * _ANSWER_BYTES + b'"}',
    ],
    ids=[
        *("unknown", "empty", "null", "other key", "a text in it", "no list", "a text"),
        *("a cut list", "cut", "byte order mark", "too long"),
    ],
)
def test_an_answer_that_nobody_understands_confirms_nothing(body: bytes) -> None:
    """As of Lambda (floci-io/floci#3152), which takes an unknown or empty identifier for one of the whole batch."""
    with pytest.raises(Undelivered, match="answer"):
        results_of(body)


@pytest.mark.parametrize(
    "body",
    [b"", b"OK", b"{}", b'{"batchItemFailures": null}', b'{"batchItemFailures": []}', b"[1]"],
)
def test_an_answer_without_names_confirms_all(body: bytes) -> None:
    assert results_of(body) == [None, None]


def test_an_answer_names_transactions_by_any_of_their_events() -> None:
    second = make_event(2, 2).text("id")
    names = [{"itemIdentifier": second, "status": 400, "why": "no such customer"}]
    done, failed = results_of(json.dumps({"batchItemFailures": names}).encode())
    assert done is None
    assert isinstance(failed, Rejected)


def test_an_event_that_cannot_be_sent_keeps_the_others_for_the_next_call() -> None:
    async def main(endpoint: Endpoint) -> Sequence[Exception | None]:
        sink = HttpBatches("shop", HttpHandler(type="http", url=endpoint.url, each="batch"))
        bad = make_event(1, payload="no JSON")
        return await sink.deliver_batch([transaction(bad), transaction(make_event(2))])

    with Endpoint() as endpoint:
        bad, other = asyncio.run(main(endpoint))
        assert endpoint.calls == []
    assert isinstance(bad, Rejected)
    assert isinstance(other, Again)


def test_an_outage_costs_no_attempts_and_loses_nothing(outbox: Outbox, endpoint: Endpoint) -> None:
    endpoint.answer_of = [Answer(503)] * 12
    more = {"circuit_breaker": {"cool_down": 0.1}, "retry": {"attempts": 2}}
    with relaying(outbox.settings(**posting(endpoint, **more))):
        with outbox.conn.transaction():
            for number in range(40):
                outbox.publish(host(number % 10), event(number))
        wait_until(lambda: len(set(endpoint.done)) == 40)
        outbox.wait_drained()
    assert outbox.value("select count(*) from relay.dead_letter_queue") == 0
    for key in range(10):
        assert [each for each in endpoint.done if each % 10 == key] == list(range(key, 40, 10))


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"mode": "binary"}, "each: batch needs mode: batch, and mode is binary"),
        ({"url": "https://{payload.tenant}.example/"}, "data choose the endpoint of each event"),
        ({"each": "event", "max_wait": 1}, "max_wait has no effect without each: batch"),
    ],
)
def test_settings_that_no_batch_can_have_are_refused(more: dict[str, Any], text: str) -> None:
    with pytest.raises(ValidationError, match=text):
        HttpHandler(**{"type": "http", "url": "http://localhost/", "each": "batch", **more})
