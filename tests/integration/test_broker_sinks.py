"""The sinks for brokers, each against its broker. No database."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import nats
import pika
import pytest
import redis
from pydantic import TypeAdapter

from relay.config.handlers import HandlerSettings
from relay.faults import Rejected, Undelivered
from relay.sinks import Sink, build_sinks
from tests.brokers import (
    BROKERS,
    TYPE,
    Broker,
    KafkaCluster,
    NatsServer,
    RabbitmqServer,
    RedisServer,
    started,
)
from tests.sinks import make_event, transaction

pytestmark = pytest.mark.brokers

TIMEOUT = 2.0


@pytest.fixture(params=BROKERS)
def broker(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Broker]:
    with started(BROKERS[request.param], tmp_path / "broker") as found:
        yield found


@pytest.fixture(params=["redis", "nats", "rabbitmq"])
def process(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    """A broker that is a process of its own."""
    with started(BROKERS[request.param], tmp_path / "broker") as found:
        yield found


def using(broker: Broker, do: Callable[[Sink], Awaitable[None]], **settings: Any) -> None:
    """Build a sink for the broker and run a test with it, in an event loop of its own."""
    configured = {**broker.handler, "topic": "shop.{event_type}", "timeout": TIMEOUT, **settings}

    found: Any = TypeAdapter(HandlerSettings).validate_python(configured)
    ((sink, _),) = build_sinks({"broker": found}).values()

    async def run() -> None:
        try:
            await do(sink)
        finally:
            began = time.monotonic()
            await sink.close()
            assert time.monotonic() - began < 5

    asyncio.run(run())


def amounts(events: list[dict[str, Any]], host: int) -> list[int]:
    """Of a host, in the order in which they first arrived."""
    hosted = [each for each in events if each["hostid"].endswith(f"{host:012d}")]
    return list(dict.fromkeys(int(each["data"]["amount"]) for each in hosted))


async def eventually(sink: Sink, *numbers: int) -> None:
    """Deliver, as often as it takes."""
    for _ in range(100):
        try:
            await sink.deliver(transaction(*(make_event(number) for number in numbers)))
        except Undelivered:
            await asyncio.sleep(0.1)
        else:
            return
    raise AssertionError("not delivered")


def test_transactions_of_many_hosts_arrive_at_once_and_in_order(broker: Broker) -> None:
    async def deliver(sink: Sink) -> None:
        async def of(host: int) -> None:
            for first in range(0, 60, 3):
                await sink.deliver(transaction(*(make_event(first + n, host) for n in range(3))))

        await asyncio.gather(*(of(host) for host in range(64)))

    using(broker, deliver)
    found = broker.events()
    assert len(found) == 64 * 60
    for host in range(64):
        assert amounts(found, host) == list(range(60))


def test_a_large_transaction_is_sent_in_portions(broker: Broker) -> None:
    async def deliver(sink: Sink) -> None:
        await sink.deliver(transaction(*(make_event(number) for number in range(3_000))))

    using(broker, deliver, timeout=10)
    assert amounts(broker.events(), 1) == list(range(3_000))


def test_messages_of_a_transaction_do_not_wait_for_each_other(tmp_path: Path) -> None:
    """Sent one by one, 2,000 messages would take as many round trips: as those of one key do, to keep its order."""

    async def deliver(sink: Sink) -> None:
        await sink.deliver(transaction(make_event(0)))
        began = time.monotonic()
        await sink.deliver(transaction(*(make_event(number) for number in range(1, 2_001))))
        assert time.monotonic() - began < 2

    with started(KafkaCluster, tmp_path / "broker") as cluster:
        cluster.slow_down(20)
        using(cluster, deliver, timeout=10, order_by="none")


def test_an_outage_is_undelivered_and_passes(broker: Broker) -> None:
    async def deliver(sink: Sink) -> None:
        await eventually(sink, 0, 1)
        broker.kill()
        # What is sent while the client has not noticed, what notices it, and what comes later.
        for first in (2, 4, 6):
            began = time.monotonic()
            results = await asyncio.gather(
                *(
                    sink.deliver(transaction(make_event(first), make_event(first + 1)))
                    for _ in range(10)
                ),
                return_exceptions=True,
            )
            assert all(isinstance(result, Undelivered) for result in results), results
            assert time.monotonic() - began < TIMEOUT * 2 + 1
        broker.start()
        await eventually(sink, 2, 3)

    using(broker, deliver)
    found = [number for number in amounts(broker.events(), 1) if number < 4]
    # RabbitMQ may lose a queue that was declared shortly before, with what it had confirmed.
    lost = 2 if isinstance(broker, RabbitmqServer) and 0 not in found else 0
    assert found == [0, 1, 2, 3][lost:]


def test_a_server_that_is_gone_without_a_word_is_noticed_in_time(process: Any) -> None:
    async def deliver(sink: Sink) -> None:
        await sink.deliver(transaction(make_event(0)))
        process.freeze()
        try:
            for _ in range(2):
                began = time.monotonic()
                results = await asyncio.gather(
                    *(sink.deliver(transaction(make_event(1), make_event(2))) for _ in range(20)),
                    return_exceptions=True,
                )
                assert all(isinstance(result, Undelivered) for result in results), results
                assert time.monotonic() - began < TIMEOUT + 1
        finally:
            process.thaw()
        await eventually(sink, 1, 2)

    using(process, deliver)
    assert amounts(process.events(), 1) == [0, 1, 2]


def test_a_sink_can_be_closed_while_its_server_is_gone(process: Any) -> None:
    async def deliver(sink: Sink) -> None:
        await sink.deliver(transaction(make_event(0)))
        process.freeze()
        waiting = asyncio.create_task(sink.deliver(transaction(make_event(1))))
        await asyncio.sleep(0.1)
        try:
            await sink.close()
            with pytest.raises(Undelivered):
                await waiting
        finally:
            process.thaw()

    using(process, deliver)


def test_a_sink_that_was_never_used_can_be_closed(broker: Broker) -> None:
    async def nothing(_: Sink) -> None:
        pass

    using(broker, nothing)


def test_deliveries_that_are_cancelled_leave_nothing_broken(broker: Broker) -> None:
    async def deliver(sink: Sink) -> None:
        for after in (0.0, 0.0002, 0.001, 0.003, 0.01):
            tasks = [
                asyncio.create_task(
                    sink.deliver(transaction(*(make_event(n, host) for n in range(50))))
                )
                for host in range(100, 120)
            ]
            kept = asyncio.create_task(
                sink.deliver(transaction(*(make_event(n, 2) for n in range(50))))
            )
            await asyncio.sleep(after)
            for task in tasks:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            assert all(each is None or isinstance(each, asyncio.CancelledError) for each in results)
            await kept
        await sink.deliver(transaction(*(make_event(number) for number in range(50))))

    using(broker, deliver)
    found = broker.events()
    assert amounts(found, 1) == amounts(found, 2) == list(range(50))


def test_the_first_deliveries_share_one_attempt_to_connect(process: Any) -> None:
    process.freeze()

    async def deliver(sink: Sink) -> None:
        began = time.monotonic()
        results = await asyncio.gather(
            *(sink.deliver(transaction(make_event(each))) for each in range(64)),
            return_exceptions=True,
        )
        assert all(isinstance(result, Undelivered) for result in results), results
        assert time.monotonic() - began < TIMEOUT * 2 + 1

    try:
        using(process, deliver)
    finally:
        process.thaw()


# What a broker refuses.


async def delivered(sink: Sink, *events: Any) -> list[Any]:
    """Each event a transaction, all at once: what became of them."""
    return await asyncio.gather(
        *(sink.deliver(transaction(event)) for event in events), return_exceptions=True
    )


def test_what_kafka_refuses_concerns_no_other_message(tmp_path: Path) -> None:
    large = make_event(1, payload=f'"{"x" * 2_000_000}"')

    async def deliver(sink: Sink) -> None:
        first, refused, last = await delivered(sink, make_event(0), large, make_event(2))
        assert first is last is None
        assert isinstance(refused, Rejected)
        assert str(refused) == "MSG_SIZE_TOO_LARGE"

    with started(KafkaCluster, tmp_path / "broker") as broker:
        using(broker, deliver)
        assert sorted(amounts(broker.events(), 1)) == [0, 2]


def test_a_producer_of_kafka_that_is_beyond_repair_is_replaced(tmp_path: Path) -> None:
    produce, out_of_order = 0, 45

    async def deliver(sink: Sink) -> None:
        await sink.deliver(transaction(make_event(0)))
        cluster.fail_requests(produce, out_of_order)
        results = await delivered(sink, *(make_event(each, each) for each in range(1, 20)))
        assert any(isinstance(result, Undelivered) for result in results)
        assert all(result is None or isinstance(result, Undelivered) for result in results)
        await eventually(sink, 20, 21)

    with started(KafkaCluster, tmp_path / "broker") as cluster:
        using(cluster, deliver)
        assert {20, 21} <= set(amounts(cluster.events(), 1))


def test_what_nats_refuses_concerns_no_other_message(tmp_path: Path) -> None:
    async def limit(url: str) -> None:
        client = await nats.connect(url)
        await client.jetstream().update_stream(
            name="shop", subjects=["shop.>"], max_msg_size=100_000
        )
        await client.close()

    def large(size: int) -> Any:
        return make_event(1, payload=f'"{"x" * size}"')

    async def deliver(sink: Sink) -> None:
        wrong = make_event(2, event_type="a b")
        elsewhere = make_event(3, payload="{}", event_type="order.placed")
        first, stream, server, subject, last = await delivered(
            sink, make_event(0), large(200_000), large(2_000_000), wrong, elsewhere
        )
        assert first is last is None
        assert isinstance(stream, Rejected)
        assert str(stream) == "JetStream 10054"
        assert isinstance(server, Rejected)
        assert str(server) == "MaxPayloadError"
        assert isinstance(subject, Rejected)
        assert str(subject) == "BadSubjectError"

    async def deliver_elsewhere(sink: Sink) -> None:
        with pytest.raises(Undelivered, match="NoStreamResponseError"):
            await sink.deliver(transaction(make_event(0)))

    with started(NatsServer, tmp_path / "broker") as broker:
        asyncio.run(limit(broker.handler["servers"][0]))
        using(broker, deliver)
        using(broker, deliver_elsewhere, topic="nowhere.{event_type}")


def test_what_redis_refuses_concerns_no_other_message(tmp_path: Path) -> None:
    async def deliver(sink: Sink) -> None:
        first, refused, last = await delivered(
            sink, make_event(0), make_event(1, event_type="no"), make_event(2)
        )
        assert first is last is None
        assert isinstance(refused, Rejected)
        assert str(refused) == "WRONGTYPE"

    with started(RedisServer, tmp_path / "broker") as broker:
        redis.Redis(port=broker.port).set("shop.no", "no stream")
        using(broker, deliver)


def rabbitmq_channel(broker: Any) -> Any:
    return pika.BlockingConnection(pika.URLParameters(broker.handler["url"])).channel()


def test_messages_that_no_queue_of_rabbitmq_takes_hold_no_others_up(tmp_path: Path) -> None:
    async def deliver(sink: Sink) -> None:
        events = [
            make_event(each, each, event_type=TYPE if each % 2 else "none") for each in range(100)
        ]
        for each, result in enumerate(await delivered(sink, *events)):
            if each % 2:
                assert result is None
            else:
                assert isinstance(result, Undelivered)
                assert str(result) == "UnroutableError"

    with started(RabbitmqServer, tmp_path / "broker") as broker:
        using(broker, deliver)
        assert len(broker.events()) == 50


def test_a_full_queue_of_rabbitmq_is_undelivered(tmp_path: Path) -> None:
    async def deliver(sink: Sink) -> None:
        for _ in range(2):
            await sink.deliver(transaction(make_event(0, event_type="few")))
        with pytest.raises(Undelivered, match="NackError"):
            await sink.deliver(
                transaction(*(make_event(each, event_type="few") for each in range(1, 10)))
            )
        await sink.deliver(transaction(make_event(1)))

    with started(RabbitmqServer, tmp_path / "broker") as broker:
        rabbitmq_channel(broker).queue_declare(
            "shop.few", arguments={"x-max-length": 2, "x-overflow": "reject-publish"}
        )
        using(broker, deliver)


def test_a_message_for_which_rabbitmq_closes_the_channel_concerns_no_other(tmp_path: Path) -> None:
    """A queue's argument that a message's header breaks closes the channel with all that is on its way."""

    async def deliver(sink: Sink) -> None:
        for _ in range(3):
            events = [make_event(each, each) for each in range(100)]
            events[50] = make_event(50, 50, payload=f'"{"x" * 200_000}"')
            results = await delivered(sink, *events)
            refused = results.pop(50)
            assert isinstance(refused, Rejected), refused
            assert str(refused) == "AMQP 406"
            assert results == [None] * 99
        whole = transaction(*(make_event(each) if each != 5 else events[50] for each in range(10)))
        with pytest.raises(Rejected, match="AMQP 406"):
            await sink.deliver(whole)

    class Limited(RabbitmqServer):
        def environment(self) -> dict[str, str]:
            return {
                **super().environment(),
                "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "-rabbit max_message_size 100000",
            }

    with started(Limited, tmp_path / "broker") as broker:
        using(broker, deliver)
        found = broker.events()
    for host in range(100):
        assert host == 50 or amounts(found, host)[0] == host


def test_an_exchange_of_rabbitmq_that_is_not_there_is_undelivered(tmp_path: Path) -> None:
    async def deliver(sink: Sink) -> None:
        for result in await delivered(sink, *(make_event(each, each) for each in range(20))):
            assert isinstance(result, Undelivered)
            assert str(result) == "AMQP 404"
        long = make_event(1, event_type="x" * 300)
        (result,) = await delivered(sink, long)
        assert isinstance(result, Rejected)
        assert str(result) == "ShortStringTooLong"

    with started(RabbitmqServer, tmp_path / "broker") as broker:
        using(broker, deliver, exchange="nowhere")


def test_a_connection_that_was_idle_is_used_again_and_nothing_comes_twice(broker: Broker) -> None:
    async def deliver(sink: Sink) -> None:
        for first in (0, 100, 200):
            numbers = range(first, first + 64)
            await asyncio.gather(
                *(sink.deliver(transaction(make_event(each, each))) for each in numbers)
            )
            await asyncio.sleep(TIMEOUT + 0.5)

    using(broker, deliver)
    found = sorted(each["data"]["amount"] for each in broker.events())
    assert found == [*range(64), *range(100, 164), *range(200, 264)]
