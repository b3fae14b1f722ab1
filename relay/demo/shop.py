"""Publishes the demo's events: orders of a shop with several tenants, poison among them, and one huge import."""

from __future__ import annotations

import random
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any

from psycopg.types.json import Jsonb

from relay.admin.publish import PublishCall, business_transactions, publish
from relay.store.connections import Connection

Events = list[dict[str, Any]]
Special = Callable[[], int]
"""Publishes a special case; returns how many orders it used."""

EVENTS_EACH = 5
"""Only generated orders with so many events are published, so that totals are round."""
SEED = 2
_SLICE = 100


@dataclass(frozen=True, slots=True)
class Scale:
    """How much the demo does."""

    transactions: int = 10_000
    hosts: int = 32
    import_events: int = 20_000
    live_rate: int = 200
    live_seconds: float = 6.0

    @property
    def backlog(self) -> int:
        """Number of events that are published before relay applies any."""
        return self.transactions * EVENTS_EACH + self.import_events


@dataclass(frozen=True, slots=True)
class Poison:
    """An event that must become a dead letter, with the handler that fails and its exception."""

    event_id: str
    handler: str | None
    fault: str


@dataclass(frozen=True, slots=True)
class _Fault:
    """A way to make an order poison, with the expected handler and exception."""

    handler: str | None
    fault: str
    apply: Callable[[Events], None]


def _charge_too_little(events: Events) -> None:
    events[-1]["payload"]["amount"] = -1


def _send_a_list(events: Events) -> None:
    events[1]["payload"] = ["valid JSON", "without an amount"]


def _name_the_customer(events: Events) -> None:
    events[0]["payload"]["customer"] = "Ada Lovelace"


def _go_nowhere(events: Events) -> None:
    events[-1]["event_type"] = "loyalty.points_granted"


_FORBIDDEN = _Fault("projection", "CheckViolation", _charge_too_little)
_FAULTS = (
    _FORBIDDEN,
    _Fault("projection", "NotNullViolation", _send_a_list),
    _Fault("totals", "InvalidTextRepresentation", _name_the_customer),
    _Fault(None, "NotRouted", _go_nowhere),
)


class Shop:
    """Publishes generated orders, and records which events are poison.

    Connections are in autocommit mode. The iterators publish while they are consumed, so the caller can show progress.
    """

    def __init__(self, hosts: int) -> None:
        endless = business_transactions(sys.maxsize, hosts, SEED)
        self._orders = (order for order in endless if len(order.events) == EVENTS_EACH)
        self.poisons: list[Poison] = []

    def backlog(self, conn: Connection, scale: Scale) -> Iterator[None]:
        """Publish the backlog: orders, and between them every kind of poison twice and the import once."""
        poisonous = self._poisonous(conn)
        specials = [*poisonous, lambda: self._import(conn, scale.import_events), *poisonous]
        left = scale.transactions
        for number, special in enumerate(specials):
            ordinary = left // (len(specials) - number + 1)
            yield from self._publish(conn, ordinary)
            left -= ordinary + special()
        yield from self._publish(conn, left)

    def live(self, conn: Connection, scale: Scale) -> Iterator[None]:
        """Publish orders at an even pace, one of them poison."""
        count = round(scale.live_rate * scale.live_seconds)
        started = time.monotonic()
        for number in range(count):
            time.sleep(max(0.0, started + number / scale.live_rate - time.monotonic()))
            if number == count // 2:
                self._alone(conn, _FORBIDDEN)
            else:
                publish(conn, [next(self._orders)])
            yield

    def _publish(self, conn: Connection, count: int) -> Iterator[None]:
        for start in range(0, count, _SLICE):
            publish(conn, islice(self._orders, min(_SLICE, count - start)))
            yield

    def _poisonous(self, conn: Connection) -> list[Special]:
        return [
            *(partial(self._alone, conn, fault_kind) for fault_kind in _FAULTS),
            partial(self._among_others, conn),
            partial(self._without_transaction_id, conn),
        ]

    def _alone(self, conn: Connection, fault_kind: _Fault) -> int:
        """Publish a poisonous business transaction in a commit of its own."""
        publish(conn, [self._poisoned(fault_kind)])
        return 1

    def _among_others(self, conn: Connection) -> int:
        """Publish three business transactions in one commit, of which the second is poison."""
        orders = [next(self._orders), self._poisoned(_FORBIDDEN), next(self._orders)]
        with conn.transaction():
            publish(conn, orders)
        return len(orders)

    def _without_transaction_id(self, conn: Connection) -> int:
        """Insert rows of two users of one host in one commit, of which those of the second user are poison."""
        good, poison = next(self._orders), self._poisoned(_FORBIDDEN)
        with conn.transaction(), conn.cursor() as cursor:
            for order in (good, poison):
                cursor.executemany(_INSERT, _rows(order, good.host_id, str(uuid.uuid4())))
        return 2

    def _poisoned(self, fault_kind: _Fault) -> PublishCall:
        """Return the next order as poison, and record its events."""
        order = next(self._orders)
        events = [event | {"id": str(uuid.uuid4())} for event in order.events]
        fault_kind.apply(events)
        self.poisons += [
            Poison(event["id"], fault_kind.handler, fault_kind.fault) for event in events
        ]
        return replace(order, events=events)

    def _import(self, conn: Connection, count: int) -> int:
        """Publish one business transaction that is larger than a batch, for the host of an unused order."""
        chance = random.Random(SEED)  # noqa: S311
        owner = next(self._orders)
        events = [_product(chance, number) for number in range(count)]
        publish(conn, [replace(owner, events=events)])
        return 0


_INSERT = """
    insert into public.outbox_message_t
        (id, host_id, user_id, aggregate_id, aggregate_version, aggregate_type, event_type, payload, metadata)
    values (coalesce(%s::uuid, gen_random_uuid()), %s, %s, %s, %s, %s, %s, %s, %s)
"""
_WORDS = ("light", "solid", "oak", "steel", "wool", "hand-made", "for", "kitchen", "garden", "blue")


def _rows(order: PublishCall, host_id: str, user_id: str) -> Iterator[tuple[Any, ...]]:
    for event in order.events:
        yield (
            event.get("id"),
            host_id,
            user_id,
            event["aggregate_id"],
            event["aggregate_version"],
            event["aggregate_type"],
            event["event_type"],
            Jsonb(event["payload"]),
            Jsonb(event["metadata"]),
        )


def _product(chance: random.Random, number: int) -> dict[str, Any]:
    return {
        "event_type": "catalogue.product_imported",
        "aggregate_type": "Product",
        "aggregate_id": f"SKU-{number:05}",
        "payload": {
            "amount": round(chance.uniform(1, 200), 2),
            "description": " ".join(chance.choices(_WORDS, k=80)),
        },
    }
