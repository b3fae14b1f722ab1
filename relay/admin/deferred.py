"""Runs, moves and cancels deferred transactions, while relay runs: `relay deferred`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from datetime import datetime
from itertools import groupby

from relay.config.settings import Settings
from relay.faults import Cancelled, ConfigurationError, exception_text
from relay.pipeline.routing import BatchRouter
from relay.store import (
    actions,
    dead_letters,
    deferred,
    presence,
)
from relay.store.connections import Connection
from relay.store.dead_letters import NewDeadTransaction
from relay.store.deferred import due as deferred_due
from relay.store.deferred import selection as deferred_selection
from relay.store.deferred.due import DueTransaction
from relay.store.deferred.selection import FoundDeferred
from relay.store.filters import DeferredSelection
from relay.store.literals import storable
from relay.store.positions import sinks

_CANCELLED_AT_ONCE = 500
_ALL = 1 << 62
_ANY = DeferredSelection()


class DeferredTransactions:
    """The deferred transactions of the configured group, on an open connection to the target."""

    def __init__(self, settings: Settings, conn: Connection) -> None:
        self._group = settings.group
        self._sinks = settings.sink_handlers.keys()
        self._batch = settings.batch
        self._router = BatchRouter(settings)
        self._conn = conn

    def find(self, wanted: DeferredSelection) -> FoundDeferred:
        """Find the transactions that a filter selects now."""
        return deferred_selection.find(self._conn, self._group, wanted)

    def with_event(self, wanted: DeferredSelection, event_id: str) -> DeferredSelection:
        """Return a filter for those of the selected transactions that have an event with this id.

        Raises ConfigurationError if none has it.
        """
        ids = self.having(event_id, wanted)
        if not ids:
            raise ConfigurationError(
                f"event {event_id} is not deferred, or the filters leave it out: `relay event {event_id}` shows where "
                "it is"
            )
        return wanted.model_copy(update={"ids": ids})

    def having(
        self, event_id: str, wanted: DeferredSelection = _ANY, offset: int | None = None
    ) -> list[int]:
        """Return the ids of the selected transactions that have an event with this id.

        Looks it up in an index; reads the rows only of those that are not in it and, with an `offset`, may have the row
        of the outbox with this c_offset.
        """
        key = storable(self._conn, deferred.event_key(event_id))
        indexed = deferred_selection.listed(self._conn, self._group, wanted, _ALL, event=key)
        ids = [each.id for each in indexed]
        with self._conn.transaction():
            due = deferred_selection.without_ids(self._conn, self._group, wanted, offset)
            for run in deferred_due.runs(due):
                transactions = deferred_due.transactions(
                    self._conn, run, self._batch.max_bytes, self._batch.spool_directory
                )
                ids += [
                    each.id
                    for each, transaction in zip(run, transactions, strict=True)
                    if any(
                        event.text("id") == event_id for event in self._router.events(transaction)
                    )
                ]
        return ids

    def idle(self, due: Mapping[str, int]) -> list[str]:
        """Return lines about due transactions, counted by sink ('' is the target), that no instance retries now."""
        stored = sinks.read(self._conn, self._group, self._sinks)
        missing = [name for name in due if name and name not in self._sinks]
        paused = [each.sink for each in stored if each.state == "paused" and each.sink in due]
        lines = [
            f"{due[name]} of them go to sink {name}, which is not configured any more: put it back, or give them up "
            f"with `relay deferred cancel --sink {name}`"
            for name in missing
        ]
        lines += [
            f"{due[name]} of them go to sink {name}, which is paused: they are tried after `relay sink resume {name}`"
            for name in paused
        ]
        running = presence.instances(self._conn, self._group)
        if due.keys() - {*missing, *paused} and not running:
            lines.append(
                f"no instance of group {self._group!r} is running: they are tried when one starts"
            )
        return lines

    def run(self, selected: FoundDeferred, reason: str | None) -> dict[str, int]:
        """Make transactions due now, in their order, whatever their time is; returns how many of each sink."""
        with self._conn.transaction():
            due = deferred_selection.make_due(self._conn, self._group, selected)
            self._record("deferred run", due, selected, reason)
        return due

    def move(self, selected: FoundDeferred, to: datetime, reason: str | None) -> dict[str, int]:
        """Move scheduled transactions to another time; returns how many of each sink.

        One of the target is either moved or was applied before, and does not count. One of a sink whose time has come
        may be in flight: it is not moved.
        """
        with self._conn.transaction():
            if not selected.wanted.sink:
                # A transaction that is being applied to the target is waited for.
                deferred.lock(self._conn, self._group)
            moved = deferred_selection.move(self._conn, self._group, selected, to)
            self._record("deferred move", moved, selected, reason, to=to.isoformat())
        return moved

    def cancel(self, selected: FoundDeferred, reason: str | None) -> int:
        """Cancel transactions: they become dead letters, which can be replayed. Returns how many.

        They no longer block later transactions with their keys. Each portion is one database transaction. A delivery in
        flight may still arrive at its sink.
        """
        cancelled = 0
        while (count := self._cancel_portion(selected, reason)) is not None:
            cancelled += count
        return cancelled

    def _cancel_portion(self, selected: FoundDeferred, reason: str | None) -> int | None:
        with self._conn.transaction():
            if not selected.wanted.sink:
                # A transaction that is being applied to the target must not become a dead letter, too.
                deferred.lock(self._conn, self._group)
            chosen = deferred_selection.oldest(
                self._conn, self._group, selected, _CANCELLED_AT_ONCE
            )
            if not chosen:
                return None
            error = Cancelled(f"cancelled by {self._user()}: {reason or 'no reason given'}")
            cancelled = Counter[str]()
            for (sink, _), alike in groupby(chosen, key=lambda each: (each[0], each[1].columns)):
                cancelled[sink] += self._dead_letter(sink, [due for _, due in alike], error, reason)
            self._record("deferred cancel", cancelled, selected, reason)
        return cancelled.total()

    def _dead_letter(
        self, sink: str, due: list[DueTransaction], error: Cancelled, reason: str | None
    ) -> int:
        """Dead-letter transactions with the same columns that are still deferred; returns how many."""
        transactions = deferred_due.transactions(
            self._conn, due, self._batch.max_bytes, self._batch.spool_directory
        )
        removed = deferred.remove(self._conn, [each.id for each in due])
        new: list[NewDeadTransaction] = []
        replayed: list[int] = []
        for each, transaction in zip(due, transactions, strict=True):
            if each.id not in removed:
                continue
            if each.dead_transaction is None:
                events = self._router.events(transaction)
                new.append(
                    NewDeadTransaction(
                        events,
                        sink or each.handler,
                        error,
                        each.undelivered,
                        attempts=each.attempts,
                        endpoint=each.endpoint,
                    )
                )
            else:
                replayed.append(each.dead_transaction)
        if new:
            numbers = dead_letters.insert(self._conn, self._group, new, sink)
            dead_letters.note(self._conn, self._group, numbers, "cancel", reason)
        if replayed:
            dead_letters.put_back(self._conn, self._group, replayed, exception_text(error), reason)
        return len(removed)

    def _user(self) -> str:
        ((user,),) = self._conn.execute(f"select {actions.WHO}").fetchall()
        return str(user)

    def _record(
        self,
        action: str,
        transactions: dict[str, int],
        selected: FoundDeferred,
        reason: str | None,
        **more: str,
    ) -> None:
        for sink, count in transactions.items():
            if not count:
                continue
            detail = {"transactions": count, "filter": selected.wanted.given(), **more}
            actions.record(self._conn, self._group, sink, action, reason, detail)
