"""When the idle slots of a worker look for messages: after pauses that grow, and after a notification."""

from __future__ import annotations

import asyncio
import random
import time
from contextlib import suppress

_FIRST_PAUSE_SECONDS = 0.005
"""How long an idle worker waits before it asks again; the pause doubles each time, up to `poll`."""
_FIRST_DELAY_SECONDS = 0.002
_LONGEST_DELAY = 1 / 4
"""Of `poll`: how long a worker may wait after a notification."""
_MOST_SHARING = 16
"""How many times `poll` a pause may last at most."""
_COUNT_AFTER = 4
"""How many times `poll` it takes at least until the workers that share the polls are counted again."""


class Idle:
    """Lets one idle slot look for messages, from time to time; the others sleep until it has found one.

    A notification ends the pause of that slot. It reaches all workers of the queue, of which one gets the message: a
    worker that has found none waits before it looks after the next notification, each time longer, so that a few
    messages do not keep all workers busy.
    """

    def __init__(self, poll: float) -> None:
        """`poll` is the most seconds between two polls of the workers that share them, see `share`."""
        self._poll = self.longest = poll
        self._pause = min(_FIRST_PAUSE_SECONDS, poll)
        self._delay = 0.0
        self._sleeping: list[asyncio.Future[None]] = []
        self._woken = asyncio.Event()
        self._is_notified = False
        self._found_at = 0.0
        self.is_empty = False
        """Whether a slot has found none since the last message was taken: who has handled one need not look again."""
        self.is_watched = asyncio.Event()
        """Set while a slot is idle."""
        self.was_woken = False
        """Whether a notification has come."""

    def found(self) -> None:
        """Note that there was a message: where one was, there may be more."""
        self._pause = min(_FIRST_PAUSE_SECONDS, self._poll)
        self._delay = 0.0
        self._found_at = time.monotonic()
        self.is_empty = False
        self.wake()

    def found_none(self, began: float) -> None:
        """Note that a slot has looked for a message from `began` on, by time.monotonic(), and there was none."""
        if began >= self._found_at:
            self.is_empty = True

    def wake(self) -> None:
        """Wake a sleeping slot."""
        while self._sleeping:
            future = self._sleeping.pop()
            if not future.done():
                future.set_result(None)
                return

    def wake_all(self) -> None:
        """Wake all slots."""
        self._woken.set()
        while self._sleeping:
            self.wake()

    def poll(self) -> None:
        """Let a slot look for messages, now or when it is idle next."""
        self._woken.set()

    def share(self, workers: int) -> None:
        """Let a number of workers, all of which are woken by notifications, poll about as often together as one."""
        self.longest = self._poll * min(max(workers, 1), _MOST_SHARING)

    @property
    def count_after(self) -> float:
        """In how many seconds the workers that share the polls should be counted again."""
        return max(self.longest, _COUNT_AFTER * self._poll)

    def notify(self) -> bool:
        """Note that messages have come, which other workers may have taken; returns whether a slot is idle."""
        self.was_woken = self._is_notified = True
        self.is_empty = False
        self._woken.set()
        return self.is_watched.is_set()

    async def wait(self, stopping: asyncio.Event) -> None:
        """Return when the slot should look for messages again, and at once when the worker is stopping."""
        if stopping.is_set():
            return
        if self.is_watched.is_set():
            future = asyncio.get_running_loop().create_future()
            self._sleeping.append(future)
            await future
            return
        self.is_watched.set()
        try:
            # Idle workers do not poll in step.
            pause = min(self._pause, self.longest)
            await either(self._woken, pause * random.uniform(0.75, 1.25))  # noqa: S311
            if self._is_notified:
                await either(stopping, self._delay * random.random())  # noqa: S311
                delay = max(2 * self._delay, _FIRST_DELAY_SECONDS)
                self._delay = min(delay, _LONGEST_DELAY * self._poll)
            elif not self._woken.is_set():
                self._pause = min(self._pause * 2, self.longest)
        finally:
            self._woken.clear()
            self._is_notified = False
            self.is_watched.clear()


async def either(event: asyncio.Event, seconds: float) -> None:
    """Wait until an event is set, or for some seconds."""
    if seconds > 0:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await event.wait()
