"""What goes wrong elsewhere where messages of Kafka are consumed and their offsets committed by hand.

Reports: splunk/kafka-connect-splunk#260, redpanda-data/connect#4009, confluentinc/librdkafka#1767 (a partition that was
lost); spring-projects/spring-kafka#813 and #2222, confluentinc/confluent-kafka-go#193, confluentinc/librdkafka#2557,
confluentinc/confluent-kafka-dotnet#672 (paused, and a rebalance); confluentinc/confluent-kafka-python#552,
confluentinc/confluent-kafka-dotnet#785, confluentinc/librdkafka#2971 (max.poll.interval.ms while a database is away);
confluentinc/librdkafka#1201 and #1540, fede1024/rust-rdkafka#111, Blizzard/node-rdkafka#140 (an unknown topic);
confluentinc/librdkafka#2933, aio-libs/aiokafka#727, tulios/kafkajs#1466 (a commit that fails in a rebalance);
jitsucom/jitsu#1491, PostHog/posthog#65809 (a fenced static member consumes nothing, and nobody knows);
confluentinc/librdkafka#521 and #1852, spring-projects/spring-kafka#1493, IBM/sarama#1739, getsentry/sentry#68664
(messages are skipped where there is no offset, or a deleted one); confluentinc/librdkafka#4519 and #1376,
confluentinc/confluent-kafka-python#107 and #1667 (closing hangs while brokers are away); confluentinc/ksql#1100,
mateusjunges/laravel-kafka#337, aws-powertools/powertools-lambda-typescript#4988 (tombstones);
confluentinc/librdkafka#2722, confluentinc/confluent-kafka-python#970 (nothing comes, and nobody knows);
spring-cloud/spring-cloud-stream#1928, apache/kafka#21359 (commits that fail, or are answered late);
confluentinc/librdkafka#4362 (closing hangs after the topic was deleted).

The slow ones are among those that `make test-brokers` runs.
"""

from __future__ import annotations

import asyncio
import json
import random
import select
import socket
import socketserver
import ssl
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event, Thread
from typing import Any, Self

import pytest
import trustme
from confluent_kafka import Consumer, KafkaError, Producer, TopicPartition

from relay.config.intake import KafkaSource
from relay.faults import ConfigurationError, Unauthorized, Undelivered
from relay.intake import kafka
from relay.intake.consuming import BrokerIntake, Taken
from relay.intake.kafka import KafkaFeed
from relay.intake.messages import Invalid, MessageReader
from relay.runtime.threads import beside
from tests.brokers import KafkaCluster, started
from tests.outbox import Outbox, host, wait_until

_OFFSET_COMMIT, _HEARTBEAT = 8, 12
"""Numbers of Kafka's protocol."""
_FAST = {"session.timeout.ms": "3000", "heartbeat.interval.ms": "200"}
"""The mock does not know static members, and waits until one that has vanished times out."""


class Topic:
    """A topic of a cluster, and its consumer groups."""

    def __init__(self, cluster: KafkaCluster, name: str = "orders", partitions: int = 1) -> None:
        self.cluster = cluster
        self.name = name
        self.servers: list[str] = cluster.handler["bootstrap"]
        self._partitions = partitions
        cluster.create_topic(name, partitions)

    def feed(self, topics: Sequence[str] = (), **conf: str) -> KafkaFeed:
        settings = {
            "type": "kafka",
            "bootstrap": self.servers,
            "topics": list(topics) or [self.name],
            "group": "relay",
            "timeout": 3,
            "conf": {**_FAST, **conf},
        }
        return KafkaFeed("orders", KafkaSource.model_validate(settings))

    def send(self, numbers: Sequence[int], **conf: Any) -> None:
        """Send numbers in turn to the partitions."""
        producer = Producer({"bootstrap.servers": ",".join(self.servers), **conf})
        for number in numbers:
            producer.produce(self.name, str(number), partition=number % self._partitions)
        assert producer.flush(30) == 0

    def send_bodies(self, bodies: Sequence[bytes | None], partition: int = 0, **conf: Any) -> None:
        producer = Producer({"bootstrap.servers": ",".join(self.servers), **conf})
        for body in bodies:
            producer.produce(self.name, body, partition=partition)
        assert producer.flush(30) == 0

    def committed(self) -> list[int]:
        """The offset of each partition; -1 without one."""
        consumer = self._consumer()
        partitions = [TopicPartition(self.name, each) for each in range(self._partitions)]
        found = consumer.committed(partitions, 30)
        consumer.close()
        return [max(each.offset, -1) for each in found]

    @contextmanager
    def other_member(self) -> Iterator[Consumer]:
        """Another member of the group, which consumes nothing unless it is polled."""
        consumer = self._consumer(**_FAST)
        consumer.subscribe([self.name])
        yield consumer
        consumer.close()

    def _consumer(self, **conf: str) -> Consumer:
        return Consumer(
            {
                "bootstrap.servers": ",".join(self.servers),
                "group.id": "relay",
                "enable.auto.commit": False,
                "partition.assignment.strategy": "cooperative-sticky",
                **conf,
            }
        )


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[KafkaCluster]:
    with started(KafkaCluster, tmp_path / "kafka") as found:
        yield found


