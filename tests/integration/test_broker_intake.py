"""Messages of a broker are published once and in order, whatever fails, and one that is invalid harms nobody."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import confluent_kafka
import nats
import pika
import pytest
from nats.js.api import AckPolicy, ConsumerConfig
from nats.js.errors import NotFoundError

from relay.admin.check import examine
from relay.admin.findings import Severity
from relay.config.settings import Settings
from relay.intake.configured import intakes
from tests.brokers import KafkaCluster, NatsServer, RabbitmqServer
from tests.outbox import Outbox, host, relaying, wait_until

pytestmark = pytest.mark.brokers


class Sender(Protocol):
    """A broker of a test that has a queue or a stream of messages."""

    section: dict[str, Any]

    def start(self) -> None: ...

    def kill(self) -> None: ...

    def send(self, bodies: Sequence[bytes], ids: Sequence[str | None]) -> None: ...

    def redeliver_soon(self) -> None:
        """Have messages that are not acknowledged come again within seconds."""

    def left(self) -> int:
        """How many messages are not acknowledged."""


class Nats(NatsServer):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.section = {
            "type": "nats",
            "servers": [self._url],
            "stream": "shop",
            "consumer": "relay",
            "timeout": 3,
        }

    def send(self, bodies: Sequence[bytes], ids: Sequence[str | None]) -> None:
        asyncio.run(self._send(bodies, ids))

    async def _send(self, bodies: Sequence[bytes], ids: Sequence[str | None]) -> None:
        client = await nats.connect(self._url)
        for body, each in zip(bodies, ids, strict=True):
            headers = {"Nats-Msg-Id": each} if each else None
            await client.jetstream().publish("shop.orders", body, headers=headers)
        await client.close()

    def redeliver_soon(self) -> None:
        asyncio.run(self._add_consumer())

    async def _add_consumer(self) -> None:
        client = await nats.connect(self._url)
        consumer = ConsumerConfig(durable_name="relay", ack_policy=AckPolicy.EXPLICIT, ack_wait=2)
        await client.jetstream().add_consumer("shop", consumer)
        await client.close()

    def left(self) -> int:
        return asyncio.run(self._left())

    async def _left(self) -> int:
        client = await nats.connect(self._url)
        try:
            info = await client.jetstream().consumer_info("shop", "relay")
            return (info.num_pending or 0) + (info.num_ack_pending or 0)
        except NotFoundError:
            return -1
        finally:
            await client.close()


class Rabbitmq(RabbitmqServer):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.section = {
            "type": "rabbitmq",
            "url": self.handler["url"],
            "queue": "intake",
            "timeout": 3,
        }

    def start(self) -> None:
        super().start()
        with pika.BlockingConnection(self._parameters) as connection:
            channel = connection.channel()
            channel.queue_declare("dead", durable=True)
            arguments = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "dead"}
            channel.queue_declare("intake", durable=True, arguments=arguments)

    def send(self, bodies: Sequence[bytes], ids: Sequence[str | None]) -> None:
        with pika.BlockingConnection(self._parameters) as connection:
            channel = connection.channel()
            channel.confirm_delivery()
            for body, each in zip(bodies, ids, strict=True):
                properties = pika.BasicProperties(message_id=each, delivery_mode=2)
                channel.basic_publish("", "intake", body, properties)

    def redeliver_soon(self) -> None:
        pass

    def left(self) -> int:
        return self.waiting("intake")

    def waiting(self, queue: str) -> int:
        with pika.BlockingConnection(self._parameters) as connection:
            return int(connection.channel().queue_declare(queue, passive=True).method.message_count)


class Kafka(KafkaCluster):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.create_topic("intake")
        self.section = {
            "type": "kafka",
            "bootstrap": self.handler["bootstrap"],
            "topics": ["intake"],
            "group": "relay",
            "timeout": 3,
            # The mock does not know static members, and waits until one that has vanished times out.
            "conf": {"session.timeout.ms": "2000", "heartbeat.interval.ms": "300"},
        }

    def send(self, bodies: Sequence[bytes], ids: Sequence[str | None]) -> None:
        producer = confluent_kafka.Producer({"bootstrap.servers": self._servers})
        for body in bodies:
            producer.produce("intake", body)
        assert producer.flush(30) == 0

    def redeliver_soon(self) -> None:
        pass

    def left(self) -> int:
        consumer = confluent_kafka.Consumer(
            {"bootstrap.servers": self._servers, "group.id": "relay"}
        )
        partition = confluent_kafka.TopicPartition("intake", 0)
        _, end = consumer.get_watermark_offsets(partition, 10)
        (committed,) = consumer.committed([partition], 10)
        consumer.close()
        return end - max(committed.offset, 0)


KINDS: dict[str, Any] = {"kafka": Kafka, "nats": Nats, "rabbitmq": Rabbitmq}


@pytest.fixture(params=KINDS)
def broker(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    folder = tmp_path / "broker"
    folder.mkdir()
    with KINDS[request.param](folder) as found:
        yield found


def settings(outbox: Outbox, broker: Sender, **more: Any) -> Settings:
    outbox.let_handlers_publish()
    section = {**broker.section, **more}
    return outbox.settings(intake={"orders": section}, unrouted="ignore", routes=[], handlers={})


def placed(number: int, **more: Any) -> bytes:
    event = {
        "host_id": str(host(1)),
        "event_type": "order.placed",
        "payload": {"n": number},
        **more,
    }
    return json.dumps(event).encode()


def send(broker: Sender, numbers: range) -> None:
    broker.send([placed(n) for n in numbers], [f"order {n}" for n in numbers])


def numbers(outbox: Outbox) -> list[int]:
    return outbox.column("select (payload->>'n')::int from outbox_message_t order by c_offset")


def test_messages_are_published_in_order(outbox: Outbox, broker: Any) -> None:
    send(broker, range(500))
    configured = settings(outbox, broker)
    assert not [each for each in examine(configured) if each.level is Severity.ERROR]
    with relaying(configured):
        wait_until(lambda: len(numbers(outbox)) == 500)
        send(broker, range(500, 520))
        wait_until(lambda: len(numbers(outbox)) == 520 and broker.left() == 0)
    assert numbers(outbox) == list(range(520))


def test_a_message_that_comes_again_is_not_published_again(outbox: Outbox, broker: Any) -> None:
    # Beyond the window in which NATS drops them itself, by ids of the events.
    ids = [str(uuid.uuid4()) for _ in range(20)]
    bodies = [placed(n, id=each) for n, each in enumerate(ids)]
    names = [f"first {n}" for n in range(20)]
    broker.send(bodies, names)
    with relaying(settings(outbox, broker)):
        wait_until(lambda: len(numbers(outbox)) == 20 and broker.left() == 0)
        broker.send(bodies, [f"again {n}" for n in range(20)])
        broker.send([placed(20)], ["last"])
        wait_until(lambda: len(numbers(outbox)) == 21 and broker.left() == 0)
    assert numbers(outbox) == list(range(21))


def test_kills_and_outages_lose_nothing(outbox: Outbox, broker: Any) -> None:
    broker.redeliver_soon()
    with relaying(settings(outbox, broker)):
        for first in range(0, 300, 100):
            send(broker, range(first, first + 100))
            wait_until(lambda: len(numbers(outbox)) > 0)
            outbox.conn.execute(
                "select pg_terminate_backend(pid) from pg_stat_activity"
                " where datname = current_database() and pid <> pg_backend_pid()"
            )
            broker.kill()
            broker.start()
        wait_until(lambda: len(numbers(outbox)) == 300 and broker.left() == 0, timeout=120)
    assert sorted(numbers(outbox)) == list(range(300))


INVALID = b'{"host_id": 1}'


def test_an_invalid_message_stops_the_intake(outbox: Outbox, broker: Any) -> None:
    broker.send([placed(0), INVALID, placed(2)], ["a", "b", "c"])
    with relaying(settings(outbox, broker)) as service:
        wait_until(lambda: _fault(service) is not None)
        fault = _fault(service)
        assert fault is not None
        assert "$.host_id: must be a UUID" in fault
    assert numbers(outbox) == [0]
    wait_until(lambda: broker.left() == 2)


def _fault(service: Any) -> str | None:
    (condition,) = [each for each in service.conditions if each.part == "intake orders"]
    return None if condition.fault is None else str(condition.fault.fault)


def test_an_invalid_message_is_rejected(outbox: Outbox, broker: Any) -> None:
    again = str(uuid.uuid4())
    broker.send(
        [placed(0, id=again), INVALID, b"\xff", placed(1, id=again), placed(2)],
        ["a", "b", "c", "d", "e"],
    )
    with relaying(settings(outbox, broker, on_invalid="reject")):
        wait_until(lambda: len(numbers(outbox)) == 2 and broker.left() == 0)
    assert numbers(outbox) == [0, 2]
    if isinstance(broker, Rabbitmq):
        wait_until(lambda: broker.waiting("dead") == 3)


def test_one_of_two_instances_works_and_the_other_takes_over(outbox: Outbox, broker: Any) -> None:
    configured = settings(outbox, broker)
    counts: dict[int, int] = {}
    instances = []
    for number in (0, 1):

        def count(name: str, result: str, messages: int, number: int = number) -> None:
            counts[number] = counts.get(number, 0) + messages

        (instance,) = intakes(configured, count)
        instances.append(instance)
        instance.start()
    try:
        send(broker, range(200))
        wait_until(lambda: len(numbers(outbox)) == 200 and broker.left() == 0)
        (working,) = [number for number, messages in counts.items() if messages]
        instances[working].close()
        send(broker, range(200, 300))
        wait_until(lambda: len(numbers(outbox)) == 300 and broker.left() == 0)
        assert counts[1 - working] == 100
    finally:
        for each in instances:
            each.close()
    assert numbers(outbox) == list(range(300))


def test_a_message_without_a_name(outbox: Outbox, broker: Any) -> None:
    broker.send([placed(0)], [None])
    if not isinstance(broker, Rabbitmq):
        with relaying(settings(outbox, broker)):
            wait_until(lambda: len(numbers(outbox)) == 1 and broker.left() == 0)
        return
    with relaying(settings(outbox, broker)) as service:
        wait_until(lambda: "has no id" in (_fault(service) or ""))
