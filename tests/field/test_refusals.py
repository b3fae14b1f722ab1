"""A refusal may be of an event, of the destination, or of neither: an ingress, a token, a deployment."""

from __future__ import annotations

import json
import time
from collections import Counter
from typing import Any

import pytest

from relay.delivery import judging
from tests.outbox import Outbox, event, host, relaying, wait_until
from tests.webhook import Answer, Webhook

_RETRY = {"wait": 0.1, "max_wait": 0.2, "jitter": 0.01, "defer_after": 0.05}


def posting(webhook: Webhook, **more: Any) -> dict[str, Any]:
    """Every event is posted."""
    hook = {
        "type": "http",
        "url": webhook.url,
        "retry": _RETRY,
        "circuit_breaker": {"cool_down": 0.3},
        **more,
    }
    return {"handlers": {"hook": hook}, "routes": [{"handlers": ["hook"]}]}


def published(outbox: Outbox, transactions: int, hosts: int = 8) -> None:
    for number in range(transactions):
        outbox.publish(host(number % hosts), event(number))


def delivered(outbox: Outbox, config: dict[str, Any]) -> None:
    """Run relay until every event is delivered or dead."""
    with relaying(outbox.settings(**config)):
        outbox.wait_delivered("hook")


def dead(outbox: Outbox) -> int:
    return int(outbox.value("select count(*) from relay.dead_letter_queue"))


def assert_delivered_in_order(outbox: Outbox, webhook: Webhook, hosts: int = 8) -> None:
    """Every event was accepted once, those of a host in order, and none is a dead letter."""
    assert dead(outbox) == 0
    assert webhook.ids() == Counter(outbox.column("select id::text from outbox_message_t"))
    for number in range(hosts):
        assert webhook.order(host(number)) == outbox.column(
            "select c_offset from outbox_message_t where host_id = %s order by 1", (host(number),)
        )


def test_an_ingress_that_refuses_for_a_moment_buries_no_event(outbox: Outbox) -> None:
    """traefik/traefik#13546, imtaqin/waxum#68, vectordotdev/vector#13414: a deployment answers 404, 403, 401."""
    begun: list[float] = []
    statuses = [404, 403, 401, 302, 405]

    def answers(headers: dict[str, str], body: bytes) -> Answer:
        begun.append(time.monotonic())
        if begun[-1] - begun[0] > 1.5:
            return Answer()
        statuses.append(statuses.pop(0))
        return Answer(statuses[0])

    with Webhook(answers) as webhook:
        published(outbox, 40)
        delivered(outbox, posting(webhook))
        assert {401, 403, 404} <= {request.status for request in webhook.requests}
        assert_delivered_in_order(outbox, webhook)


def test_one_bad_replica_of_eight_buries_no_event(outbox: Outbox) -> None:
    """traefik/traefik#13390, tektoncd/plumbing#945: one replica answers 404 until somebody deletes it."""
    asked = 0

    def answers(headers: dict[str, str], body: bytes) -> Answer:
        nonlocal asked
        asked += 1
        return Answer(404 if asked % 8 == 0 else 204)

    with Webhook(answers) as webhook:
        published(outbox, 120, hosts=24)
        delivered(outbox, posting(webhook))
        assert_delivered_in_order(outbox, webhook, hosts=24)


def test_a_request_that_still_runs_is_sent_again(outbox: Outbox) -> None:
    """KeeperHub/keeperhub#1532, fastrepl/anarlog#6459: 409 while the first request with the key is running."""
    first_at: dict[str, float] = {}

    def answers(headers: dict[str, str], body: bytes) -> Answer:
        now = time.monotonic()
        begun = first_at.setdefault(headers["idempotency-key"], now)
        if begun == now:
            return Answer(after=1.0)
        return Answer(409) if now - begun < 1.0 else Answer()

    with Webhook(answers) as webhook:
        outbox.publish(host(1), event(1))
        delivered(outbox, posting(webhook, timeout=0.3))
        assert 409 in {request.status for request in webhook.requests}
        assert dead(outbox) == 0
        assert webhook.accepted


def test_a_refusal_of_the_content_is_a_dead_letter(outbox: Outbox) -> None:
    statuses = {1: 400, 3: 413, 5: 422, 7: 431}

    def answers(headers: dict[str, str], body: bytes) -> Answer:
        return Answer(statuses.get(json.loads(body)["data"]["amount"], 204))

    with Webhook(answers) as webhook:
        published(outbox, 8)
        delivered(outbox, posting(webhook))
        assert len(webhook.requests) == 8
        dead_letters = outbox.column("select payload->>'amount' from relay.dead_letter_queue")
        assert sorted(dead_letters) == ["1", "3", "5", "7"]


def test_a_receiver_that_wants_no_more_stops_the_sink(outbox: Outbox) -> None:
    """standard-webhooks: 410 means that the receiver wants no more events. eventrelay/eventrelay#91."""
    gone = True

    with Webhook(lambda headers, body: Answer(410 if gone else 204)) as webhook:
        published(outbox, 40)
        config = posting(webhook, concurrency=4, circuit_breaker={"cool_down": 0.5})
        with relaying(outbox.settings(**config)):
            wait_until(
                lambda: (
                    outbox.column("select fault from relay.sinks")
                    == ["DestinationRefused: HTTP 410"]
                )
            )
            # Only those that had begun, and trials.
            assert len(webhook.requests) <= 8
            gone = False
            outbox.wait_delivered("hook")
        assert_delivered_in_order(outbox, webhook)


def test_an_operator_says_what_a_status_means(outbox: Outbox) -> None:
    """vectordotdev/vector#21469, getsentry/sentry#65659: a receiver's 404 may be final, its 400 of the moment."""
    refused = {3: 404, 4: 422, 5: 418}
    asked: Counter[int] = Counter()

    def answers(headers: dict[str, str], body: bytes) -> Answer:
        amount = json.loads(body)["data"]["amount"]
        asked[amount] += 1
        if amount == 4 and asked[amount] > 2:
            return Answer()
        return Answer(refused.get(amount, 204))

    statuses = {404: "dead", "422": "retry", "4xx": "dead"}
    with Webhook(answers) as webhook:
        published(outbox, 8)
        delivered(outbox, posting(webhook, statuses=statuses))
        assert asked[4] == 3
        assert sorted(outbox.column("select payload->>'amount' from relay.dead_letter_queue")) == [
            "3",
            "5",
        ]


def test_a_bad_replica_s_refusals_of_content_are_bounded(
    outbox: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each success between two refusals does not begin the count again: one replica of eight cannot bury an eighth."""
    asked = 0

    def answers(headers: dict[str, str], body: bytes) -> Answer:
        nonlocal asked
        asked += 1
        return Answer(400 if asked % 8 == 0 else 204)

    with Webhook(answers) as webhook:
        monkeypatch.setattr(judging, "LONGEST_WAIT_SECONDS", 0.3)
        published(outbox, 200, hosts=50)
        config = {**posting(webhook), "dead_letters": {"brake": 3}}
        delivered(outbox, config)
        # Three, and no more than one in twenty.
        assert dead(outbox) <= 3 + 200 // 20
        assert sum(webhook.ids().values()) + dead(outbox) == 200
