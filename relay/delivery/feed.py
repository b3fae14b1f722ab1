"""Passes the commits of the stream for one sink from the service's thread to the sink's worker."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from threading import Lock
from typing import Protocol

from relay.delivery.hold import WalHold
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
