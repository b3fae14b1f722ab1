"""Counts what each engine applies, and stores the counts every few seconds."""

from __future__ import annotations

import logging
from collections import Counter
from threading import Event, Lock

import psycopg

from relay.faults import describe
from relay.model.batch import Batch, Outcome
from relay.store import engines
from relay.store.connections import connect
from relay.threads import Thread

log = logging.getLogger(__name__)

STORE_SECONDS = 5.0
"""How often counts are stored at most."""


class EngineCounts:
    """Adds up what is applied by engine and reason; a thread of its own stores it in `relay.engines`.

    What cannot be stored is stored later; what is not stored when the process dies is not counted.
    """

    def __init__(self, dsn: str, group: str, interval: float = STORE_SECONDS) -> None:
        self._dsn = dsn
        self._group = group
        self._interval = interval
        self._batches: Counter[tuple[str, str]] = Counter()
        self._events: Counter[tuple[str, str]] = Counter()
        self._transactions: Counter[tuple[str, str]] = Counter()
        self._lock = Lock()
        self._noted = Event()
        self._closing = Event()
        self._thread = Thread(target=self._run, name="engines", daemon=True)

    def start(self) -> None:
        """Begin to store."""
        self._thread.start()

    def note(self, batch: Batch, outcome: Outcome) -> None:
        """Add a batch that is durable."""
        key = (outcome.engine, outcome.reason)
        with self._lock:
            self._batches[key] += 1
            self._events[key] += batch.events
            self._transactions[key] += _transactions(batch)
        self._noted.set()

    def close(self) -> None:
        """Store what is left and end."""
        self._closing.set()
        self._noted.set()
        if self._thread.is_alive():
            self._thread.join()
        self._store()

    def _run(self) -> None:
        while not self._closing.is_set():
            self._noted.wait()
            if not self._closing.wait(self._interval):
                self._store()

    def _store(self) -> None:
        with self._lock:
            batches, self._batches = self._batches, Counter()
            events, self._events = self._events, Counter()
            transactions, self._transactions = self._transactions, Counter()
            self._noted.clear()
        if not batches:
            return
        try:
            with connect(self._dsn) as conn:
                counts = {key: (batches[key], events[key], transactions[key]) for key in batches}
                engines.add(conn, self._group, counts)
        except psycopg.Error as error:
            log.debug("cannot store the counts of the engines", extra={"fault": describe(error)})
            with self._lock:
                self._batches.update(batches)
                self._events.update(events)
                self._transactions.update(transactions)
            self._noted.set()


def _transactions(batch: Batch) -> int:
    """Business transactions; of polled rows database transactions, since only those who read them know the others."""
    if batch.window is None:
        return len(batch.transactions)
    return sum(len(share.xids) for share in batch.window.shares)
