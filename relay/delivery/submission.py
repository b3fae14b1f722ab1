"""Makes deliveries of transactions, of the log or deferred ones, and submits them in order."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from datetime import datetime

from relay.delivery.checkpoint import Checkpoint, SinkContext
from relay.delivery.dispatch import Dispatcher
from relay.delivery.order import Delivery
from relay.delivery.progress import SinkCommit
from relay.model.dispositions import AttemptHistory, DeadLetter, Scheduled
from relay.model.events import Event, Events, Row
from relay.model.headers import RESEND
from relay.model.transactions import ColumnDecoder, Routed, Transactions
from relay.pipeline.deferral import Ordering, to_defer
from relay.pipeline.routing import BatchRouter
from relay.source.outbox.rows import not_received
from relay.store import deferred
from relay.store.deferred import due as deferred_due
from relay.store.deferred.due import DueTransaction

log = logging.getLogger(__name__)

RETRIED_AT_ONCE = 200
"""How many retries may be in memory, of at most `sinks.attach_bytes` but for one; the others stay in the table."""


class _Resent:
    """Decodes the rows of a delivery that is made again: each event has the header that says so."""

    def __init__(self, decoder: ColumnDecoder, number: int) -> None:
        self._decoder = decoder
        self._mark = {RESEND: str(number)}
        self.columns = decoder.columns

    def event(self, data: bytes, commit_fields: Row) -> Event:
        """Decode one row."""
        event = self._decoder.event(data, commit_fields)
        return Event(event.row, {**event.headers, **self._mark})


class Submission:
    """Submits the deliveries of one sink to its dispatcher. For one event loop."""

    def __init__(
        self,
        context: SinkContext,
        router: BatchRouter,
        checkpoint: Checkpoint,
        dispatcher: Dispatcher,
    ) -> None:
        self._context = context
        self._router = router
        self._checkpoint = checkpoint
        self._dispatcher = dispatcher
        self._ordering = Ordering({context.name: context.settings.handlers[context.name]})

    async def submit(
        self, routed: Routed, commits: Sequence[SinkCommit], large: Collection[int] = ()
    ) -> None:
        """Submit transactions in order, each when there is room; `commits` has the commit of each.

        `large` are the c_offsets of rows that were too large to be read: their transactions are dead-lettered.
        """
        transactions, table = routed.transactions, self._context.settings.source.table
        later = await self._scheduled(transactions)
        keys = self._ordering.delivery_keys(self._context.name, routed)
        await self._query_held(keys)
        dispatcher = self._dispatcher
        for index, (rows, events) in enumerate(routed.pairs()):
            delivery = Delivery(rows, events, keys[index], commits[index])
            if large and (fault := not_received(rows, events.events, large, table)):
                dispatcher.end(delivery, DeadLetter(self._context.name, fault))
            elif index in later:
                dispatcher.end(delivery, Scheduled(later[index]))
            else:
                await dispatcher.wait_for_room()
                dispatcher.submit(delivery)

    async def _scheduled(self, transactions: Transactions) -> dict[int, datetime]:
        """The transactions with an event for later, by index, with the time until which each is deferred."""
        times = self._router.delivery_times(transactions)
        if not times:
            return {}
        return await self._context.connections.in_target(
            to_defer, self._router, transactions, times
        )

    async def _query_held(self, keys: Iterable[frozenset[str]]) -> None:
        """Query which of the keys deferred transactions hold."""
        held, context = self._dispatcher.held, self._context
        if not held.any:
            return
        asked = frozenset[str]().union(*keys)
        # First, since the query misses a delivery that fails during the flush.
        held.begin_query()
        if self._checkpoint.has_unstored_keys:
            await self._checkpoint.flush()
        if asked:
            found = await context.connections.in_target(
                deferred.held, context.group, context.name, asked
            )
            held.end_query(found, asked)

    async def retry(self) -> None:
        """Deliver deferred transactions when they are due; runs until it is cancelled."""
        while True:
            if await self._retry_some():
                continue
            await self._checkpoint.may_be_due.wait()
            self._checkpoint.may_be_due.clear()

    async def _retry_some(self) -> bool:
        context, retried = self._context, self._checkpoint.retried
        limit, size = self._room()
        if self._dispatcher.is_paused or not limit:
            return False
        due = await context.connections.in_target(
            deferred_due.heads, context.group, context.name, limit, size, tuple(retried)
        )
        if not due:
            await self._forget_outage()
            if self._dispatcher.held.any and not (retried or self._checkpoint.has_unstored):
                await self._refresh_held()
            return False
        # An operator may have replayed dead letters, which hold keys again.
        self._dispatcher.held.any = True
        # All are read before any is submitted: one that fails meanwhile would not block a later one with its keys.
        deliveries = [each for run in deferred_due.runs(due) for each in await self._read(run)]
        for each in deliveries:
            # Not after `wait_for_room`: later deliveries with the same keys may fill it, and only be deferred.
            self._dispatcher.submit(each)
        return True

    async def _read(self, due: Sequence[DueTransaction]) -> list[Delivery]:
        """Read deferred transactions of one table layout."""
        limits, retried = self._context.settings.batch, self._checkpoint.retried
        transactions = await self._context.connections.in_target(
            deferred_due.transactions, due, limits.max_bytes, limits.spool_directory
        )
        decoder = self._router.decoder(transactions.columns)
        deliveries: list[Delivery] = []
        for each, (rows, events) in zip(due, Routed(transactions, decoder).pairs(), strict=True):
            retried[each.id] = each.size
            history = AttemptHistory.of(each.attempts, each.failing_seconds)
            keys = frozenset(each.keys)
            if each.resent_by is not None:
                marked = _Resent(decoder, each.id)
                events = replace(events, events=Events(rows.tuples, marked, rows.commit))
            deliveries.append(
                Delivery(rows, events, keys, due=each, history=history, endpoint=each.endpoint)
            )
        return deliveries

    def _room(self) -> tuple[int, int]:
        """How many more retries may be in memory, and of how many bytes; 0 while less than half of the room is free."""
        retried, most = self._checkpoint.retried, self._context.settings.sinks.attach_bytes
        if self._dispatcher.breaker.is_open:
            # Only one at a time may be the trial.
            return (0 if retried else 1), most
        limit, size = RETRIED_AT_ONCE - len(retried), most - sum(retried.values())
        return (limit, size) if limit * 2 >= RETRIED_AT_ONCE and size * 2 >= most else (0, 0)

    async def _forget_outage(self) -> None:
        """Let the destination count as unknown, not as down, once nothing is left to try, such as after a cancellation.

        Where nothing is published, no delivery would ever tell that it is there again.
        """
        dispatcher, checkpoint, context = self._dispatcher, self._checkpoint, self._context
        if (
            not dispatcher.breaker.is_open
            or dispatcher.count
            or checkpoint.retried
            or checkpoint.has_unstored
            or await context.connections.in_target(
                deferred.any_deferred, context.group, context.name
            )
            or dispatcher.count
        ):
            return
        dispatcher.breaker.forget()
        log.info(
            "the circuit breaker is closed, since nothing is left to deliver",
            extra={"handler": context.name},
        )

    async def _refresh_held(self) -> None:
        """Release all keys if no deferred transaction holds one."""
        held, context = self._dispatcher.held, self._context
        before = held.deferred
        if await context.connections.in_target(deferred.any_held, context.group, context.name):
            return
        if held.deferred != before:
            return
        held.release()
        if not self._checkpoint.lags:
            self._dispatcher.defer_new(False)
