"""Stops a handler that dead-letters one transaction after another for the same kind of fault (`dead_letters.brake`).

The cause is then the handler or its environment (a dropped column, expired credentials, a deployment), not the events.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import ceil
from threading import Lock

import numpy as np

from relay.faults import Braked, describe, first_line, kind_of
from relay.model.dispositions import APPLIED, Applied, DeadLetter, Dispositions
from relay.model.transactions import Undecoded
from relay.pipeline.routing import Assignment
from relay.store import brakes
from relay.store.brakes import Streak
from relay.store.connections import Connection

log = logging.getLogger(__name__)

_SUCCESSES_OF_ONE = 20
"""How many successes weigh as much as one dead letter where the limit is `gradual`."""
_MOST_IN_A_ROW = 10
"""After so many faults of the target in a row, no other transaction of the handler is worth a time-out."""
_SECONDS_OF_ONE = 6.0
"""How long such a fault takes. One that takes longer counts as several: others wait a minute, not ten time-outs."""


class FailureLimit:
    """Counts dead letters in a row while a task's transactions are tried. Safe in several threads."""

    def __init__(
        self,
        limits: Mapping[str, int],
        streaks: Mapping[str, Streak],
        defers: bool = False,
        gradual: bool = False,
    ) -> None:
        """`limits` are the most dead letters in a row of each handler that has a limit; `streaks` are those so far.

        With `defers`, a stopped handler's transactions are deferred, so that others go on. With `gradual`, a success
        does not end a streak but takes a twentieth of a dead letter from it: of what a destination refuses, no more
        than one transaction in twenty is dead-lettered in the long run, even if one of its servers refuses everything.
        """
        self.streaks = streaks
        self.defers = defers
        self.began = time.monotonic()
        self._gradual = gradual
        self.stopped: dict[str, str] = {}
        self._described: dict[str, str] = {}
        self.limits = limits
        self._lock = Lock()
        self.begin()

    def begin(self) -> None:
        """Reset the counts, since the transactions are tried from the first one again."""
        self._counts: dict[str, tuple[str, float]] = {
            name: (each.fault, each.deaths) for name, each in self.streaks.items()
        }
        self._of_target: defaultdict[str, float] = defaultdict(float)

    def failed(self, handler: str, seconds: float) -> None:
        """Count a transaction that a handler could not apply for a fault of the target, such as a time-out."""
        self._of_target[handler] += max(1.0, seconds / _SECONDS_OF_ONE)

    def gives_up(self, handlers: Iterable[str]) -> bool:
        """Whether one of the handlers has had such faults with many transactions in a row."""
        return bool(self._of_target) and any(
            self._of_target[each] >= _MOST_IN_A_ROW for each in handlers
        )

    def succeeded(self, handlers: Iterable[str]) -> None:
        """End, or shorten, the streaks of handlers that have succeeded; those that were stopped go on."""
        for handler in handlers if self._of_target else ():
            self._of_target.pop(handler, None)
        if not (self._counts or self.stopped):
            return
        with self._lock:
            for handler in handlers:
                self.stopped.pop(handler, None)
                fault, deaths = self._counts.pop(handler, ("", 0.0))
                deaths -= 1 / _SUCCESSES_OF_ONE
                if self._gradual and deaths > 0:
                    self._counts[handler] = fault, deaths

    def streak(self, handler: str) -> Streak | None:
        """The current streak of a handler; None without one."""
        if handler not in self._counts:
            return None
        fault, deaths = self._counts[handler]
        return Streak(fault, ceil(deaths), handler in self.stopped)

    def stops(self, handler: str, error: BaseException) -> bool:
        """Count a transaction that is to be dead-lettered; returns whether the limit forbids that."""
        limit = self.limits.get(handler)
        if limit is None:
            return False
        fault = kind_of(error)
        with self._lock:
            known, deaths = self._counts.get(handler, (fault, 0))
            deaths = deaths + 1 if known == fault else 1
            # Transactions above the limit are not dead-lettered.
            self._counts[handler] = (fault, min(deaths, limit))
            if deaths <= limit:
                return False
            self._described[handler] = describe(error)
            self.stopped[handler] = fault
            return True

    def stops_late(self, handler: str, error: BaseException) -> bool:
        """`stops` for a transaction that failed before other transactions of the task, which may have succeeded."""
        before = self.streaks.get(handler)
        return self.stops(handler, error) or (before is not None and before.braked)

    def require(self, handler: str, error: BaseException, transaction: Undecoded) -> bool:
        """`stops` for a transaction, but raises Braked unless this limit `defers`."""
        if not self.stops(handler, error):
            return False
        if not self.defers:
            before = self.streaks.get(handler)
            earlier = before.deaths if before and before.fault == kind_of(error) else 0
            raise self.fault(
                handler, error, transaction, max(1, self.limits[handler] + 1 - earlier)
            )
        return True

    def fault(
        self, handler: str, error: BaseException, transaction: Undecoded, failed: int
    ) -> Braked:
        """The fault that stops a handler, after `failed` transactions of the task: `transaction` is one of them."""
        return Braked(
            self._explained(handler, describe(error)),
            handler,
            kind_of(error),
            failed,
            transaction.transaction_id,
            transaction.hosts,
            first_line(error),
        )

    def explain(self, handler: str) -> str:
        """One line: why a handler is stopped, and what to do."""
        return self._explained(handler, self._described[handler])

    def _explained(self, handler: str, fault: str) -> str:
        how = f", and more than one in {_SUCCESSES_OF_ONE}," if self._gradual else " in a row"
        return (
            f"handlers.{handler}: more than {self.limits[handler]} transactions{how} failed with {fault}: no more of "
            "them are dead-lettered; mend the handler or what it needs, and relay goes on by itself; to dead-letter "
            "them all the same, raise dead_letters.brake and restart"
        )


