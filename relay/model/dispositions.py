"""Dispositions: what becomes of a transaction that was not applied, and when it may be retried. No I/O."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeGuard

from tenacity import RetryCallState, wait_exponential, wait_random

from relay.faults import Action, TransientFault, action_for

if TYPE_CHECKING:
    from relay.config.handlers import RetrySettings

LONGEST_ASKED_SECONDS = 86_400.0
"""The longest wait that a fault may ask for: an endpoint's Retry-After must not hold a key for ever."""


@dataclass(frozen=True, slots=True)
class AttemptHistory:
    """The earlier attempts to apply a transaction: how many, and when the first was made (seconds since 1970)."""

    attempts: int = 0
    since: float | None = None


NEW = AttemptHistory()


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a transaction was not applied, and after how many attempts.

    `handler` is the one that failed; None where no route matched, or processes died. It is retried `after` so many
    seconds. Where that is None it is dead; if it `holds` its keys then, later transactions with them are blocked.
    """

    handler: str | None
    error: BaseException
    attempts: int = 1
    after: float | None = None
    holds: bool = False


@dataclass(frozen=True, slots=True)
class Blocked:
    """It was not tried, or its effects were rolled back, since an earlier one holds one of its keys."""


Disposition = Failure | Blocked
Dispositions = dict[int, Disposition]
"""What became of the transactions that were not applied, by index."""


def is_dead(disposition: Disposition | None) -> TypeGuard[Failure]:
    """Whether the transaction is to be dead-lettered."""
    return isinstance(disposition, Failure) and disposition.after is None


def holds_up_followers(disposition: Disposition) -> bool:
    """Whether later transactions with the same keys are blocked."""
    return isinstance(disposition, Blocked) or disposition.after is not None or disposition.holds


def judge(
    handler: str,
    error: BaseException,
    attempts: int,
    before: AttemptHistory,
    retry: RetrySettings,
    blocks: bool,
) -> Failure:
    """Map a fault to a failure after `attempts` attempts; `blocks` says that a dead transaction holds its keys."""
    after = retry_delay(retry, error, attempts)
    if action_for(error) is not Action.RETRY or _exhausted(retry, attempts, before.since, after):
        return Failure(handler, error, attempts, holds=blocks)
    return Failure(handler, error, attempts, after)


def retry_delay(retry: RetrySettings, error: BaseException | None, attempts: int) -> float:
    """The seconds from the failure of an attempt to the next one: what the fault asks for, if that is more."""
    state = RetryCallState(None, None, (), {})  # type: ignore[arg-type]
    state.attempt_number = max(1, attempts)
    backoff = wait_exponential(multiplier=retry.wait, max=retry.max_wait)
    jitter = wait_random(0, retry.jitter)
    asked = error.after if isinstance(error, TransientFault) else None
    # An endpoint may ask for any number, also NaN, for which every comparison is false.
    asked = min(asked, LONGEST_ASKED_SECONDS) if asked is not None and asked > 0 else 0.0
    return max(backoff(state) + jitter(state), asked)


def _exhausted(retry: RetrySettings, attempts: int, since: float | None, after: float) -> bool:
    if retry.attempts is not None and attempts >= retry.attempts:
        return True
    now = time.time()
    return retry.max_elapsed is not None and now + after - (since or now) > retry.max_elapsed
