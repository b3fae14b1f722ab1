"""How often a worker asks for messages, and that none waits while a slot is free: a queue and a clock in memory."""

from __future__ import annotations

import asyncio
import json
import random
import selectors
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, fields
from typing import Any

import pytest

from relay import RetryLater
from relay.client.databases import AsyncSteps
from relay.client.messages import CLAIM, COMPLETE, EXTEND, LEASE, Message
from relay.client.sessions import Statement
from relay.client.worker import Worker

STATEMENT_SECONDS = 0.001
NOTIFICATION_SECONDS = 0.001
"""How long a notification is under way at most."""
WATCH_SECONDS = 0.003
"""How long a worker takes to watch a queue."""
TICK_SECONDS = 0.0005

FIELDS = [each.name for each in fields(Message) if each.name not in ("queue", "replies")]


class _Jumping(selectors.SelectSelector):
    """Moves the clock instead of waiting."""

    now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        ready = super().select(0)
        if not ready:
            assert timeout is not None, "everybody waits, and for nothing"
            self.now += timeout
        return ready


class _Loop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self.clock = _Jumping()
        super().__init__(self.clock)

    def time(self) -> float:
        return self.clock.now


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        await scenario()

    with asyncio.Runner(loop_factory=_Loop) as runner:
        runner.run(main())


@dataclass(eq=False)
class Listener:
    """What notifies a worker: it watches while a slot is idle, as relay.client.wakeups does."""

    table: Table
    worker: Worker
    workers: int
    watching: bool = False
    lost: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self) -> None:
        idle = self.worker._idle
        while True:
            await idle.is_watched.wait()
            await asyncio.sleep(WATCH_SECONDS)
            self.watching = True
            idle.trust(self.workers)
            idle.poll()
            self.table.notified.update(self.table.waiting)
            await self.lost.wait()
            self.watching = False
            self.lost.clear()
            idle.distrust()

    def notify(self) -> None:
        if not self.worker._idle.notify():
            self.lost.set()


@dataclass(eq=False)
class Table:
    """A queue in memory, and the database of its workers. `waiting` has the key of each message that is not done."""

    waiting: dict[int, str | None] = field(default_factory=dict)
    locked: set[int] = field(default_factory=set)
    listeners: list[Listener] = field(default_factory=list)
    notified: set[int] = field(default_factory=set)
    """The messages whose notifications have arrived, or that were there when a worker began to watch."""
    queries: int = 0
    vain: int = 0
    _last: int = 0

    def put(self, *keys: str | None) -> None:
        """Commit messages."""
        added = range(self._last + 1, self._last + len(keys) + 1)
        self.waiting.update(zip(added, keys, strict=True))
        self._last += len(keys)
        for each in self.listeners:
            if each.watching:
                seconds = random.random() * NOTIFICATION_SECONDS
                asyncio.get_running_loop().call_later(seconds, self._arrive, each, added)

    def _arrive(self, listener: Listener, added: range) -> None:
        self.notified.update(added)
        listener.notify()

    def takeable(self) -> list[int]:
        """The messages that a worker can take, the oldest first."""
        firsts = {key: number for number, key in sorted(self.waiting.items(), reverse=True)}
        return [
            number
            for number, key in sorted(self.waiting.items())
            if number not in self.locked and (key is None or firsts[key] == number)
        ]

    def take(self) -> list[str]:
        self.queries += 1
        taken = self.takeable()[:1]
        self.vain += not taken
        self.locked.update(taken)
        return [self._row(each) for each in taken]

    def _row(self, number: int) -> str:
        now = "2025-11-12T01:02:03+00:00"
        message = {"id": number, "attempt": 1, "key": self.waiting[number], "payload": number}
        message = dict.fromkeys(FIELDS) | message | {"event_id": str(number), "event_type": "a"}
        message |= {"enqueued_at": now, "first_taken_at": now}
        more = "true" if max(self.waiting) > number else "false"
        return f'{{"more" : {more}, "message" : {json.dumps(message)}}}'

    def link(self) -> Link:
        return Link(self)


@dataclass
class Session:
    """What a transaction does when it commits."""

    unlocked: set[int] = field(default_factory=set)
    done: set[int] = field(default_factory=set)


class Link(AsyncSteps):
    """A slot's connection. A lease ends with its message, since no worker dies."""

    def __init__(self, table: Table) -> None:
        self._table = table

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[Session]:
        session = Session()
        await asyncio.sleep(random.random() * STATEMENT_SECONDS)
        yield session
        await asyncio.sleep(random.random() * STATEMENT_SECONDS)
        self._table.locked -= session.unlocked
        for each in session.done:
            del self._table.waiting[each]

    @asynccontextmanager
    async def savepoint(self, session: object) -> AsyncIterator[None]:
        yield

    async def fetch(self, session: Session, statement: Statement, text: str) -> list[str]:
        await asyncio.sleep(random.random() * STATEMENT_SECONDS)
        if statement in (CLAIM, LEASE):
            rows = self._table.take()
            await asyncio.sleep(random.random() * STATEMENT_SECONDS)
            return rows
        if statement is not EXTEND:
            number = json.loads(text)["id"]
            session.unlocked.add(number)
            if statement is COMPLETE:
                session.done.add(number)
        return ["true"]

    async def close(self) -> None:
        pass


