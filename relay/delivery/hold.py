"""Tracks the WAL that a sink needs: what is confirmed is derived from what `relay.sinks` has. No I/O."""

from __future__ import annotations

import time
from threading import Lock

from relay.model.events import Lsn


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
