"""Decides which transactions are deferred instead of applied: scheduled ones, and those that a held key blocks."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from datetime import datetime
from itertools import islice

import numpy as np

from relay.config.effects import Effects
from relay.config.handlers import HandlerSettings, HttpHandler, SinkHandler
from relay.config.settings import Settings
from relay.model.dispositions import BLOCKED, Dispositions, Scheduled
from relay.model.keys import of_endpoint, of_host, of_values
from relay.model.transactions import Routed, Transactions, Undecoded, text
from relay.pipeline.routing import Assignment, BatchRouter, Parts
from relay.store import clock, dead_letters, deferred
from relay.store.connections import Connection
from relay.store.deferred import Deferral
from relay.store.deferred import due as deferred_due
from relay.store.positions import sinks

log = logging.getLogger(__name__)

_REKEYED_AT_ONCE = 1_000


class Ordering:
    """Finds the ordering keys of a transaction: the values of `order_by` of the handlers of its events.

    Two transactions with a common key stay in order. A key begins with the host and a space: `relay.lock_positions`
    finds the keys of a host by that prefix.
    """

    def __init__(self, configured: dict[str, HandlerSettings]) -> None:
        # A handler that is not reliable neither blocks transactions nor is blocked.
        self._order_by = {
            name: handler.order_by if handler.reliable else "none"
            for name, handler in configured.items()
        }
        self._sinks = {name for name, each in configured.items() if isinstance(each, SinkHandler)}

    def keys(self, parts: Parts) -> frozenset[str]:
        """The ordering keys of all handlers in `parts`, together."""
        return frozenset[str]().union(
            *(keys for name, routed in parts.items() for keys in self.delivery_keys(name, routed))
        )

    def transactional_keys(self, parts: Parts) -> frozenset[str]:
        """The ordering keys of the transactional handlers in `parts`."""
        return self.keys({name: each for name, each in parts.items() if name not in self._sinks})

    def delivery_keys(self, name: str, routed: Routed) -> list[frozenset[str]]:
        """The ordering keys of one handler for each of the transactions that are routed to it, in order."""
        order_by, transactions = self._order_by[name], routed.transactions
        if order_by == "none":
            return [frozenset()] * len(transactions)
        if order_by == "host":
            hosts = transactions.hosts
            of_hosts = {
                index: frozenset(map(of_host, hosts[index])) for index in transactions.touching
            }
            return [of_hosts[index] for index in transactions.facts["hosts"].tolist()]
        keys = _keys_of_events(order_by, routed.values(("host_id", *_FIELDS[order_by])))
        return [frozenset(islice(keys, events)) for events in transactions.facts["events"].tolist()]


_FIELDS = {
    "user": ("user_id",),
    "aggregate": ("aggregate_type", "aggregate_id"),
}


def _keys_of_events(kind: str, events: Iterable[tuple[bytes | None, ...]]) -> Iterator[str]:
    """The key of each event, of its host and some other fields."""
    before: tuple[bytes | None, ...] | None = None
    key = ""
    for values in events:
        # Events of a transaction often have one key.
        if values != before:
            host, *fields = ("" if value is None else text(value) for value in values)
            key, before = of_values(kind, host, fields), values
        yield key


def to_defer(
    conn: Connection, router: BatchRouter, transactions: Transactions, times: Mapping[int, datetime]
) -> dict[int, datetime]:
    """Those of the transactions with a time of delivery, by index, that are deferred until it.

    These are those whose time is still to come, and those that somebody has asked to cancel: they are deleted when they
    are due.
    """
    if not times:
        return {}
    later = clock.ahead(conn, times)
    decoder = router.decoder(transactions.columns)
    ids = {
        index: deferred.ids_of(transactions.part(index, index + 1)[0], decoder) or ()
        for index in times
        if index not in later
    }
    return later | {index: times[index] for index in deferred.cancelled(conn, ids)}


class DeferralRules:
    """Finds the new transactions that are deferred. Used under the lock of their partitions' offsets."""

    def __init__(self, settings: Settings, router: BatchRouter) -> None:
        self._group = settings.group
        self._router = router
        self._ordering = Ordering(settings.handlers)
        self._sinks = list(settings.sink_handlers)
        self._spark_sinks = list(settings.spark_handlers)
        self._with_ids = {
            name
            for name, each in settings.handlers.items()
            if isinstance(each, HttpHandler) and each.has_ids
        }

    def keys(self, assigned: Assignment, index: int) -> frozenset[str]:
        """The ordering keys of the transaction at an index for transactional handlers; empty if it is refused."""
        return self._ordering.transactional_keys(assigned.part(index, index + 1).parts)

    def delivery_keys(
        self, one: Transactions, sink: str, endpoint: str | None = None
    ) -> frozenset[str]:
        """The ordering keys of a single delivery; `one` has only the events that go to the sink, or to its endpoint."""
        (keys,) = self._ordering.delivery_keys(sink, self._router.whole(one))
        return of_endpoint(keys, endpoint if sink in self._with_ids else None)

    def deliveries(self, one: Assignment) -> Iterator[tuple[str, Undecoded, Deferral]]:
        """Yield each sink of a single transaction, with its part and a deferral that is due now."""
        for name in self._sinks:
            if name in one.parts:
                delivery = one.parts[name].transactions
                rows, decoder = delivery[0], self._router.decoder(delivery.columns)
                ids = deferred.ids_of(rows, decoder)
                yield name, rows, Deferral(self.delivery_keys(delivery, name), event_ids=ids)

    def pass_on(
        self,
        conn: Connection,
        assigned: Assignment,
        dispositions: Dispositions,
        due: Sequence[deferred_due.DueTransaction],
    ) -> None:
        """Defer, for each of their sinks, what the target has applied of replayed transactions that no sink has had.

        Their workers deliver them in order. A Spark sink that has still to read one from the outbox reads it there, by
        the routes of now; it has left out those that were dead when it came to them. One whose payload was edited it
        gets from here, and leaves out of what it reads.
        """
        replayed = {
            index: each.dead_transaction
            for index, each in enumerate(due)
            if each.undelivered and index not in dispositions
        }
        if not replayed:
            return
        # Locked before the positions are read: a Spark sink locks them while it decides what it leaves out.
        numbers = [number for number in replayed.values() if number is not None]
        as_published = dead_letters.lock_as_published(conn, numbers)
        ranges = sinks.read_ranges(conn, self._group, self._spark_sinks)
        by_sink: dict[str, list[tuple[Undecoded, Deferral]]] = {}
        unread: dict[str, list[int]] = {}
        for index, number in replayed.items():
            xid = int(assigned.transactions.facts["xid"][index])
            for sink, delivery, deferral in self.deliveries(assigned.part(index, index + 1)):
                known = ranges.get(sink)
                full = known.unread(xid) if known is not None and xid else None
                if full is not None:
                    if number in as_published:
                        continue
                    unread.setdefault(sink, []).append(full)
                by_sink.setdefault(sink, []).append((delivery, deferral))
        if unread:
            sinks.add_done(conn, self._group, unread)
        for sink, deliveries in by_sink.items():
            deferred.defer(conn, self._group, deliveries, sink)

    def split(
        self, conn: Connection, assigned: Assignment, holding: Set[str]
    ) -> tuple[Dispositions, dict[int, frozenset[str]]]:
        """The transactions that cannot be applied now, by index: what becomes of them, and their ordering keys.

        `holding` are the hosts of which a deferred transaction holds a key. A transaction with a held key is blocked;
        it holds its own keys in turn. A scheduled one (`deliver_at`) is deferred until its time, and holds no key.

        Example: a deferred transaction holds key a. Of new transactions with keys {a, b}, {b} and {c} the first two are
        blocked: the first by a, the second by b, which the first one holds now.
        """
        keys: dict[int, frozenset[str]] = {}
        dispositions: Dispositions = {}
        transactions = assigned.transactions
        times = self._router.delivery_times(transactions)
        for index, moment in to_defer(conn, self._router, transactions, times).items():
            one = assigned.part(index, index + 1)
            # Sinks defer what goes to sinks only.
            if one.parts.keys() - set(self._sinks):
                dispositions[index], keys[index] = Scheduled(moment), self.keys(one, 0)
        if holding:
            blocked = self._blocked(conn, assigned, dispositions, holding)
            dispositions |= dict.fromkeys(blocked, BLOCKED)
            keys |= blocked
        return dispositions, keys

    def _blocked(
        self,
        conn: Connection,
        assigned: Assignment,
        scheduled: Collection[int],
        holding: Set[str],
    ) -> dict[int, frozenset[str]]:
        """The transactions that a held key blocks, by index, with their keys."""
        transactions = assigned.transactions
        suspects = np.array([not holding.isdisjoint(hosts) for hosts in transactions.hosts])
        keys = {
            index: self.keys(assigned, index)
            for index in np.flatnonzero(suspects[transactions.facts["hosts"]]).tolist()
            if index not in scheduled
        }
        asked = frozenset[str]().union(*keys.values())
        held = deferred.held(conn, self._group, "", asked) if asked else set()
        blocked: dict[int, frozenset[str]] = {}
        for index, own in keys.items():
            if not held.isdisjoint(own):
                held |= own
                blocked[index] = own
        return blocked


