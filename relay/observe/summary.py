"""Logs one line every ten seconds with the sums of batches and redeliveries, if there were any."""

from __future__ import annotations

import logging
import time
from collections import Counter
from threading import Lock

from relay.model.batch import Batch, Outcome
from relay.model.events import POSTGRES_EPOCH
from relay.observe.flushing import FlushThread

log = logging.getLogger(__name__)

SUMMARY_SECONDS = 10.0
_EPOCH = POSTGRES_EPOCH.timestamp()


class Summary:
    """Adds up batches and redeliveries; a thread of its own logs the sums every `interval` seconds.

    Safe in several threads.
    """

    def __init__(self, interval: float = SUMMARY_SECONDS) -> None:
        self._sums: Counter[str] = Counter()
        self._lag: dict[str, float | int] = {}
        self._lock = Lock()
        self._thread = FlushThread(self._log, "summary", interval)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def note(self, batch: Batch, outcome: Outcome) -> None:
        """Add a batch that is durable."""
        with self._lock:
            if batch.window is not None and outcome.did_nothing:
                # Other instances have these partitions, or have applied them: nothing was relayed here.
                self._sums["windows_of_others"] += 1
                self._lag = _lag(batch)
                self._thread.note()
                return
            self._sums.update(
                batches=1,
                events=batch.events,
                transactions=len(batch.transactions),
                applied=outcome.applied,
                skipped=outcome.skipped,
                deferred=outcome.deferred,
                dead=sum(dead.events for dead in outcome.dead),
            )
            self._lag = _lag(batch)
        self._thread.note()

    def note_redelivered(self, transactions: int) -> None:
        """Add applied transactions of `relay.deferred`."""
        if transactions:
            with self._lock:
                self._sums["redelivered"] += transactions
            self._thread.note()

    def close(self) -> None:
        """Log the remaining sums and end the thread."""
        self._thread.close()

    def _log(self) -> None:
        with self._lock:
            sums, self._sums = self._sums, Counter()
            lag, self._lag = self._lag, {}
            self._thread.clear()
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


def _lag(batch: Batch) -> dict[str, float | int]:
    """Return the lag of a batch: the age of its last commit in seconds, or of a window the number of rows after it."""
    if batch.window is not None:
        return {"lag_rows": batch.window.left}
    if not len(batch.transactions):
        return {}
    committed = _EPOCH + int(batch.transactions.facts["ts"][-1]) / 1_000_000
    # The clock of the source may be ahead of this machine's.
    return {"lag_seconds": round(max(0.0, time.time() - committed), 3)}
