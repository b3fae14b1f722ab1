"""When an idle worker looks for messages: after pauses, and after notifications that other workers get too."""

from __future__ import annotations

import asyncio
import random

import psycopg
import pytest

from relay.client import idle, wakeups
from relay.client.idle import Idle


async def _polls(waiting: Idle, stopping: asyncio.Event) -> None:
    """Wait as an idle slot does, and return when it would look for messages; fails where it does not."""
    async with asyncio.timeout(30):
        await waiting.wait(stopping)


def test_a_notification_ends_the_longest_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idle, "_FIRST_PAUSE_SECONDS", 3600)

    async def scenario() -> None:
        waiting, stopping = Idle(3600), asyncio.Event()
        assert not waiting.notify(), "no slot is idle"
        await _polls(waiting, stopping)
        slot = asyncio.create_task(_polls(waiting, stopping))
        await waiting.is_watched.wait()
        assert waiting.notify()
        await slot
        assert not waiting.is_watched.is_set()

    asyncio.run(scenario())


def test_one_slot_looks_for_messages_and_the_others_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idle, "_FIRST_PAUSE_SECONDS", 3600)

    async def scenario() -> None:
        waiting, stopping = Idle(3600), asyncio.Event()
        slots = [asyncio.create_task(waiting.wait(stopping)) for _ in range(16)]
        await waiting.is_watched.wait()
        waiting.notify()
        polling, sleeping = await asyncio.wait(slots, return_when=asyncio.FIRST_COMPLETED)
        assert len(polling) == 1
        waiting.found()
        polling, sleeping = await asyncio.wait(sleeping, return_when=asyncio.FIRST_COMPLETED)
        assert len(polling) == 1
        stopping.set()
        waiting.wake_all()
        await asyncio.wait(sleeping)

    asyncio.run(scenario())


def test_a_worker_that_comes_too_late_again_and_again_lets_others_go_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waits: list[float] = []

    async def either(event: asyncio.Event, seconds: float) -> None:
        waits.append(seconds)

    monkeypatch.setattr(idle, "either", either)
    monkeypatch.setattr(random, "random", lambda: 1.0)

    async def notified(waiting: Idle) -> float:
        waits.clear()
        waiting.notify()
        await waiting.wait(asyncio.Event())
        return waits[-1]

    async def scenario() -> None:
        waiting = Idle(2.0)
        delays = [await notified(waiting) for _ in range(12)]
        assert delays[:4] == [0.0, 0.002, 0.004, 0.008]
        assert delays[-1] == 0.5, "a quarter of the polling interval at most"
        waiting.found()
        assert await notified(waiting) == 0.0

    asyncio.run(scenario())


def test_workers_that_are_woken_share_the_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []

    async def either(event: asyncio.Event, seconds: float) -> None:
        waits.append(seconds)

    monkeypatch.setattr(idle, "either", either)
    monkeypatch.setattr(random, "uniform", lambda low, high: 1.0)

    async def pauses(waiting: Idle, polls: int) -> list[float]:
        waits.clear()
        for _ in range(polls):
            await waiting.wait(asyncio.Event())
        return waits

    async def scenario() -> None:
        waiting = Idle(2.0)
        assert (await pauses(waiting, 20))[-1] == 2.0
        waiting.share(5)
        assert await pauses(waiting, 4) == [2.0, 4.0, 8.0, 10.0]
        waiting.share(1000)
        assert (await pauses(waiting, 3))[-1] == 32.0
        waiting.share(1)
        waiting.share(1000)
        assert await pauses(waiting, 1) == [32.0], "counted again"
        waiting.share(1)
        assert await pauses(waiting, 2) == [2.0, 2.0]
        waiting.share(3)
        waiting.found()
        assert (await pauses(waiting, 1)) == [0.005]

    asyncio.run(scenario())


def test_a_worker_that_no_longer_listens_polls_at_once_and_shares_no_polls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(idle, "_FIRST_PAUSE_SECONDS", 3600)

    async def refused(*given: object, **named: object) -> None:
        raise psycopg.OperationalError("the server is gone")

    monkeypatch.setattr(psycopg.AsyncConnection, "connect", refused)

    async def scenario() -> None:
        waiting = Idle(3600)
        waiting.share(10)
        slot = asyncio.create_task(_polls(waiting, asyncio.Event()))
        await waiting.is_watched.wait()
        listening = asyncio.create_task(wakeups.listen("", "mail", waiting))
        await slot
        assert waiting.longest == 3600
        listening.cancel()
        await asyncio.wait([listening])

    asyncio.run(scenario())
