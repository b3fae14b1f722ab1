"""Passes the commits of the stream for one sink to its worker, and tracks the WAL that the sink needs. No I/O."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from threading import Lock
from typing import Protocol

from relay.model.events import Lsn
from relay.model.snapshots import Xids
from relay.model.transactions import Routed


@dataclass(frozen=True, slots=True, eq=False)
class Streamed:
    """The part of a batch of the stream that goes to one sink.

    `next_xid` extends the xids of its rows to full xids, `since` is when the batch was received (monotonic clock,
    seconds), and `size` is in bytes.
    """

    routed: Routed
    next_xid: int
    since: float
    size: int


class Feed:
    """A bounded buffer of commits.

    The service calls `offer` and `interrupt`, the worker everything else. The feed calls `wake` when it has changed.
    """

    def __init__(self, limit: int | None, wake: Callable[[], None]) -> None:
        """`limit` is the capacity in bytes of rows; an empty buffer accepts any batch. None is no limit."""
        self._limit = limit
        self._wake = wake
        self._lock = Lock()
        self._queue: deque[Streamed] = deque()
        self._size = 0
        self._open = False
        self._overflowed = False

    def open(self) -> None:
        """Begin to buffer commits."""
        with self._lock:
            self._queue.clear()
            self._size = 0
            self._open, self._overflowed = True, False

    def close(self) -> None:
        """Drop the buffered commits, and buffer no more."""
        with self._lock:
            self._queue.clear()
            self._size = 0
            self._open = False

    def offer(self, streamed: Streamed) -> None:
        """Buffer commits; a full buffer drops them and is `overflowed`."""
        with self._lock:
            if not self._open:
                return
            if self._overflowed or self._is_full(streamed.size):
                self._overflowed = True
            else:
                self._queue.append(streamed)
                self._size += streamed.size
        self._wake()

    def _is_full(self, more: int) -> bool:
        return bool(self._queue) and self._limit is not None and self._size + more > self._limit

    def interrupt(self) -> None:
        """Mark the feed as overflowed, since the stream does not bring all commits from now on."""
        with self._lock:
            self._overflowed = self._open
        self._wake()

    def take(self) -> Streamed | None:
        """Remove and return the next commits; None if there are none."""
        with self._lock:
            if not self._queue:
                return None
            streamed = self._queue.popleft()
            self._size -= streamed.size
        return streamed

    @property
    def is_open(self) -> bool:
        """Whether commits are buffered."""
        return self._open

    @property
    def overflowed(self) -> bool:
        """Whether commits are missing, since the buffer was full or the stream was interrupted."""
        return self._overflowed

    @property
    def size(self) -> int:
        """How many bytes of rows are buffered."""
        return self._size

    @property
    def oldest(self) -> float | None:
        """When the first buffered commit arrived (monotonic clock, seconds); None if there is none."""
        with self._lock:
            return self._queue[0].since if self._queue else None


class WalHold:
    """The WAL that one sink needs: what it has not stored as done. Safe in any thread.

    Whether the sink is worked now does not matter, since a restart continues from its row. In mode wal it needs what
    comes after its stored position. Where it polls, it needs WAL while its row says that it is attached; once the row
    says that it polls, the outbox has its events. Before the row has been loaded, nothing is confirmed.
    """

    def __init__(self, polls: bool) -> None:
        """Without `polls` only the WAL has the sink's events (mode wal)."""
        self._polls = polls
        self._lock = Lock()
        self._required = Lsn(0)
        self._stored: Lsn | None = None
        self._joined: Lsn | None = None
        self._released = False
        self._unattended_since: float | None = time.monotonic()

    @property
    def lower_bound(self) -> Lsn | None:
        """The position up to which WAL may be confirmed; None if the sink needs none of it."""
        with self._lock:
            if self._released:
                return None
            if self._stored is None:
                return Lsn(0)
            return None if self._stored >= self._required else self._stored

    def lacks(self, applied: Lsn) -> bool:
        """Whether a sink that is done up to `applied` lacks events which the stream has brought already."""
        with self._lock:
            return applied < self._required

    def require(self, end: Lsn) -> None:
        """Note that the stream has brought events for the sink, the last of which ends at `end`."""
        with self._lock:
            self._required = max(self._required, end)

    def forget(self) -> None:
        """Confirm nothing until the row is loaded or stored: another process may have changed it."""
        with self._lock:
            self._stored = self._joined = None
            self._released = False
            self._unattended_since = time.monotonic()

    def load(self, applied: Lsn, attached: bool) -> None:
        """Note what the row says: the position `applied` in mode wal, otherwise whether the sink is attached."""
        with self._lock:
            self._joined = None
            if not self._polls:
                self._stored = applied
            elif attached:
                self._stored, self._released = None, False
            else:
                self._released = True

    def join(self, end: Lsn) -> None:
        """Note that the sink takes the stream from the position `end` on, and polls what came before it."""
        if not self._polls:
            return
        with self._lock:
            if self._released:
                self._stored = end
            # If the row says attached already, nothing is confirmed until it is stored again.
            self._joined = self._required = end
            self._released = False
            self._unattended_since = None

    def leave(self) -> None:
        """Note that the sink does not take the stream any more; its row may still say that it is attached."""
        with self._lock:
            self._joined = None
            self._unattended_since = time.monotonic()

    def store(self, reached: Lsn, attached: bool) -> None:
        """Note that the row was stored: everything up to `reached` is done, and whether the sink is attached."""
        with self._lock:
            if not self._polls:
                self._stored = max(self._stored or Lsn(0), reached)
            elif self._joined is not None:
                self._stored = max(self._stored or Lsn(0), self._joined, reached)
            elif not attached:
                self._released = True
            elif self._stored is not None:
                self._stored = max(self._stored, reached)

    def expire(self, seconds: float) -> bool:
        """Release WAL that nobody has taken from the stream for so long; returns whether there was any.

        Never in mode wal. Otherwise the sink continues from its snapshot, in the outbox.
        """
        with self._lock:
            since = self._unattended_since
            if not self._polls or self._released or since is None:
                return False
            self._released = time.monotonic() - since > seconds
            return self._released


@dataclass(frozen=True, slots=True)
class JoinPoint:
    """Where a feed begins: after the position `lsn`. `streamed` are the full xids that were streamed before."""

    lsn: Lsn
    streamed: Xids


class Stream(Protocol):
    """The stream of this process, for the workers of its sinks. Safe in any thread."""

    def join(self, feed: Feed, hold: WalHold) -> JoinPoint | None:
        """Open the feed from now on; None if this process does not read the stream now."""

    def confirm(self) -> None:
        """Confirm WAL, since a sink may need less of it."""

    @property
    def reads(self) -> bool:
        """Whether this process reads the source; it then works the sinks that do not lag."""

    @property
    def is_stalled(self) -> bool:
        """Whether the stream is stalled, since the target does not apply its last batch."""
