"""A refusal is of a message, of a batch, of the connection or of the destination; only the message's own is its end.

Reports: confluentinc/librdkafka#488, #1716 and #1356, confluentinc/confluent-kafka-python#290 (a batch above the
topic's limit); nats-io/nats.py#888 and #896, nats-io/nats.go#63 (headers count in `max_payload`);
rabbitmq/rabbitmq-java-client#362, php-amqplib/php-amqplib#934, rabbitmq/rabbitmq-server#921 (a header above
`frame_max`).
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pika
import pytest
import redis
from pika.exceptions import ShortStringTooLong
from pydantic import TypeAdapter
from redis.exceptions import OutOfMemoryError, ResponseError

from relay.config.handlers import HandlerSettings
from relay.faults import Rejected, Undelivered
from relay.model.events import Event
from relay.sinks import Sink, build_sinks
from relay.sinks import rabbitmq as amqp
from relay.sinks import redis as streams
from relay.sinks.brokers import Message, SendWindow, Unanswered
from tests.brokers import KafkaCluster, NatsServer, RabbitmqServer, RedisServer, started
from tests.jetstream import jetstream
from tests.sinks import make_event, transaction

PRODUCE = 0
MESSAGE_TOO_LARGE, RECORD_LIST_TOO_LARGE, INVALID_RECORD = 10, 18, 87
"""Numbers of Kafka's protocol."""


def using(do: Callable[[Sink], Awaitable[None]], **settings: Any) -> None:
    """Run a test with a sink."""
    found: Any = TypeAdapter(HandlerSettings).validate_python(
        {"topic": "shop.{event_type}", "timeout": 3, **settings}
    )
    ((sink, _),) = build_sinks({"broker": found}).values()

    async def run() -> None:
        sink.resume("s")
        try:
            await do(sink)
        finally:
            await sink.close()

    asyncio.run(run())


async def delivered(sink: Sink, *events: Event) -> list[Any]:
    """What became of some events, each a transaction, all at once."""
    return await asyncio.gather(
        *(sink.deliver(transaction(event)) for event in events), return_exceptions=True
    )


def with_header(number: int, host: int, size: int) -> Event:
    """An event with a header of that many bytes."""
    return Event(make_event(number, host).row, {"note": "x" * size})


# Kafka: a batch.


@pytest.mark.parametrize("error", [MESSAGE_TOO_LARGE, RECORD_LIST_TOO_LARGE, INVALID_RECORD])
def test_a_batch_that_kafka_refuses_kills_none_of_its_messages(tmp_path: Path, error: int) -> None:
    """A record without a key refuses its batch in a compacted topic: apache/kafka#2875, BEagle1984/silverback#42."""
    with started(KafkaCluster, tmp_path / "broker") as cluster:
        for _ in range(3):
            cluster.fail_requests(PRODUCE, error)

        async def deliver(sink: Sink) -> None:
            events = [make_event(number, number) for number in range(60)]
            assert await delivered(sink, *events) == [None] * 60

        using(deliver, **cluster.handler)
        assert len({each["id"] for each in cluster.events()}) == 60


def test_the_messages_of_a_refused_batch_stay_in_order(tmp_path: Path) -> None:
    with started(KafkaCluster, tmp_path / "broker") as cluster:
        cluster.fail_requests(PRODUCE, MESSAGE_TOO_LARGE)

        async def deliver(sink: Sink) -> None:
            await sink.deliver(transaction(*(make_event(number) for number in range(300))))

        # Several batches are in flight when the first one is refused.
        using(deliver, **cluster.handler, conf={"batch.num.messages": "20"})
        stored = [int(each["data"]["amount"]) for each in cluster.events()]
    assert set(stored) == set(range(300))
    # The last copies are in order, which a compacted topic keeps, and so are the first.
    last = {number: position for position, number in enumerate(stored)}
    assert sorted(last, key=last.__getitem__) == list(range(300))
    assert list(dict.fromkeys(stored)) == list(range(300))


def test_a_message_that_kafka_refuses_alone_too_is_rejected(tmp_path: Path) -> None:
    with started(KafkaCluster, tmp_path / "broker") as cluster:

        async def deliver(sink: Sink) -> None:
            for _ in range(2):
                cluster.fail_requests(PRODUCE, MESSAGE_TOO_LARGE)
            with pytest.raises(Rejected, match="MSG_SIZE_TOO_LARGE"):
                await sink.deliver(transaction(make_event(1)))
            await sink.deliver(transaction(make_event(2)))

        using(deliver, **cluster.handler)
        assert [each["data"]["amount"] for each in cluster.events()] == [2]


# NATS: the connection.


