"""Waits between polls of the outbox."""

from __future__ import annotations

import logging

from relay.config.settings import Settings
from relay.runtime.parts import Condition
from relay.source.outbox.listener import Listener
from relay.source.wakeup import Wakeup

log = logging.getLogger(__name__)

FIRST_SECONDS = 0.01
"""The first wait after events."""


class Interval:
    """The wait after a poll without events: short at first, then doubling up to `poll.wait_period_ms`.

    With `poll.listen` a notification ends it. relay listens from the first wait until `leave`.
    """

    def __init__(self, settings: Settings) -> None:
        self._dsn = settings.source_dsn
        self._listens = settings.poll.listen
        self._longest = settings.poll.wait_period_ms / 1000
        self._next = FIRST_SECONDS
        self._wakeup = Wakeup()
        self._listener: Listener | None = None
        self.condition = Condition(
            "listener",
            log,
            "cannot listen: events are polled",
            "notifications come again",
            least_attempts=2,
        )

    def wait(self) -> None:
        """Wait, and make the next wait longer."""
        if self._listens and self._listener is None:
            self._listener = Listener(self._dsn, self._wakeup.wake, self.condition)
        if self._wakeup.wait(min(self._next, self._longest)):
            self._wakeup.clear()
        self._next = min(self._next * 2, self._longest)

    def shorten(self) -> None:
        """Make the next wait short, since events came."""
        self._next = FIRST_SECONDS

    def wake(self) -> None:
        """End the current wait, or else the next one. Safe in any thread."""
        self._wakeup.wake()

    def leave(self) -> None:
        """Stop listening until the next wait: relay does not poll."""
        self.shorten()
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.stop()
        self.condition.clear()

    def close(self) -> None:
        """Close the connection that listens."""
        if self._listener is not None:
            self._listener.close()
        self._wakeup.close()
