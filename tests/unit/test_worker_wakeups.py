"""When an idle worker looks for messages: after pauses, and after notifications that other workers get too."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

import psycopg
import pytest

from relay.client import idle, wakeups
from relay.client.idle import Idle, Left


async def _polls(waiting: Idle, stopping: asyncio.Event) -> None:
    """Wait as an idle slot does, and return when it would look for messages; fails where it does not."""
    async with asyncio.timeout(30):
        await waiting.wait(stopping)


def test_a_notification_ends_the_longest_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idle, "_FIRST_PAUSE_SECONDS", 3600)

    async def scenario() -> None:
        waiting, stopping = Idle(3600), asyncio.Event()
        assert not waiting.notify(), "no slot is idle"
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

        async def woken() -> int:
            # A task that is woken ends in the next round of the loop.
            for _ in range(3):
                await asyncio.sleep(0)
            return sum(each.done() for each in slots)

        waiting.notify()
        assert await woken() == 1
        query = waiting.begin()
        waiting.found(query, more=False)
        assert await woken() == 1, "no more were seen"
        assert not waiting.ended(query, Left.NOTHING)
        query = waiting.begin()
        waiting.found(query, more=True)
        assert await woken() == 2
        former, query = waiting.begin(), waiting.begin()
        waiting.found(former, more=True)
        assert await woken() == 2, "the later one will tell"
        waiting.found(query, more=False)
        assert await woken() == 3, "it has been asked for before the earlier one told"
        stopping.set()
        waiting.wake_all()
        await asyncio.wait(slots)

    asyncio.run(scenario())


def test_a_slot_that_ends_looks_again_for_what_nobody_else_tells_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(idle, "_FIRST_PAUSE_SECONDS", 3600)

    async def scenario() -> None:
        waiting, stopping = Idle(3600), asyncio.Event()
        waiting.trust(1)

        def ended(left: Left | None, more: bool = False, queries: int = 0) -> bool:
            query = waiting.begin()
            if left is not None:
                waiting.found(query, more)
            for _ in range(queries):
                assert not waiting.ended(waiting.begin(), None)
            return waiting.ended(query, left)

        assert not ended(None)
        assert not ended(Left.NOTHING)
        assert ended(Left.AGAIN)
        assert not ended(Left.KEY)
        assert ended(Left.KEY, more=True), "the next of its key may have been blocked then"
        assert ended(Left.KEY, queries=1), "or since"
        query = waiting.begin()
        waiting.notify()
        assert waiting.ended(query, None), "no slot was idle"
        waiting.distrust()
        assert ended(Left.NOTHING), "nobody has polled meanwhile"
        slot = asyncio.create_task(waiting.wait(stopping))
        await waiting.is_watched.wait()
        assert not ended(Left.NOTHING)
        stopping.set()
        waiting.wake_all()
        await slot

    asyncio.run(scenario())


@pytest.fixture
def timers(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds of the timers that are set, the longest that they can be."""
    seconds: list[float] = []
    later = idle._later

    def noted(pause: float, call: Callable[[], None]) -> asyncio.TimerHandle:
        seconds.append(pause)
        return later(0, call)

    monkeypatch.setattr(idle, "_later", noted)
    monkeypatch.setattr(random, "random", lambda: 1.0)
    monkeypatch.setattr(random, "uniform", lambda low, high: 1.0)
    return seconds


def test_a_worker_that_comes_too_late_again_and_again_lets_others_go_first(
    timers: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Idle, "_arm", lambda waiting: None)

    async def notified(waiting: Idle) -> float:
        slot = asyncio.create_task(waiting.wait(asyncio.Event()))
        await waiting.is_watched.wait()
        timers.clear()
        waiting.notify()
        await slot
        delays = list(timers)
        assert not waiting.ended(waiting.begin(), None)
        return sum(delays)

    async def scenario() -> None:
        waiting = Idle(2.0)
        delays = [await notified(waiting) for _ in range(12)]
        assert delays[:4] == [0.0, 0.002, 0.004, 0.008]
        assert delays[-1] == 0.5, "a quarter of the polling interval at most"
        waiting.found(waiting.begin(), more=False)
        assert await notified(waiting) == 0.0
        waiting.trust(1)
        waiting.found(waiting.begin(), more=False)
        assert [await notified(waiting) for _ in range(3)] == [0.0] * 3, "there are no others"

    asyncio.run(scenario())


def test_workers_that_are_woken_share_the_polls(timers: list[float]) -> None:
    async def pauses(waiting: Idle, polls: int) -> list[float]:
        timers.clear()
        for _ in range(polls):
            await _polls(waiting, asyncio.Event())
            assert not waiting.ended(waiting.begin(), None)
        return list(timers)

    async def scenario() -> None:
        waiting = Idle(2.0)
        assert (await pauses(waiting, 20))[-1] == 2.0
        waiting.trust(5)
        assert await pauses(waiting, 4) == [2.0, 4.0, 8.0, 10.0]
        waiting.trust(1000)
        assert (await pauses(waiting, 3))[-1] == 32.0
        waiting.distrust()
        waiting.trust(1000)
        assert await pauses(waiting, 1) == [32.0], "counted again"
        waiting.distrust()
        assert await pauses(waiting, 2) == [2.0, 2.0]
        waiting.trust(3)
        waiting.found(waiting.begin(), more=False)
        assert await pauses(waiting, 2) == [2.0, 4.0], "what comes is notified"
        waiting.distrust()
        waiting.found(waiting.begin(), more=False)
        assert await pauses(waiting, 2) == [0.005, 0.01]
        waiting.trust(3)
        assert waiting.ended(waiting.begin(), Left.AGAIN)
        assert await pauses(waiting, 2) == [0.005, 0.01], "nobody notifies when a retry is due"

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
        waiting.trust(10)
        slot = asyncio.create_task(_polls(waiting, asyncio.Event()))
        await waiting.is_watched.wait()
        listening = asyncio.create_task(wakeups.listen("", "mail", waiting))
        await slot
        assert waiting.longest == 3600
        listening.cancel()
        await asyncio.wait([listening])

    asyncio.run(scenario())
