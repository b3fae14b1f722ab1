"""Brokers that tests kill and restart: Debian's packages, and librdkafka's mock of a Kafka cluster.

Long because each kind of broker is a class with the same methods.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, Self

import confluent_kafka
import nats
import pika
import psutil
import pytest
import redis
from tenacity import retry, retry_if_exception_type, stop_after_delay, wait_fixed

from relay.demo.embedded import free_port
from tests.outbox import APPEND, Outbox, wait_until

CloudEvent = dict[str, Any]
SHORT_INTERVALS = {"wait": 0.2, "max_wait": 0.5, "jitter": 0.05, "defer_after": 0}
TYPE = "order.placed"


class Broker(Protocol):
    """A broker of a test, which keeps the messages that it has confirmed when it is killed and restarted."""

    handler: dict[str, Any]
    """The settings of a handler for it."""
    ports: list[int]

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...

    def start(self) -> None:
        """Start it, and wait until it accepts connections."""

    def kill(self) -> None:
        """End it with SIGKILL."""

    def events(self) -> list[CloudEvent]:
        """All its events, in its order (within each partition, where it has partitions)."""

    def count(self) -> int:
        """The number of its events."""


class _Process:
    """A broker in its own process, on its own port."""

    def __init__(self) -> None:
        self.port = free_port()
        self.ports = [self.port]
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def command(self) -> Sequence[str]:
        raise NotImplementedError

    def environment(self) -> Mapping[str, str]:
        return {}

    def start(self) -> None:
        self._process = subprocess.Popen(
            self.command(),
            env={**os.environ, **self.environment()},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        wait_until(self._listens)

    def _listens(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def freeze(self) -> None:
        """Stop the process until `thaw`, so that it does not answer, like an unreachable machine."""
        assert self._process is not None
        group = self._process.pid
        os.killpg(group, signal.SIGSTOP)
        wait_until(lambda: _is_stopped(group))

    def thaw(self) -> None:
        assert self._process is not None
        os.killpg(self._process.pid, signal.SIGCONT)

    def kill(self) -> None:
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None


def _is_stopped(group: int) -> bool:
    """Whether all threads of a process group are; on a busy machine one may answer for some time after the signal."""
    leader = psutil.Process(group)
    members = [
        each.pid for each in leader.children(recursive=True) if os.getpgid(each.pid) == group
    ]
    threads = [
        each for pid in [group, *members] for each in Path(f"/proc/{pid}/task").glob("*/stat")
    ]
    return all(each.read_text().rpartition(")")[2].split()[0] == "T" for each in threads)


def _program(name: str, *folders: str) -> str:
    path = shutil.which(name, path=os.pathsep.join(folders) if folders else None)
    if path is None:
        pytest.skip(f"{name} is not installed")
    return path


class RedisServer(_Process):
    """Debian's redis-server, which writes to disk before it confirms."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder
        self.handler: dict[str, Any] = {"type": "redis", "url": f"redis://127.0.0.1:{self.port}"}

    def command(self) -> Sequence[str]:
        options = {
            "port": self.port,
            "dir": self._folder,
            "appendonly": "yes",
            "appendfsync": "always",
        }
        return [
            _program("redis-server"),
            "--save",
            "",
            *(text for key, value in options.items() for text in (f"--{key}", str(value))),
        ]

    def start(self) -> None:
        super().start()
        # It accepts connections while it still reads its file.
        redis.Redis(
            port=self.port, retry=redis.retry.Retry(redis.backoff.ConstantBackoff(0.05), 200)
        ).ping()

    def fill(self, full: bool) -> None:
        """Let it be out of memory, or not any more."""
        with redis.Redis(port=self.port) as client:
            client.config_set("maxmemory", 1 if full else 0)

    def events(self) -> list[CloudEvent]:
        entries: Any = redis.Redis(port=self.port).xrange(f"shop.{TYPE}")
        for _, fields in entries:
            assert f'"id": "{fields[b"id"].decode()}"'.encode() in fields[b"data"]
        return [json.loads(fields[b"data"]) for _, fields in entries]

    def count(self) -> int:
        length: Any = redis.Redis(port=self.port).xlen(f"shop.{TYPE}")
        return int(length)


