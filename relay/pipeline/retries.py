"""The retry worker: retries deferred transactions when they are due, beside the batches."""

from __future__ import annotations

import logging
from collections.abc import Callable
from threading import Event

from relay.conditions import Condition
from relay.faults import RelayError, TaskFault
from relay.heartbeat import Due, Heartbeat
from relay.pipeline.apply import Applier, Redelivery
from relay.retry import RetryUntilSuccess
from relay.threads import Thread

log = logging.getLogger(__name__)

PAUSE_SECONDS = 0.5
"""How often due transactions are queried: this or another process may have deferred some meanwhile."""


class RetryWorker:
    """Retries in a thread. Calls `failed` once at a fault that no retry can repair (see `error`)."""

    def __init__(
        self,
        applier: Applier,
        timeout: float,
        failed: Callable[[], None],
        retried: Callable[[Redelivery], None],
    ) -> None:
        """`timeout` is how many seconds `close` waits for a retry in flight.

        `retried` is called with the result after each commit.
        """
        self._applier = applier
        self._timeout = timeout
        self._failed = failed
        self._retried = retried
        self._guarded = False
        self._stopping = Event()
        self._thread = Thread(target=self._run, name="retry worker", daemon=True)
        self.error: RelayError | None = None
        self.condition = Condition(
            "retries",
            log,
            "cannot retry deferred transactions yet",
            "deferred transactions are retried again",
        )
        self.heartbeat = Heartbeat()

    def start(self, guarded: bool) -> None:
        """Start the thread. `guarded`, after a crash: retries are guarded until none is due any more."""
        self._guarded = guarded
        self._thread.start()

    def stop(self) -> None:
        """End after the retry in flight. Safe in a signal handler's thread."""
        self._stopping.set()

    def close(self) -> None:
        """Stop, and wait for the retry in flight."""
        self.stop()
        if self._thread.is_alive():
            self._thread.join(self._timeout)

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def _run(self) -> None:
        retrying = RetryUntilSuccess(self._stopping, self.condition)
        try:
            while not self._stopping.is_set():
                self._stopping.wait(retrying(self._retry_deferred))
        except Exception as error:
            if not self._stopping.is_set():
                self.error = TaskFault.of(error).as_error()
                self._failed()

    def _retry_deferred(self) -> float:
        """Retry what is due; returns the seconds until the next query."""
        self.heartbeat.update("retries what is deferred", Due.OPEN)
        found = self._applier.retry_deferred(self._guarded)
        tried, applied, dead, _ = found
        for each in dead:
            log.warning("dead letter", extra=each.fields)
        if tried:
            log.debug("redelivery", extra={"transactions": tried, "applied": applied})
            self._retried(found)
            return 0.0
        self._guarded = False
        following = self._applier.seconds_to_next()
        return PAUSE_SECONDS if following is None else max(0.0, min(following, PAUSE_SECONDS))
