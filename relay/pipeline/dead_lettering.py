"""Dead-letters transactions that cannot be applied, in the database transaction of their task."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence

from relay.config.fields import JSON_FIELDS
from relay.config.settings import Settings
from relay.faults import NotReceived, NotRouted, ProcessDied, Undecodable, describe, kind_of
from relay.model.batch import DeadLettered
from relay.model.dispositions import DeadLetter
from relay.model.events import Event
from relay.model.trace_context import trace_id
from relay.model.transactions import Transactions, Undecoded
from relay.pipeline.routing import BatchRouter
from relay.store import dead_letters
from relay.store.connections import Connection


class DeadLetterWriter:
    """Writes dead letters of the target's group. Raises psycopg.Error."""

    def __init__(self, settings: Settings, router: BatchRouter) -> None:
        self._group = settings.group
        self._table = settings.source.table
        self._max_event_bytes = settings.source.max_event_bytes
        self._router = router

    def write(
        self,
        conn: Connection,
        transaction: Undecoded,
        failure: DeadLetter,
        number: int | None = None,
        undelivered: bool = False,
    ) -> tuple[int, DeadLettered]:
        """Dead-letter a transaction; returns its number. One that was replayed keeps its `number`.

        `undelivered` says that sinks have not received it either; that always holds if it cannot be routed.
        """
        events = self._router.events(transaction)
        left_out: list[int] = []
        written = (
            self._small(events, left_out) if isinstance(failure.error, ProcessDied) else events
        )
        if number is None:
            undelivered |= isinstance(failure.error, NotRouted | Undecodable | NotReceived)
            number = dead_letters.insert(
                conn,
                self._group,
                written,
                failure.handler,
                failure.error,
                undelivered=undelivered,
            )
        else:
            dead_letters.mark_dead_again(conn, self._group, number, failure.handler, failure.error)
        if left_out:
            dead_letters.mark_by_reference(conn, number, left_out)
        return number, DeadLettered(
            transaction.transaction_id,
            transaction.commit.end_lsn,
            len(events),
            failure.handler,
            describe(failure.error),
            trace_id(events),
            kind_of(failure.error),
        )

    def write_too_large(
        self, conn: Connection, transactions: Transactions, by_reference: Collection[int]
    ) -> tuple[Transactions, list[DeadLettered]]:
        """Dead-letter the transactions with a row that was too large to be read; returns the others and the dead.

        `by_reference` are the c_offsets of such rows.
        """
        if not by_reference:
            return transactions, []
        large = {
            index: found
            for index, each in enumerate(transactions)
            if (found := large_offsets(each, self._router.events(each), by_reference))
        }
        dead = []
        for index, missing in large.items():
            failure = DeadLetter(None, not_received(self._table, missing))
            number, dead_lettered = self.write(conn, transactions[index], failure)
            dead_letters.mark_by_reference(conn, number, missing)
            dead.append(dead_lettered)
        others = transactions.take(transactions.besides(large)) if large else transactions
        return others, dead

    def _small(self, events: Iterable[Event], left_out: list[int]) -> Iterator[Event]:
        """Yield events, those above `source.max_event_bytes` without payload and metadata; appends their c_offsets.

        Writing an event of which processes died, perhaps for want of memory, must not take as much memory again.
        """
        for event in events:
            texts = (event.text(name) or "" for name in JSON_FIELDS)
            offset = event.c_offset
            if offset is None or sum(map(len, texts)) <= self._max_event_bytes:
                yield event
            else:
                left_out.append(offset)
                yield event.without(JSON_FIELDS)


def large_offsets(
    rows: Undecoded, events: Iterable[Event], by_reference: Collection[int]
) -> list[int]:
    """The c_offsets of a transaction's events that are among `by_reference`; `events` is read only if some may be."""
    if not any(rows.first_offset <= offset <= rows.last_offset for offset in by_reference):
        return []
    found = (event.c_offset for event in events)
    return [offset for offset in found if offset is not None and offset in by_reference]


def not_received(table: str, offsets: Sequence[int]) -> NotReceived:
    """The fault of a transaction with rows of `table` that were too large to be read."""
    where = f"{table}, c_offset {', '.join(map(str, offsets))}"
    return NotReceived(f"payload and metadata are too large, they are only in {where}", offsets)
