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
from typing import assert_never


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
