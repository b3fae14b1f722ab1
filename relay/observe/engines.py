"""Counts what each engine applies, and stores the counts every five seconds."""

from __future__ import annotations

import logging
from collections import Counter
from threading import Lock

from relay.faults import describe
from relay.model.batch import Batch, Outcome
from relay.pipeline.listeners import BatchListener
from relay.runtime.parts import Condition, Recurring
from relay.store import activity
from relay.store.connections import Dsn, asking

log = logging.getLogger(__name__)

STORE_SECONDS = 5.0
"""Shortest interval between two writes of the counts."""


class EngineCounts(BatchListener, Recurring):
    """Counts batches, events and transactions by engine and reason; a thread of its own adds them to `relay.engines`.

    Counts that cannot be stored are stored later; those of a process that dies are lost.
    """

    def __init__(self, dsn: Dsn, group: str) -> None:
        super().__init__(
            Condition(
                "counts of the engines",
                log,
                "cannot write counts of the engines",
                "counts of the engines are written again",
                level=logging.DEBUG,
            ),
            close_seconds=STORE_SECONDS,
        )
        self._dsn = dsn
        self._group = group
        self._batches: Counter[tuple[str, str]] = Counter()
        self._events: Counter[tuple[str, str]] = Counter()
        self._transactions: Counter[tuple[str, str]] = Counter()
        self._lock = Lock()

    def durable(self, batch: Batch, outcome: Outcome, seconds: float) -> None:
        """Add a batch that is durable."""
        key = (outcome.engine, outcome.reason)
        with self._lock:
            self._batches[key] += 1
            self._events[key] += batch.events
            self._transactions[key] += _transactions(batch)

    def turn(self) -> float:
        """Store the counts, if there are any."""
        self._store()
        self.condition.works()
        return STORE_SECONDS

    def close(self) -> None:
        """Store the remaining counts and end the thread."""
        super().close()
        try:
            self._store()
        except Exception as error:
            self.condition.fails(describe(error))

    def _store(self) -> None:
        with self._lock:
            batches, self._batches = self._batches, Counter()
            events, self._events = self._events, Counter()
            transactions, self._transactions = self._transactions, Counter()
        if not batches:
            return
        try:
            with asking(self._dsn) as conn:
                counts = {key: (batches[key], events[key], transactions[key]) for key in batches}
                activity.add_batches(conn, self._group, counts)
        except BaseException:
            with self._lock:
                self._batches.update(batches)
                self._events.update(events)
                self._transactions.update(transactions)
            raise


def _transactions(batch: Batch) -> int:
    """Return how many business transactions a batch has; of a window, whose rows are unread, database transactions."""
    if batch.window is None:
        return len(batch.transactions)
    return sum(len(share.xids) for share in batch.window.shares)
