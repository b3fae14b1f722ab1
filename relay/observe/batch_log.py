"""Logs what becomes of batches: their sums every ten seconds, dead letters at once, and each batch at level debug."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Sequence
from threading import Lock

from relay.model.batch import Batch, Outcome, TaskOutcome
from relay.model.events import POSTGRES_EPOCH
from relay.pipeline.apply import Handled
from relay.pipeline.listeners import BatchListener
from relay.pipeline.settlement import log_dead
from relay.runtime.parts import Condition, Recurring

log = logging.getLogger(__name__)

SUMMARY_SECONDS = 10.0
_EPOCH = POSTGRES_EPOCH.timestamp()


class BatchLog(BatchListener):
    """Logs each batch at level debug, and at once what a task has dead-lettered or a handler is stopped for."""

    def committed(self, task: TaskOutcome) -> None:
        """Log stopped handlers and dead letters."""
        _log_failed(task, partition=_partitions([task]))

    def redelivered(self, retried: Handled) -> None:
        """Log retries, stopped handlers and dead letters."""
        _log_failed(retried)
        counts = {"transactions": retried.tried, "applied": retried.applied}
        log.debug("redelivery", extra=counts)

    def durable(self, batch: Batch, outcome: Outcome, seconds: float) -> None:
        """Log a batch."""
        if not log.isEnabledFor(logging.DEBUG):
            return
        log.debug(
            "batch",
            extra={
                "batch": batch.number,
                "engine": outcome.engine,
                "reason": outcome.reason,
                "partition": _partitions(outcome.tasks),
                "lsn": None if batch.window else str(batch.end),
                "upto": batch.window.upto if batch.window else None,
                "events": batch.events,
                "spooled": batch.spooled,
                "transactions": len(batch.transactions),
                "applied": outcome.applied,
                "skipped": outcome.skipped,
                "deferred": outcome.deferred,
                "dead": sum(dead.events for dead in outcome.dead),
                "ms": round(seconds * 1000, 1),
            },
        )


class Summary(BatchListener, Recurring):
    """Adds up batches and redeliveries; a thread of its own logs the sums every `interval` seconds.

    Safe in several threads.
    """

    def __init__(self, interval: float = SUMMARY_SECONDS) -> None:
        self._sums: Counter[str] = Counter()
        self._lag: dict[str, float | int] = {}
        self._lock = Lock()
        self._interval = interval
        super().__init__(
            Condition("summary", log, "cannot sum up batches", "batches are summed up"),
            close_seconds=1.0,
        )

    def durable(self, batch: Batch, outcome: Outcome, seconds: float) -> None:
        """Add a batch that is durable."""
        with self._lock:
            if batch.window is not None and outcome.did_nothing:
                # Other instances have these partitions, or have applied them: nothing was relayed here.
                self._sums["windows_of_others"] += 1
                self._lag = _lag(batch)
                return
            sums = self._sums
            sums["batches"] += 1
            sums["events"] += batch.events
            sums["transactions"] += len(batch.transactions)
            for task in outcome.tasks:
                sums["applied"] += task.applied
                sums["skipped"] += task.skipped
                sums["deferred"] += task.deferred
                sums["dead"] += sum(dead.events for dead in task.dead)
            self._lag = _lag(batch)

    def redelivered(self, retried: Handled) -> None:
        """Add applied transactions of `relay.deferred`."""
        with self._lock:
            self._sums["redelivered"] += retried.applied

    def turn(self) -> float:
        """Log the sums, if there are any."""
        self._log()
        self.condition.works()
        return self._interval

    def close(self) -> None:
        """Log the remaining sums and end the thread."""
        super().close()
        self._log()

    def _log(self) -> None:
        with self._lock:
            sums, self._sums = self._sums, Counter()
            lag, self._lag = self._lag, {}
        others = sums.pop("windows_of_others", 0)
        if others and not (sums["events"] or sums["redelivered"]):
            log.info(
                "other instances apply what is polled",
                extra={"windows": others, **lag, "batch": None},
            )
        elif sums["events"] or sums["redelivered"]:
            # 0 for windows: only the instances that read their rows know the transactions.
            transactions = sums["transactions"] or None
            redelivered = sums["redelivered"] or None
            # The sums belong to no batch, not even to the one that this thread works on when relay ends with a fault.
            known = {"transactions": transactions, "redelivered": redelivered, "batch": None}
            log.info("relayed", extra={**sums, **known, **lag})


def _log_failed(done: TaskOutcome | Handled, **fields: str) -> None:
    for fault in done.braked:
        log.error("a handler is stopped", extra={"fault": fault})
    log_dead(done.dead, **fields)


def _lag(batch: Batch) -> dict[str, float | int]:
    """Return the lag of a batch: the age of its last commit in seconds, or of a window the number of rows after it."""
    if batch.window is not None:
        return {"lag_rows": batch.window.left}
    if not len(batch.transactions):
        return {}
    committed = _EPOCH + int(batch.transactions.facts["ts"][-1]) / 1_000_000
    # The clock of the source may be ahead of this machine's.
    return {"lag_seconds": round(max(0.0, time.time() - committed), 3)}


def _partitions(tasks: Sequence[TaskOutcome]) -> str:
    return ",".join(str(p) for p in sorted(p for task in tasks for p in task.partitions))