class NatsServer(_Process):
    """Debian's nats-server with a JetStream stream on disk."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder
        self._url = f"nats://127.0.0.1:{self.port}"
        self.handler: dict[str, Any] = {"type": "nats", "servers": [self._url]}

    def __enter__(self) -> Self:
        super().__enter__()
        asyncio.run(self._prepare())
        return self

    def command(self) -> Sequence[str]:
        program = _program("nats-server", "/usr/sbin", *os.environ["PATH"].split(os.pathsep))
        folder = str(self._folder)
        return [program, "-a", "127.0.0.1", "-p", str(self.port), "-js", "-sd", folder]

    def events(self) -> list[CloudEvent]:
        return asyncio.run(self._read())

    def count(self) -> int:
        return asyncio.run(self._count())

    def fill(self, full: bool) -> None:
        """Let no stream take messages, as while it has no leader, or let it take them again."""
        asyncio.run(self._fill(full))

    async def _fill(self, full: bool) -> None:
        client = await nats.connect(self._url)
        await client.jetstream().update_stream(name="shop", subjects=["none" if full else "shop.>"])
        await client.close()

    async def _prepare(self) -> None:
        client = await nats.connect(self._url)
        await client.jetstream().add_stream(name="shop", subjects=["shop.>"])
        await client.close()

    async def _count(self) -> int:
        client = await nats.connect(self._url)
        count = (await client.jetstream().stream_info("shop")).state.messages
        await client.close()
        return count

    async def _read(self) -> list[CloudEvent]:
        client = await nats.connect(self._url)
        stream = client.jetstream()
        count = await self._count()
        subscription = await stream.subscribe("shop.>", ordered_consumer=True)
        events = [json.loads((await subscription.next_msg(5)).data) for _ in range(count)]
        await client.close()
        return events


class RabbitmqServer(_Process):
    """Debian's rabbitmq-server with a durable queue."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder
        url = f"amqp://guest:guest@127.0.0.1:{self.port}"
        self._parameters = pika.URLParameters(url)
        self.handler: dict[str, Any] = {"type": "rabbitmq", "url": url}

    def start(self) -> None:
        super().start()
        self._declare()

    @retry(
        retry=retry_if_exception_type(pika.exceptions.AMQPError),
        wait=wait_fixed(0.2),
        stop=stop_after_delay(60),
        reraise=True,
    )
    def _declare(self) -> None:
        """Declare the queue at every start, because the server confirms a declaration before it is on disk.

        A server that is still starting accepts connections and resets them.
        """
        with pika.BlockingConnection(self._parameters) as connection:
            connection.channel().queue_declare(f"shop.{TYPE}", durable=True)

    def command(self) -> Sequence[str]:
        # Not Debian's wrapper, which changes the user.
        return [_program("rabbitmq-server", "/usr/lib/rabbitmq/bin")]

    def environment(self) -> Mapping[str, str]:
        folder = str(self._folder)
        return {
            "HOME": folder,
            "RABBITMQ_NODENAME": f"relay{self.port}@localhost",
            "RABBITMQ_NODE_IP_ADDRESS": "127.0.0.1",
            "RABBITMQ_NODE_PORT": str(self.port),
            "RABBITMQ_DIST_PORT": str(free_port()),
            "RABBITMQ_MNESIA_BASE": folder,
            "RABBITMQ_LOG_BASE": folder,
            "RABBITMQ_PID_FILE": f"{folder}/pid",
            "RABBITMQ_ENABLED_PLUGINS_FILE": f"{folder}/plugins",
        }

    def events(self) -> list[CloudEvent]:
        with pika.BlockingConnection(self._parameters) as connection:
            channel = connection.channel()
            queue = f"shop.{TYPE}"
            count = channel.queue_declare(queue, passive=True).method.message_count
            events: list[CloudEvent] = []
            if count == 0:
                return events
            for _, properties, body in channel.consume(queue, inactivity_timeout=10):
                assert body is not None, "a message is missing"
                events.append(json.loads(body))
                assert properties.message_id == events[-1]["id"]
                if len(events) == count:
                    break
        return events

    def count(self) -> int:
        with pika.BlockingConnection(self._parameters) as connection:
            declared = connection.channel().queue_declare(f"shop.{TYPE}", passive=True)
            return int(declared.method.message_count)


