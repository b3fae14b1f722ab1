"""What is stored in part does not let a message overtake an earlier one of its key: in one request, or in several that
are under way at once.

An entry of a group fails and later ones of the group are done in brefphp/symfony-messenger#81,
aws-powertools/powertools-lambda-java#1140, aws-powertools/powertools-lambda-python#2981 and #1927; that a request may
be stored in part comes up in vectordotdev/vector#4675.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Protocol

import pytest

from relay.faults import Undelivered
from relay.sinks.batching import Batching, Outgoing, RequestLimits
from relay.sinks.brokers import Message, Sending, SendWindow

Entry = tuple[str | None, int]


def message(key: str | None, number: int, topic: str = "t") -> Message:
    return Message(topic, key, f"{number}", f"{number}", "application/json", {}, b"{}")


class Busy:
    """Refuses some entries of a request as busy, each once, and stores the others."""

    def __init__(self, whole: bool = False) -> None:
        self.limits = RequestLimits(messages=10, size=1_000_000, requests=4, whole=whole)
        self.stored: list[Entry] = []
        self.requests = 0
        self.refused = set[Entry]()
        self._random = random.Random(7)

    async def open(self) -> None: ...

    async def close(self) -> None: ...

    def outgoing(self, message: Message) -> Outgoing[Entry]:
        return Outgoing(message.topic, (message.key, int(message.identity)), len(message.body))

    async def send(self, group: object, entries: Sequence[Entry]) -> list[Exception | None]:
        self.requests += 1
        await asyncio.sleep(0)
        if self.limits.whole:
            self.stored += entries
            return [None] * len(entries)
        faults: list[Exception | None] = []
        for entry in entries:
            busy = entry not in self.refused and self._random.random() < 0.03
            faults.append(Undelivered("busy") if busy else None)
            self.refused |= {entry} if busy else set()
            self.stored += [] if busy else [entry]
        return faults


class Nacking:
    """A broker that confirms each message, or refuses some, each once, as RabbitMQ, NATS and Kafka do."""

    def __init__(self, awaits_all: bool) -> None:
        self.window = SendWindow(5, awaits_all)
        self.stored: list[Entry] = []
        self.refused = set[str]()
        self._random = random.Random(7)

    async def send(self, messages: Sequence[Message]) -> None:
        await self.window.send(self.window.sending(messages), self._publish)

    async def _publish(self, sending: Sending, index: int) -> None:
        asyncio.get_running_loop().call_soon(self._take, sending, index)

    def _take(self, sending: Sending, index: int) -> None:
        message = sending.messages[index]
        busy = message.identity not in self.refused and self._random.random() < 0.03
        self.refused |= {message.identity} if busy else set()
        self.stored += [] if busy else [(message.key, int(message.identity))]
        sending.answer(index, Undelivered("full") if busy else None)


class Sends(Protocol):
    async def send(self, messages: Sequence[Message]) -> None: ...


async def deliver(sends: Sends, messages: Sequence[Message]) -> None:
    while True:
        try:
            await sends.send(messages)
        except Undelivered:
            continue
        return


def overtaken(stored: Sequence[Entry]) -> int:
    first = list(dict.fromkeys(stored))
    return sum(
        number < max((n for k, n in first[:index] if k == key), default=0)
        for index, (key, number) in enumerate(first)
    )


def of_keys(keys: int) -> list[list[Message]]:
    """Deliveries, each with keys of its own: relay gives a key to one delivery at a time. Without keys it is one."""
    return [
        [
            message(f"{each}-{number % keys}" if keys else None, 300 * each + number)
            for number in range(60 if keys else 300)
        ]
        for each in range(5 if keys else 1)
    ]


@pytest.mark.parametrize("keys", [1, 4, 0])
def test_a_refused_message_is_not_overtaken_by_a_later_one_of_its_key(keys: int) -> None:
    async def main() -> Busy:
        service = Busy()
        batching = Batching(service, timeout=5)
        await asyncio.gather(*(deliver(batching, each) for each in of_keys(keys)))
        await batching.close()
        return service

    service = asyncio.run(main())
    assert len(set(service.stored)) == 300
    assert service.refused
    assert overtaken(service.stored) == 0


@pytest.mark.parametrize("awaits_all", [True, False])
@pytest.mark.parametrize("keys", [1, 4, 0])
def test_a_message_that_a_broker_refuses_is_not_overtaken_by_a_later_one_of_its_key(
    keys: int, awaits_all: bool
) -> None:
    """RabbitMQ and NATS refuse while a queue is full, or has no leader; Kafka refuses a batch, or is late with it."""

    async def main() -> Nacking:
        broker = Nacking(awaits_all)
        await asyncio.gather(*(deliver(broker, each) for each in of_keys(keys)))
        return broker

    broker = asyncio.run(main())
    assert len(set(broker.stored)) == 300
    assert broker.refused
    assert overtaken(broker.stored) == 0


def test_a_service_that_stores_all_or_nothing_gets_full_requests() -> None:
    async def main() -> Busy:
        service = Busy(whole=True)
        await Batching(service, timeout=5).send([message("a", number) for number in range(60)])
        return service

    service = asyncio.run(main())
    assert service.requests == 6
    assert overtaken(service.stored) == 0
