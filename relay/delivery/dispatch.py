"""Delivers transactions to a sink: in order for each ordering key, concurrently for different keys.

A delivery is a batch of one, unless the sink takes batches.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from typing import NamedTuple

from relay.config.handlers import DeliveryHandler, FunctionHandler, HttpHandler
from relay.config.settings import AttemptSettings
from relay.delivery.attempts import AttemptLog
from relay.delivery.judging import Judge, PutBack, SinkCall, fault_of, key_of
from relay.delivery.order import Delivery
from relay.delivery.turns import DeliveryTurns
from relay.faults import (
    DestinationRefused,
    Drop,
    Fail,
    FaultAction,
    RetryLater,
    Unauthorized,
    action_for,
    asked_of,
)
from relay.model.dispositions import APPLIED, BLOCKED, Disposition, holds_keys
from relay.model.keys import of_endpoint
from relay.pipeline.failure_limit import FailureLimit
from relay.sinks import ATTEMPT, Again, Attempt, OfBatch, Sink, ToEndpoints
from relay.sinks.circuit_breaker import CircuitBreaker
from relay.sinks.destination import Destination
from relay.store.activity import Attempts

MOST_DELIVERIES = 10_000
"""How many deliveries may be in memory, in flight or queued; the others stay in the log."""
MOST_WAITING = 1_000
"""How many deliveries of a sink with many endpoints may be in flight, or wait for a turn at theirs."""
DEFER_BLOCKED_SECONDS = 300.0
"""How long blocked deliveries may fill the memory before they are deferred."""

Results = Sequence[Exception | None]
"""What became of each delivery of a call: None if it was delivered."""


class _Memory:
    """The deliveries in memory, in flight or queued; retries take no room."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self.deliveries: dict[int, Delivery] = {}
        self._new_count = self._new_size = 0

    def add(self, delivery: Delivery) -> None:
        self.deliveries[id(delivery)] = delivery
        self._count(delivery, 1)

    def remove(self, delivery: Delivery) -> None:
        del self.deliveries[id(delivery)]
        self._count(delivery, -1)

    def _count(self, delivery: Delivery, sign: int) -> None:
        if delivery.due is None:
            self._new_count += sign
            self._new_size += sign * delivery.rows.size

    @property
    def is_full(self) -> bool:
        return self._new_count >= MOST_DELIVERIES or self._new_size > self._most_bytes


class _Left(NamedTuple):
    """What a call has left: what to deliver `again`, in order, and what to queue again, since the sink is down.

    It is delivered again after so many seconds, and `first` of them without the others.
    """

    again: list[Delivery]
    seconds: float
    first: int
    returned: list[Delivery]
    is_last: bool = False


_NOTHING = _Left([], 0.0, 0, [])


