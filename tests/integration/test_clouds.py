"""Events sent to queues and topics of Amazon's, as moto plays them, and to Google Pub/Sub, from an outbox."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.brokers import assert_complete_and_in_order, sending
from tests.clouds import CREDENTIALS, Moto, PubSub
from tests.outbox import Outbox, event, host, relaying, wait_until


@pytest.fixture(autouse=True)
def _credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)


class _Handler:
    """What `sending` reads of a broker."""

    def __init__(self, handler: dict[str, Any]) -> None:
        self.handler = handler


def configured(handler: dict[str, Any]) -> dict[str, Any]:
    of_broker: Any = _Handler(handler)
    return sending(of_broker, topic=handler["topic"], timeout=30)


@pytest.fixture
def moto() -> Iterator[Moto]:
    with Moto() as server:
        yield server


@pytest.mark.brokers
@pytest.mark.parametrize("kind", ["sqs", "sns"])
def test_events_arrive_in_order_at_motos_queue(outbox: Outbox, moto: Moto, kind: str) -> None:
    outbox.fill(20, events=3, hosts=10)
    with relaying(outbox.settings(**configured(moto.handler(kind)))):
        outbox.wait_drained()
        wait_until(lambda: len(moto.events()) >= 60)
    assert_complete_and_in_order(outbox, moto.events())


def test_events_arrive_in_order_after_an_outage(outbox: Outbox) -> None:
    with PubSub() as pubsub:
        pubsub.kill()
        for number in range(20):
            outbox.publish(host(number % 4), event(number))
        with relaying(outbox.settings(**configured(pubsub.handler()))):
            outbox.wait_handled()
            outbox.wait_drained()
            pubsub.start()
            wait_until(lambda: len(pubsub.events()) >= 20)
        assert_complete_and_in_order(outbox, pubsub.events())


def test_what_the_service_refuses_is_dead_lettered(outbox: Outbox) -> None:
    for number in (1, 2, 3):
        outbox.publish(host(number), event(number))
    with PubSub() as pubsub:
        outbox.publish(host(4), {**event(4), "payload": {"amount": "x" * 2_000}})
        outbox.drain(outbox.settings(**configured(pubsub.handler(key="{payload.amount}"))))
        assert sorted(each["data"]["amount"] for each in pubsub.events()) == [1, 2, 3]
    refused = outbox.conn.execute(
        "select exception from relay.dead_letter_queue where handler = 'broker'"
    ).fetchall()
    assert refused == [("Rejected: the ordering key has more than 1024 bytes",)]