async def fetched(feed: KafkaFeed, count: int) -> list[Taken]:
    """Fetch until so many messages have come."""
    found: list[Taken] = []
    async with asyncio.timeout(60):
        while len(found) < count:
            found += await feed.fetch()
    return found


async def until(condition: Callable[[], bool], meanwhile: Callable[[], Awaitable[Any]]) -> None:
    """Wait for a condition, in a thread, and do something meanwhile."""
    async with asyncio.timeout(60):
        while not await asyncio.to_thread(condition):
            await meanwhile()
            await asyncio.sleep(0.05)


async def go_on(feed: KafkaFeed) -> None:
    """Take what comes next, and acknowledge it."""
    await feed.acknowledge(await feed.fetch())


def numbers(taken: Sequence[Taken]) -> list[int]:
    return [int(each.body) for each in taken]


def assigned(feed: KafkaFeed) -> int:
    """How many partitions a feed has."""
    return len(feed._joined._assigned)


def test_offsets_are_committed_after_the_acknowledgement_only(cluster: KafkaCluster) -> None:
    topic = Topic(cluster)
    topic.send(range(10))

    async def first() -> None:
        async with topic.feed() as feed:
            taken = await fetched(feed, 10)
            await feed.acknowledge(taken[:4])

    async def second() -> list[Taken]:
        async with topic.feed() as feed:
            return await fetched(feed, 6)

    asyncio.run(first())
    assert topic.committed() == [4]
    again = asyncio.run(second())
    assert numbers(again) == [4, 5, 6, 7, 8, 9]
    assert topic.committed() == [4]


@pytest.mark.brokers
def test_a_partition_that_was_lost_is_not_committed(cluster: KafkaCluster) -> None:
    """Its messages were taken before, and published after another member had it."""
    topic = Topic(cluster, partitions=2)
    topic.send(range(8))

    async def scenario() -> list[int]:
        async with topic.feed() as feed:
            taken = await fetched(feed, 8)
            with topic.other_member() as other:
                await until(
                    lambda: other.poll(0.05) is None and len(other.assignment()) == 1,
                    lambda: feed.extend(taken),
                )
                (theirs,) = other.assignment()
                await feed.acknowledge(taken)
                mine = 1 - theirs.partition
                await until(lambda: topic.committed()[mine] == 4, lambda: go_on(feed))
                return [theirs.partition, *topic.committed()]

    theirs, *committed = asyncio.run(scenario())
    assert committed[theirs] == -1


@pytest.mark.brokers
def test_what_a_rebalance_assigns_is_paused_too_and_all_of_it_comes(cluster: KafkaCluster) -> None:
    topic = Topic(cluster, partitions=4)
    topic.send(range(8))

    async def scenario() -> tuple[list[Taken], list[Taken]]:
        async with topic.feed() as feed:
            with topic.other_member() as other:
                # The feed has some, then all of them, and takes nothing meanwhile.
                await until(
                    lambda: other.poll(0.05) is None and len(other.assignment()) == 2,
                    lambda: feed.extend([]),
                )
            await until(lambda: assigned(feed) == 4, lambda: feed.extend([]))
            topic.send(range(8, 40))
            for _ in range(10):
                await feed.extend([])
                await asyncio.sleep(0.05)
            waiting = list(feed._joined._found)
            return waiting, await fetched(feed, 40)

    waiting, taken = asyncio.run(scenario())
    # Those that came before the next call could pause the partition.
    assert len(waiting) <= 8
    assert sorted(numbers(taken)) == list(range(40))
    for partition in range(4):
        of_partition = [each for each in numbers(taken) if each % 4 == partition]
        assert of_partition == sorted(of_partition)


