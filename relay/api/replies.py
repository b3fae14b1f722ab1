"""Requests that wait for the event that answers the one that they publish.

Such a request is registered before its commit, and gets what the tail of the streams reads from then on. Where the tail
begins later, or the event was published before, the answer is looked up as well.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

from relay import causes
from relay.api.filters import ReadFilter
from relay.faults import describe
from relay.model import exact_json
from relay.runtime.parts import SOON_SECONDS, Condition
from relay.store import log_pages
from relay.store.log_pages import LogEvent, OutboxPage
from relay.web.problems import FAULTS

log = logging.getLogger(__name__)

MOST_SECONDS = 50
"""The longest that a request waits for an answer: less than the minute after which most proxies give up."""
_AGAIN_SECONDS = 1.0
"""How long it takes until an answer is looked up again after a fault."""
_CAUSE = re.compile(rf'"(?:{causes.CAUSATION}|{causes.CORRELATION})": "([^"]+)"')
"""What names a cause in the text of an event. A payload may have the same, so that the metadata decide."""

Read = Callable[..., Awaitable[Any]]
"""Runs a function with a session, and further arguments."""


class Waiter:
    """A request that waits for the answer to an event: one of the same host that its token may read."""

    def __init__(self, wanted: ReadFilter, event_id: str) -> None:
        """`wanted` are the events that may answer."""
        self.filter = wanted
        self.event_id = event_id
        self.answer: LogEvent | None = None
        self.must_look = False
        """Whether the tail may have passed the answer."""
        self.is_over = False
        self._takes = wanted.test()
        self._changed = asyncio.Event()

    def offer(self, event: LogEvent) -> None:
        """Take an event if it is the answer, the first one."""
        if self.answer is None and self._takes(event) and self.event_id in _causes(event):
            self.answer = event
            self._changed.set()

    def look(self) -> None:
        """Have the answer looked up: the tail has not read all that came since the commit."""
        self.must_look = True
        self._changed.set()

    def end(self) -> None:
        """Wait no longer: relay stops, the token is revoked, or the client has gone."""
        self.is_over = True
        self._changed.set()

    async def wait(self, read: Read, condition: Condition) -> LogEvent | None:
        """Return the answer; None if the wait ends before there is one. `condition` is that of looking up."""
        while not self.is_over:
            self._changed.clear()
            if self.must_look:
                self.must_look = False
                try:
                    found = await read(log_pages.answer, self.event_id, self._takes)
                except FAULTS as error:
                    condition.fails(describe(error))
                    if self.answer is None:
                        self.must_look = True
                        await self._pause()
                else:
                    condition.works()
                    # It comes before what the tail has offered meanwhile.
                    self.answer = found or self.answer
            elif self.answer is not None:
                break
            else:
                await self._changed.wait()
        return self.answer

    async def _pause(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(_AGAIN_SECONDS):
                await self._changed.wait()


class Waiters:
    """The requests that wait, by the id of the event that is to be answered. Of the event loop."""

    def __init__(self) -> None:
        self.waits = {"answered": 0, "unanswered": 0}
        """How many requests have waited, by result."""
        self.condition = Condition(
            "API",
            log,
            "answers to requests that wait cannot be looked up",
            "answers to requests that wait are looked up again",
            SOON_SECONDS,
        )
        self._waiting: dict[str, set[Waiter]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def add(self, waiter: Waiter) -> None:
        """Let a request have what comes from now on."""
        self._waiting.setdefault(waiter.event_id, set()).add(waiter)

    def remove(self, waiter: Waiter) -> None:
        """Forget a request."""
        waiting = self._waiting[waiter.event_id]
        waiting.remove(waiter)
        if not waiting:
            del self._waiting[waiter.event_id]
        if not self._waiting:
            self.condition.clear()

    def count(self, waiter: Waiter) -> None:
        """Count a request whose event is published, and whose wait is over."""
        self.waits["unanswered" if waiter.answer is None else "answered"] += 1

    def deliver(self, page: OutboxPage) -> None:
        """Give requests the answers of a page."""
        if not self._waiting:
            return
        for transaction in page.transactions:
            for event in transaction.events:
                for cause in set(_CAUSE.findall(event.text)):
                    for waiter in self._waiting.get(cause, ()):
                        waiter.offer(event)

    def look(self) -> None:
        """Have all answers looked up."""
        for waiting in self._waiting.values():
            for waiter in waiting:
                waiter.look()


def _causes(event: LogEvent) -> set[str]:
    """Return the ids that an event names as its cause and as the first of its chain, but its own."""
    document = exact_json.loads(event.text)
    metadata = document["metadata"]
    if not isinstance(metadata, dict):
        return set()
    named = {metadata.get(name) for name in (causes.CAUSATION, causes.CORRELATION)}
    return {each for each in named if isinstance(each, str) and each != document["id"]}
