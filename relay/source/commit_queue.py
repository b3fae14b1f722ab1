"""Whole commits on their way from the receiver to the service, and how much memory they hold."""

from __future__ import annotations

from collections import deque
from threading import Condition

from relay.config.settings import BatchLimits
from relay.model.batch import Batch
from relay.model.transactions import Transactions


class CommitQueue:
    """The receiver puts commits in, the service takes batches out and acknowledges them. Safe in any thread.

    `_changed` guards all attributes. Only `size` and `empty` are read without it: single values, which may be late.
    """

    def __init__(self, limits: BatchLimits) -> None:
        self._limits = limits
        self._changed = Condition()
        self._commits: deque[Transactions] = deque()
        self._size = 0
        self._events = 0
        self._taken = 0
        self._unapplied: deque[tuple[int, int]] = deque()
        self._error: BaseException | None = None
        self._stopped = False

    @property
    def empty(self) -> bool:
        """Whether there is nothing to take."""
        return not self._commits

    @property
    def size(self) -> int:
        """The bytes in memory of all commits that are not acknowledged."""
        return self._size

    def held(self) -> tuple[int, int, int | None]:
        """Of all commits that are not acknowledged: bytes, events, and the time of the oldest, as a Commit has it."""
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
        """Let `take` raise this, once it has returned all commits."""
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def stop(self) -> None:
        """Let `take` return None from now on."""
        self._stopped = True
        with self._changed:
            self._changed.notify_all()

    def take(self, timeout: float) -> tuple[int, Transactions] | None:
        """The next commits, within the limits of a batch, and the batch's number, from 1.

        None after `timeout` seconds, or `stop()`. Raises what `fail` was given.
        """
        taken = self._take(timeout)
        if not taken:
            return None
        transactions = Transactions.joined(taken)
        with self._changed:
            self._taken += 1
            self._unapplied.append((self._taken, int(transactions.facts["ts"][0])))
            return self._taken, transactions

    def has_ready(self, events: int, full: bool) -> bool:
        """Whether `take` would return about so many events at once, or as many as the limits allow.

        `full` says that nothing more is received until a batch is acknowledged.
        """
        with self._changed:
            if self._stopped or not self._commits:
                return False
            ready = sum(each.events for each in self._commits)
            size = sum(each.held for each in self._commits)
        # Of a buffer that is full, a small rest would make one job more.
        return ready >= events or size >= self._limits.max_bytes or (full and 2 * ready >= events)

    def ack(self, batch: Batch) -> None:
        """The batch is committed: its memory is free."""
        with self._changed:
            self._size -= batch.size
            self._events -= batch.events
            while self._unapplied and self._unapplied[0][0] <= batch.number:
                self._unapplied.popleft()

    def _take(self, timeout: float) -> list[Transactions]:
        with self._changed:
            self._changed.wait_for(lambda: self._commits or self._error or self._stopped, timeout)
            if self._stopped or not (self._commits or self._error):
                return []
            if self._error is not None and not self._commits:
                raise self._error
            taken = [self._first_commits()]
            if not self._commits:
                return taken
            events, size = taken[0].events, taken[0].held
            # What came together stays together: cutting and joining copies, and a fuller batch does not pay for that.
            while self._commits and taken[0].joins(self._commits[0]):
                events += self._commits[0].events
                size += self._commits[0].held
                if events > self._limits.max_events or size > self._limits.max_bytes:
                    break
                taken.append(self._commits.popleft())
            return taken

    def _first_commits(self) -> Transactions:
        """The next commits within the limits of a batch; one that is larger comes alone."""
        head = self._commits.popleft()
        fitting = head.fitting(self._limits.max_events, self._limits.max_bytes)
        index = fitting or head.first_commit()
        if index == len(head):
            return head
        self._commits.appendleft(head.part(index, len(head)))
        return head.part(0, index)
