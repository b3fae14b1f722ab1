"""When an idle worker looks for messages: after pauses, and after notifications that other workers get too."""

from __future__ import annotations

import asyncio
import random

import pytest

from relay.client import idle
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