@pytest.mark.parametrize(
    ("mode", "bad", "reason"),
    [
        ("structured", make_event(99, payload=f'"{"x" * 9_800}"'), "MaxPayloadError"),
        ("binary", with_header(99, 1, 12_000), "MaxPayloadError"),
        ("binary", make_event(99, event_type="x" * 4_200), "the subject is too long"),
        ("structured", make_event(99, event_type="order..placed"), "the subject has an empty part"),
        ("structured", make_event(99, event_type=""), "the subject has an empty part"),
    ],
)
def test_what_nats_would_close_the_connection_for_is_not_sent(
    mode: str, bad: Event, reason: str
) -> None:
    with jetstream(max_payload=10_000) as stream:

        async def deliver(sink: Sink) -> None:
            good = [make_event(number, number) for number in range(20)]
            results = await delivered(sink, *good[:10], bad, *good[10:])
            refused = results.pop(10)
            assert results == [None] * 20
            assert isinstance(refused, Rejected)
            assert str(refused) == reason

        using(deliver, type="nats", servers=[stream.url], mode=mode)
        assert (stream.errors, stream.connections) == ([], 1)
        assert Counter(each.headers["Nats-Msg-Id"] for each in stream.stored).total() == 20


def test_a_message_as_large_as_nats_takes_arrives() -> None:
    """Every size around the limit is sent, or refused by relay; none by the server."""
    with jetstream(max_payload=10_000) as stream:

        async def deliver(sink: Sink) -> None:
            results = [
                (await delivered(sink, make_event(size, payload=f'"{"x" * size}"')))[0]
                for size in range(9_100, 9_800, 7)
            ]
            assert results[0] is None
            assert isinstance(results[-1], Rejected)

        using(deliver, type="nats", servers=[stream.url])
        assert (stream.errors, stream.connections) == ([], 1)


def test_a_limit_that_nats_lowers_is_noticed() -> None:
    with jetstream() as stream:

        async def deliver(sink: Sink) -> None:
            await sink.deliver(transaction(make_event(1)))
            stream.announce(max_payload=1_000)
            for number in range(100):
                (result,) = await delivered(sink, make_event(number, payload=f'"{"x" * 2_000}"'))
                if isinstance(result, Rejected):
                    return
                await asyncio.sleep(0.01)
            raise AssertionError("not noticed")

        using(deliver, type="nats", servers=[stream.url])


@pytest.mark.parametrize("answer", [b"+OK", b'{"ok": true}', b"[1]", b"null", b"\xff"])
def test_a_service_that_answers_before_the_stream_does_is_not_the_stream(answer: bytes) -> None:
    """nats-io/nats.go#1781: whoever subscribes to the subject gets the reply's subject too."""
    with jetstream() as stream:
        stream.interrupts = answer

        async def deliver(sink: Sink) -> None:
            assert await delivered(sink, make_event(1)) == [None]
            stream.refuses["shop.order.placed"] = '{"error": {"code": 400, "err_code": 10077}}'
            (full,) = await delivered(sink, make_event(2))
            # A full stream: nats-io/nats-server#6196, nats-io/jetstream#396.
            assert isinstance(full, Undelivered)
            assert str(full) == "JetStream 10077"

        using(deliver, type="nats", servers=[stream.url])
        assert len(stream.stored) == 1


@pytest.mark.brokers
def test_a_nats_server_closes_no_connection_for_a_message(tmp_path: Path) -> None:
    with started(NatsServer, tmp_path / "broker") as broker:

        async def deliver(sink: Sink) -> None:
            good = [make_event(number, number) for number in range(20)]
            bad = with_header(1, 1, 1_100_000), make_event(1, event_type="x" * 4_200)
            fitting = make_event(99, event_type=f"{'x' * 3_900}")
            *results, header, subject, long = await delivered(sink, *good, *bad, fitting)
            assert results == [None] * 20
            assert isinstance(header, Rejected)
            assert isinstance(subject, Rejected)
            assert long is None

        using(deliver, **broker.handler, mode="binary")
        assert broker.count() == 21


# RabbitMQ: the connection.


def test_a_header_above_frame_max_is_not_sent_to_rabbitmq() -> None:
    connection: Any = amqp.Connection.__new__(amqp.Connection)
    connection.params = SimpleNamespace(frame_max=4_096)
    with pytest.raises(amqp._FrameTooLarge) as raised:
        connection._output_marshaled_frames([b"method", b"x" * 4_097, b"body"])
    assert isinstance(amqp.fault_of(raised.value), Rejected)
    assert isinstance(amqp.fault_of(ShortStringTooLong("x")), Rejected)


