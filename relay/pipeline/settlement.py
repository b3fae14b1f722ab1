"""Settles business transactions, of the target and of sinks: stores their dispositions in the current transaction.

| disposition | a new transaction | one with a row in `relay.deferred` |
| --- | --- | --- |
| Applied | nothing is stored | the row is removed; dead letters that were replayed are marked so |
| RetryLater | is deferred, and holds its keys | is deferred again, and keeps its turn |
| Blocked | is deferred, and holds its keys | the same, unless the row holds them already: then it stays as it is |
| Scheduled | is deferred, and holds no key | |
| DeadLetter | is dead-lettered | is dead-lettered, or dead again; the row is removed |
| DeadLetter that holds | the same, and is deferred until an operator decides | the same, and the row stays |

What holds a key blocks all that come after it with that key.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from relay.config.fields import JSON_FIELDS
from relay.config.settings import Settings
from relay.faults import NotReceived, NotRouted, ProcessDied, Undecodable, describe, kind_of
from relay.logs import RepeatedLines
from relay.model.batch import DeadLetterReport
from relay.model.dispositions import (
    NEW,
    Applied,
    AttemptHistory,
    Blocked,
    DeadLetter,
    Disposition,
    RetryLater,
    Scheduled,
    is_deferred,
)
from relay.model.events import Event, Events
from relay.model.trace_context import trace_id
from relay.model.transactions import Undecoded
from relay.store import dead_letters, deferred
from relay.store.connections import Connection
from relay.store.dead_letters import NewDeadTransaction
from relay.store.deferred import Deferral
from relay.store.deferred.due import DueTransaction

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Unsettled:
    """A transaction, or a sink's part of one, and what became of it.

    `rows` are stored if it is deferred, `events` if it is dead-lettered. `due` is its row if it was deferred before. A
    new one that is deferred gets the ordering `keys`. Of several endpoints it concerns `endpoint` alone, as a part of
    the row `part_of` if that is divided here: it is stored only where that row still exists, since it may be cancelled.
    """

    rows: Undecoded
    events: Events
    disposition: Disposition
    keys: Collection[str] = ()
    before: AttemptHistory = NEW
    due: DueTransaction | None = None
    endpoint: str | None = None
    part_of: DueTransaction | None = None


class Settlement:
    """Stores what became of the transactions of a sink or, if that is '', of the target. Raises psycopg.Error."""

    def __init__(self, settings: Settings, sink: str = "") -> None:
        self._group = settings.group
        self._sink = sink
        self._max_event_bytes = settings.source.max_event_bytes
        self._lines = RepeatedLines(log, logging.WARNING, "deferred", "attempts")

    def store(self, conn: Connection, unsettled: Iterable[Unsettled]) -> list[DeadLetterReport]:
        """Store what became of transactions; returns those that were dead-lettered.

        New ones are deferred in the order of `unsettled`, which is the order of their retries.
        """
        settled = list(unsettled)
        numbers = self._dead_letter(conn, settled)
        new: list[tuple[Unsettled, Deferral]] = []
        again: list[tuple[int, Deferral]] = []
        done: dict[int, Unsettled] = {}
        replayed: list[int] = []
        for index, each in enumerate(settled):
            due, disposition = each.due, each.disposition
            number = numbers.get(index, due.dead_transaction if due else None)
            deferral = _deferral(each)
            if deferral is not None:
                deferral = replace(
                    deferral,
                    dead_transaction=number,
                    endpoint=each.endpoint,
                    resent_by=each.part_of.resent_by if each.part_of else None,
                )
            if due is None:
                if deferral is not None:
                    ids = deferred.ids_of(each.rows, each.events.decoder)
                    new.append((each, replace(deferral, event_ids=ids)))
            elif deferral is None:
                done[due.id] = each
                if isinstance(disposition, Applied) and number is not None:
                    replayed.append(number)
            elif not isinstance(disposition, Blocked) or not due.holds:
                again.append((due.id, deferral))
        if replayed:
            dead_letters.mark(conn, self._group, replayed, "replayed", "replayed")
        deferred.defer_again(conn, again)
        gone = done.keys() - deferred.remove(conn, done) if done else set()
        divided = {each.part_of.id for each, _ in new if each.part_of}
        self._note_delivered(conn, [done[number] for number in gone - divided])
        parts = [
            (each.rows, deferral)
            for each, deferral in new
            if each.part_of is None or each.part_of.id not in gone
        ]
        if parts:
            deferred.defer(conn, self._group, parts, self._sink)
        return [
            _report(each, each.disposition)
            for each in settled
            if isinstance(each.disposition, DeadLetter)
        ]

    def _note_delivered(self, conn: Connection, gone: Sequence[Unsettled]) -> None:
        """Tell of transactions whose rows somebody has deleted while they were delivered: they have arrived."""
        arrived = [each for each in gone if isinstance(each.disposition, Applied)]
        if not arrived:
            return
        log.warning(
            "deliveries that were in flight arrived although they were cancelled",
            extra={"handler": self._sink, "transactions": len(arrived)},
        )
        ids = [deferred.ids_of(each.rows, each.events.decoder) or () for each in arrived]
        deferred.note_delivered(conn, self._group, self._sink, [*chain(*ids)])

    def _dead_letter(self, conn: Connection, unsettled: Sequence[Unsettled]) -> dict[int, int]:
        """Dead-letter those that are to be; returns the numbers of the new dead transactions, by index.

        One that was replayed keeps its number.
        """
        new: dict[int, NewDeadTransaction] = {}
        again: list[tuple[int, str | None, BaseException, int]] = []
        for index, each in enumerate(unsettled):
            failure = each.disposition
            if not isinstance(failure, DeadLetter):
                continue
            if each.due is not None and each.due.dead_transaction is not None:
                number = each.due.dead_transaction
                again.append((number, failure.handler, failure.error, failure.attempts))
            else:
                new[index] = self._new_dead(each, failure)
        if again:
            dead_letters.mark_dead_again(conn, self._group, again)
        if not new:
            return {}
        numbers = dead_letters.insert(conn, self._group, list(new.values()), self._sink)
        return dict(zip(new, numbers, strict=True))

    def _new_dead(self, each: Unsettled, failure: DeadLetter) -> NewDeadTransaction:
        error, due = failure.error, each.due
        left_out: set[int] = set()
        events: Iterable[Event] = each.events
        if isinstance(error, ProcessDied):
            events = self._small(events, left_out)
        elif isinstance(error, NotReceived):
            left_out.update(error.offsets)
        # What could not be received, decoded or routed has not reached the sinks either. A sink's dead letters are
        # replayed to it alone.
        undelivered = not self._sink and (
            (due is not None and due.undelivered)
            or isinstance(error, NotRouted | Undecodable | NotReceived)
        )
        return NewDeadTransaction(
            events,
            failure.handler,
            error,
            undelivered,
            left_out,
            failure.attempts,
            each.endpoint,
        )

    def _small(self, events: Iterable[Event], left_out: set[int]) -> Iterator[Event]:
        """Yield events, those above `source.max_event_bytes` without payload and metadata; adds their c_offsets.

        Writing an event of which processes died, perhaps for want of memory, must not take as much memory again.
        """
        for event in events:
            texts = (event.text(name) or "" for name in JSON_FIELDS)
            offset = event.c_offset
            if offset is None or sum(map(len, texts)) <= self._max_event_bytes:
                yield event
            else:
                left_out.add(offset)
                yield event.without(JSON_FIELDS)

    def log_retries(self, dispositions: Iterable[Disposition]) -> None:
        """Log each handler and fault for which transactions are retried later, with their number."""
        faults = Counter(
            (disposition.handler, describe(disposition.error))
            for disposition in dispositions
            if isinstance(disposition, RetryLater)
        )
        for (handler, fault), attempts in faults.items():
            self._lines.note(attempts, handler=handler, fault=fault)


def log_dead(dead: Iterable[DeadLetterReport], **fields: object) -> None:
    """Log the transactions that were dead-lettered, once that is stored, in lines that have more `fields`."""
    for each in dead:
        log.warning("dead letter", extra={**fields, **each.fields})


def _deferral(each: Unsettled) -> Deferral | None:
    """The deferral of a transaction: until its retry or its time, or while it is blocked; None if its keys are free."""
    disposition, before = each.disposition, each.before
    if isinstance(disposition, Scheduled):
        return Deferral(each.keys, holds=False, until=disposition.until)
    if isinstance(disposition, Blocked):
        return Deferral(each.keys, attempts=before.attempts, failing_seconds=before.failing_seconds)
    if isinstance(disposition, Applied) or not is_deferred(disposition):
        return None
    return Deferral(
        each.keys,
        after=disposition.after if isinstance(disposition, RetryLater) else 0.0,
        blocked=isinstance(disposition, DeadLetter),
        attempts=disposition.attempts,
        failing_seconds=before.failing_seconds or 0.0,
        handler=disposition.handler,
        reason=describe(disposition.error),
    )


def _report(each: Unsettled, failure: DeadLetter) -> DeadLetterReport:
    return DeadLetterReport(
        each.rows.transaction_id,
        each.rows.commit.end_lsn,
        len(each.events),
        failure.handler,
        describe(failure.error),
        trace_id(each.events),
        kind_of(failure.error),
    )