@dataclass(frozen=True, slots=True)
class FailureRun:
    """The dead letters in a row with which a task ended for one handler: the kind of fault, and how many.

    `begins` says that the streak began in this task, so that it does not continue that of earlier tasks.
    """

    fault: str | None
    deaths: int
    begins: bool


def run_of(handler: str, indices: Iterable[int], dispositions: Dispositions) -> FailureRun:
    """The dead letters in a row at the end of the transactions, at `indices` in order, that reached a handler."""
    fault, deaths, begins = None, 0, False
    for index in indices:
        disposition = dispositions.get(index, APPLIED)
        if isinstance(disposition, Applied):
            fault, deaths, begins = None, 0, True
        elif isinstance(disposition, DeadLetter) and disposition.handler == handler:
            kind = kind_of(disposition.error)
            if fault is not None and kind != fault:
                deaths, begins = 0, True
            fault, deaths = kind, deaths + 1
    return FailureRun(fault, deaths, begins)


def store_streaks(
    conn: Connection,
    group: str,
    assigned: Assignment,
    dispositions: Dispositions,
    limit: FailureLimit,
) -> list[str]:
    """Store the streaks after a task, in the database transaction that writes its dead letters.

    Returns an explanation for each handler that is stopped now. Raises Braked if tasks that run at the same time have
    together exceeded a limit.
    """
    failed: dict[str, list[tuple[int, DeadLetter]]] = {}
    for index, disposition in dispositions.items():
        if isinstance(disposition, DeadLetter) and disposition.handler:
            failed.setdefault(disposition.handler, []).append((index, disposition))
    explanations = []
    for handler in sorted(failed.keys() | limit.streaks.keys() | limit.stopped.keys()):
        if handler not in limit.limits:
            if handler in limit.streaks:
                brakes.forget(conn, group, handler)
            continue
        reached = np.flatnonzero(assigned.reached(handler)).tolist()
        last = run_of(handler, reached, dispositions)
        stopped = limit.stopped.get(handler)
        fault = last.fault or stopped
        if fault is None:
            if last.begins:
                brakes.forget(conn, group, handler)
                _report_release(handler, limit)
            continue
        deaths = brakes.add(
            conn, group, handler, fault, last.deaths, last.begins, stopped is not None
        )
        before = limit.streaks.get(handler)
        if stopped and not (before and before.braked):
            explanations.append(limit.explain(handler))
        elif handler in failed and not stopped and deaths > limit.limits[handler]:
            index, disposition = failed[handler][-1]
            transaction = assigned.transactions[index]
            raise limit.fault(handler, disposition.error, transaction, len(failed[handler]))
    return explanations


def _report_release(handler: str, limit: FailureLimit) -> None:
    """Log that a stopped handler has succeeded: a warning, since Spark's workers print nothing below."""
    streak = limit.streaks.get(handler)
    if streak is not None and streak.braked:
        log.warning("a stopped handler goes on", extra={"handler": handler})
