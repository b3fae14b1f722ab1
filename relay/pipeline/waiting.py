"""What has to wait instead of being applied: until its time, or behind a transaction with the same ordering key."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any

import numpy as np
import psycopg

from relay.config import Settings
from relay.events import Event
from relay.handler_settings import Handler
from relay.pipeline.routed import Parts, Routing
from relay.store import deferred
from relay.store.deferred import Wait
from relay.transactions import Transactions

Connection = psycopg.Connection[Any]

_LONG_AGO = datetime(1, 1, 1, tzinfo=UTC)
_NEVER = datetime(9999, 12, 31, tzinfo=UTC)


class Ordering:
    """The ordering keys of transactions: what the handlers of their events order by."""

    def __init__(self, configured: dict[str, Handler]) -> None:
        # Nothing waits for a handler that is not reliable, nor does it wait for others.
        self._order_by = {
            name: handler.order_by if handler.reliable else "none"
            for name, handler in configured.items()
        }

    def keys(self, hosts: Sequence[str], parts: Parts) -> frozenset[str]:
        """Of one transaction, routed. Two transactions with a key in common stay in order."""
        keys: set[str] = set()
        for name, routed in parts.items():
            order_by = self._order_by[name]
            if order_by == "host":
                keys.update(f"host {host}" for host in hosts)
            elif order_by != "none":
                fields = _FIELDS[order_by]
                keys.update(
                    _key(order_by, event, fields)
                    for transaction in routed
                    for event in transaction.events
                )
        return frozenset(keys)


_FIELDS = {
    "user": ("host_id", "user_id"),
    "aggregate": ("host_id", "aggregate_type", "aggregate_id"),
}


def _key(kind: str, event: Event, fields: Iterable[str]) -> str:
    return " ".join((kind, *(event.text(field) or "" for field in fields)))


class Waiting:
    """Decides about fresh transactions, under the lock of their partitions' offsets."""

    def __init__(self, settings: Settings, routing: Routing) -> None:
        self._group = settings.group
        self._routing = routing
        self._ordering = Ordering(settings.handlers)

    def keys(self, one: Transactions) -> frozenset[str]:
        """The ordering keys of a single transaction; none where it is not routed."""
        return self.keys_of(one, self._routing.route(one)[1])

    def keys_of(self, one: Transactions, parts: Parts) -> frozenset[str]:
        """The ordering keys of a single transaction that was routed."""
        return self._ordering.keys(one.hosts[int(one.facts["hosts"][0])], parts)

    def split(
        self, conn: Connection, transactions: Transactions, holding: set[str]
    ) -> dict[int, Wait]:
        """The transactions that have to wait, by place. `holding` are the hosts of which one that waits holds a key.

        What lies behind a transaction that holds its key waits until that is gone, in order. What is to be delivered
        at a later time waits for it, and is overtaken.
        """
        waits = self._until(transactions)
        if holding:
            waits |= self._behind(conn, transactions, waits, holding)
        return waits

    def _until(self, transactions: Transactions) -> dict[int, Wait]:
        """Those with an event whose time is still to come; the latest one counts."""
        now = datetime.now(UTC)
        moments: dict[int, datetime] = {}
        ends = np.cumsum(transactions.facts["events"])
        for row, value in self._routing.times(transactions):
            moment = _moment(value)
            if moment > now:
                place = int(np.searchsorted(ends, row, side="right"))
                moments[place] = max(moment, moments.get(place, moment))
        return {
            place: Wait(self.keys(transactions.part(place, place + 1)), holds=False, until=moment)
            for place, moment in moments.items()
        }

    def _behind(
        self,
        conn: Connection,
        transactions: Transactions,
        scheduled: dict[int, Wait],
        holding: set[str],
    ) -> dict[int, Wait]:
        suspects = np.array([not holding.isdisjoint(hosts) for hosts in transactions.hosts])
        keys = {
            place: self.keys(transactions.part(place, place + 1))
            for place in np.flatnonzero(suspects[transactions.facts["hosts"]]).tolist()
            if place not in scheduled
        }
        asked = frozenset[str]().union(*keys.values())
        held = deferred.held(conn, self._group, asked) if asked else set()
        waits: dict[int, Wait] = {}
        for place, own in keys.items():
            if not held.isdisjoint(own):
                held |= own
                waits[place] = Wait(own)
        return waits


def _moment(value: str) -> datetime:
    """A time as PostgreSQL prints it in UTC; what lies outside of Python's calendar as the end of it that is nearer."""
    try:
        return datetime.fromisoformat(value)
    except ValueError:
        return _LONG_AGO if value.startswith("-") or value.endswith("BC") else _NEVER
