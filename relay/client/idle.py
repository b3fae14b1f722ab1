"""When the slots of a worker look for messages: one slot for each message that there may be, as far as it is told."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum, auto

from relay.waits import Backoff

_FIRST_PAUSE_SECONDS = 0.005
"""How long an idle worker waits before it asks again; the pause doubles each time, up to `poll`."""
_FIRST_DELAY_SECONDS = 0.002
_LONGEST_DELAY = 1 / 4
"""Of `poll`: how long a worker may wait after a notification."""
_MOST_SHARING = 16
"""How many times `poll` a pause may last at most."""
_COUNT_AFTER = 4
"""How many times `poll` it takes at least until the workers that share the polls are counted again."""


class Left(Enum):
    """What an attempt leaves that nobody else tells of."""

    NOTHING = auto()
    KEY = auto()
    """The next message of its key, if there is one."""
    AGAIN = auto()
    """The message itself, which was not completed, or the next one of its key."""


@dataclass(slots=True, eq=False)
class Query:
    """A slot's query for a message, and the attempt that it leads to.

    `number` counts the queries of the worker; `more` says whether, as far as it saw, there may be more messages.
    """

    number: int
    more: bool = True


class Idle:
    """Wakes one idle slot where there may be a message: after a notification, a pause, or a query that saw more.

    A query that finds a message says whether it saw more, so that messages which come one by one cost one query each.
    A notification reaches all workers of the queue, of which one gets the message: a worker that has found none waits
    before it looks after the next notification, each time longer, so that a few messages do not keep all workers busy.
    """

    def __init__(self, poll: float) -> None:
        """`poll` is the most seconds between two polls of the workers that share them, see `trust`."""
        self._poll = self.longest = poll
        self._pauses = Backoff(_FIRST_PAUSE_SECONDS, poll)
        self._delay = 0.0
        self._sleeping: list[asyncio.Future[None]] = []
        self._polling: asyncio.TimerHandle | None = None
        self._delayed: asyncio.TimerHandle | None = None
        self._queries = 0
        self._asking: set[int] = set()
        self._is_pending = False
        self._is_notified = False
        self._is_trusted = self._is_alone = False
        self.is_watched = asyncio.Event()
        """Set while a slot is idle."""
        self.was_woken = False
        """Whether a notification has come."""

    def begin(self) -> Query:
        """Note that a slot begins to look for a message."""
        self._is_pending = False
        self._queries += 1
        self._asking.add(self._queries)
        return Query(self._queries)

    def found(self, query: Query, more: bool) -> None:
        """Note that there was a message, and whether there may be more."""
        query.more = more
        self._asking.discard(query.number)
        self._delay, self._is_notified = 0.0, False
        if not self._is_trusted:
            self._restart()
        # Where a later query has begun, that one tells: of what it is too early to see there is a notification.
        is_told = self._is_trusted and self._queries > query.number
        if (not more or is_told) and not self._is_pending:
            return
        if any(later > query.number for later in self._asking):
            # That one tells.
            self._is_pending = True
        else:
            self.wake()

    def ended(self, query: Query, left: Left | None) -> bool:
        """Note what an attempt has left, None if there was no message; returns whether its slot looks again at once."""
        self._asking.discard(query.number)
        if left is None:
            self._came_in_vain()
            return self._is_pending
        if left is Left.AGAIN:
            # Nobody is notified when it is due.
            self._restart()
            return True
        if self._is_pending or (left is Left.KEY and (query.more or self._queries > query.number)):
            return True
        # Where no notification may come, nobody has polled while all slots were at work.
        return not self._is_trusted and not self._sleeping

    def wake(self) -> None:
        """Let a slot look for messages, now or when it is idle next."""
        self._is_pending = not self._wake_one()

    def wake_all(self) -> None:
        """Wake all slots, since the worker is stopping."""
        for timer in (self._polling, self._delayed):
            if timer is not None:
                timer.cancel()
        while self._wake_one():
            pass

    def poll(self) -> None:
        """Let a slot look for messages, and then after pauses that begin with the shortest."""
        self._restart()
        self.wake()

    def trust(self, workers: int) -> None:
        """Note that all that comes is notified, to so many workers: they poll about as often together as one alone."""
        self.longest = self._poll * min(max(workers, 1), _MOST_SHARING)
        self._is_trusted, self._is_alone = True, workers <= 1

    def distrust(self) -> None:
        """Note that messages may come without a notification."""
        self.longest = self._poll
        self._is_trusted = self._is_alone = False

    @property
    def count_after(self) -> float:
        """In how many seconds the workers that share the polls should be counted again."""
        return max(self.longest, _COUNT_AFTER * self._poll)

    def notify(self) -> bool:
        """Note that messages have come, which other workers may have taken; returns whether a slot is idle."""
        self.was_woken = self._is_notified = True
        is_idle = self.is_watched.is_set()
        delay = self._delay * random.random() if is_idle else 0  # noqa: S311
        if delay == 0:
            self.wake()
        elif self._delayed is None:
            self._delayed = _later(delay, self._end_delay)
        return is_idle

    async def wait(self, stopping: asyncio.Event) -> None:
        """Return when the slot should look for messages again, and at once when the worker is stopping."""
        if stopping.is_set():
            return
        future = asyncio.get_running_loop().create_future()
        self._sleeping.append(future)
        self.is_watched.set()
        self._arm()
        await future

    def _came_in_vain(self) -> None:
        """Let other workers go first after the next notification, if this one has found none after the last one."""
        if self._is_notified and self._is_alone:
            # It cannot be taken yet: relay.claim leaves what aborted transactions had to the next call.
            self._restart()
        elif self._is_notified:
            delay = max(2 * self._delay, _FIRST_DELAY_SECONDS)
            self._delay = min(delay, _LONGEST_DELAY * self._poll)
        self._is_notified = False

    def _wake_one(self) -> bool:
        """Wake a sleeping slot; returns whether there was one."""
        is_woken = False
        while self._sleeping and not is_woken:
            future = self._sleeping.pop()
            if not future.done():
                future.set_result(None)
                is_woken = True
        if not self._sleeping:
            self.is_watched.clear()
            self._disarm()
        return is_woken

    def _arm(self) -> None:
        """Let a slot poll after a pause, while one is idle."""
        if self._polling is None and self._sleeping:
            # Idle workers do not poll in step.
            pause = min(self._pauses.next, self.longest) * random.uniform(0.75, 1.25)  # noqa: S311
            self._polling = _later(pause, self._end_pause)

    def _disarm(self) -> None:
        if self._polling is not None:
            self._polling.cancel()
            self._polling = None

    def _restart(self) -> None:
        """Begin again with the shortest pause."""
        self._pauses.reset()
        self._disarm()
        self._arm()

    def _end_pause(self) -> None:
        self._polling = None
        self._pauses.take(self.longest)
        # Where the database is slow, the first polls do not pile up.
        if not self._asking or self._pauses.next >= self.longest:
            self.wake()
        self._arm()

    def _end_delay(self) -> None:
        self._delayed = None
        self.wake()


def _later(seconds: float, call: Callable[[], None]) -> asyncio.TimerHandle:
    return asyncio.get_running_loop().call_later(seconds, call)


async def either(event: asyncio.Event, seconds: float) -> None:
    """Wait until an event is set, or for some seconds."""
    if seconds > 0:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await event.wait()
