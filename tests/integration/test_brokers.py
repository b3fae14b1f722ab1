"""Events sent to brokers: nothing is missing, what comes twice has the same id, each host's events come in order."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pika
import pytest
import redis

from relay.spark.session import Session
from tests.brokers import (
    BROKERS,
    Broker,
    KafkaCluster,
    RabbitmqServer,
    RedisServer,
    assert_complete_and_in_order,
    sending,
    started,
)
from tests.outbox import Outbox, event, host, relaying, wait_until

pytestmark = pytest.mark.brokers


@pytest.fixture(params=BROKERS)
def broker(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Broker]:
    with started(BROKERS[request.param], tmp_path / "broker") as found:
        yield found


def test_events_arrive_in_order(
    outbox: Outbox, broker: Broker, engine: str, session: Session | None
) -> None:
    outbox.fill(200, events=3, hosts=10)
    outbox.drain(outbox.settings(engine, **sending(broker)), session)
    found = broker.events()
    assert len(found) == 600
    assert_complete_and_in_order(outbox, found)


def test_an_outage_of_the_broker_defers_and_loses_nothing(outbox: Outbox, broker: Broker) -> None:
    broker.kill()
    for number in range(20):
        outbox.publish(host(number % 4), event(number))
    with relaying(outbox.settings(**sending(broker))):
        outbox.wait_handled()
        # Neither the WAL nor the target waits for it.
        outbox.wait_drained()
        broker.start()
        wait_until(lambda: len(broker.events()) >= 20)
    assert_complete_and_in_order(outbox, broker.events())


def test_a_binary_event_in_redis(outbox: Outbox, tmp_path: Path) -> None:
    outbox.publish(host(1), event(5, aggregate_id="é"))
    with started(RedisServer, tmp_path / "broker") as broker:
        outbox.drain(outbox.settings(**sending(broker, mode="binary", topic="{payload.amount}")))
        found: Any = redis.Redis(port=broker.port).xrange("5")
    ((_, fields),) = found
    assert fields[b"id"].decode() == outbox.value("select id::text from outbox_message_t")
    assert (fields[b"subject"].decode(), fields[b"type"]) == ("é", b"order.placed")
    assert json.loads(fields[b"data"]) == {"amount": 5}


def test_what_a_broker_refuses_is_dead_lettered(outbox: Outbox, tmp_path: Path) -> None:
    for number in (5, 13, 6):
        outbox.publish(host(1), event(number))
    outbox.publish(host(1), {**event(7), "payload": {"amount": None}})
    with started(RedisServer, tmp_path / "broker") as broker:
        redis.Redis(port=broker.port).set("shop.13", "no stream")
        outbox.drain(outbox.settings(**sending(broker, topic="shop.{payload.amount}")))
        assert redis.Redis(port=broker.port).keys("shop.*").__len__() == 3
    dead_letters = outbox.conn.execute(
        "select (payload->>'amount')::int, exception from relay.dead_letter_queue order by c_offset"
    ).fetchall()
    assert [amount for amount, _ in dead_letters] == [13, None]
    assert "WRONGTYPE" in dead_letters[0][1]
    assert "the event has no text or number at payload.amount" in dead_letters[1][1]


def test_messages_in_rabbitmq_that_no_queue_takes_wait(outbox: Outbox, tmp_path: Path) -> None:
    with started(RabbitmqServer, tmp_path / "broker") as broker:
        outbox.publish(host(1), event(5, "order.paid"))
        with relaying(outbox.settings(**sending(broker, mode="binary"))):
            wait_until(lambda: outbox.value("select count(*) from relay.deferred") == 1)
            with pika.BlockingConnection(pika.URLParameters(broker.handler["url"])) as connection:
                channel = connection.channel()
                channel.queue_declare("shop.order.paid")
                wait_until(lambda: outbox.value("select count(*) from relay.deferred") == 0)
                _, properties, body = channel.basic_get("shop.order.paid")
    assert properties.content_type == "application/json"
    assert properties.headers["cloudEvents:type"] == "order.paid"
    assert json.loads(body) == {"amount": 5}


def test_messages_in_kafka_have_the_host_for_a_key(outbox: Outbox, tmp_path: Path) -> None:
    outbox.fill(30, events=3, hosts=3)
    with started(KafkaCluster, tmp_path / "broker") as broker:
        outbox.drain(outbox.settings(**sending(broker, mode="binary")))
        found = broker.messages()
    for message in found:
        headers = dict(message.headers())
        assert message.key() == headers["ce_partitionkey"]
        assert headers["content-type"] == b"application/json"
    assert {dict(message.headers())["ce_id"].decode() for message in found} == set(
        outbox.column("select id::text from outbox_message_t")
    )
    assert len({(message.key(), message.partition()) for message in found}) == 3
