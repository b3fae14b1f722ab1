"""The retry worker: retries deferred transactions when they are due, beside the batches."""

from __future__ import annotations

import logging
from collections.abc import Callable

from relay.faults import is_transient
from relay.pipeline.apply import Applier, Handled
from relay.runtime.parts import Condition, Due, Recurring
from relay.runtime.retry import FIRST_WAIT_SECONDS, LONGEST_WAIT_SECONDS
from relay.waits import Backoff

log = logging.getLogger(__name__)

PAUSE_SECONDS = 0.5
"""How often due transactions are queried: another process, such as a command, may have changed their times."""
REST_SECONDS = 5.0
"""To so many seconds the pause doubles while none has a time: another process may give one a time, by a replay."""


class RetryWorker(Recurring):
    """Retries in a thread. Calls `failed` once at a fault that no retry can repair (see `error`)."""

    def __init__(
        self,
        applier: Applier,
        timeout: float,
        failed: Callable[[], None],
        retried: Callable[[Handled], None],
    ) -> None:
        """`timeout` is how many seconds `close` waits for a retry in flight.

        `retried` is called with the result after each commit.
        """
        condition = Condition(
            "retries",
            log,
            "cannot retry deferred transactions yet",
            "deferred transactions are retried again",
            first_pause=FIRST_WAIT_SECONDS,
            longest_pause=LONGEST_WAIT_SECONDS,
        )
        super().__init__(
            condition,
            failed,
            is_final=lambda error: not is_transient(error),
            ends_at_stop=True,
            close_seconds=timeout,
        )
        self._applier = applier
        self._retried = retried
        self._guarded = False
        self._pauses = Backoff(PAUSE_SECONDS, REST_SECONDS)

    def guard(self) -> None:
        """Guard retries, after a crash, until none is due any more. Call before `start`."""
        self._guarded = True

    def turn(self) -> float:
        """Retry what is due; returns the seconds until the next query, which `wake` asks for at once."""
        self.heartbeat.update("retries what is deferred", Due.OPEN)
        times = self._applier.deferred_times()
        found = self._applier.retry_deferred(self._guarded) if times.may_be_due else None
        self.condition.works()
        if times.may_be_due or times.seconds_to_next is not None:
            self._pauses.reset()
        if found is not None and found.tried:
            self._retried(found)
            return 0.0
        self._guarded = False
        if times.seconds_to_next is not None:
            return max(0.0, min(times.seconds_to_next, PAUSE_SECONDS))
        return self._pauses.take()