@pytest.mark.brokers
def test_a_long_outage_of_the_database_does_not_cost_the_membership(cluster: KafkaCluster) -> None:
    topic = Topic(cluster)
    topic.send(range(3))

    async def scenario() -> None:
        conf = {"max.poll.interval.ms": "6000", "session.timeout.ms": "6000"}
        async with topic.feed(**conf) as feed:
            taken = await fetched(feed, 3)
            began = time.monotonic()
            while time.monotonic() - began < 8:
                await feed.extend(taken)
                await asyncio.sleep(0.1)
            await feed.acknowledge(taken)
            topic.send([3])
            await until(lambda: topic.committed() == [4], lambda: go_on(feed))

    asyncio.run(scenario())


@pytest.mark.brokers
def test_who_polls_too_late_begins_again_with_what_is_not_committed(cluster: KafkaCluster) -> None:
    topic = Topic(cluster)
    topic.send(range(3))

    async def scenario() -> None:
        async with topic.feed(**{"max.poll.interval.ms": "3000"}) as feed:
            taken = await fetched(feed, 3)
            await asyncio.sleep(5)
            with pytest.raises(Undelivered, match="_MAX_POLL_EXCEEDED"):
                await fetched(feed, 1)
            await feed.acknowledge(taken)
        async with topic.feed() as feed:
            assert numbers(await fetched(feed, 3)) == [0, 1, 2]

    asyncio.run(scenario())


def test_an_unknown_topic_is_named(cluster: KafkaCluster) -> None:
    topic = Topic(cluster)
    topic.name = "missing"

    async def scenario() -> list[int]:
        with pytest.raises(ConfigurationError, match=r"intake\.orders\.topics: .* topic missing"):
            await topic.feed().__aenter__()
        Topic(cluster, "missing")
        topic.send([1])
        async with topic.feed() as feed:
            return numbers(await fetched(feed, 1))

    assert asyncio.run(scenario()) == [1]


@pytest.mark.parametrize(
    "error",
    [
        KafkaError.REBALANCE_IN_PROGRESS,
        *(
            pytest.param(each, marks=pytest.mark.brokers)
            for each in (
                KafkaError.ILLEGAL_GENERATION,
                KafkaError.UNKNOWN_MEMBER_ID,
                KafkaError.NOT_COORDINATOR,
            )
        ),
    ],
)
def test_a_commit_that_fails_is_made_again(cluster: KafkaCluster, error: int) -> None:
    topic = Topic(cluster)
    topic.send(range(5))

    async def scenario() -> None:
        async with topic.feed() as feed:
            taken = await fetched(feed, 5)
            for _ in range(3):
                cluster.fail_requests(_OFFSET_COMMIT, error)
            await feed.acknowledge(taken)
            topic.send([5])
            # After a rebalance the messages come again, and are recognised by their ids.
            await until(lambda: topic.committed() == [6], lambda: go_on(feed))

    asyncio.run(scenario())


@pytest.mark.brokers
def test_a_fenced_member_says_so_and_begins_again(cluster: KafkaCluster) -> None:
    topic = Topic(cluster)

    async def scenario() -> None:
        async with topic.feed() as feed:
            await until(lambda: assigned(feed) == 1, feed.fetch)
            cluster.fail_requests(_HEARTBEAT, KafkaError.FENCED_INSTANCE_ID)
            with pytest.raises(Undelivered, match=r"FENCED_INSTANCE_ID|_FATAL"):
                await fetched(feed, 1)
        topic.send([1])
        async with topic.feed() as feed:
            assert numbers(await fetched(feed, 1)) == [1]

    asyncio.run(scenario())


