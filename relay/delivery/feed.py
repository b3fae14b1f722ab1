"""What the stream brings for one sink, on its way from the service's thread to the sink's worker."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from threading import Lock

from relay.model.events import Lsn
from relay.model.transactions import Routed


@dataclass(frozen=True, slots=True, eq=False)
class Streamed:
    """What of a batch of the stream goes to a sink. `since` is when it came (monotonic clock, seconds)."""

    routed: Routed
    next_xid: int
    since: float
    size: int


class Feed:
    """A bounded buffer of commits. While it is open, WAL that the sink has not stored as done is not confirmed.

    `offer` is called by the service, everything else by the worker; `wake` is called when there is something to take.
    """

    def __init__(self, limit: int | None, wake: Callable[[], None]) -> None:
        """`limit`: how many bytes of rows the buffer takes; one batch may be larger. Without it, all of them."""
        self._limit = limit
        self._wake = wake
        self._lock = Lock()
        self._queue: deque[Streamed] = deque()
        self._size = 0
        self._open = False
        self._overflowed = False
        self._offered = Lsn(0)
        self._stored = Lsn(0)

    def open(self, stored: Lsn) -> None:
        """Begin to buffer; everything up to a position is done already."""
        with self._lock:
            self._queue.clear()
            self._size = 0
            self._open, self._overflowed = True, False
            self._offered = self._stored = stored

    def close(self) -> None:
        """Forget what is buffered, and hold back no WAL."""
        with self._lock:
            self._queue.clear()
            self._size = 0
            self._open = False

    def offer(self, streamed: Streamed, end: Lsn) -> None:
        """Buffer commits, the last of which ends at a position."""
        with self._lock:
            if not self._open:
                return
            self._offered = end
            if self._overflowed or self._is_full(streamed.size):
                self._overflowed = True
            else:
                self._queue.append(streamed)
                self._size += streamed.size
        self._wake()

    def _is_full(self, more: int) -> bool:
        return bool(self._queue) and self._limit is not None and self._size + more > self._limit

    def interrupt(self) -> None:
        """The stream does not bring everything from here on."""
        with self._lock:
            self._overflowed = self._open
        self._wake()

    def take(self) -> Streamed | None:
        """The next commits, None if there are none."""
        with self._lock:
            if not self._queue:
                return None
            taken = self._queue.popleft()
            self._size -= taken.size
        return taken

    def note_stored(self, reached: Lsn) -> None:
        """Everything up to a position is done, and stored."""
        with self._lock:
            self._stored = max(self._stored, reached)

    @property
    def is_open(self) -> bool:
        """Whether commits are buffered."""
        return self._open

    @property
    def overflowed(self) -> bool:
        """Whether commits were left out, for want of room or since the stream was interrupted."""
        return self._overflowed

    @property
    def size(self) -> int:
        """How many bytes of rows are buffered."""
        return self._size

    @property
    def oldest(self) -> float | None:
        """When the first of what is buffered came (monotonic clock, seconds)."""
        with self._lock:
            return self._queue[0].since if self._queue else None

    @property
    def lower_bound(self) -> Lsn | None:
        """The position up to which WAL may be confirmed; None where the sink holds back nothing."""
        with self._lock:
            if not self._open or self._stored >= self._offered:
                return None
            return self._stored
