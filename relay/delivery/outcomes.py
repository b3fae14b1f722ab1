"""Writes the outcomes of deliveries into the target: rows to defer, dead letters, and deferred rows to remove."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from relay.config.settings import Settings
from relay.delivery.queues import Delivery
from relay.faults import NotReceived, describe, kind_of
from relay.logs import RepeatedLines
from relay.model.batch import DeadLettered
from relay.model.dispositions import Applied, DeadLetter, Disposition, RetryLater, holds_keys
from relay.model.trace_context import trace_id
from relay.model.transactions import Undecoded
from relay.pipeline.deferral import deferral_of
from relay.pipeline.listeners import Meter
from relay.store import dead_letters, deferred
from relay.store.connections import Connection
from relay.store.deferred import Deferral

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Scheduled:
    """A transaction has an event with a later `deliver_at`: it is deferred until then, and holds no key."""

    until: datetime


Outcome = Disposition | Scheduled
"""The outcome of a delivery."""


class Recorder:
    """Writes the outcomes of one sink's deliveries. Raises psycopg.Error."""

    def __init__(self, settings: Settings, sink: str, meter: Meter) -> None:
        self._meter = meter
        self._group = settings.group
        self._sink = sink
        self._table = settings.source.table
        self._deferrals = RepeatedLines(log, logging.WARNING, "deferred", "attempts")

    def write(self, conn: Connection, outcomes: Sequence[tuple[Delivery, Outcome]]) -> None:
        """Write outcomes, in the order in which they became known, in the current database transaction."""
        deferrals: list[tuple[Undecoded, Deferral]] = []
        deferred_again: list[tuple[int, Deferral]] = []
        done: list[int] = []
        replayed: list[int] = []
        for delivery, outcome in outcomes:
            due = delivery.due
            number = due.dead_transaction if due else None
            if isinstance(outcome, DeadLetter):
                number = self._dead_letter(conn, delivery, outcome, number)
            deferral = _deferral(delivery, outcome)
            if deferral is not None:
                deferral = replace(deferral, dead_transaction=number)
            if due is None and deferral is not None:
                deferrals.append((delivery.rows, deferral))
            elif due is not None and deferral is not None:
                deferred_again.append((due.id, deferral))
            elif due is not None:
                done.append(due.id)
                if isinstance(outcome, Applied) and number is not None:
                    replayed.append(number)
        if deferrals:
            deferred.defer(conn, self._group, deferrals, self._sink)
        deferred.defer_again(conn, deferred_again)
        if replayed:
            dead_letters.mark(conn, self._group, replayed, "replayed", "replayed")
        if done:
            deferred.remove(conn, done)

    def _dead_letter(
        self, conn: Connection, delivery: Delivery, failure: DeadLetter, number: int | None
    ) -> int:
        if number is not None:
            dead_letters.mark_dead_again(conn, self._group, number, self._sink, failure.error)
            return number
        events = delivery.events.events
        number = dead_letters.insert(
            conn, self._group, events, self._sink, failure.error, self._sink
        )
        if isinstance(failure.error, NotReceived):
            dead_letters.mark_by_reference(conn, number, failure.error.offsets)
        return number

    def report(self, outcomes: Sequence[tuple[Delivery, Outcome]]) -> None:
        """Log dead letters and the faults that defer transactions, and count both. Called once they are stored."""
        dead_lettered: list[DeadLettered] = []
        for delivery, outcome in outcomes:
            if isinstance(outcome, RetryLater):
                self._deferrals.note(1, handler=self._sink, fault=describe(outcome.error))
            if not isinstance(outcome, DeadLetter):
                continue
            rows = delivery.rows
            dead = DeadLettered(
                rows.transaction_id,
                rows.commit.end_lsn,
                len(rows.tuples),
                self._sink,
                describe(outcome.error),
                trace_id(delivery.events.events),
                kind_of(outcome.error),
            )
            dead_lettered.append(dead)
            log.warning("dead letter", extra=dead.fields)
        deferred_now = sum(_deferral(*each) is not None for each in outcomes)
        self._meter.stored(self._sink, deferred_now, dead_lettered)


def _deferral(delivery: Delivery, outcome: Outcome) -> Deferral | None:
    """The deferral of a delivery; None if the transaction is not deferred."""
    if isinstance(outcome, Scheduled):
        return Deferral(delivery.keys, holds=False, until=outcome.until)
    if isinstance(outcome, Applied) or not holds_keys(outcome):
        return None
    return deferral_of(delivery.keys, outcome, delivery.history)