class Dispatcher:
    """Runs deliveries in the current event loop, and queues those that have ended, with their dispositions.

    `take_ended` takes that queue, which is in order for each key; `has_ended` is set while it is not empty. `failure`
    gets a fault that no retry can repair.

    A delivery is `Blocked` and not tried if an earlier one with the same key is deferred, or a deferred transaction
    holds one of its keys (`held`).
    """

    def __init__(
        self,
        sink: Sink,
        settings: DeliveryHandler,
        most_bytes: int,
        limit: FailureLimit,
        claim: int = 0,
        kept: AttemptLog | None = None,
    ) -> None:
        """`claim` is the number of the sink's claim, which functions need for commits of their own."""
        self.kept = kept or AttemptLog(AttemptSettings(), settings)
        self.destination = Destination(sink.name, settings)
        self.limit = limit
        self.has_ended = asyncio.Event()
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._sink = sink
        self._reliable = settings.reliable
        self._claim = claim
        # A delivery may wait for its endpoint: the sink itself limits how many are posted at once, and how fast.
        has_endpoints = isinstance(settings, HttpHandler) and settings.has_endpoints
        self._notes_attempt = has_endpoints or isinstance(settings, FunctionHandler)
        self._pace = None if has_endpoints else self.destination.pace
        self._most_running = MOST_WAITING if has_endpoints else settings.concurrency
        self._judge = Judge(sink.name, settings, self.destination, limit, self.kept)
        self._turns = DeliveryTurns(self.destination)
        self.held = self._turns.held
        self._memory = _Memory(most_bytes)
        self._numbers = count(1)
        self._running: set[asyncio.Task[None]] = set()
        self._ended: list[tuple[Delivery, Disposition]] = []
        self._paused = False
        self._changed = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None

    @property
    def breaker(self) -> CircuitBreaker:
        """The circuit breaker of the destination."""
        return self.destination.breaker

    @property
    def is_paused(self) -> bool:
        """Whether no delivery starts, until `resume`."""
        return self._paused

    @property
    def count(self) -> int:
        """How many deliveries are in flight or queued."""
        return len(self._memory.deliveries)

    @property
    def pending(self) -> list[Delivery]:
        """The deliveries that are in flight or queued, in the order of submission."""
        return sorted(self._memory.deliveries.values(), key=lambda each: each.number)

    def take_attempts(self) -> Attempts:
        """Return what was attempted since the last call."""
        taken, self._judge.attempts = self._judge.attempts, Attempts()
        return taken

    def take_ended(self) -> list[tuple[Delivery, Disposition]]:
        """Return the deliveries that have ended since the last call, in order, each with its disposition."""
        self.has_ended.clear()
        taken, self._ended = self._ended, []
        return taken

    def submit(self, delivery: Delivery) -> None:
        """Queue a delivery; it starts after all before it with its keys, and a retry before new ones with its keys."""
        delivery.number = next(self._numbers)
        self._memory.add(delivery)
        if self._turns.add(delivery):
            self._start()

    def end(self, delivery: Delivery, disposition: Disposition) -> bool:
        """Put a delivery that is not submitted where the ended ones are; returns whether it holds its keys."""
        holds = False
        if disposition is not APPLIED:
            disposition = self._judge.ended(disposition)
            if disposition is not APPLIED:
                holds = holds_keys(disposition) and self._reliable
                self.held.add(delivery.keys if holds else ())
        self._ended.append((delivery, disposition))
        self.has_ended.set()
        return holds

    def _completed(self, delivery: Delivery, disposition: Disposition) -> None:
        self._memory.remove(delivery)
        self._turns.remove(delivery, self.end(delivery, disposition))
        self._changed.set()

    def _divide(self, delivery: Delivery, endpoints: Iterable[str]) -> None:
        """Put a delivery to each of some endpoints in the place of one, which is as many deliveries of its commit.

        What becomes of each is its own. Those of a retry are stored as retries of their own, since it has one row.
        """
        self.destination.answered(key_of(delivery))
        commit = delivery.commit
        parts = [
            Delivery(
                *(delivery.rows, delivery.events, of_endpoint(delivery.keys, each), commit),
                number=delivery.number,
                endpoint=each,
                part_of=delivery.due,
            )
            for each in endpoints
        ]
        if delivery.due is not None:
            for each in parts:
                self.end(each, BLOCKED)
            self._completed(delivery, APPLIED)
            return
        if commit is not None:
            commit.deliveries += len(parts) - 1
        self._memory.remove(delivery)
        self._turns.remove(delivery, False)
        for each in parts:
            self._memory.add(each)
            self._turns.add(each)
        self._changed.set()

    # When deliveries start

    def pause(self) -> None:
        """Start no delivery until `resume`."""
        self._paused = True

    def resume(self) -> None:
        """Start deliveries again."""
        self._paused = False
        self._start()

    def defer_new(self, on: bool) -> None:
        """Turn the deferral of new deliveries on or off: while it is on, they are not queued in memory."""
        self._turns.defers_new = on
        self._start()

    def defer_early(self) -> None:
        """Defer the queued deliveries whose destination asked for a time that has not come: a restart keeps to it."""
        for delivery in self._turns.ready.take_early():
            self._defer(delivery)

    def _defer(self, delivery: Delivery) -> None:
        self._completed(delivery, self._judge.deferred(delivery))

    async def wait_for_room(self) -> None:
        """Wait until there is room for another new delivery."""
        while self._memory.is_full:
            since = time.monotonic() - self._judge.down_since
            if not self._turns.keeps_any or since <= DEFER_BLOCKED_SECONDS:
                await self._change()
                continue
            # Later in the log there may be keys that can be delivered.
            self._judge.down_since = time.monotonic()
            while self._turns.keeps_any:
                for each in self._turns.take_kept():
                    self._defer(each)

    async def wait_idle(self) -> None:
        """Wait until no delivery is in flight; queued ones do not count."""
        while self._running:
            await self._change()

    async def close(self) -> None:
        """Cancel the deliveries in flight."""
        self._paused = True
        if self._timer is not None:
            self._timer.cancel()
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    def _start(self) -> None:
        """Start ready deliveries, up to `concurrency`, and complete the blocked ones."""
        self._turns.release()
        while self._turns.defers_new or not self._paused:
            turn = self._turns.next(self._may_start)
            if turn is None:
                return
            if turn.is_tried:
                self._begin(turn.delivery)
            else:
                self._defer(turn.delivery)

    def _may_start(self) -> bool:
        return not self._paused and len(self._running) < self._most_running and self._may_begin()

    def _may_begin(self) -> bool:
        seconds = self.breaker.seconds_to_trial()
        if seconds:
            if self._timer is None:
                self._timer = asyncio.get_running_loop().call_later(seconds, self._try_again)
            return False
        return seconds is not None

    def _try_again(self) -> None:
        self._timer = None
        self._start()

    def _begin(self, delivery: Delivery) -> None:
        self._begin_batch([delivery])

    def _begin_batch(self, batch: Sequence[Delivery]) -> None:
        for each in batch:
            each.is_running = True
        # While the breaker is open, it is the trial.
        is_trial = self.breaker.begin()
        task = asyncio.create_task(self._run(batch, is_trial))
        self._running.add(task)
        task.add_done_callback(partial(self._stopped, is_trial))

    def _stopped(self, is_trial: bool, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        if is_trial:
            # It may have learned nothing of the destination.
            self.breaker.give_up()
        error = None if task.cancelled() else task.exception()
        if error is not None and not self.failure.done():
            self.failure.set_exception(error)
        self._changed.set()
        self._start()

    # What becomes of a batch

    async def _run(self, batch: Sequence[Delivery], is_trial: bool) -> None:
        """Deliver a batch, and again what a call has left, in memory for up to `retry.defer_after` seconds."""
        started = time.monotonic()
        for each in batch:
            each.attempts = each.history.attempts
        parts = deque([batch])
        is_first = True
        while parts:
            part = parts.popleft()
            wait = self._pace.turn() if self._pace else 0.0
            if wait:
                await asyncio.sleep(wait)
            if (wait or not is_first) and self._is_held_up(is_trial and is_first):
                self._turns.put_back(
                    [*part, *(each for some in parts for each in some)], first=True
                )
                return
            is_first = False
            call = SinkCall(started, is_trial)
            left = self._judged(part, await self._results(part, call), call)
            if left.returned:
                rest = [*left.again, *(each for some in parts for each in some)]
                returned = sorted([*left.returned, *rest], key=ranked)
                self._turns.put_back(returned, first=not left.is_last)
                return
            if left.again:
                again, first = left.again, left.first
                parts.extendleft(filter(None, (again[first:], again[:first])))
                await asyncio.sleep(left.seconds)

    def _is_held_up(self, is_trial: bool) -> bool:
        """Whether meanwhile the sink was paused, or its destination was found to be down."""
        return self._paused or (self.breaker.is_open and not is_trial)

    async def _results(self, part: Sequence[Delivery], call: SinkCall) -> Results:
        """What became of each delivery of a part.

        What a failed one blocks is not in the call. It is completed after those of its keys that are.
        """
        called = part
        if any(each.is_blocked for each in part):
            called = _unblocked(part)
            if not called:
                return [Again()] * len(part)
        for each in called:
            if each.events.attempt != each.attempts + 1:
                each.events = replace(each.events, attempt=each.attempts + 1)
        self.kept.begin()
        began = time.monotonic()
        found: Results
        try:
            found = await self._deliver(called, call)
        except BaseException as raised:
            found = [OfBatch(fault_of(raised))] * len(called)
        call.seconds = time.monotonic() - began
        if called is part:
            return found
        of = dict(zip(called, found, strict=True))
        return [of[each] if each in of else Again() for each in part]

    async def _deliver(self, part: Sequence[Delivery], call: SinkCall) -> Results:
        """Let the sink deliver; raises what it raises."""
        (one,) = part
        if self._notes_attempt:
            ATTEMPT.set(self._attempt(one, call))
        await self._sink.deliver(one.events)
        return (None,)

    def _attempt(self, delivery: Delivery, call: SinkCall) -> Attempt:
        since = delivery.history.since
        if since is None and delivery.attempts:
            since = call.started
        xid = None if delivery.commit is None else delivery.commit.xid
        return Attempt(delivery.keys, since, self._claim, xid, key_of(delivery), delivery.endpoint)

    def _judged(self, part: Sequence[Delivery], results: Results, call: SinkCall) -> _Left:
        """Complete what has ended; returns what is left."""
        if all(each is None for each in results):
            call.is_answered = True
            for delivery in part:
                self._arrived(delivery, call)
            self._note_call(len(part), call, False)
            return _NOTHING
        fault = self._unattributed(results)
        halves = fault is not None
        call.is_answered = any(each is None or isinstance(each, Drop) for each in results)
        is_down = fault is not None and self._judge.failed_together(part, fault, call)
        again: list[Delivery] = []
        returned: list[Delivery] = []
        is_last = False
        kept: set[str] = set()
        waits = 0.0
        # The index in `again` of the first one whose result is not taken.
        first_kept = 0
        for delivery, result in zip(part, results, strict=True):
            error = result.fault if isinstance(result, OfBatch) and not halves else result
            if not kept.isdisjoint(delivery.keys):
                # An earlier one is still to be done.
                if error is None:
                    self._note_disorder()
                if not (first_kept or isinstance(result, Again | OfBatch)):
                    first_kept = len(again)
                again.append(delivery)
                kept |= delivery.keys
            elif delivery.is_blocked:
                self._completed(delivery, BLOCKED)
            elif error is None:
                self._arrived(delivery, call)
            elif isinstance(error, Drop):
                self._judge.dropped(delivery, error, call)
                self._completed(delivery, APPLIED)
            elif isinstance(error, ToEndpoints):
                self._divide(delivery, error.endpoints)
            elif isinstance(error, Again | OfBatch):
                (returned if is_down else again).append(delivery)
                kept |= delivery.keys
            else:
                verdict = self._judge.failed(delivery, error, call, in_memory=not self._paused)
                if isinstance(verdict, PutBack):
                    returned.append(delivery)
                    is_last |= verdict is PutBack.LAST
                    kept |= delivery.keys
                elif isinstance(verdict, float | int):
                    again.append(delivery)
                    waits = max(waits, verdict)
                    kept |= delivery.keys
                else:
                    self._completed(delivery, verdict)
        self._note_call(len(part), call, halves)
        if halves:
            first = (len(again) + 1) // 2
        elif len(again) == len(part) and isinstance(results[0], Again):
            # The next call would end as this one, for ever.
            first = first_kept
        else:
            first = len(again)
        return _Left(again, waits, first, returned, is_last)

    def _arrived(self, delivery: Delivery, call: SinkCall) -> None:
        self._judge.confirmed(delivery, call)
        self._completed(delivery, APPLIED)

    def _unattributed(self, results: Results) -> Exception | None:
        """The fault of several transactions of which one may be the culprit; None without one."""
        faults = [each.fault for each in results if isinstance(each, OfBatch)]
        if len(faults) < 2 or not self._reliable:
            return None
        return faults[0] if _may_be_of_one(faults[0]) else None

    def _note_disorder(self) -> None:
        """Note that the destination has done what follows a failed one with its key."""

    def _note_call(self, size: int, call: SinkCall, halves: bool) -> None:
        """Note what a call of so many deliveries has ended with."""


def _unblocked(part: Sequence[Delivery]) -> list[Delivery]:
    """The deliveries of a part that are not blocked, and that follow no blocked one with a key of theirs."""
    found: list[Delivery] = []
    left_out: set[str] = set()
    for each in part:
        if each.is_blocked or not left_out.isdisjoint(each.keys):
            left_out |= each.keys
        else:
            found.append(each)
    return found


def ranked(delivery: Delivery) -> tuple[bool, int, Delivery]:
    """The rank of a delivery in a batch: retries first, each kind in the order of submission."""
    return delivery.due is None, delivery.number, delivery


def _may_be_of_one(fault: Exception) -> bool:
    """Whether a fault of a batch may be one of a single transaction, so that others could be delivered without it.

    What users say of the batch as a whole, and what a destination says of itself, is not.
    """
    return not (
        isinstance(fault, RetryLater | Drop | Fail | DestinationRefused | Unauthorized)
        or asked_of(fault) > 0
        or action_for(fault) is FaultAction.STOP
    )
