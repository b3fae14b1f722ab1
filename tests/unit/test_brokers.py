"""Messages that are on their way to a broker: their answers, their deadline, and the room that they take."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import Any

import pytest
from pika.adapters.utils.connection_workflow import AMQPConnectorException
from pika.exceptions import AMQPError
from pydantic import SecretStr

from relay.sinks import brokers, rabbitmq
from relay.sinks.brokers import Message, Sending, SendWindow, Shared, Unanswered


def messages(count: int) -> list[Message]:
    return [Message("t", None, str(each), "", "", {}, b"") for each in range(count)]


@pytest.fixture(autouse=True)
def _little_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(brokers, "_MOST_UNANSWERED", 10)


class Broker:
    """Answers what it is told to, when it is told to."""

    def __init__(self) -> None:
        self.got: list[tuple[Sending, int]] = []

    async def publish(self, sending: Sending, index: int) -> None:
        self.got.append((sending, index))

    def answer(self, count: int, fault: Exception | None = None) -> None:
        for sending, index in self.got[:count]:
            sending.answer(index, fault)
        del self.got[:count]


async def soon() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(test)


def test_all_are_sent_before_the_first_is_answered() -> None:
    async def test() -> None:
        broker, sends = Broker(), SendWindow(1, ordered=False)
        task = asyncio.create_task(sends.send(sends.sending(messages(5)), broker.publish))
        await soon()
        assert [index for _, index in broker.got] == [0, 1, 2, 3, 4]
        broker.answer(4)
        await soon()
        assert not task.done()
        broker.answer(1)
        await task

    run(test())


def test_in_order_one_of_a_key_is_sent_when_those_before_it_are_stored() -> None:
    async def test() -> None:
        broker, sends = Broker(), SendWindow(1)
        given = [Message("t", key, "", "", "", {}, b"") for key in "abacb"]
        sending = sends.sending(given)
        task = asyncio.create_task(sends.send(sending, broker.publish))
        await soon()
        assert [index for _, index in broker.got] == [0, 1]
        broker.answer(2)
        await soon()
        assert [index for _, index in broker.got] == [2, 3, 4]
        broker.answer(1, ValueError())
        with pytest.raises(ValueError):  # noqa: PT011
            await task
        assert sending.rest == given[2:]

    run(test())


def test_what_waits_for_room_is_sent_in_its_turn() -> None:
    async def test() -> None:
        broker, sends = Broker(), SendWindow(1, ordered=False)
        tasks = [
            asyncio.create_task(sends.send(sends.sending(messages(8)), broker.publish))
            for _ in range(3)
        ]
        for _ in range(20):
            await soon()
            assert len(broker.got) <= 10
            broker.answer(3)
        await asyncio.gather(*tasks)

    run(test())


def test_a_fault_ends_its_own_delivery_and_leaves_its_room_to_others() -> None:
    async def test() -> None:
        broker, sends = Broker(), SendWindow(1, ordered=False)
        for _ in range(5):
            sending = sends.sending(messages(8))
            task = asyncio.create_task(sends.send(sending, broker.publish))
            await soon()
            broker.answer(2)
            broker.answer(1, ValueError())
            with pytest.raises(ValueError):  # noqa: PT011
                await task
            assert [message.identity for message in sending.unconfirmed] == list("234567")
            # Answers that are no longer awaited change nothing.
            broker.answer(5)
        task = asyncio.create_task(sends.send(sends.sending(messages(10)), broker.publish))
        await soon()
        assert len(broker.got) == 10
        broker.answer(10)
        await task

    run(test())


@pytest.mark.parametrize("count", [3, 30])
def test_a_delivery_that_is_cancelled_leaves_its_room_to_others(count: int) -> None:
    async def test() -> None:
        broker, sends = Broker(), SendWindow(1, ordered=False)
        for _ in range(5):
            task = asyncio.create_task(sends.send(sends.sending(messages(count)), broker.publish))
            await soon()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        broker.got.clear()
        task = asyncio.create_task(sends.send(sends.sending(messages(10)), broker.publish))
        await soon()
        broker.answer(10)
        await task

    run(test())


def test_the_deadline_counts_from_the_last_answer() -> None:
    async def test() -> None:
        broker, sends = Broker(), SendWindow(0.6, ordered=False)
        task = asyncio.create_task(sends.send(sends.sending(messages(4)), broker.publish))
        began = time.monotonic()
        for _ in range(3):
            await asyncio.sleep(0.2)
            broker.answer(1)
        with pytest.raises(TimeoutError):
            await task
        assert time.monotonic() - began > 1.1

    run(test())


def test_a_connection_is_silent_when_it_answers_nothing_although_something_was_sent() -> None:
    async def test() -> None:
        unanswered, sends = Unanswered(), SendWindow(1, ordered=False)
        await asyncio.sleep(0.1)
        assert not unanswered.is_silent(0.05)
        sending = sends.sending(messages(2))
        unanswered.add(1, sending, 0)
        unanswered.add(2, sending, 1)
        assert not unanswered.is_silent(0.05)
        await asyncio.sleep(0.1)
        assert unanswered.is_silent(0.05)
        assert unanswered.up_to(2) == [1, 2]
        sending.end()
        assert unanswered.is_silent(0.05)
        assert unanswered.up_to(2) == []

    run(test())


def test_those_that_need_a_connection_share_one_attempt_and_its_outcome() -> None:
    attempts = 0

    async def connect() -> int:
        nonlocal attempts
        attempts += 1
        await asyncio.sleep(0.05)
        if attempts == 1:
            raise OSError("refused")
        return attempts

    async def test() -> None:
        shared = Shared(connect, lambda link: link != 2)
        results = await asyncio.gather(*(shared.get() for _ in range(5)), return_exceptions=True)
        assert [str(result) for result in results] == ["refused"] * 5
        first = asyncio.create_task(shared.get())
        await soon()
        first.cancel()
        assert await shared.get() == 2
        assert await shared.get() == 3
        assert await shared.get() == 3
        assert attempts == 3
        assert await shared.close() == 3

    run(test())


def test_closing_ends_an_attempt_to_connect() -> None:
    async def connect() -> int:
        await asyncio.sleep(60)
        return 1

    async def test() -> None:
        shared = Shared(connect, lambda _: True)
        waiting = asyncio.create_task(shared.get())
        await soon()
        assert await shared.close() is None
        with pytest.raises(ConnectionAbortedError):
            await waiting

    run(test())


@pytest.mark.parametrize("counts", [[12], [5] * 30, [7] * 10])
def test_a_broker_that_never_answers_holds_nobody_for_ever(counts: list[int]) -> None:
    """Deliveries that have a part of the room each, and wait for more, would wait for each other."""

    async def test() -> None:
        broker, sends = Broker(), SendWindow(0.02, ordered=False)
        tasks = [
            asyncio.create_task(sends.send(sends.sending(messages(count)), broker.publish))
            for count in counts
        ]
        async with asyncio.timeout(10):
            ended = await asyncio.gather(*tasks, return_exceptions=True)
        assert {type(each) for each in ended} == {TimeoutError}
        broker.got.clear()
        task = asyncio.create_task(sends.send(sends.sending(messages(4)), broker.publish))
        await soon()
        broker.answer(4)
        await task

    run(test())


def test_why_rabbitmq_cannot_be_reached_is_told() -> None:
    """The client wraps it twice, and its own class says nothing: `AMQPConnectionError`."""

    async def reach(host: str) -> str:
        with pytest.raises((AMQPError, AMQPConnectorException)) as refused:
            await rabbitmq.connect(SecretStr(f"amqp://guest:secret@{host}"), 10)
        return str(rabbitmq.fault_of(refused.value))

    refused = asyncio.run(reach("127.0.0.1:1"))
    assert refused == "no connection: ConnectionRefusedError: Connection refused"
    assert asyncio.run(reach("nowhere.invalid")).startswith("no connection: gaierror: ")
