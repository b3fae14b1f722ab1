"""Waits between polls of the outbox, and listens to its notifications, which end a wait."""

from __future__ import annotations

import logging
import selectors
from collections.abc import Callable

from relay.config.settings import Settings
from relay.faults import describe
from relay.runtime.notifications import take_notifications
from relay.runtime.parts import Condition
from relay.runtime.threads import Thread, Wakeup
from relay.store.connections import Dsn, connect
from relay.waits import Backoff

log = logging.getLogger(__name__)

LISTEN = "listen event_channel"
RETRY_SECONDS = 1.0
FIRST_SECONDS = 0.01
"""The first wait after events."""


class Interval:
    """The wait after a poll without events: short at first, then doubling up to `poll.wait_period_ms`.

    With `poll.listen` a notification ends it. relay listens from the first wait until `leave`.
    """

    def __init__(self, settings: Settings) -> None:
        self._dsn = settings.source_dsn
        self._listens = settings.poll.listen
        self._waits = Backoff(FIRST_SECONDS, settings.poll.wait_period_ms / 1000)
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
        if self._wakeup.wait(self._waits.take()):
            self._wakeup.clear()

    def shorten(self) -> None:
        """Make the next wait short, since events came."""
        self._waits.reset()

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


class Listener:
    """Calls `notified` when something is published, from a thread that connects and reads until `stop`.

    The thread reads even while relay is busy: a session that listens and is not read fills the server's notification
    queue, and then every COMMIT that notifies fails, in all databases. A notification is a hint: those sent while there
    is no connection are missed.
    """

    def __init__(self, dsn: Dsn, notified: Callable[[], None], condition: Condition) -> None:
        self._dsn = dsn
        self._notified = notified
        self._condition = condition
        self._stopped = Wakeup()
        self._thread = Thread(target=self._run, name="listener")
        self._thread.start()

    def stop(self) -> None:
        """Let the thread close its connection and end. Does not wait for it."""
        self._stopped.wake()

    def close(self, timeout: float = 5.0) -> None:
        """Stop, and wait up to `timeout` seconds until the connection is closed."""
        self.stop()
        self._thread.join(timeout)

    def _run(self) -> None:
        try:
            while not self._stopped.wait(0):
                try:
                    self._listen()
                except Exception as error:
                    self._condition.fails(describe(error))
                    self._stopped.wait(RETRY_SECONDS)
        finally:
            self._stopped.close()

    def _listen(self) -> None:
        with connect(self._dsn) as conn, selectors.DefaultSelector() as selector:
            conn.execute(LISTEN)
            self._condition.works()
            # Notifications from before LISTEN were missed.
            self._notified()
            selector.register(self._stopped, selectors.EVENT_READ)
            selector.register(conn.pgconn.socket, selectors.EVENT_READ)
            while not self._stopped.wait(0):
                if take_notifications(conn.pgconn):
                    self._notified()
                selector.select()