@pytest.mark.brokers
def test_without_an_offset_nothing_is_skipped(
    cluster: KafkaCluster, caplog: pytest.LogCaptureFixture
) -> None:
    """The first time begins with the oldest message; where the next one is deleted, the oldest that is left follows."""
    topic = Topic(cluster)
    topic.send(range(10))

    async def scenario() -> list[int]:
        async with topic.feed() as feed:
            taken = await fetched(feed, 10)
            await feed.acknowledge(taken[:4])
        cluster.delete_records(topic.name, 7)
        async with topic.feed() as feed:
            return numbers(taken) + numbers(await fetched(feed, 3))

    assert asyncio.run(scenario()) == [*range(10), 7, 8, 9]
    assert "offset reset" in caplog.text


@pytest.mark.brokers
def test_brokers_that_are_away_are_a_fault_and_closing_does_not_hang(cluster: KafkaCluster) -> None:
    topic = Topic(cluster)
    topic.send(range(3))

    async def scenario() -> list[int]:
        async with topic.feed() as feed:
            taken = await fetched(feed, 3)
            cluster.kill()
            await feed.acknowledge(taken)
            with pytest.raises(Undelivered):
                await fetched(feed, 1)
        with pytest.raises(Undelivered):
            await topic.feed().__aenter__()
        cluster.start()
        topic.send([3])
        async with topic.feed() as feed:
            return numbers(await fetched(feed, 1))

    # The offsets may be committed or not.
    assert asyncio.run(scenario())[0] in (0, 3)


