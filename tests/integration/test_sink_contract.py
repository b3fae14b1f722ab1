"""relay's own sinks keep the contract that `relay.testing.SinkContract` tests, and so does that of the guide."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from relay import Delivery, Fail
from relay.testing import SinkContract
from tests.brokers import (
    BROKERS,
    TYPE,
    Broker,
    NatsServer,
    RabbitmqServer,
    RedisServer,
    started,
)
from tests.clouds import CREDENTIALS, Aws, PubSub
from tests.packages import install_guides
from tests.process import ROOT
from tests.webhook import Answer, Webhook


class TestHttp(SinkContract):
    OUTAGE_TIMEOUT = 1.0

    @pytest.fixture(autouse=True)
    def _destination(self) -> Iterator[None]:
        with Webhook(self._answer) as self.webhook:
            self.restore()
            yield

    def _answer(self, headers: dict[str, str], body: bytes) -> Answer:
        if not self.is_up:
            return Answer(0, after=self.after)
        return Answer(422 if b"refused" in body else 204)

    def settings(self) -> dict[str, Any]:
        return {"type": "http", "url": self.webhook.url, "each": "transaction"}

    def received(self) -> list[str]:
        return [
            each["id"] for request in self.webhook.accepted for each in json.loads(request.body)
        ]

    def interrupt(self) -> None:
        self.is_up = False

    def silence(self) -> None:
        self.is_up, self.after = False, 30.0

    def restore(self) -> None:
        self.is_up, self.after = True, 0.0

    def refused(self) -> dict[str, Any]:
        return {"payload": "refused"}


class Called:
    """What the function of this module was called with."""

    ids: ClassVar[list[str]] = []
    is_up = answers = True


async def take(delivery: Delivery) -> None:
    """A function that a sink calls."""
    await asyncio.sleep(0 if Called.answers else 30)
    if not Called.is_up:
        raise ConnectionRefusedError
    if any(each.payload == "refused" for each in delivery.events):
        raise Fail("refused")
    Called.ids += [str(each.id) for each in delivery.events]


class TestFunction(SinkContract):
    OUTAGE_TIMEOUT = 1.0

    @pytest.fixture(autouse=True)
    def _destination(self) -> None:
        Called.ids = []
        self.restore()

    def settings(self) -> dict[str, Any]:
        return {"type": "function", "callable": f"{__name__}:take"}

    def received(self) -> list[str]:
        return Called.ids

    def interrupt(self) -> None:
        Called.is_up = False

    def silence(self) -> None:
        Called.answers = False

    def restore(self) -> None:
        Called.is_up = Called.answers = True

    def test_a_sink_can_be_closed_while_it_delivers(self) -> None:
        # No call ends by itself before.
        self.silence()
        super().test_a_sink_can_be_closed_while_it_delivers()


class _OfServer(SinkContract):
    """A broker in a process of its own, whose events are CloudEvents."""

    broker: Broker

    def settings(self) -> dict[str, Any]:
        return {**self.broker.handler, "topic": f"shop.{TYPE}"}

    def received(self) -> list[str]:
        return [each["id"] for each in self.broker.events()]

    def interrupt(self) -> None:
        self.broker.kill()

    def restore(self) -> None:
        self.broker.start()


class _OfBroker(_OfServer):
    kind: str

    @pytest.fixture(autouse=True)
    def _destination(self, tmp_path: Path) -> Iterator[None]:
        with started(BROKERS[self.kind], tmp_path / "broker") as self.broker:
            yield


class _OfProcess(_OfBroker):
    broker: RedisServer | NatsServer | RabbitmqServer
    is_frozen = False

    def silence(self) -> None:
        self.broker.freeze()
        self.is_frozen = True

    def restore(self) -> None:
        if self.is_frozen:
            self.broker.thaw()
        else:
            super().restore()


@pytest.mark.brokers
class TestRedis(_OfProcess):
    kind = "redis"


@pytest.mark.brokers
class TestNats(_OfProcess):
    kind = "nats"


@pytest.mark.brokers
class TestRabbitmq(_OfProcess):
    kind = "rabbitmq"

    def test_an_outage_is_retried_and_passes(self) -> None:
        try:
            super().test_an_outage_is_retried_and_passes()
        except AssertionError:
            # The server may lose a queue that was declared shortly before, with what it had confirmed.
            if [each for each in self._received().get(1, []) if each < 4] != [2, 3]:
                raise


@pytest.mark.brokers
class TestKafka(_OfBroker):
    kind = "kafka"


class _OfAws(SinkContract):
    OUTAGE_TIMEOUT = 1.0
    LARGE = 300
    SMALL = 20
    kind: str

    @pytest.fixture(autouse=True)
    def _destination(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        for name, value in CREDENTIALS.items():
            monkeypatch.setenv(name, value)
        with Aws() as self.aws:
            yield

    def settings(self) -> dict[str, Any]:
        return self.aws.sqs() if self.kind == "sqs" else self.aws.sns()

    def received(self) -> list[str]:
        return [each["id"] for each in self.aws.events()]

    def interrupt(self) -> None:
        self.aws.kill()

    def silence(self) -> None:
        self.aws.delay = 3.0

    def restore(self) -> None:
        if self.aws.delay:
            self.aws.delay = 0.0
        else:
            self.aws.start()

    def refused(self) -> dict[str, Any]:
        self.aws.fault = lambda entry: (
            "InvalidMessageContents" if "refused" in entry["body"] else None
        )
        return {"payload": "refused"}


class TestSqs(_OfAws):
    kind = "sqs"


class TestSns(_OfAws):
    kind = "sns"


class TestPubSub(SinkContract):
    @pytest.fixture(autouse=True)
    def _destination(self) -> Iterator[None]:
        with PubSub() as self.pubsub:
            yield

    def settings(self) -> dict[str, Any]:
        return self.pubsub.handler()

    def received(self) -> list[str]:
        return [each["id"] for each in self.pubsub.events()]

    def interrupt(self) -> None:
        self.pubsub.kill()

    def restore(self) -> None:
        self.pubsub.start()

    def refused(self) -> dict[str, Any]:
        return {"payload": "x" * 10_100_000}


@pytest.mark.rare
def test_the_sink_of_the_guide_keeps_the_contract(tmp_path: Path) -> None:
    """Without pip: with the metadata that it would write."""
    install_guides(tmp_path)
    tested = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_beanstalk.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{tmp_path}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert tested.returncode == 0, tested.stdout
    assert "9 passed" in tested.stdout
