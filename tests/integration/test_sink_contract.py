"""relay's own sinks keep the contract that `relay.testing.SinkContract` tests, and so does that of the guide."""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import psutil
import pytest

from relay import Delivery, Fail, RetryLater
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
from tests.clouds import CREDENTIALS, Aws, PubSub, Refusal
from tests.packages import install_guides
from tests.process import ROOT
from tests.webhook import Answer, Webhook


class Chooses:
    """What a busy destination refuses: about every sixth thing, but no more than 30."""

    def __init__(self) -> None:
        self._random = random.Random(7)
        self._left = 30

    def refuses(self) -> bool:
        refused = self._left > 0 and self._random.random() < 1 / 6
        self._left -= refused
        return refused


def open_to(*ports: int) -> int:
    """How many connections this process has open to servers on these ports."""
    found = psutil.Process().net_connections("tcp")
    return sum(
        bool(each.raddr) and each.raddr.port in ports and each.status == psutil.CONN_ESTABLISHED
        for each in found
    )


class TestHttp(SinkContract):
    OUTAGE_TIMEOUT = 1.0
    chooses: Chooses | None

    @pytest.fixture(autouse=True)
    def _destination(self) -> Iterator[None]:
        with Webhook(self._answer) as self.webhook:
            self.restore()
            yield

    def _answer(self, headers: dict[str, str], body: bytes) -> Answer:
        if not self.is_up:
            return Answer(self.status, after=self.after)
        if self.chooses is not None and self.chooses.refuses():
            return Answer(503)
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

    def overloaded(self) -> None:
        self.is_up, self.status = False, 503

    def partial(self) -> None:
        self.chooses = Chooses()

    def opened(self) -> int:
        return open_to(self.webhook.port)

    def restore(self) -> None:
        self.is_up, self.after, self.status, self.chooses = True, 0.0, 0, None

    def refused(self) -> dict[str, Any]:
        return {"payload": "refused"}


class Called:
    """What the function of this module was called with."""

    ids: ClassVar[list[str]] = []
    is_up = answers = True
    is_busy = False
    chooses: ClassVar[Chooses | None] = None


async def take(delivery: Delivery) -> None:
    """A function that a sink calls."""
    await asyncio.sleep(0 if Called.answers else 30)
    if not Called.is_up:
        raise ConnectionRefusedError
    if Called.is_busy or (Called.chooses is not None and Called.chooses.refuses()):
        raise RetryLater
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

    def overloaded(self) -> None:
        Called.is_busy = True

    def partial(self) -> None:
        Called.chooses = Chooses()

    def restore(self) -> None:
        Called.is_up = Called.answers = True
        Called.is_busy, Called.chooses = False, None

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

    def opened(self) -> int:
        return open_to(*self.broker.ports)

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


class _OfLimits(_OfProcess):
    """A server that can be made full."""

    broker: RedisServer | NatsServer
    is_full = False
    filling: threading.Thread | None = None

    def overloaded(self) -> None:
        self.is_full = True
        self.broker.fill(True)

    def partial(self) -> None:
        self.is_full = True
        self.filling = threading.Thread(target=self._fill)
        self.filling.start()

    def _fill(self) -> None:
        for number in range(20):
            self.broker.fill(number % 2 == 0)

    def restore(self) -> None:
        if not self.is_full:
            super().restore()
            return
        if self.filling is not None:
            self.filling.join()
        self.broker.fill(False)
        self.is_full = False


@pytest.mark.brokers
class TestRedis(_OfLimits):
    kind = "redis"


@pytest.mark.brokers
class TestNats(_OfLimits):
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

    def overloaded(self) -> None:
        self.aws.refusal = Refusal("ServiceUnavailable", 503)

    def partial(self) -> None:
        chooses = Chooses()
        self.aws.fault = lambda _: "InternalError" if chooses.refuses() else None

    def opened(self) -> int:
        return open_to(self.aws.port)

    def restore(self) -> None:
        if self.aws.is_up:
            self.aws.delay, self.aws.refusal, self.aws.fault = 0.0, None, lambda _: None
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
    OUTAGE_TIMEOUT = 1.0

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

    def silence(self) -> None:
        self.pubsub.silent.set()

    def overloaded(self) -> None:
        self.pubsub.refuses = lambda: True

    def partial(self) -> None:
        self.pubsub.refuses = Chooses().refuses

    def opened(self) -> int:
        return open_to(self.pubsub.port)

    def restore(self) -> None:
        self.pubsub.silent.clear()
        self.pubsub.refuses = lambda: False
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
    assert "12 passed" in tested.stdout