def rekey(settings: Settings, conn: Connection, former: Mapping[str, str]) -> None:
    """Compute the keys of deferred transactions again where the configuration orders by others than before.

    Their rows have the keys that `order_by` gave them when they were deferred. New transactions have those of the
    current configuration, so they would pass the ones before them.

    `former` are the effects of the former configuration. In the current database transaction. Raises psycopg.Error, and
    Unrouted as `BatchRouter.route` does.
    """
    for sink in Effects.of(settings).reordered(former):
        if not sink:
            # A retry of the target's transactions may be under way in another instance.
            deferred.lock(conn, settings.group)
        count = _rekey(settings, conn, sink)
        if count:
            log.info(
                "deferred transactions have new ordering keys",
                extra={"sink": sink, "transactions": count},
            )


def _rekey(settings: Settings, conn: Connection, sink: str) -> int:
    limits = settings.batch
    router = BatchRouter(settings)
    rules = DeferralRules(settings, router)
    count = last = 0
    while rows := deferred_due.stored(conn, settings.group, sink, last, _REKEYED_AT_ONCE):
        found = deferred_due.transactions(conn, rows, limits.max_bytes, limits.spool_directory)
        if sink:
            keys = [
                rules.delivery_keys(found.part(n, n + 1), sink, row.endpoint)
                for n, row in enumerate(rows)
            ]
        else:
            assigned = router.route(found)
            keys = [rules.keys(assigned, n) for n in range(len(rows))]
        deferred.set_keys(conn, {row.id: each for row, each in zip(rows, keys, strict=True)})
        last = rows[-1].id
        count += len(rows)
    if count:
        deferred.hold_set_keys(conn, settings.group, sink)
    return count