@asynccontextmanager
async def working(
    table: Table,
    handle: Callable[[Message], Awaitable[None]],
    processes: int = 1,
    listens: bool = True,
    lease: float | None = None,
) -> AsyncIterator[list[Worker]]:
    """Run workers of four slots during a block, which begins when all are idle."""
    workers = [
        Worker("dbname=none", "mail", concurrency=4, lease=lease, listen=False)
        for _ in range(processes)
    ]
    tasks = []
    for each in workers:

        @each.handles()
        async def handled(message: Message, *session: object) -> None:
            await handle(message)

        each._database.async_link = table.link  # type: ignore[method-assign]
        # A thread would prolong the leases on a connection of its own.
        each._database.is_opened_here = False
        tasks.append(asyncio.create_task(each.run()))
        if listens:
            listener = Listener(table, each, processes)
            table.listeners.append(listener)
            tasks.append(asyncio.create_task(listener.run()))
    await asyncio.sleep(10)
    table.queries = table.vain = 0
    yield workers
    for each in workers:
        each.stop()
    await asyncio.gather(*tasks[:: 2 if listens else 1])
    for task in tasks:
        task.cancel()


async def _quick(message: Message) -> None:
    await asyncio.sleep(0.002)


def _arrivals(at_least: float) -> float:
    """Return a pause between two commits: 25 in a second, no two closer than a notification and a query take."""
    return at_least + random.expovariate(25)


@pytest.mark.parametrize("lease", [None, 60], ids=["claimed", "leased"])
@pytest.mark.parametrize("key", [None, "Ada"])
def test_messages_that_come_one_by_one_cost_one_query_each(
    key: str | None, lease: float | None
) -> None:
    """It was two: each message that was found woke one more slot, which found none, and then came the polls."""

    async def scenario() -> None:
        random.seed(1)
        table = Table()
        async with working(table, _quick, lease=lease):
            for _ in range(400):
                table.put(key)
                await asyncio.sleep(_arrivals(0.02))
            # Those of a poll each two seconds.
            assert table.vain <= 400 / 20
            assert not table.waiting
            assert table.queries == 400 + table.vain

    run(scenario)


def test_messages_at_random_cost_few_queries_more() -> None:
    async def scenario() -> None:
        random.seed(2)
        table = Table()
        async with working(table, _quick):
            for _ in range(500):
                table.put(*[None] * random.choice([1, 1, 1, 2, 5]))
                await asyncio.sleep(random.expovariate(100))
            await asyncio.sleep(1)
            assert not table.waiting
            assert table.vain < (table.queries - table.vain) / 5

    run(scenario)


def test_a_query_that_a_later_one_has_followed_lets_nobody_ask() -> None:
    """Each that saw more made one more slot ask, though a notification of the same message had: in vain, every fourth
    time."""

    async def scenario() -> None:
        random.seed(4)
        table = Table()
        async with working(table, _quick):
            for _ in range(1_000):
                table.put(None)
                await asyncio.sleep(random.expovariate(200))
            await asyncio.sleep(1)
            assert not table.waiting
            assert table.vain < table.queries / 5

    run(scenario)


def test_a_worker_that_only_polls_asks_once_for_a_message() -> None:
    async def scenario() -> None:
        random.seed(3)
        table = Table()
        counted: list[int] = []

        async def handle(message: Message) -> None:
            counted.append(table.queries)
            # The first pause is 5 ms, less a quarter.
            await asyncio.sleep(0.0035)
            counted.append(table.queries)

        async with working(table, handle, listens=False):
            table.put(None)
            await asyncio.sleep(10)
            assert counted[0] == counted[1]
            assert not table.waiting

    run(scenario)


@pytest.mark.parametrize("seed", range(6))
def test_no_message_waits_while_a_slot_is_free(seed: int) -> None:
    """Not one that was notified of, nor one that came with it, nor the next of a key whose message is done."""

    async def scenario() -> None:
        random.seed(seed)
        table, processes = Table(), 1 + seed % 2
        keys: list[str | None] = [None, "Ada", "Bob"] if seed % 3 else [None]
        rate = random.choice([5, 20, 60])
        failed: set[int] = set()

        async def handle(message: Message) -> None:
            await asyncio.sleep(random.choice([0, 0.001, 0.01, 0.03]))
            if random.random() < 0.05 and message.id not in failed:
                failed.add(message.id)
                raise RetryLater(after=0)

        def is_neglected() -> bool:
            """Whether a message can be taken, and somebody could take it, but nobody asks, nor will at once."""
            known = settled.intersection(table.takeable())
            idles = [each._idle for each in workers]
            return (
                bool(known)
                and all(each.watching for each in table.listeners)
                and any(each._sleeping for each in idles)
                and not any(each._asking or each._delayed for each in idles)
            )

        lease = random.choice([None, 60.0])
        async with working(table, handle, processes, lease=lease) as workers:
            ends = asyncio.get_running_loop().time() + 3
            comes, settled = 0.0, set[int]()
            while table.waiting or asyncio.get_running_loop().time() < ends:
                now = asyncio.get_running_loop().time()
                if comes <= now < ends:
                    table.put(*random.choices(keys, k=random.choice([1, 1, 2, 10])))
                    comes = now + random.expovariate(rate)
                # What a notification may have told of at this moment is asked for at the next.
                assert not is_neglected()
                settled = table.notified.intersection(table.takeable())
                await asyncio.sleep(TICK_SECONDS)
                assert now < ends + 300, "a message is never taken"

    run(scenario)
