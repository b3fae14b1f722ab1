"""Delivers transactions to a sink in batches (`each: batch`): many in one call, those of a key in order.

A batch is whatever can be delivered now, in the order of the log: of a key as many as there are, while no other batch
has the key. It begins when it is full, or when its first transaction has waited for `max_wait`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from heapq import heapify, heappop, heappush
from itertools import count

from relay.config.handlers import BatchHandler
from relay.delivery.dispatch import MOST_DELIVERIES, Dispatcher, fault_of
from relay.delivery.queues import Delivery
from relay.faults import (
    DestinationRefused,
    Drop,
    Fail,
    FaultAction,
    RetryLater,
    Unauthorized,
    Undelivered,
    action_for,
    asked_of,
    describe,
)
from relay.model.dispositions import BLOCKED
from relay.pipeline.failure_limit import FailureLimit
from relay.sinks import ATTEMPTS, Again, BatchSink, OfBatch

log = logging.getLogger(__name__)


class BatchDispatcher(Dispatcher):
    """Runs batches of deliveries in the current event loop, at most `concurrency` of them.

    A fault that says whose it is concerns that transaction, and holds its keys: what follows with one of them in the
    batch is not done, whatever the sink says of it. After a fault that does not, the batch is tried again in halves,
    until the culprit stands alone; only then the attempt counts. Transactions that have failed before are in batches of
    their own kind, so that one that always fails does not bring new ones to be delivered again.
    """

    def __init__(
        self,
        sink: BatchSink,
        settings: BatchHandler,
        most_bytes: int,
        limit: FailureLimit,
        claim: int = 0,
    ) -> None:
        super().__init__(sink, settings, most_bytes, limit, claim)
        self._batches = sink
        self._max_batch = settings.max_batch
        self._grown = settings.max_batch
        """The size up to which batches may grow: from one after an outage, twice what was delivered last."""
        self._wait = settings.max_wait
        self._one_of_key = settings.one_of_key
        self._has_warned = not settings.is_ordered
        self._numbers = count(1)
        self._waiting: dict[Delivery, float] = {}
        """Those that may begin, with the time since which they may (monotonic clock, seconds), the oldest first."""
        self._is_due = False
        self._has_no_room = False
        self._changes = self._enough_changes = 0
        self._fill_timer: asyncio.TimerHandle | None = None
        # Of the call whose results are judged now.
        self._is_answered = self._is_counted = False
        self._returned: list[Delivery] = []

    # Which deliveries are in a batch

    @property
    def _most(self) -> int:
        """The most deliveries of the next batch."""
        return 1 if self.breaker.is_open else min(self._max_batch, self._grown)

    def submit(self, delivery: Delivery) -> None:
        """Queue a delivery, which may join the next batch."""
        delivery.number, delivery.queued = next(self._numbers), time.monotonic()
        super().submit(delivery)
        if delivery.blockers and self._waiting:
            # It may follow one that waits.
            self._changes += 1
            self._launch_soon()

    def _begin(self, delivery: Delivery) -> None:
        # With one of a key in a batch, what has waited for another one's answer has waited for this batch.
        self._waiting[delivery] = delivery.queued if self._one_of_key else time.monotonic()
        self._changes += 1
        self._launch_soon()

    def _enqueue(self, delivery: Delivery) -> None:
        if not (delivery.is_running or delivery in self._waiting):
            super()._enqueue(delivery)

    def _start(self) -> None:
        super()._start()
        if self._waiting:
            self._launch_soon()

    def _stopped(self, is_trial: bool, task: asyncio.Task[None]) -> None:
        # Its keys are free.
        self._enough_changes = 0
        super()._stopped(is_trial, task)

    def pause(self) -> None:
        """Start no batch until `resume`."""
        super().pause()
        self._give_back()

    def defer_new(self, on: bool) -> None:
        """Turn the deferral of new deliveries on or off; those that wait for others are deferred too."""
        self._give_back()
        super().defer_new(on)

    async def wait_for_room(self) -> None:
        """Wait until there is room for another new delivery; a batch that is not full begins then."""
        self._has_no_room = self._new_count >= MOST_DELIVERIES or self._new_size > self._most_bytes
        if self._has_no_room:
            self._launch_soon()
            await super().wait_for_room()
            self._has_no_room = False

    async def close(self) -> None:
        """Cancel the batches in flight."""
        if self._fill_timer is not None:
            self._fill_timer.cancel()
        await super().close()

    def _launch_soon(self) -> None:
        """Launch batches in the next turn of the loop, once all that can be submitted now is submitted."""
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._launch)

    def _launch(self) -> None:
        self._is_due = False
        if self._fill_timer is not None:
            self._fill_timer.cancel()
            self._fill_timer = None
        while self._waiting and len(self._running) < self._most_running:
            if self._paused or not self._may_begin():
                self._give_back()
                return
            left = self._seconds_to_fill()
            if left > 0 and self._changes < self._enough_changes:
                self._fill(left)
                return
            batch = self._gathered()
            if len(batch) < self._most and left > 0 and not self._is_urgent(batch):
                # Before so many changes it is not full.
                self._enough_changes = self._changes + self._most - len(batch)
                self._fill(left)
                return
            if batch:
                self._enough_changes = 0
                self._begin_batch(batch)

    def _fill(self, seconds: float) -> None:
        self._fill_timer = asyncio.get_running_loop().call_later(seconds, self._launch)

    def _seconds_to_fill(self) -> float:
        """The seconds for which the batch of the oldest may wait for others."""
        waiting = self._waiting.values()
        oldest = min(waiting) if self._one_of_key else next(iter(waiting))
        return max(0.0, oldest + self._wait - time.monotonic())

    def _is_urgent(self, batch: Sequence[Delivery]) -> bool:
        """Whether a batch begins although it is not full: a retry has waited already, and a trial is a single one."""
        return (
            self.breaker.is_open
            or self._has_no_room
            or not batch
            or any(each.due is not None for each in batch)
        )

    def _gathered(self) -> list[Delivery]:
        """The next batch, in the order of the log, retries first. Those that may not begin any more are given back."""
        most = self._most
        candidates: list[tuple[bool, int, Delivery]] = []
        is_repeated = False
        for each in list(self._waiting):
            if each.blockers or self._is_blocked(each) or each.early():
                del self._waiting[each]
                if not each.blockers:
                    self._ready.add(each, first=True)
                    asyncio.get_running_loop().call_soon(self._start)
            elif not candidates:
                is_repeated = _is_repeated(each)
                candidates.append(_ranked(each))
            elif _is_repeated(each) is is_repeated:
                candidates.append(_ranked(each))
            if len(candidates) >= most:
                break
        heapify(candidates)
        batch: list[Delivery] = []
        taken: dict[str, int] = {}
        while candidates and len(batch) < most:
            *_, delivery = heappop(candidates)
            batch.append(delivery)
            if self._one_of_key:
                continue
            for each in self._queues.following(delivery, taken):
                if (
                    _is_repeated(each) is is_repeated
                    and not self._is_blocked(each)
                    and not each.early()
                ):
                    heappush(candidates, _ranked(each))
        return batch

    def _give_back(self) -> None:
        """Let those that wait for others be ready again, as they were before."""
        waiting, self._waiting = self._waiting, {}
        for each in reversed(waiting):
            if not each.blockers:
                self._ready.add(each, first=True)

    def _begin_batch(self, batch: Sequence[Delivery]) -> None:
        for each in batch:
            each.is_running = True
            self._waiting.pop(each, None)
        self._follow(self._run_batch(batch))

    # What becomes of a batch

    async def _run_batch(self, batch: Sequence[Delivery]) -> None:
        """Deliver a batch, and again what a call has left, in memory for up to `retry.defer_after` seconds."""
        started, is_trial = time.monotonic(), self.breaker.is_open
        attempts = {each: each.history.attempts for each in batch}
        parts = deque([batch])
        is_first = True
        while parts:
            part = parts.popleft()
            if not is_first and (self.breaker.is_open or self._paused):
                self._return([*part, *(each for some in parts for each in some)])
                return
            is_first = False
            results, seconds = await self._results(part, attempts, started)
            left, wait, first = self._judge(part, results, seconds, attempts, started, is_trial)
            if self._returned:
                returned, self._returned = self._returned, []
                rest = [*left, *(each for some in parts for each in some)]
                self._return(sorted([*returned, *rest], key=_ranked))
                return
            if left:
                parts.extendleft(filter(None, (left[first:], left[:first])))
                await asyncio.sleep(wait)

    async def _results(
        self, part: Sequence[Delivery], attempts: dict[Delivery, int], started: float
    ) -> tuple[Sequence[Exception | None], float]:
        """What became of each delivery of a part, and the seconds that the call took.

        What a failed one blocks is not in the call. It is completed after those of its keys that are.
        """
        called: list[Delivery] = []
        left_out: set[str] = set()
        for each in part:
            if each.is_blocked or not left_out.isdisjoint(each.keys):
                left_out |= each.keys
            else:
                called.append(each)
        if not called:
            return [Again()] * len(part), 0.0
        if len(called) == len(part):
            return await self._call(called, attempts, started)
        found, seconds = await self._call(called, attempts, started)
        of = dict(zip(called, found, strict=True))
        return [of[each] if each in of else Again() for each in part], seconds

    async def _call(
        self, part: Sequence[Delivery], attempts: dict[Delivery, int], started: float
    ) -> tuple[Sequence[Exception | None], float]:
        """What became of each delivery of one call, and the seconds that it took."""
        for each in part:
            if each.events.attempt != attempts[each] + 1:
                each.events = replace(each.events, attempt=attempts[each] + 1)
        if self._notes_attempt:
            ATTEMPTS.set([self._attempt(each, attempts[each], started) for each in part])
        if self._pace:
            await asyncio.sleep(self._pace.turn())
        began = time.monotonic()
        results: Sequence[Exception | None]
        try:
            results = await self._batches.deliver_batch([each.events for each in part])
            if all(isinstance(each, Again) for each in results):
                raise Undelivered("the sink has tried nothing of the batch")
        except BaseException as raised:
            results = [OfBatch(fault_of(raised))] * len(part)
        return results, time.monotonic() - began

    def _judge(
        self,
        part: Sequence[Delivery],
        results: Sequence[Exception | None],
        seconds: float,
        attempts: dict[Delivery, int],
        started: float,
        is_trial: bool,
    ) -> tuple[list[Delivery], float, int]:
        """Complete what has ended.

        Returns what is to be delivered again, in order, after how many seconds, and how many of them without the
        others. Those that are to be queued again, since the destination is down, are in `_returned`.
        """
        fault = self._unattributed(results)
        halves, is_down = fault is not None, False
        self._is_answered = any(each is None or isinstance(each, Drop) for each in results)
        self._is_counted = False
        if fault is not None:
            self._attempts.fail(describe(fault))
            if action_for(fault) is FaultAction.RETRY:
                self.destination.last_fault = describe(fault)
                is_down = self._is_down(part[0], fault)
        self._grow(len(part), halves)
        left: list[Delivery] = []
        kept: set[str] = set()
        waits = 0.0
        # The index in `left` of the first one whose result is not taken.
        first_kept = 0
        for delivery, result in zip(part, results, strict=True):
            error = result.fault if isinstance(result, OfBatch) and not halves else result
            if not kept.isdisjoint(delivery.keys):
                # An earlier one is still to be done.
                if error is None:
                    self._warn_of_order()
                if not (first_kept or isinstance(result, Again | OfBatch)):
                    first_kept = len(left)
                left.append(delivery)
                kept |= delivery.keys
            elif delivery.is_blocked:
                self._completed(delivery, BLOCKED)
            elif error is None:
                self._attempts.confirm(seconds, len(delivery.rows.tuples))
                self._confirmed(delivery)
            elif isinstance(error, Drop):
                self._dropped(delivery, error, seconds)
            elif isinstance(error, Again | OfBatch):
                (self._returned if is_down else left).append(delivery)
                kept |= delivery.keys
            else:
                wait = self._failed(delivery, error, attempts, started, is_trial)
                if wait is not None:
                    left.append(delivery)
                    waits = max(waits, wait)
                    kept |= delivery.keys
                elif delivery in self._returned:
                    kept |= delivery.keys
        if halves:
            return left, waits, (len(left) + 1) // 2
        if len(left) == len(part) and isinstance(results[0], Again):
            # The next call would end as this one, for ever.
            return left, waits, first_kept
        return left, waits, len(left)

    def _warn_of_order(self) -> None:
        """Log, once, that the destination has done what follows a failed one with its key."""
        if not self._has_warned:
            self._has_warned = True
            log.warning(
                "a transaction of a batch was confirmed although an earlier one of its key had failed, so it is "
                "delivered again: if the destination has done it, set one_of_key: true; if not, let it name both",
                extra={"handler": self._sink.name},
            )

    def _grow(self, size: int, halves: bool) -> None:
        """Let batches grow after one of `size` was answered: a large one may be what was taken for an outage."""
        if self.breaker.is_open and not self._is_answered:
            self._grown = 1
        elif self._is_answered and not halves:
            self._grown = min(self._max_batch, max(self._grown, 2 * size))

    def _failed(
        self,
        delivery: Delivery,
        error: Exception,
        attempts: dict[Delivery, int],
        started: float,
        is_trial: bool,
    ) -> float | None:
        attempts[delivery] += 1
        self._note_failure(error)
        return self._after_failure(delivery, error, attempts[delivery], started, is_trial)

    def _unattributed(self, results: Sequence[Exception | None]) -> Exception | None:
        """The fault of several transactions of which one may be the culprit; None without one."""
        faults = [each.fault for each in results if isinstance(each, OfBatch)]
        if len(faults) < 2 or not self._settings.reliable:
            return None
        return faults[0] if _may_be_of_one(faults[0]) else None

    def _is_down(self, delivery: Delivery, error: BaseException) -> bool:
        # One call is one attempt, and one that something was delivered in says that the destination is there.
        if self._is_counted or (self._is_answered and not isinstance(error, DestinationRefused)):
            return self.breaker.is_open and self._settings.reliable
        self._is_counted = True
        return super()._is_down(delivery, error)

    def _put_back(self, delivery: Delivery, *, first: bool = True) -> None:
        self._returned.append(delivery)

    def _return(self, deliveries: Sequence[Delivery]) -> None:
        """Queue deliveries of a batch again, after the retries with their keys."""
        for each in deliveries:
            each.is_running = False
        self._unblock(self._queues.stop_batch(deliveries))
        is_again = any(each.was_trial for each in deliveries)
        for each in deliveries if is_again else reversed(deliveries):
            if not each.blockers and not each.is_ready:
                # After a trial, another key's turn comes first.
                self._ready.add(each, first=not is_again)


def _ranked(delivery: Delivery) -> tuple[bool, int, Delivery]:
    return delivery.due is None, delivery.number, delivery


def _is_repeated(delivery: Delivery) -> bool:
    return delivery.history.attempts > 0


def _may_be_of_one(fault: Exception) -> bool:
    """Whether a fault of a batch may be one of a single transaction, so that others could be delivered without it.

    What users say of the batch as a whole, and what a destination says of itself, is not.
    """
    return not (
        isinstance(fault, RetryLater | Drop | Fail | DestinationRefused | Unauthorized)
        or asked_of(fault) > 0
        or action_for(fault) is FaultAction.STOP
    )
