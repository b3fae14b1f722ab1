"""Says whether a failed transaction is retried and after how many seconds, for the target and for sinks alike."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from queue import Empty, SimpleQueue
from typing import Any

from relay.config.handlers import RetrySettings
from relay.config.imports import load
from relay.faults import (
    LONGEST_ASKED_SECONDS,
    Drop,
    FaultAction,
    action_for,
    asked_of,
    describe,
    first_line,
    is_final,
)
from relay.logs import RepeatedLines
from relay.model.dispositions import AttemptHistory, DeadLetter, Failed, RetryLater
from relay.outcomes import named_wait
from relay.runtime.retry import FIRST_WAIT_SECONDS
from relay.runtime.threads import Thread
from relay.waits import doubled

log = logging.getLogger(__name__)

FUNCTION_SECONDS = 1.0
"""How long a function of users may take to say a wait, all of its slow calls within about a minute together.

All sinks' deliveries stand still meanwhile."""
SLOW_SECONDS = 0.02
"""A call that takes no longer is not slow."""
_FORGIVEN = 1 / 60
"""How many of these seconds are forgotten a second."""

Waits = Callable[[int], float]
"""The seconds of the wait after the failed attempt of a number, from 1."""


class RetryPolicy:
    """The retries of one handler, as its section `retry` describes them. Safe in several threads.

    A function of users is imported in the process in which the policy is made, which is a Spark executor for tasks that
    run there.
    """

    def __init__(self, handler: str, settings: RetrySettings) -> None:
        """Raises ConfigurationError for a function that cannot be imported, or not be called with an attempt."""
        self._handler = handler
        self._settings = settings
        self._waits = _waits(handler, settings)

    @property
    def longest(self) -> float:
        """The longest wait that the settings name, in seconds."""
        backoff = self._settings.backoff
        return max(backoff) if isinstance(backoff, list) else self._settings.max_wait

    @property
    def defer_after(self) -> float:
        """The seconds within which a sink makes attempts without deferring the transaction."""
        return self._settings.defer_after

    @property
    def on_any(self) -> bool:
        """Whether faults that are no outages are retried too."""
        return self._settings.on == "any"

    def retries(self, error: BaseException) -> bool:
        """Whether a fault is one that is retried, before the limits count."""
        action = action_for(error)
        if action is FaultAction.DEAD_LETTER:
            return self.on_any and not is_final(error)
        return action is FaultAction.RETRY

    def disposition_of(
        self, error: BaseException, attempts: int, before: AttemptHistory, blocks: bool
    ) -> Failed:
        """Map a fault to a disposition after `attempts` attempts; `blocks` says that a dead letter holds its keys."""
        used_up = self._settings.attempts is not None and attempts >= self._settings.attempts
        if self.retries(error) and not used_up:
            after = self.wait(error, attempts)
            most = self._settings.max_elapsed
            if most is None or (before.failing_seconds or 0.0) + after <= most:
                return RetryLater(self._handler, error, after, attempts)
        return DeadLetter(self._handler, error, attempts, holds=blocks)

    def wait(self, error: BaseException | None, attempts: int) -> float:
        """The seconds from a failed attempt to the next one.

        That is what `RetryLater(after=…)` says, else the backoff or, if it is longer, what the destination asks for.
        """
        named = named_wait(error)
        if named is not None:
            return named
        asked = asked_of(error)
        jitter = random.uniform(0, self._settings.jitter)  # noqa: S311 no secret
        return max(self._waits(max(1, attempts)) + jitter, asked)

    def wait_uncounted(self, error: BaseException, before: AttemptHistory) -> float:
        """`wait` after an attempt that does not count: it grows with the time since the first failure."""
        wait = self.wait(error, before.attempts)
        if named_wait(error) is not None:
            return wait
        return max(wait, min(self.longest, before.failing_seconds or 0.0))


class DropLog:
    """Counts what handlers drop in one log line of `logger`, with the reason of one. Safe in several threads."""

    def __init__(self, logger: logging.Logger) -> None:
        # A warning, since Spark's workers print nothing below.
        self._lines = RepeatedLines(logger, logging.WARNING, "dropped by the handler", "drops")

    def note(self, handler: str, drop: Drop, transaction_id: str | None) -> None:
        """Count a transaction."""
        sample = {"transaction_id": transaction_id, "reason": first_line(drop, "none given")}
        self._lines.note(1, handler=handler, sample=sample)


def _waits(handler: str, settings: RetrySettings) -> Waits:
    backoff, wait, most = settings.backoff, settings.wait, settings.max_wait
    if isinstance(backoff, list):
        return lambda attempt: backoff[min(attempt, len(backoff)) - 1]
    if backoff == "constant":
        return lambda attempt: min(wait, most)
    if backoff == "linear":
        return lambda attempt: min(wait * attempt, most)

    def exponential(attempt: int) -> float:
        return doubled(wait, attempt - 1, most)

    if backoff == "exponential":
        return exponential
    return _UsersWaits(f"handlers.{handler}.retry.backoff", backoff, exponential)


class _UsersWaits:
    """Asks a function of users for a wait. Where it fails, `otherwise` says it, and a log line says why.

    It runs in a thread of its own, since it may hang. It is not called any more once slow calls have taken longer than
    `FUNCTION_SECONDS` together, so that it costs the sinks' loop that time only once.
    """

    def __init__(self, key: str, path: str, otherwise: Waits) -> None:
        self._function = load(key, path, "attempt")
        self._key = key
        self._otherwise = otherwise
        self._hangs = False
        self._spent, self._spent_at = 0.0, time.monotonic()
        self._last_fault: str | None = None

    def __call__(self, attempt: int) -> float:
        if self._hangs:
            return self._otherwise(attempt)
        found: SimpleQueue[float | str] = SimpleQueue()
        name = f"backoff {self._key}"
        began = time.monotonic()
        Thread(self._ask, name=name, args=(attempt, found)).start()
        said: float | str | None = None
        with suppress(Empty):
            said = found.get(timeout=FUNCTION_SECONDS)
        if said is None or self._takes_too_long(time.monotonic() - began):
            self._hangs = True
            said = f"took longer than {FUNCTION_SECONDS:g} s within a minute and is not called any more"
        if not isinstance(said, str):
            return said
        if said != self._last_fault:
            self._last_fault = said
            log.error(
                "a backoff function failed: the waits double instead",
                extra={"key": self._key, "fault": said},
            )
        return self._otherwise(attempt)

    def _takes_too_long(self, seconds: float) -> bool:
        """Count the seconds of a call."""
        if seconds > SLOW_SECONDS:
            now = time.monotonic()
            self._spent = max(0.0, self._spent - (now - self._spent_at) * _FORGIVEN) + seconds
            self._spent_at = now
        return self._spent > FUNCTION_SECONDS

    def _ask(self, attempt: int, found: SimpleQueue[float | str]) -> None:
        try:
            found.put(_seconds(self._function(attempt)))
        except Exception as error:
            found.put(f"raised {describe(error)}")


def _seconds(returned: Any) -> float | str:
    """The wait that a function of users has returned, at most `LONGEST_ASKED_SECONDS`; a text says why it is none."""
    seconds = returned.total_seconds() if isinstance(returned, timedelta) else returned
    if isinstance(seconds, bool) or not isinstance(seconds, int | float):
        return f"returned a {type(returned).__name__}, and no number of seconds or timedelta"
    # Not math.isnan: an integer may be too large for a float.
    if not seconds >= 0:
        return "returned NaN or a negative wait"
    return max(FIRST_WAIT_SECONDS, float(min(seconds, LONGEST_ASKED_SECONDS)))
