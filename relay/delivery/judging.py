"""Judges the attempts of a sink: what becomes of a delivery that has failed, and what that says of the destination."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from enum import Enum, auto

from relay.config.handlers import DeliveryHandler
from relay.delivery.attempts import AttemptLog
from relay.delivery.order import Delivery
from relay.faults import (
    DestinationRefused,
    Drop,
    EndpointBusy,
    EndpointDisabled,
    EndpointDown,
    EndpointFailed,
    EndpointRejected,
    FaultAction,
    NotTried,
    Unauthorized,
    Undelivered,
    action_for,
    asked_of,
    describe,
)
from relay.logs import RepeatedLines
from relay.model.dispositions import (
    APPLIED,
    BLOCKED,
    DeadLetter,
    Disposition,
    Failed,
    RetryLater,
)
from relay.pipeline.failure_limit import FailureLimit
from relay.pipeline.retry_policy import DropLog, RetryPolicy
from relay.runtime.retry import LONGEST_WAIT_SECONDS
from relay.sinks.destination import Destination
from relay.store.activity import Attempts

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class SinkCall:
    """A call of a sink for some deliveries: when their batch began, and whether it is the trial of a destination.

    `seconds` is how long it took. `is_answered`: something was delivered. `is_counted`: a failure of it was, so that
    one call is one failure.
    """

    started: float
    is_trial: bool
    seconds: float = 0.0
    is_answered: bool = False
    is_counted: bool = False


class PutBack(Enum):
    """A delivery that is queued again, since the destination is down: the attempt does not count."""

    FIRST = auto()
    LAST = auto()
    """After a trial: the next one goes to another key."""


Verdict = Disposition | PutBack | float
"""What becomes of a delivery: it has ended, is queued again, or is tried again after some seconds."""


class Judge:
    """Judges the attempts of one sink. For one event loop.

    `down_since` is when the destination was found to be down last (monotonic clock, seconds).
    """

    def __init__(
        self,
        sink: str,
        settings: DeliveryHandler,
        destination: Destination,
        limit: FailureLimit,
        kept: AttemptLog,
    ) -> None:
        self._limit = limit
        self._kept = kept
        self.attempts = Attempts()
        self.down_since = time.monotonic()
        self._destination = destination
        self._sink = sink
        self._settings = settings
        self._retry = RetryPolicy(sink, settings.retry)
        self._drops = DropLog(log)
        self._losses = RepeatedLines(
            log,
            logging.WARNING,
            "not delivered, and not tried again: the handler is not reliable",
            "losses",
        )

    def confirmed(self, delivery: Delivery, call: SinkCall) -> None:
        """Count a delivery that has arrived."""
        self._kept.ended(delivery, call.seconds)
        self._confirmed(delivery, call)

    def _confirmed(self, delivery: Delivery, call: SinkCall) -> None:
        self.attempts.confirm(call.seconds, len(delivery.rows.tuples))
        self._destination.answered(key_of(delivery))
        self._limit.succeeded((self._sink,))

    def dropped(self, delivery: Delivery, drop: Drop, call: SinkCall) -> None:
        """Count a delivery that the sink ends as done."""
        self._kept.ended(delivery, call.seconds, "dropped", drop)
        self._drops.note(self._sink, drop, delivery.rows.transaction_id)
        self._confirmed(delivery, call)

    def failed(
        self, delivery: Delivery, error: Exception, call: SinkCall, *, in_memory: bool
    ) -> Verdict:
        """Count a failed attempt; returns what becomes of the delivery, which may be tried again `in_memory`."""
        delivery.attempts += 1
        is_untried = isinstance(error, NotTried) or (
            isinstance(error, EndpointDown) and not error.tried
        )
        if not is_untried:
            self.attempts.fail(describe(error))
            self._kept.ended(delivery, call.seconds, "failed", error)
        action = action_for(error)
        if action is FaultAction.STOP:
            # What would stop relay stops this sink, until somebody has acted.
            error, cause = DestinationRefused(describe(error)), error
            error.__cause__ = cause
            action = FaultAction.RETRY
        self._destination.last_fault = describe(error)
        if action is not FaultAction.RETRY:
            self._destination.answered(key_of(delivery))
        elif not isinstance(error, EndpointFailed | NotTried) and self._is_down(
            delivery, error, call
        ):
            return self._later(delivery, error, call)
        reliable = self._settings.reliable
        if isinstance(error, Unauthorized | EndpointDown | NotTried) and reliable:
            return self._uncounted(delivery, error)
        blocks_key = self._settings.blocks_key and not isinstance(error, EndpointDisabled)
        disposition = self._retry.disposition_of(
            error, delivery.attempts, delivery.history, blocks_key
        )
        if (
            in_memory
            and reliable
            and isinstance(disposition, RetryLater)
            and time.monotonic() - call.started + disposition.after <= self._retry.defer_after
        ):
            return disposition.after
        return self._limited(disposition)

    def failed_together(self, part: Sequence[Delivery], fault: Exception, call: SinkCall) -> bool:
        """Count a call that has failed and does not say for which delivery; returns whether the destination is down."""
        self.attempts.fail(describe(fault))
        for each in part:
            self._kept.ended(each, call.seconds, "failed", fault)
        if action_for(fault) is not FaultAction.RETRY:
            return False
        self._destination.last_fault = describe(fault)
        return self._is_down(part[0], fault, call)

    def ended(self, disposition: Disposition) -> Disposition:
        """What a disposition is for this sink: one that is not reliable loses what has failed."""
        if self._settings.reliable or not isinstance(disposition, Failed):
            return disposition
        self._losses.note(1, handler=self._sink, fault=describe(disposition.error))
        return APPLIED

    def deferred(self, delivery: Delivery) -> Disposition:
        """What becomes of one that is not tried: it is blocked, or its destination has asked for a time to come."""
        early = delivery.early()
        if delivery.asked is None or not early:
            return BLOCKED
        return RetryLater(self._sink, delivery.asked[0], early, delivery.history.attempts)

    def _later(self, delivery: Delivery, error: Exception, call: SinkCall) -> Verdict:
        """Queue or defer a delivery without counting the attempt, since the destination is down."""
        asked = asked_of(error)
        delivery.asked = (error, time.monotonic() + asked) if asked else None
        if not call.is_trial:
            return PutBack.FIRST
        if not delivery.was_trial:
            delivery.was_trial = True
            return PutBack.LAST
        # All others have failed too. If only these keys fail, deferring them makes room for others.
        return self._uncounted(delivery, error)

    def _limited(self, failed: Failed) -> Failed:
        """After too many dead letters in a row, defer the transaction instead and stop the sink."""
        if (
            not isinstance(failed, DeadLetter)
            # One endpoint must not stop the others.
            or isinstance(failed.error, EndpointRejected)
            or not self._limit.stops(self._sink, failed.error)
        ):
            return failed
        self._destination.breaker.hold(LONGEST_WAIT_SECONDS)
        return RetryLater(self._sink, failed.error, LONGEST_WAIT_SECONDS, failed.attempts)

    def _is_down(self, delivery: Delivery, error: BaseException, call: SinkCall) -> bool:
        """Count a failure; returns whether the destination counts as down, so that the attempt does not count.

        A call in which something was delivered says that the destination is there.
        """
        stops = isinstance(error, DestinationRefused)
        if not call.is_counted and (stops or not call.is_answered):
            call.is_counted = True
            if self._destination.failed(key_of(delivery), error, stop=stops):
                self.down_since = time.monotonic()
        return self._destination.breaker.is_open and self._settings.reliable

    def _uncounted(self, delivery: Delivery, error: BaseException) -> RetryLater:
        """The disposition of a failed attempt that does not count. The wait grows with the time since the first one."""
        attempts = delivery.history.attempts
        if isinstance(error, EndpointBusy):
            # It does not grow here: what waits for its turn at an endpoint that works would come later and later.
            return RetryLater(self._sink, error, asked_of(error), attempts)
        after = self._retry.wait_uncounted(error, delivery.history)
        return RetryLater(self._sink, error, after, attempts)


def fault_of(raised: BaseException) -> Exception:
    """What a sink's call has raised, as a fault of the sink. Raises it if it is the end of the current task.

    A library may wait for a task of its own that somebody has cancelled, and panic or exit: the delivery ends
    nevertheless, and the other sinks go on.
    """
    if isinstance(raised, Exception):
        return raised
    task = asyncio.current_task()
    if isinstance(raised, GeneratorExit) or (task is not None and task.cancelling()):
        raise raised
    if isinstance(raised, asyncio.CancelledError):
        return Undelivered("what the sink waited for was cancelled")
    return DestinationRefused(f"the sink raised {type(raised).__name__}")


def key_of(delivery: Delivery) -> Hashable:
    """The key that the breaker counts: the ordering keys together, or the commit if there are none."""
    return delivery.keys or delivery.rows.commit.xid
