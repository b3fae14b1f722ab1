"""Queues whole commits between the receiver and the service, and counts the memory that they hold."""

from __future__ import annotations

from collections import deque
from threading import Condition

from relay.config.settings import BatchLimits
from relay.model.batch import Batch
from relay.model.transactions import Transactions


class CommitQueue:
    """A queue into which the receiver puts commits, and from which the service takes batches. Safe in any thread.

    `_changed` guards all attributes. Only `size` and `empty` are read without it: single values, which may be late.
    """

    def __init__(self, limits: BatchLimits) -> None:
        self._limits = limits
        self._changed = Condition()
        self._commits: deque[Transactions] = deque()
        self._size = 0
        self._events = 0
        self._number = 0
        self._unapplied: deque[tuple[int, int]] = deque()
        self._error: BaseException | None = None
        self._stopped = self._woken = False

    @property
    def empty(self) -> bool:
        """Whether no commit is queued."""
        return not self._commits

    @property
    def size(self) -> int:
        """The bytes in memory of all commits that are not acknowledged."""
        return self._size

    def held(self) -> tuple[int, int, int | None]:
        """Bytes, events, and oldest commit time (microseconds since 2000) of the commits that are not acknowledged."""
        with self._changed:
            oldest = self._unapplied[0][1] if self._unapplied else None
            if oldest is None and self._commits:
                oldest = int(self._commits[0].facts["ts"][0])
            return self._size, self._events, oldest

    def put(self, commits: list[Transactions]) -> None:
        """Add commits, in the order of the stream."""
        events = sum(received.events for received in commits)
        with self._changed:
            self._commits.extend(commits)
            self._size += sum(received.held for received in commits)
            self._events += events
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """Let `take` raise `error` once it has returned all commits."""
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def stop(self) -> None:
        """Let `take` return None from now on."""
        self._stopped = True
        with self._changed:
            self._changed.notify_all()

    def wake(self) -> None:
        """Let the current or else the next `take` return at once."""
        with self._changed:
            self._woken = True
            self._changed.notify_all()

    def take(self, timeout: float) -> tuple[int, Transactions] | None:
        """Remove and return the next commits, within the limits of a batch, with the batch's number, from 1.

        None after `timeout` seconds, `wake()` or `stop()`. Raises the error that `fail` was given.
        """
        commits = self._take(timeout)
        if not commits:
            return None
        transactions = Transactions.joined(commits)
        with self._changed:
            self._number += 1
            self._unapplied.append((self._number, int(transactions.facts["ts"][0])))
            return self._number, transactions

    def has_ready(self, events: int, full: bool) -> bool:
        """Whether `take` would return about `events` events at once, or as many as the limits allow.

        `full`: nothing more is received until a batch is acknowledged.
        """
        with self._changed:
            if self._stopped or not self._commits:
                return False
            ready = sum(each.events for each in self._commits)
            size = sum(each.held for each in self._commits)
        # Of a full buffer, half is enough: the rest would otherwise cost a Spark job of its own.
        return ready >= events or size >= self._limits.max_bytes or (full and 2 * ready >= events)

    def ack(self, batch: Batch) -> None:
        """Free the memory of a batch that is committed."""
        with self._changed:
            self._size -= batch.size
            self._events -= batch.events
            while self._unapplied and self._unapplied[0][0] <= batch.number:
                self._unapplied.popleft()

    def _take(self, timeout: float) -> list[Transactions]:
        with self._changed:
            self._changed.wait_for(
                lambda: self._commits or self._error or self._stopped or self._woken, timeout
            )
            self._woken = False
            if self._stopped or not (self._commits or self._error):
                return []
            if self._error is not None and not self._commits:
                raise self._error
            commits = [self._first_commits()]
            if not self._commits:
                return commits
            events, size = commits[0].events, commits[0].held
            # Commits that were received together stay together: to split and join them costs more than a fuller batch
            # gains.
            while self._commits and commits[0].joins(self._commits[0]):
                events += self._commits[0].events
                size += self._commits[0].held
                if events > self._limits.max_events or size > self._limits.max_bytes:
                    break
                commits.append(self._commits.popleft())
            return commits

    def _first_commits(self) -> Transactions:
        """Remove and return the next commits within the limits of a batch; a larger commit is returned alone."""
        head = self._commits.popleft()
        fitting = head.fitting(self._limits.max_events, self._limits.max_bytes)
        index = fitting or head.first_commit()
        if index == len(head):
            return head
        self._commits.appendleft(head.part(index, len(head)))
        return head.part(0, index)