@pytest.mark.brokers
def test_a_certificate_that_is_not_trusted_is_the_fault(cluster: KafkaCluster) -> None:
    """Not only that no broker answers."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    trustme.CA().issue_cert("127.0.0.1").configure_cert(context)
    topic = Topic(cluster)
    with _Handshakes(("127.0.0.1", 0), context) as server:
        Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        topic.servers = [f"127.0.0.1:{server.server_address[1]}"]
        with pytest.raises(Unauthorized, match="_SSL"):
            asyncio.run(topic.feed(**{"security.protocol": "ssl"}).__aenter__())
        server.shutdown()


class _Handshakes(socketserver.ThreadingTCPServer):
    """Begins TLS with whoever connects."""

    daemon_threads = True

    def __init__(self, address: tuple[str, int], context: ssl.SSLContext) -> None:
        super().__init__(address, socketserver.BaseRequestHandler)
        self._context = context

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        with suppress(OSError):
            self._context.wrap_socket(request, server_side=True).close()


class TlsFronts:
    """TLS in front of each broker of a cluster, with certificates that change; answers name the fronts."""

    def __init__(self, servers: Sequence[str], authority: trustme.CA) -> None:
        self._ports: dict[bytes, bytes] = {}
        """The address of each front, in the form of Kafka's protocol, by that of its broker."""
        self._fronts = [_Front(int(each.rpartition(":")[2]), self._ports) for each in servers]
        for each in self._fronts:
            self._ports[_address(each.broker)] = _address(each.server_address[1])
        self.servers = [f"127.0.0.1:{each.server_address[1]}" for each in self._fronts]
        self.change(authority)

    def __enter__(self) -> Self:
        for each in self._fronts:
            Thread(target=each.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        for each in self._fronts:
            each.shutdown()
            each.server_close()
            each.cut()

    def change(self, authority: trustme.CA, brokers: slice = slice(None)) -> None:
        """Give brokers new certificates, and end their connections, as a restart does."""
        for each in self._fronts[brokers]:
            each.context = _server_context(authority)
            each.cut()


class _Front(socketserver.ThreadingTCPServer):
    """TLS in front of one broker."""

    daemon_threads = True

    def __init__(self, broker: int, ports: Mapping[bytes, bytes]) -> None:
        super().__init__(("127.0.0.1", 0), socketserver.BaseRequestHandler)
        self.broker = broker
        self.context: ssl.SSLContext
        self._ports = ports
        self._open: list[socket.socket] = []

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        with (
            suppress(OSError),
            self.context.wrap_socket(request, server_side=True) as client,
            socket.create_connection(("127.0.0.1", self.broker)) as broker,
        ):
            self._open += [client, broker]
            while True:
                ready = [client] if client.pending() else select.select([client, broker], [], [])[0]
                if client in ready:
                    if not (asked := client.recv(65536)):
                        return
                    broker.sendall(asked)
                if broker in ready:
                    size = _read(broker, 4)
                    answer = _read(broker, int.from_bytes(size))
                    for address, front in self._ports.items():
                        answer = answer.replace(address, front)
                    client.sendall(size + answer)

    def cut(self) -> None:
        for each in self._open:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        self._open.clear()


def _read(conn: socket.socket, size: int) -> bytes:
    """Return so many bytes. Raises OSError."""
    found = b""
    while len(found) < size:
        if not (data := conn.recv(size - len(found))):
            raise ConnectionResetError
        found += data
    return found


def _address(port: int) -> bytes:
    return b"127.0.0.1" + port.to_bytes(4)


def _server_context(authority: trustme.CA) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    return context


def _trusting(topic: Topic, fronts: TlsFronts, trusted: Path) -> KafkaFeed:
    """A feed through the fronts, which trusts the authorities in a file."""
    conf = {"security.protocol": "ssl", "ssl.ca.location": str(trusted)}
    plain, topic.servers = topic.servers, fronts.servers
    feed = topic.feed(**conf)
    topic.servers = plain
    return feed


@contextmanager
def _publishing(feed: KafkaFeed, outbox: Outbox) -> Iterator[BrokerIntake]:
    outbox.let_handlers_publish()
    works = BrokerIntake(
        *("orders", feed, MessageReader(), outbox.relay_dsn, "shop", True),
        lambda result, messages: None,
    )
    works.condition._first_pause = works.condition._longest_pause = 0.1
    works.start()
    try:
        yield works
    finally:
        works.close()


def _published(outbox: Outbox) -> list[int]:
    return outbox.column("select (payload->>'n')::int from outbox_message_t order by c_offset")


@pytest.mark.brokers
def test_brokers_whose_certificates_change_lose_and_repeat_nothing(
    outbox: Outbox, cluster: KafkaCluster, tmp_path: Path
) -> None:
    """Nobody notices a renewed one. One of another authority is a fault until the file has that one, too: it is read
    again without a restart."""
    trusted, first, other = tmp_path / "ca.pem", trustme.CA(), trustme.CA()
    first.cert_pem.write_to_path(str(trusted))
    topic = Topic(cluster)

    def send(begin: int) -> None:
        topic.send_bodies([_placed(number) for number in range(begin, begin + 20)])

    with (
        TlsFronts(topic.servers, first) as fronts,
        _publishing(_trusting(topic, fronts, trusted), outbox) as works,
    ):
        send(0)
        wait_until(lambda: len(_published(outbox)) == 20, 60)
        fronts.change(first)
        send(20)
        wait_until(lambda: len(_published(outbox)) == 40, 60)
        fronts.change(other)
        send(40)
        wait_until(lambda: "_SSL" in str(works.condition.fault), 60)
        assert len(_published(outbox)) == 40
        other.cert_pem.write_to_path(str(trusted), append=True)
        wait_until(lambda: len(_published(outbox)) == 60, 60)
        wait_until(lambda: works.condition.fault is None, 60)
    assert _published(outbox) == list(range(60))


@pytest.mark.brokers
def test_a_broker_whose_certificate_changes_before_those_of_others(
    outbox: Outbox, cluster: KafkaCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Brokers are restarted one by one. While messages of the others came, its partitions stood still, and nothing
    was said."""
    monkeypatch.setattr(kafka, "_RENEW_SECONDS", 0.5)
    trusted, first, other = tmp_path / "ca.pem", trustme.CA(), trustme.CA()
    first.cert_pem.write_to_path(str(trusted))
    topic = Topic(cluster, partitions=3)
    sent = [0]

    def send(ended: Event) -> None:
        while not ended.wait(0.05):
            for partition in range(3):
                topic.send_bodies([_placed(sent[0])], partition)
                sent[0] += 1

    with (
        TlsFronts(topic.servers, first) as fronts,
        _publishing(_trusting(topic, fronts, trusted), outbox),
    ):
        with beside(send, "sends"):
            wait_until(lambda: len(_published(outbox)) > 10, 60)
            # The next connection would trust it.
            other.cert_pem.write_to_path(str(trusted), append=True)
            fronts.change(other, slice(1))
            changed = sent[0]
            wait_until(
                lambda: {each % 3 for each in _published(outbox) if each > changed} == {0, 1, 2}, 60
            )
        wait_until(lambda: len(_published(outbox)) == sent[0], 60)
    assert sorted(_published(outbox)) == list(range(sent[0]))


def test_a_topic_that_is_deleted_is_named(
    cluster: KafkaCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client tells nobody; also while messages of another topic come. Closing does not hang."""
    monkeypatch.setattr(kafka, "_CHECK_SECONDS", 0.5)
    topic, other = Topic(cluster), Topic(cluster, "others")
    topic.send([1])

    async def scenario(*topics: str, is_busy: bool) -> None:
        async with topic.feed(topics) as feed:
            await fetched(feed, 1)
            cluster.delete_topic(topic.name)

            async def others_come() -> None:
                if is_busy:
                    other.send([2])
                await go_on(feed)

            with pytest.raises(ConfigurationError, match="topic orders"):
                await until(lambda: False, others_come)

    asyncio.run(scenario("orders", is_busy=False))
    Topic(cluster)
    topic.send([1, 2])
    asyncio.run(scenario("orders", "others", is_busy=True))


def test_a_setting_that_the_client_does_not_know_is_named(cluster: KafkaCluster) -> None:
    topic = Topic(cluster)
    with pytest.raises(ConfigurationError, match=r'intake\.orders\.conf: .*"acks.all"'):
        topic.feed(**{"acks.all": "1"})
    with pytest.raises(ConfigurationError, match=r"intake\.orders\.conf: .*auto\.offset\.reset"):
        topic.feed(**{"auto.offset.reset": "soon"})


def test_messages_of_every_form_come(cluster: KafkaCluster) -> None:
    """Without a key and headers, empty, compressed or larger than what is taken at once; a tombstone is invalid."""
    topic = Topic(cluster)
    event = {"host_id": "6f1f5a3e-3c1c-4f6e-9f5b-0d8f3f1f2a11", "event_type": "a", "payload": 1}
    large = json.dumps({**event, "payload": "x" * 2_000_000}).encode()
    topic.send_bodies([None, b""])
    for compression in ("gzip", "snappy", "lz4", "zstd"):
        conf: dict[str, Any] = {"compression.type": compression, "message.max.bytes": 9_000_000}
        topic.send_bodies([large], **conf)
    topic.send_bodies([json.dumps(event).encode()])

    async def scenario() -> list[Taken]:
        async with topic.feed() as feed:
            return await fetched(feed, 7)

    taken = asyncio.run(scenario())
    assert [each.body for each in taken] == [b"", b"", *[large] * 4, json.dumps(event).encode()]
    reader = MessageReader()
    for each in taken[:2]:
        with pytest.raises(Invalid):
            reader.read(each.body)
    assert [len(reader.read(each.body).ids) for each in taken[2:]] == [1] * 5


@pytest.mark.brokers
def test_ids_are_those_of_the_message_and_not_of_the_offset_alone(cluster: KafkaCluster) -> None:
    """The same message has the same name in each delivery; one of a topic that was made again has another."""
    topic = Topic(cluster)
    topic.send([1])

    async def names() -> list[tuple[str, ...]]:
        async with topic.feed() as feed:
            return [each.identity for each in await fetched(feed, 1)]

    first, again = asyncio.run(names()), asyncio.run(names())
    assert first == again
    assert first[0][:4] == ("kafka", "orders", "0", "0")
    cluster.delete_topic(topic.name)
    cluster.create_topic(topic.name)
    topic.send([1])
    (other,) = asyncio.run(names())
    assert other[:4] == first[0][:4]
    assert other != first[0]


@pytest.mark.brokers
def test_a_member_without_partitions_says_so(
    cluster: KafkaCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kafka, "_UNASSIGNED_SECONDS", 3.0)
    topic = Topic(cluster)

    async def scenario() -> None:
        with topic.other_member() as other:
            await until(lambda: other.poll(0.05) is None and len(other.assignment()) == 1, _nothing)
            ended = asyncio.create_task(_raises_unassigned(topic.feed()))
            await until(ended.done, lambda: asyncio.to_thread(other.poll, 0.05))
            await ended

    asyncio.run(scenario())


async def _nothing() -> None: ...


async def _raises_unassigned(feed: KafkaFeed) -> None:
    async with feed:
        with pytest.raises(Undelivered, match="the group relay assigns no partition to relay"):
            await fetched(feed, 1)


@pytest.mark.brokers
@pytest.mark.parametrize("seed", range(2))
def test_rebalances_outages_and_lost_commits_lose_and_repeat_nothing(
    outbox: Outbox, cluster: KafkaCluster, seed: int
) -> None:
    """A member that commits nothing comes and goes, brokers and sessions are killed, commits of offsets fail."""
    chance = random.Random(seed)
    topic = Topic(cluster, partitions=3)
    sent = 0
    with _publishing(topic.feed(), outbox):
        for _ in range(10):
            bodies = [_placed(n) for n in range(sent, sent + 60)]
            bodies.insert(chance.randrange(60), b"{}")
            topic.send_bodies(bodies, partition=chance.randrange(3))
            sent += 60
            _disturb(chance.randrange(4), topic, outbox)
        wait_until(lambda: len(_published(outbox)) >= sent, timeout=120)
        wait_until(lambda: sum(topic.committed()) == sent + 10, timeout=60)
    found = _published(outbox)
    assert sorted(found) == list(range(sent))
    for n in range(0, sent, 60):
        of_partition = [each for each in found if n <= each < n + 60]
        assert of_partition == sorted(of_partition)


def _placed(number: int) -> bytes:
    event = {"host_id": str(host(1)), "event_type": "order.placed", "payload": {"n": number}}
    return json.dumps(event).encode()


def _disturb(kind: int, topic: Topic, outbox: Outbox) -> None:
    if kind == 0:
        topic.cluster.kill()
        time.sleep(0.3)
        topic.cluster.start()
    elif kind == 1:
        outbox.conn.execute(
            "select pg_terminate_backend(pid) from pg_stat_activity"
            " where datname = current_database() and pid <> pg_backend_pid()"
        )
    elif kind == 2:
        for error in (KafkaError.ILLEGAL_GENERATION, KafkaError.REBALANCE_IN_PROGRESS):
            topic.cluster.fail_requests(_OFFSET_COMMIT, error)
    else:
        with topic.other_member() as other:
            wait_until(lambda: other.poll(0.05) is None and bool(other.assignment()))


@pytest.mark.brokers
def test_commits_that_are_slower_than_batches_are_no_fault(
    cluster: KafkaCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the answer to a commit is on its way the offset that is to be committed moves on."""
    monkeypatch.setattr(kafka, "_UNCOMMITTED_SECONDS", 4.0)
    monkeypatch.setattr(kafka, "FETCH_MESSAGES", 1)
    topic = Topic(cluster)
    topic.send(range(300))

    async def scenario() -> None:
        async with topic.feed() as feed:
            await feed.acknowledge(await fetched(feed, 1))
            # Many batches a commit.
            cluster.slow_down(500)
            number = 1
            while number < 300:
                taken = await feed.fetch()
                await feed.acknowledge(taken)
                number += len(taken)
                await asyncio.sleep(0.02)
            await until(lambda: topic.committed() == [300], feed.fetch)

    asyncio.run(scenario())


def test_commits_that_fail_are_a_fault_also_while_messages_come(
    cluster: KafkaCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kafka, "_UNCOMMITTED_SECONDS", 0.5)
    monkeypatch.setattr(kafka, "FETCH_MESSAGES", 1)
    topic = Topic(cluster)
    topic.send(range(500))

    async def scenario() -> None:
        async with topic.feed() as feed:
            while True:
                cluster.fail_requests(_OFFSET_COMMIT, KafkaError.INVALID_COMMIT_OFFSET_SIZE)
                taken = await feed.fetch()
                assert 499 not in numbers(taken), "nobody has noticed"
                await feed.acknowledge(taken)
                await asyncio.sleep(0.01)

    with pytest.raises(Undelivered, match="INVALID_COMMIT_OFFSET_SIZE"):
        asyncio.run(scenario())
