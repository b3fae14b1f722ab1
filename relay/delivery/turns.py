"""Says which delivery of a sink is next. No I/O."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

from relay.delivery.order import Delivery, HeldKeys, Queues, Ready
from relay.sinks.destination import Destination


class Turn(NamedTuple):
    """A delivery whose turn it is: to be tried, or to be deferred without an attempt."""

    delivery: Delivery
    is_tried: bool


class DeliveryTurns:
    """The deliveries that are not in flight: in order for each key, retries and new ones by turns.

    A new one is blocked if an earlier one with its keys is deferred, if a deferred transaction holds one of its keys
    (`held`), or while the sink defers all new ones (`defers_new`). While the destination is down, blocked ones are kept
    in memory: reading stops, and the log is not copied into the table of deferred transactions.
    """

    def __init__(self, destination: Destination) -> None:
        self.held = HeldKeys()
        self.defers_new = False
        self.queues = Queues()
        self.ready = Ready()
        self._destination = destination
        self._kept: deque[Delivery] = deque()

    def add(self, delivery: Delivery) -> bool:
        """Add a delivery after all with its keys, a retry before new ones; returns whether none precedes it."""
        self.queues.add(delivery)
        if delivery.blockers:
            return False
        self.enqueue(delivery)
        return True

    def enqueue(self, delivery: Delivery) -> None:
        """Make a delivery ready to be tried or, if it is blocked, to be deferred."""
        if delivery.is_ready or delivery.is_running:
            return
        if not self.is_blocked(delivery):
            self.ready.add(delivery)
        elif self._keeps(delivery):
            self._keep(delivery)
        else:
            self.ready.add_blocked(delivery)

    def unblock(self, deliveries: Iterable[Delivery]) -> None:
        """Make those ready that nothing precedes any more."""
        for each in deliveries:
            if not each.blockers:
                self.enqueue(each)

    def is_blocked(self, delivery: Delivery) -> bool:
        """Whether a delivery is not to be tried."""
        if delivery.is_blocked or delivery.due is not None:
            # A retry holds its keys itself.
            return delivery.is_blocked
        return self.defers_new or not self.held.known.isdisjoint(delivery.keys)

    def next(self, may_begin: Callable[[], bool]) -> Turn | None:
        """Take the delivery whose turn it is; None where none is ready, or is one to be tried and none `may_begin`."""
        while self.ready:
            delivery = self.ready.next()
            if delivery.blockers:
                # Meanwhile a retry with one of its keys was queued before it.
                self.ready.take()
            elif self.is_blocked(delivery):
                self.ready.take()
                if not self._keeps(delivery):
                    return Turn(delivery, False)
                self._keep(delivery)
            elif not may_begin():
                return None
            elif delivery.early():
                # Others may be tried meanwhile.
                return Turn(self.ready.take(), False)
            else:
                return Turn(self.ready.begin(), True)
        return None

    def remove(self, delivery: Delivery, holds_up: bool) -> None:
        """Remove a delivery that has ended; if it `holds_up` what follows with its keys, that is blocked."""
        following = self.queues.remove(delivery)
        for each in following:
            each.is_blocked |= holds_up
        self.unblock(following)

    def put_back(self, deliveries: Iterable[Delivery], *, first: bool) -> None:
        """Queue deliveries of a batch again, after the retries with their keys, `first` of their kind or last."""
        returned = list(deliveries)
        for each in returned:
            each.is_running = False
        self.unblock(self.queues.stop(returned))
        for each in reversed(returned) if first else returned:
            if not each.blockers and not each.is_ready:
                self.ready.add(each, first=first)

    # Blocked ones, while the destination is down

    def _keeps(self, delivery: Delivery) -> bool:
        return self._keeps_new and delivery.due is None

    @property
    def _keeps_new(self) -> bool:
        return self._destination.breaker.is_open and not self.defers_new

    def _keep(self, delivery: Delivery) -> None:
        delivery.is_ready = True
        self._kept.append(delivery)

    @property
    def keeps_any(self) -> bool:
        """Whether blocked ones are kept in memory."""
        return bool(self._kept)

    def release(self) -> None:
        """Let go of what is kept, unless the destination is still down."""
        if self._kept and not self._keeps_new:
            self.unblock(self._let_go())

    def take_kept(self) -> list[Delivery]:
        """Remove and return those that are kept, in order, but for those that others precede now."""
        return [each for each in self._let_go() if not each.blockers]

    def _let_go(self) -> Iterable[Delivery]:
        kept, self._kept = self._kept, deque()
        for each in kept:
            each.is_ready = False
        return kept
