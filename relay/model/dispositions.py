"""Dispositions: what an attempt to apply or deliver a transaction ended in. No I/O.

Disposition
├── Applied      done; nothing is left
└── Unapplied
    ├── Failed
    │   ├── RetryLater   deferred until its retry; holds its keys
    │   └── DeadLetter   dead-lettered; holds its keys if it `holds`
    ├── Blocked          deferred; an earlier transaction holds one of its keys
    └── Scheduled        deferred until its time; holds no key
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol, assert_never

from tenacity import RetryCallState, wait_exponential, wait_random

from relay.faults import FaultAction, TransientFault, action_for

LONGEST_ASKED_SECONDS = 86_400.0
"""The longest wait that relay accepts from a fault, such as an endpoint's Retry-After: the transaction holds keys."""


@dataclass(frozen=True, slots=True)
class AttemptHistory:
    """The earlier attempts to apply a transaction: their number, and when the first one failed.

    `since` is in seconds of this process's monotonic clock, None without a failure.
    """

    attempts: int = 0
    since: float | None = None

    @classmethod
    def of(cls, attempts: int, failing_seconds: float | None) -> AttemptHistory:
        """Return a history whose first attempt failed `failing_seconds` ago."""
        since = None if failing_seconds is None else time.monotonic() - failing_seconds
        return cls(attempts, since)

    @property
    def failing_seconds(self) -> float | None:
        """How long ago the first attempt failed; None without a failure."""
        return None if self.since is None else time.monotonic() - self.since


NEW = AttemptHistory()


@dataclass(frozen=True, slots=True)
class Applied:
    """The transaction was applied, or its destination has confirmed it."""


@dataclass(frozen=True, slots=True)
class RetryLater:
    """`handler` failed with `error` for the `attempts`-th time; the transaction is retried `after` seconds."""

    handler: str
    error: BaseException
    after: float
    attempts: int = 1


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """The transaction is not retried. `handler` is None if no route matched, or processes crashed."""

    handler: str | None
    error: BaseException
    attempts: int = 1
    holds: bool = False
    """Whether it holds its keys until an operator replays or discards it."""


@dataclass(frozen=True, slots=True)
class Blocked:
    """An earlier transaction holds one of its keys: the transaction was not tried, or was rolled back."""


@dataclass(frozen=True, slots=True)
class Scheduled:
    """An event of the transaction is for later (`deliver_at`): the transaction is tried at the time `until`."""

    until: datetime


Failed = RetryLater | DeadLetter
Unapplied = Failed | Blocked | Scheduled
Disposition = Applied | Unapplied
Dispositions = dict[int, Unapplied]
"""The dispositions of the transactions that were not applied, by index; the others are Applied."""

APPLIED = Applied()
BLOCKED = Blocked()


def holds_keys(disposition: Disposition) -> bool:
    """Whether the transaction blocks later ones that share a key with it."""
    match disposition:
        case Applied() | Scheduled():
            return False
        case DeadLetter():
            return disposition.holds
        case RetryLater() | Blocked():
            return True
    assert_never(disposition)


def is_deferred(disposition: Disposition) -> bool:
    """Whether the transaction gets, or keeps, a row in `relay.deferred`: to be tried again, or since it holds keys."""
    return isinstance(disposition, Scheduled) or holds_keys(disposition)


class RetryPolicy(Protocol):
    """How a handler retries, as `relay.config.handlers.RetrySettings` describes it."""

    @property
    def attempts(self) -> int | None:
        """The attempts after which the transaction is dead-lettered."""

    @property
    def wait(self) -> float:
        """Seconds before the second attempt."""

    @property
    def max_wait(self) -> float:
        """The longest wait, in seconds."""

    @property
    def jitter(self) -> float:
        """The most seconds that are added to a wait."""

    @property
    def max_elapsed(self) -> float | None:
        """Seconds after the first failure; an attempt that would begin later is not made."""


def disposition_of(
    handler: str,
    error: BaseException,
    attempts: int,
    before: AttemptHistory,
    retry: RetryPolicy,
    blocks: bool,
) -> Failed:
    """Map a fault to a disposition after `attempts` attempts; `blocks` says that a dead letter holds its keys."""
    after = retry_delay(retry, error, attempts)
    if action_for(error) is not FaultAction.RETRY or _exhausted(
        retry, attempts, before.failing_seconds or 0.0, after
    ):
        return DeadLetter(handler, error, attempts, holds=blocks)
    return RetryLater(handler, error, after, attempts)


def retry_delay(retry: RetryPolicy, error: BaseException | None, attempts: int) -> float:
    """The seconds from a failed attempt to the next one: the backoff, or what the fault asks for, if that is more."""
    state = RetryCallState(None, None, (), {})  # type: ignore[arg-type]
    state.attempt_number = max(1, attempts)
    backoff = wait_exponential(multiplier=retry.wait, max=retry.max_wait)
    jitter = wait_random(0, retry.jitter)
    return max(backoff(state) + jitter(state), asked_of(error))


def asked_of(error: BaseException | None) -> float:
    """The seconds that a fault asks for before the next attempt, at most `LONGEST_ASKED_SECONDS`; 0 if it does not."""
    asked = error.after if isinstance(error, TransientFault) else None
    # An endpoint may ask for NaN, for which every comparison is false.
    return min(asked, LONGEST_ASKED_SECONDS) if asked is not None and asked > 0 else 0.0


def _exhausted(retry: RetryPolicy, attempts: int, failing: float, after: float) -> bool:
    if retry.attempts is not None and attempts >= retry.attempts:
        return True
    return retry.max_elapsed is not None and failing + after > retry.max_elapsed
