"""Which deliveries wait for which others: a queue for each ordering key. No I/O."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import takewhile

from relay.delivery.progress import SinkCommit
from relay.model.dispositions import NEW, AttemptHistory
from relay.model.events import Transaction
from relay.model.transactions import Undecoded
from relay.store.deferred_due import Due


@dataclass(slots=True, eq=False)
class Delivery:
    """A business transaction's events for the sink.

    `rows` are what is deferred or dead-lettered, `commit` is where they came from, or `due` is their deferred row.
    `blockers` counts the keys of which it is not the first; one before it that waits makes it `is_blocked`.
    `was_trial`: it has been tried while the breaker was open. `is_ready`: it waits for nothing but its turn.
    """

    rows: Undecoded
    events: Transaction
    keys: frozenset[str]
    commit: SinkCommit | None = None
    due: Due | None = None
    history: AttemptHistory = NEW
    blockers: int = 0
    is_blocked: bool = False
    was_trial: bool = False
    is_ready: bool = False
    is_running: bool = False


class Queues:
    """For each key what runs, then what was deferred, then what is new, each in the order in which it was added.

    What was deferred was in the log before anything new that has one of its keys. If it waited behind that, which may
    have to wait until the deferred one is done, neither would ever be done.
    """

    def __init__(self) -> None:
        self._of: defaultdict[str, deque[Delivery]] = defaultdict(deque)

    def add(self, delivery: Delivery) -> None:
        """Add a delivery that does not run."""
        for key in delivery.keys:
            queue = self._of[key]
            index = len(queue) if delivery.due is None else _earlier(queue)
            if index:
                delivery.blockers += 1
            elif queue:
                queue[0].blockers += 1
            queue.insert(index, delivery)

    def remove(self, delivery: Delivery) -> list[Delivery]:
        """A delivery without blockers is over; returns those that are the first of one of its keys now."""
        first: list[Delivery] = []
        for key in delivery.keys:
            queue = self._of[key]
            queue.popleft()
            if queue:
                queue[0].blockers -= 1
                first.append(queue[0])
            else:
                del self._of[key]
        return first

    def stop(self, delivery: Delivery) -> list[Delivery]:
        """A delivery does not run any more; returns those that are the first of one of its keys now, instead of it."""
        delivery.is_running = False
        if delivery.due is not None:
            return []
        first: list[Delivery] = []
        for key in delivery.keys:
            queue = self._of[key]
            queue.popleft()
            index = _earlier(queue)
            queue.insert(index, delivery)
            if index:
                delivery.blockers += 1
                queue[0].blockers -= 1
                first.append(queue[0])
        return first


def _earlier(queue: Iterable[Delivery]) -> int:
    """How many deliveries of a queue go before one that was deferred."""
    return sum(1 for _ in takewhile(lambda each: each.is_running or each.due is not None, queue))
