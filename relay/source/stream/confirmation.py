"""Tracks the position of the stream that may be confirmed to PostgreSQL. No I/O."""

from __future__ import annotations

from struct import Struct
from threading import Lock

from relay.model.events import Lsn

STATUS = Struct(">cQQQq?")
"""Standby status update: written, flushed and applied position, clock in microseconds since 2000, reply requested.

Source: PostgreSQL documentation, "Streaming Replication Protocol".
"""


class Confirmation:
    """Received and durable positions, shared by the receiver and the service.

    The flushed position never moves back, never passes a commit that is not acknowledged, and follows the stream when
    nothing is pending, so that an idle outbox does not hold WAL.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._received = Lsn(0)
        self._flushed = Lsn(0)
        self._last_commit = Lsn(0)

    def reset(self) -> None:
        """Forget all positions: those of another server, or of a slot that was recreated, begin elsewhere."""
        with self._lock:
            self._received = self._flushed = self._last_commit = Lsn(0)

    def start(self, confirmed: Lsn) -> None:
        """Begin, or continue after a reconnection, at the position that the slot has confirmed."""
        with self._lock:
            self._received = max(self._received, confirmed)
            if self._last_commit <= self._flushed:
                self._flushed = max(self._flushed, confirmed)

    def commit(self, end: Lsn) -> None:
        """Note a commit with rows of the outbox that was received whole: it is pending until it is acknowledged."""
        with self._lock:
            self._received = max(self._received, end)
            self._last_commit = max(self._last_commit, end)

    def nothing_until(self, position: Lsn) -> None:
        """Note that the stream reached a position, between commits, without rows of the outbox."""
        with self._lock:
            self._received = max(self._received, position)
            self._advance(Lsn(0))

    def ack(self, end: Lsn) -> None:
        """Note that everything up to a commit's end is durable in the target."""
        with self._lock:
            self._advance(end)

    def _advance(self, end: Lsn) -> None:
        self._flushed = max(self._flushed, end)
        if self._flushed >= self._last_commit:
            self._flushed = max(self._flushed, self._received)

    @property
    def received(self) -> Lsn:
        """The position at which the stream is resumed after a lost connection."""
        with self._lock:
            return self._received

    @property
    def all_acknowledged(self) -> bool:
        """Whether every commit that was received is acknowledged."""
        with self._lock:
            return self._flushed >= self._last_commit

    @property
    def flushed(self) -> Lsn:
        """The position up to which PostgreSQL may recycle the WAL."""
        with self._lock:
            return self._flushed

    def status(self, clock: int, reply: bool = False) -> bytes | None:
        """The status update to send; None while no position is known. `reply` requests an answer."""
        with self._lock:
            if not self._flushed:
                return None
            return STATUS.pack(
                b"r", max(self._received, self._flushed), self._flushed, self._flushed, clock, reply
            )