class KafkaCluster:
    """The mock of a cluster in librdkafka, with real sockets, in this process.

    The Python client cannot stop its brokers, so this class calls the client's librdkafka.
    """

    _PRODUCER = 0
    _BROKERS = (1, 2, 3)

    def __init__(self, _: Path) -> None:
        self._lib = lib = ctypes.CDLL(_librdkafka())
        for function, result in (
            (lib.rd_kafka_new, ctypes.c_void_p),
            (lib.rd_kafka_mock_cluster_new, ctypes.c_void_p),
            (lib.rd_kafka_mock_cluster_bootstraps, ctypes.c_char_p),
        ):
            function.restype = result
        self._client = ctypes.c_void_p(lib.rd_kafka_new(self._PRODUCER, None, None, 0))
        self._cluster = ctypes.c_void_p(
            lib.rd_kafka_mock_cluster_new(self._client, len(self._BROKERS))
        )
        self._servers = lib.rd_kafka_mock_cluster_bootstraps(self._cluster).decode()
        lib.rd_kafka_mock_group_initial_rebalance_delay_ms(self._cluster, 0)
        # 96 partitions: one keeps no more than 5 MB.
        self.create_topic(f"shop.{TYPE}", 96)
        servers = self._servers.split(",")
        self.handler: dict[str, Any] = {"type": "kafka", "bootstrap": servers}
        self.ports = [int(each.rpartition(":")[2]) for each in servers]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._lib.rd_kafka_mock_cluster_destroy(self._cluster)
        self._lib.rd_kafka_destroy(self._client)

    def start(self) -> None:
        for broker in self._BROKERS:
            self._lib.rd_kafka_mock_broker_set_up(self._cluster, broker)

    def kill(self) -> None:
        for broker in self._BROKERS:
            self._lib.rd_kafka_mock_broker_set_down(self._cluster, broker)

    def create_topic(self, name: str, partitions: int = 1) -> None:
        self._lib.rd_kafka_mock_topic_create(self._cluster, name.encode(), partitions, 1)

    def delete_topic(self, name: str) -> None:
        self._lib.rd_kafka_mock_topic_delete(self._cluster, name.encode())

    def delete_records(self, topic: str, before: int) -> None:
        """Delete the messages of partition 0 with offsets below a number."""
        self._lib.rd_kafka_mock_partition_delete_records(
            self._cluster, topic.encode(), 0, ctypes.c_int64(before)
        )

    def slow_down(self, milliseconds: int) -> None:
        """Delay the answer to each request."""
        for broker in self._BROKERS:
            self._lib.rd_kafka_mock_broker_set_rtt(self._cluster, broker, milliseconds)

    def fail_requests(self, request: int, error: int) -> None:
        """Answer the next request of a kind with an error; both are numbers of Kafka's protocol."""
        self._lib.rd_kafka_mock_push_request_errors(
            self._cluster, ctypes.c_int16(request), ctypes.c_size_t(1), ctypes.c_int(error)
        )

    def events(self) -> list[CloudEvent]:
        return [json.loads(each.value() or b"") for each in self.messages()]

    def count(self) -> int:
        consumer, partitions = self._consumer()
        count = sum(consumer.get_watermark_offsets(each, 10)[1] for each in partitions)
        consumer.close()
        return count

    def messages(self) -> list[confluent_kafka.Message]:
        """All messages, read by a consumer."""
        consumer, partitions = self._consumer()
        consumer.assign(partitions)
        messages, ended = [], 0
        while ended < len(partitions):
            for message in consumer.consume(1_000, 0.5):
                error = message.error()
                if error is None:
                    messages.append(message)
                else:
                    assert error.code() == confluent_kafka.KafkaError._PARTITION_EOF
                    ended += 1
        consumer.close()
        return messages

    def _consumer(self) -> tuple[confluent_kafka.Consumer, list[confluent_kafka.TopicPartition]]:
        """A consumer, and the beginnings of the topic's partitions."""
        consumer = confluent_kafka.Consumer(
            {
                "bootstrap.servers": self._servers,
                "group.id": "test",
                "enable.partition.eof": True,
                "auto.offset.reset": "earliest",
            }
        )
        partitions = consumer.list_topics(f"shop.{TYPE}", 10).topics[f"shop.{TYPE}"].partitions
        return consumer, [
            confluent_kafka.TopicPartition(f"shop.{TYPE}", each, 0) for each in partitions
        ]


def _librdkafka() -> str:
    maps = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    return next(line.split()[-1] for line in maps if "librdkafka" in line)


BROKERS = {
    "redis": RedisServer,
    "nats": NatsServer,
    "rabbitmq": RabbitmqServer,
    "kafka": KafkaCluster,
}


def started(kind: Any, folder: Path) -> Any:
    folder.mkdir()
    return kind(folder)


def sending(broker: Broker, **more: Any) -> dict[str, Any]:
    """Sections of a configuration that sends every event to the projection and to the broker."""
    handlers = {
        "projection": {"type": "sql", "statement": APPEND},
        "broker": {
            **broker.handler,
            "topic": "shop.{event_type}",
            "retry": SHORT_INTERVALS,
            "timeout": 3,
            **more,
        },
    }
    return {"handlers": handlers, "routes": [{"handlers": list(handlers)}]}


def assert_complete_and_in_order(outbox: Outbox, found: list[CloudEvent]) -> None:
    published = outbox.conn.execute(
        "select id::text, host_id::text, c_offset from outbox_message_t order by c_offset"
    ).fetchall()
    assert {(each["id"], each["hostid"], int(each["sequence"])) for each in found} == set(published)
    first: dict[str, list[int]] = {}
    for sequence, host_id in {int(each["sequence"]): each["hostid"] for each in found}.items():
        first.setdefault(host_id, []).append(sequence)
    assert all(sequences == sorted(sequences) for sequences in first.values())
    assert outbox.value("select count(*) from relay.dead_letter_queue") == 0
    outbox.assert_exact()
