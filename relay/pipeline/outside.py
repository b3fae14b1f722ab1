"""Runs the handlers that act outside the target: side by side where nothing has to be in order, in order elsewhere."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from threading import BoundedSemaphore, Event

from relay import handlers
from relay.config import Settings
from relay.events import Transaction
from relay.fates import NEW, Behind, Failure, Fates, History, has_to_wait, is_dead
from relay.faults import describe
from relay.handlers.delivery import Delivery
from relay.pipeline.brake import Brake

log = logging.getLogger(__name__)

LOOSE_BACKLOG = 1_000
"""How many transactions may wait for handlers that are not reliable; more are lost."""


@dataclass(frozen=True, slots=True)
class Parcel:
    """What goes outside of a business transaction: for each handler the events that were routed to it."""

    place: int
    keys: frozenset[str]
    contents: Sequence[tuple[str, Transaction]]
    history: History


class Outside:
    """The configured handlers of this kind. Raises ConfigurationError when one cannot be built."""

    def __init__(self, settings: Settings) -> None:
        self._stopping = Event()
        self._deliveries = {
            name: Delivery(handler, configured, self._stopping)
            for name, (handler, configured) in handlers.build_outside(settings.handlers).items()
        }
        widest = max((each.settings.concurrency for each in self._deliveries.values()), default=1)
        self._threads = ThreadPoolExecutor(widest, thread_name_prefix="deliver")
        self._loose = ThreadPoolExecutor(widest, thread_name_prefix="fire-and-forget")
        self._backlog = BoundedSemaphore(LOOSE_BACKLOG)
        self._losses: Counter[str] = Counter()

    @property
    def names(self) -> Set[str]:
        """The names of the handlers, in the configuration's order."""
        return self._deliveries.keys()

    def interrupt(self) -> None:
        """Deliver no more than what is on its way; the rest is left to wait."""
        self._stopping.set()

    def close(self) -> None:
        """Let the threads end and the handlers let go of their connections."""
        self._threads.shutdown(cancel_futures=True)
        self._loose.shutdown(cancel_futures=True)
        for delivery in self._deliveries.values():
            delivery.close()

    def deliver(self, parcels: Sequence[Parcel], brake: Brake) -> Fates:
        """Deliver all parcels; returns, by place, those that were not.

        Parcels that share a key are delivered one after the other, and none behind one that failed. What a handler that
        the brake has stopped would let die is deferred instead, so that others flow.
        """
        fates: Fates = {}
        for found in self._threads.map(partial(self._lane, brake), _lanes(parcels)):
            fates |= found
        for parcel in parcels:
            if parcel.place not in fates:
                self._fire(parcel)
        return fates

    def _lane(self, brake: Brake, parcels: Iterable[Parcel]) -> Fates:
        fates: Fates = {}
        stuck: set[str] = set()
        for parcel in parcels:
            tried = stuck.isdisjoint(parcel.keys) and not self._stopping.is_set()
            fate = self._one(brake, parcel) if tried else Behind()
            if fate is not None:
                fates[parcel.place] = fate
                if has_to_wait(fate):
                    stuck |= parcel.keys
        return fates

    def _one(self, brake: Brake, parcel: Parcel) -> Failure | None:
        for name, transaction in parcel.contents:
            delivery = self._deliveries[name]
            if not delivery.settings.reliable:
                continue
            failure = delivery.attempt(transaction, parcel.history)
            if failure is None:
                brake.succeeded((name,))
            elif is_dead(failure) and brake.stops(name, failure.error):
                return delivery.held(failure)
            else:
                return failure
        return None

    def _fire(self, parcel: Parcel) -> None:
        """Hand a transaction to its handlers that are not reliable, without waiting for them."""
        for name, transaction in parcel.contents:
            delivery = self._deliveries[name]
            if delivery.settings.reliable:
                continue
            if self._backlog.acquire(blocking=False):
                self._loose.submit(self._try, delivery, transaction)
            else:
                self._lost(name, transaction, "too many wait already")

    def _try(self, delivery: Delivery, transaction: Transaction) -> None:
        try:
            failure = delivery.attempt(transaction, NEW)
        finally:
            self._backlog.release()
        if failure is not None:
            self._lost(delivery.name, transaction, describe(failure.error))

    def _lost(self, name: str, transaction: Transaction, reason: str) -> None:
        self._losses[name] += 1
        log.warning(
            "not delivered, and not tried again: the handler is not reliable",
            extra={
                "handler": name,
                "transaction_id": transaction.transaction_id,
                "fault": reason,
                "losses": self._losses[name],
            },
        )


def _lanes(parcels: Sequence[Parcel]) -> list[list[Parcel]]:
    """Parcels that share a key, directly or through others, together and in order."""
    lane_of: dict[str, list[Parcel]] = {}
    lanes: dict[int, list[Parcel]] = {}
    for parcel in parcels:
        found = {id(lane): lane for key in parcel.keys if (lane := lane_of.get(key)) is not None}
        lane, *others = found.values() or ([],)
        for other in others:
            del lanes[id(other)]
            lane += other
            for moved in other:
                lane_of.update(dict.fromkeys(moved.keys, lane))
        lane.append(parcel)
        lanes[id(lane)] = lane
        lane_of.update(dict.fromkeys(parcel.keys, lane))
    return [sorted(lane, key=lambda parcel: parcel.place) for lane in lanes.values()]
