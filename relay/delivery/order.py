"""Keeps deliveries in order: a queue for each ordering key, and the keys that deferred transactions hold. No I/O."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Set
from dataclasses import dataclass
from itertools import takewhile

from relay.delivery.progress import SinkCommit
from relay.model.dispositions import NEW, AttemptHistory
from relay.model.events import Transaction
from relay.model.keys import at_any
from relay.model.transactions import Undecoded
from relay.store.deferred.due import DueTransaction


@dataclass(slots=True, eq=False)
class Delivery:
    """A business transaction's events for the sink.

    `rows` are written if it is deferred or dead-lettered. It is of `commit` or, if it is a retry, of the deferred row
    `due`. `blockers` counts the keys in whose queues it is not the first. `is_blocked`: an earlier one
    with one of its keys was deferred. `was_trial`: it was tried while the breaker was open. `is_ready`: it may start.
    `asked`: the last fault that asked for a wait, and until when (monotonic clock, seconds). `attempts` are those that
    have failed, while it runs. `has_failed`: an attempt of this process has, also one that does not count. `number` is
    its rank in the order of submission, and `queued` when that was, for batches. Of several endpoints it goes to
    `endpoint` alone, as a part of the deferred row `part_of` if that was divided.
    """

    rows: Undecoded
    events: Transaction
    keys: frozenset[str]
    commit: SinkCommit | None = None
    due: DueTransaction | None = None
    history: AttemptHistory = NEW
    blockers: int = 0
    is_blocked: bool = False
    was_trial: bool = False
    is_ready: bool = False
    is_running: bool = False
    asked: tuple[BaseException, float] | None = None
    attempts: int = 0
    has_failed: bool = False
    number: int = 0
    queued: float = 0.0
    endpoint: str | None = None
    part_of: DueTransaction | None = None

    def early(self) -> float:
        """The seconds until it may be tried, as its last fault has asked; 0 if it may be now."""
        return max(0.0, self.asked[1] - time.monotonic()) if self.asked else 0.0


class HeldKeys:
    """The ordering keys of a sink that deferred transactions hold: a new delivery with one of them is blocked.

    `known` are those of deliveries that were deferred here, and those that a query has found. While `any`, there may be
    others, so that keys are queried before something with them is delivered.
    """

    def __init__(self) -> None:
        self.known: set[str] = set()
        self.any = True
        self.deferred = 0
        self._since_query: set[str] = set()
        self._at_endpoints: defaultdict[str, set[str]] = defaultdict(set)
        """Those of `known` that are held at single endpoints, by the keys of which they are parts."""

    def add(self, keys: Collection[str]) -> None:
        """Note that a delivery was deferred, which holds `keys`; counts it as `deferred`."""
        self._know(keys)
        self._since_query.update(keys)
        self.any = True
        self.deferred += 1

    def begin_query(self) -> None:
        """Note that a query begins, which may miss the keys of deliveries that are deferred from now on."""
        self._since_query.clear()

    def end_query(self, held: Collection[str], asked: Set[str]) -> None:
        """Note that of the keys `asked` only `held` are held, and those added since `begin_query`."""
        self.known.difference_update(asked)
        for key in self._at_endpoints.keys() & asked:
            self.known.difference_update(self._at_endpoints.pop(key))
        self._know(held)
        self._know(self._since_query)

    def _know(self, keys: Collection[str]) -> None:
        self.known.update(keys)
        for key in keys:
            if (whole := at_any(key)) != key:
                self._at_endpoints[whole].add(key)

    def release(self) -> None:
        """Forget all keys: no deferred transaction holds one."""
        self.known.clear()
        self._at_endpoints.clear()
        self.any = False


class Ready:
    """The deliveries that may start: retries and new ones take turns, each in the order in which they became ready.

    Ten thousand retries that fall due together, or replays, keep new deliveries of other keys waiting for one delivery
    each. What is blocked comes before both, since it needs no turn.
    """

    def __init__(self) -> None:
        self._blocked: deque[Delivery] = deque()
        self._retries: deque[Delivery] = deque()
        self._new: deque[Delivery] = deque()
        self._is_retrys_turn = False

    def __bool__(self) -> bool:
        return bool(self._blocked or self._retries or self._new)

    def add(self, delivery: Delivery, *, first: bool = False) -> None:
        """Add a delivery after those of its kind, or before them."""
        queue = self._retries if delivery.due is not None else self._new
        delivery.is_ready = True
        if first:
            queue.appendleft(delivery)
        else:
            queue.append(delivery)

    def add_blocked(self, delivery: Delivery) -> None:
        """Add a delivery that is not to be tried."""
        delivery.is_ready = True
        self._blocked.append(delivery)

    def next(self) -> Delivery:
        """Return the delivery whose turn it is; there is one."""
        return self._queue[0]

    def take(self) -> Delivery:
        """Remove and return the delivery whose turn it is; it does not use its turn."""
        delivery = self._queue.popleft()
        delivery.is_ready = False
        return delivery

    def begin(self) -> Delivery:
        """Remove and return the delivery whose turn it is; the next turn is for the other kind."""
        delivery = self.take()
        self._is_retrys_turn = delivery.due is None
        return delivery

    @property
    def _queue(self) -> deque[Delivery]:
        if self._blocked:
            return self._blocked
        is_retrys = self._retries and (self._is_retrys_turn or not self._new)
        return self._retries if is_retrys else self._new

    def take_early(self) -> list[Delivery]:
        """Remove and return the deliveries whose destination has asked for a time that has not come."""
        taken: list[Delivery] = []
        for queue in (self._blocked, self._retries, self._new):
            early = [each for each in queue if each.early()]
            for each in early:
                queue.remove(each)
                each.is_ready = False
            taken += early
        return taken


class Queues:
    """For each key the deliveries in flight, then retries, then new ones, each in the order in which they were added.

    Retries precede new deliveries, since they were in the log before everything new that has one of their keys. A retry
    after a new delivery would deadlock: the new one is blocked until the retry is done.

    Example: new deliveries N1 (keys a, b) and N2 (key b), then a retry R (key b). The queues are a: N1; b: R, N1, N2.
    N1 and N2 have one blocker each; R runs. `remove(R)` returns N1, which has no blocker left.
    """

    def __init__(self) -> None:
        self._queues: defaultdict[str, deque[Delivery]] = defaultdict(deque)

    def add(self, delivery: Delivery) -> None:
        """Add a delivery that is not in flight."""
        for key in delivery.keys:
            queue = self._queues[key]
            index = len(queue) if delivery.due is None else _earlier(queue)
            if index:
                delivery.blockers += 1
            elif queue:
                queue[0].blockers += 1
            queue.insert(index, delivery)

    def remove(self, delivery: Delivery) -> list[Delivery]:
        """Remove a delivery without blockers; returns those that are now first in the queue of one of its keys."""
        first: list[Delivery] = []
        for key in delivery.keys:
            queue = self._queues[key]
            queue.popleft()
            if queue:
                queue[0].blockers -= 1
                first.append(queue[0])
            else:
                del self._queues[key]
        return first

    def following(self, delivery: Delivery, taken: dict[str, int]) -> list[Delivery]:
        """Add a delivery to a batch; returns those that have no blocker left but what is in the batch.

        `taken` counts, for each key, the deliveries at the head of its queue that are in the batch.
        """
        for key in delivery.keys:
            taken[key] = taken.get(key, 0) + 1
        found: list[Delivery] = []
        for key in delivery.keys:
            queue = self._queues[key]
            if len(queue) <= taken[key]:
                continue
            follower = queue[taken[key]]
            if follower not in found and all(
                self._queues[each][taken.get(each, 0)] is follower for each in follower.keys
            ):
                found.append(follower)
        return found

    def stop(self, deliveries: Iterable[Delivery]) -> list[Delivery]:
        """Queue deliveries of a batch, which are not in flight any more, after the retries.

        Returns those that are first instead of one of them.
        """
        first: list[Delivery] = []
        for key in frozenset[str]().union(*(each.keys for each in deliveries)):
            queue = self._queues[key]
            before = queue[0]
            self._queues[key] = queue = deque(sorted(queue, key=lambda each: each.due is None))
            if queue[0] is not before:
                before.blockers += 1
                queue[0].blockers -= 1
                first.append(queue[0])
        return first


def rests_of_partial_commits(pending: Iterable[Delivery]) -> list[Delivery]:
    """The deliveries to defer when a sink is left, since a position cannot describe half a commit, in their order.

    These are the rest of each commit of which some deliveries are done, and what was submitted before with the same
    keys: a deferred delivery would overtake what is only read again. A commit that is not whole in memory, and what
    follows it with its keys, is left to be delivered again as a whole.

    Example: C1 is delivery A, C2 is A and B, by their keys, and B of C2 is done. Both A are returned.
    """
    of: dict[SinkCommit, list[Delivery]] = {}
    for delivery in pending:
        if delivery.commit is not None:
            of.setdefault(delivery.commit, []).append(delivery)
    keys_of = {commit: {at_any(key) for each in of[commit] for key in each.keys} for commit in of}
    needed: set[SinkCommit] = set()
    keys: set[str] = set()
    for commit in reversed(of):
        if len(of[commit]) == commit.deliveries and (
            commit.is_begun or not keys.isdisjoint(keys_of[commit])
        ):
            needed.add(commit)
            keys |= keys_of[commit]
    deferred: list[Delivery] = []
    read_again: set[str] = set()
    for commit in of:
        if commit in needed and read_again.isdisjoint(keys_of[commit]):
            deferred += of[commit]
        else:
            read_again |= keys_of[commit]
    return deferred


def _earlier(queue: Iterable[Delivery]) -> int:
    """How many deliveries of a queue precede a retry that is added."""
    return sum(1 for _ in takewhile(lambda each: each.is_running or each.due is not None, queue))