@pytest.mark.brokers
def test_a_header_above_frame_max_concerns_no_other_message_in_rabbitmq(tmp_path: Path) -> None:
    with started(RabbitmqServer, tmp_path / "broker") as broker:

        async def deliver(sink: Sink) -> None:
            for _ in range(2):
                good = [make_event(number, number) for number in range(20)]
                *results, refused, fits = await delivered(
                    sink, *good, with_header(1, 77, 200_000), with_header(2, 78, 100_000)
                )
                assert results == [None] * 20
                assert fits is None
                assert isinstance(refused, Rejected)
                assert str(refused) == "the headers are larger than frame_max"

        using(deliver, **broker.handler, mode="binary")
        # No copy was sent: the connection was never closed.
        assert broker.count() == 42


@pytest.mark.parametrize(("routable", "stored"), [("a", [0]), ("b", [1]), ("", [])])
def test_messages_with_equal_ids_are_returned_by_rabbitmq_each(
    routable: str, stored: list[int]
) -> None:
    """Rows of an adopted outbox may have equal ids, and an attempt that came too late has the id of the next one."""

    async def confirm() -> list[int]:
        channel: Any = amqp._Channel.__new__(amqp._Channel)
        channel.unanswered = Unanswered()
        channel._returned = Counter()
        window = SendWindow(1)
        sendings = [
            window.sending([Message(topic, None, "7", f"s/7/{topic}", "", {}, b"")])
            for topic in ("a", "b")
        ]
        for number, sending in enumerate(sendings, start=1):
            sending._unanswered = 1
            channel.unanswered.add(number, sending, 0)
            topic = sending.messages[0].topic
            if topic != routable:
                of = SimpleNamespace(routing_key=topic), SimpleNamespace(message_id="7")
                channel._on_return(None, *of, b"")
        frame = SimpleNamespace(method=pika.spec.Basic.Ack(delivery_tag=2, multiple=True))
        channel._on_confirm(frame)
        assert not channel._returned
        return [index for index, each in enumerate(sendings) if not each.unconfirmed]

    assert asyncio.run(confirm()) == stored


# Redis: the destination.


def fault_of(messages: int, *answers: Any) -> Exception | None:
    async def take() -> Exception | None:
        message = Message("t", None, "1", "s/1/1", "", {}, b"")
        return streams._Append([message] * messages).take(deque(answers))

    return asyncio.run(take())


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        (
            ResponseError("WRONGTYPE Operation against a key holding the wrong kind of value"),
            Rejected,
        ),
        (ResponseError("Elements are too large to be stored"), Rejected),
        # A stream whose last id is the greatest possible one takes nothing, whatever the event.
        (ResponseError("The stream has exhausted the last possible ID"), Undelivered),
        (OutOfMemoryError("command not allowed when used memory > 'maxmemory'."), Undelivered),
        (ResponseError("MISCONF Errors writing to the AOF file: No space left"), Undelivered),
    ],
)
def test_an_error_of_redis_is_the_events_only_where_the_event_is_at_fault(
    fault: Exception, kind: type[Exception]
) -> None:
    assert type(fault_of(1, fault)) is kind
    assert type(fault_of(2, b"OK", b"QUEUED", b"QUEUED", [b"1-1", fault])) is kind
    assert fault_of(1, b"1-1") is None
    assert fault_of(2, b"OK", b"QUEUED", b"QUEUED", [b"1-1", b"1-2"]) is None


def test_a_value_that_redis_closes_the_connection_for_is_not_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(streams, "_MOST_BYTES", 1_000)

    async def deliver(sink: Sink) -> None:
        with pytest.raises(Rejected, match="proto-max-bulk-len"):
            await sink.deliver(transaction(make_event(1, payload=f'"{"x" * 1_000}"')))

    using(deliver, type="redis", url="redis://127.0.0.1:1")


@pytest.mark.brokers
def test_what_redis_closes_the_connection_for_does_not_stop_the_others(tmp_path: Path) -> None:
    """With a lower proto-max-bulk-len all transactions of a round trip failed with the large one, for ever."""
    with started(RedisServer, tmp_path / "broker") as server:
        with redis.Redis.from_url(server.handler["url"]) as client:
            client.config_set("proto-max-bulk-len", "1mb")

        async def deliver(sink: Sink) -> None:
            events = [make_event(number, number) for number in range(8)]
            events[3] = make_event(3, 3, payload=f'"{"x" * 2_000_000}"')
            results = await delivered(sink, *events)
            assert isinstance(results.pop(3), Undelivered)
            assert results == [None] * 7
            server.kill()
            for failed in await delivered(sink, *events[:3]):
                assert isinstance(failed, Undelivered)

        using(deliver, **server.handler)
