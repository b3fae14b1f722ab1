"""Publishes what requests submit; those that wait share a commit.

One thread writes. While a commit is in flight further submissions come, and the next commit has all of them: nobody
waits for others, and a slow disk makes groups larger instead of the queue longer.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass

from relay.config.dsn import DatabaseAccess
from relay.intake.messages import IncomingEvents
from relay.intake.publishing import Accepted, MayNotPublish, NotCommitted, Publisher
from relay.runtime.parts import SOON_SECONDS, Condition, Recurring

log = logging.getLogger(__name__)

WAIT_SECONDS = 10.0
"""How long a submission waits for its commit, such as while the database is away."""
_MOST_QUEUED = 2_000
_MOST_QUEUED_BYTES = 64_000_000
"""The limits of what waits. What comes beyond them is refused at once."""
_GROUP_EVENTS = 1_000
_GROUP_BYTES = 4_000_000
"""The limits of what shares a commit; a single submission may be larger."""
_IDLE_SECONDS = 30.0
"""After so long without a submission the connection is closed."""


@dataclass(frozen=True, slots=True)
class _Queued:
    submission: IncomingEvents
    future: Future[Accepted]
    deadline: float


class CommitWriter(Recurring):
    """Publishes submissions from any thread, with one connection and in one thread of its own."""

    def __init__(self, dsn: DatabaseAccess | str, wait_seconds: float = WAIT_SECONDS) -> None:
        condition = Condition(
            "intake",
            log,
            "events that others send cannot be published",
            "events that others send are published again",
            SOON_SECONDS,
            # A session that was ended meanwhile costs the first.
            least_attempts=2,
            first_pause=0.1,
            longest_pause=2.0,
        )
        super().__init__(condition, close_seconds=5.0)
        self.published = 0
        """How many events were published."""
        self._publisher = Publisher(dsn)
        self._wait_seconds = wait_seconds
        self._changed = threading.Condition()
        self._queue: deque[_Queued] = deque()
        self._bytes = 0
        self._group: list[_Queued] = []

    @property
    def commits(self) -> int:
        """How many transactions were committed."""
        return self._publisher.commits

    def submit(self, submission: IncomingEvents) -> Future[Accepted]:
        """Publish a submission soon. Raises NotCommitted if too many wait.

        The future's exceptions are Conflict, Refused and NotCommitted. It can be cancelled until it runs.
        """
        future: Future[Accepted] = Future()
        queued = _Queued(submission, future, time.monotonic() + self._wait_seconds)
        size = len(submission.events)
        with self._changed:
            if self.stopping.is_set():
                raise NotCommitted("relay stops")
            is_full = self._bytes + size > _MOST_QUEUED_BYTES and self._queue
            if is_full or len(self._queue) >= _MOST_QUEUED:
                raise NotCommitted("too many requests wait for the database")
            self._queue.append(queued)
            self._bytes += size
            self._changed.notify()
        return future

    def stop(self) -> None:
        """Take no further submission, and write none but those in flight."""
        self.stopping.set()
        with self._changed:
            self._changed.notify()

    def turn(self) -> float:
        """Write the submissions that wait, or wait for one."""
        self._expire()
        if not self._group:
            self._group = self._take()
        if not self._group:
            self._publisher.close()
            self.condition.clear()
            return 0.0
        until = max(each.deadline for each in self._group)
        try:
            outcomes = self._publisher.publish([each.submission for each in self._group], until)
        except MayNotPublish:
            # It stays so until an administrator has acted: a wait is of no use.
            for each in self._group:
                each.future.set_exception(NotCommitted("relay may not publish: its log says why"))
            self._group = []
            raise
        group, self._group = self._group, []
        for each, outcome in zip(group, outcomes, strict=True):
            if isinstance(outcome, Exception):
                each.future.set_exception(outcome)
            else:
                self.published += 0 if outcome.is_repeated else len(each.submission.ids)
                each.future.set_result(outcome)
        self.condition.works()
        return 0.0

    def _take(self) -> list[_Queued]:
        """Return what waits, up to the limits of a group; empty after a time without any."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._queue or self.stopping.is_set(), timeout=_IDLE_SECONDS
            )
            group: list[_Queued] = []
            events = size = 0
            while self._queue and not self.stopping.is_set():
                following = self._queue[0].submission
                events += len(following.ids)
                size += len(following.events)
                if group and (events > _GROUP_EVENTS or size > _GROUP_BYTES):
                    break
                each = self._queue.popleft()
                self._bytes -= len(following.events)
                if each.future.set_running_or_notify_cancel():
                    group.append(each)
            return group

    def _expire(self) -> None:
        """Answer those that have waited long enough."""
        now = time.monotonic()
        over = [each for each in self._group if each.deadline <= now]
        self._group = [each for each in self._group if each.deadline > now]
        with self._changed:
            if any(each.deadline <= now for each in self._queue):
                over += [
                    each
                    for each in self._queue
                    if each.deadline <= now and each.future.set_running_or_notify_cancel()
                ]
                self._keep([each for each in self._queue if each.deadline > now])
        # The fault has the address of the database, which does not concern the sender.
        fails = self.condition.fault is not None
        why = "relay cannot publish now: its log says why" if fails else "the database is busy"
        for each in over:
            each.future.set_exception(NotCommitted(why))

    def _keep(self, queued: list[_Queued]) -> None:
        self._queue = deque(queued)
        self._bytes = sum(len(each.submission.events) for each in queued)

    def release(self) -> None:
        """Answer those that still wait, and close the connection."""
        with self._changed:
            left = [each for each in self._queue if each.future.set_running_or_notify_cancel()]
            self._keep([])
        left += self._group
        self._group = []
        for each in left:
            each.future.set_exception(NotCommitted("relay stops"))
        self._publisher.close()
