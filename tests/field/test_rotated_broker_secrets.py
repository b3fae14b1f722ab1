"""Brokers refuse credentials that were rotated: the sink goes on with the newest, and nothing is dead-lettered.

Public reports: confluentinc/confluent-kafka-python#1960, confluentinc/confluent-kafka-python#2164,
confluentinc/confluent-kafka-go#692, confluentinc/librdkafka#2868, tulios/kafkajs#1455, nats-io/nats.py#193,
nats-io/nats.py#1019, nats-io/nats.rs#1471, pika/pika#1335, rabbitmq/rabbitmq-stream-dotnet-client#363.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import nats
import pytest
import redis

from relay.config.handlers import KafkaHandler
from relay.sinks.kafka import Kafka
from tests import brokers, callables
from tests.brokers import KafkaCluster, NatsServer, RabbitmqServer, RedisServer, sending
from tests.outbox import Outbox, event, host, relaying, wait_until

pytestmark = pytest.mark.brokers

ATTEMPTS = {"retry": {**brokers.SHORT_INTERVALS, "attempts": 2}}


class RedisWithPassword(RedisServer):
    """A server whose password the test changes."""

    def change(self, former: str, password: str) -> None:
        with redis.Redis(port=self.port, password=former or None) as client:
            client.config_set("requirepass", password)
            # As a restart does, which ends the connections.
            client.client_kill_filter(_type="normal", skipme=True)

    def delivered(self, password: str) -> int:
        with redis.Redis(port=self.port, password=password) as client:
            length: Any = client.xlen(f"shop.{brokers.TYPE}")
            return int(length)


class NatsWithPassword(NatsServer):
    """A server that reads its password again."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._config = folder / "server.conf"
        self._write("first")
        self._url = f"nats://u:first@127.0.0.1:{self.port}"

    def _write(self, password: str) -> None:
        # With JetStream, which a reload would turn off if only the command line had it.
        self._config.write_text(
            f"jetstream {{ store_dir: {str(self._folder)!r} }}\n"
            f"authorization {{ user: u, password: {password} }}\n"
        )

    def command(self) -> Sequence[str]:
        program, *_ = super().command()
        return [program, "-a", "127.0.0.1", "-p", str(self.port), "-c", str(self._config)]

    def change(self, password: str) -> None:
        self._write(password)
        self._url = f"nats://u:{password}@127.0.0.1:{self.port}"
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGHUP)
        wait_until(lambda: asyncio.run(self._accepts()))

    async def _accepts(self) -> bool:
        try:
            client = await nats.connect(self._url, allow_reconnect=False, connect_timeout=1)
        except Exception:
            return False
        await client.close()
        return True


class RabbitmqWithPassword(RabbitmqServer):
    """A server whose password the test changes."""

    def change(self, password: str) -> None:
        for words in (
            ["change_password", "guest", password],
            ["close_all_connections", "rotated"],
        ):
            program = brokers._program("rabbitmqctl", "/usr/lib/rabbitmq/bin")
            subprocess.run(
                [program, *words],
                env={**os.environ, **self.environment()},
                check=True,
                capture_output=True,
            )


def dead(outbox: Outbox) -> int:
    return int(outbox.value("select count(*) from relay.dead_letter_queue"))


def faults(outbox: Outbox) -> list[str]:
    return outbox.column("select fault from relay.sinks where fault like 'Unauthorized%%'")


def test_a_password_of_redis_is_read_again(outbox: Outbox, tmp_path: Path) -> None:
    file = tmp_path / "url"
    (tmp_path / "redis").mkdir()
    with RedisWithPassword(tmp_path / "redis") as server:
        server.change("", "first")
        file.write_text(f"redis://:first@127.0.0.1:{server.port}")
        with relaying(outbox.settings(**sending(server, url={"file": str(file)}, **ATTEMPTS))):
            outbox.publish(host(1), event(1))
            wait_until(lambda: server.delivered("first") == 1)
            server.change("first", "second")
            outbox.fill(10, 1)
            wait_until(lambda: bool(faults(outbox)))
            file.write_text(f"redis://:second@127.0.0.1:{server.port}")
            wait_until(lambda: server.delivered("second") == 11)
    assert dead(outbox) == 0


@pytest.mark.parametrize("kind", ["file", "call"])
def test_a_password_of_nats_is_read_again(
    outbox: Outbox, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "url"
    (tmp_path / "nats").mkdir()
    with NatsWithPassword(tmp_path / "nats") as server:
        monkeypatch.setattr(callables, "PASSWORDS", [server._url])
        file.write_text(server._url)
        secret = {"file": str(file)} if kind == "file" else {"call": "tests.callables:token"}
        with relaying(outbox.settings(**sending(server, servers=[secret], **ATTEMPTS))):
            outbox.publish(host(1), event(1))
            wait_until(lambda: server.count() == 1)
            server.change("second")
            outbox.fill(10, 1)
            wait_until(lambda: bool(faults(outbox)))
            file.write_text(server._url)
            callables.PASSWORDS.append(server._url)
            wait_until(lambda: server.count() == 11)
    assert dead(outbox) == 0


def test_a_password_of_rabbitmq_is_read_again(outbox: Outbox, tmp_path: Path) -> None:
    file = tmp_path / "url"
    (tmp_path / "rabbitmq").mkdir()
    with RabbitmqWithPassword(tmp_path / "rabbitmq") as server:
        file.write_text(f"amqp://guest:guest@127.0.0.1:{server.port}")
        with relaying(outbox.settings(**sending(server, url={"file": str(file)}, **ATTEMPTS))):
            outbox.publish(host(1), event(1))
            outbox.wait_delivered("broker")
            server.change("second")
            outbox.fill(10, 1)
            wait_until(lambda: bool(faults(outbox)))
            file.write_text(f"amqp://guest:second@127.0.0.1:{server.port}")
            outbox.wait_delivered("broker")
    assert dead(outbox) == 0


def test_producers_of_kafka_are_replaced_in_order(outbox: Outbox, tmp_path: Path) -> None:
    """A change under load, whether of a secret or of a certificate that a setting names."""
    file = tmp_path / "client"
    file.write_text("first")
    with brokers.started(KafkaCluster, tmp_path / "kafka") as cluster:
        settings = outbox.settings(**sending(cluster, conf={"client.id": {"file": str(file)}}))
        with relaying(settings):
            for number in range(5):
                outbox.fill(40, 2, hosts=4)
                file.write_text(f"number {number}")
            outbox.wait_delivered("broker")
        brokers.assert_complete_and_in_order(outbox, cluster.events())


def test_a_token_of_kafka_is_made_by_a_function(monkeypatch: pytest.MonkeyPatch) -> None:
    handler = {
        "type": "kafka",
        "bootstrap": ["127.0.0.1:1"],
        "topic": "t",
        "conf": {
            "security.protocol": "SASL_PLAINTEXT",
            "sasl.mechanisms": "OAUTHBEARER",
            "oauth_cb": {"call": "tests.callables:token"},
        },
    }

    async def connect() -> None:
        kafka = Kafka("stream", KafkaHandler.model_validate(handler))
        monkeypatch.setattr(callables, "PASSWORDS", [])
        with pytest.raises(Exception, match=r"conf.oauth_cb: {call: tests.callables:token} failed"):
            await kafka._producer("shared")
        # Seen by the client too, which waits ten seconds for a token.
        callables.PASSWORDS.append("a token")
        await kafka._producer("shared")
        await kafka.close()

    asyncio.run(connect())
