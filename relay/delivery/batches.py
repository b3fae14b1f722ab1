"""Delivers transactions to a sink in batches (`each: batch`): many in one call, those of a key in order.

A batch is whatever can be delivered now, in the order of the log: of a key as many as there are, while no other batch
has the key. It begins when it is full, or when its first transaction has waited for `max_wait`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from heapq import heapify, heappop, heappush

from relay.config.handlers import BatchHandler
from relay.delivery.attempts import AttemptLog
from relay.delivery.dispatch import Dispatcher, Results, ranked
from relay.delivery.judging import SinkCall
from relay.delivery.order import Delivery
from relay.faults import Undelivered
from relay.pipeline.failure_limit import FailureLimit
from relay.sinks import ATTEMPTS, Again, BatchSink

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
        kept: AttemptLog | None = None,
    ) -> None:
        super().__init__(sink, settings, most_bytes, limit, claim, kept)
        self._batches = sink
        self._max_batch = settings.max_batch
        self._grown = settings.max_batch
        """The size up to which batches may grow: from one after an outage, twice what was delivered last."""
        self._wait = settings.max_wait
        self._one_of_key = settings.one_of_key
        self._has_warned = not settings.is_ordered
        self._waiting: dict[Delivery, float] = {}
        """Those that may begin, with the time since which they may (monotonic clock, seconds), the oldest first."""
        self._is_due = False
        self._has_no_room = False
        self._changes = self._enough_changes = 0
        self._fill_timer: asyncio.TimerHandle | None = None

    # Which deliveries are in a batch

    @property
    def _most(self) -> int:
        """The most deliveries of the next batch."""
        return 1 if self.breaker.is_open else min(self._max_batch, self._grown)

    def submit(self, delivery: Delivery) -> None:
        """Queue a delivery, which may join the next batch."""
        delivery.queued = time.monotonic()
        super().submit(delivery)
        if delivery.blockers and self._waiting:
            # It may follow one that waits.
            self._changes += 1
            self._launch_soon()

    def _begin(self, delivery: Delivery) -> None:
        # With one of a key in a batch, what has waited for another one's answer has waited for this batch.
        delivery.is_ready = True
        self._waiting[delivery] = delivery.queued if self._one_of_key else time.monotonic()
        self._changes += 1
        self._launch_soon()

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
        self._has_no_room = self._memory.is_full
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
            if each.blockers or self._turns.is_blocked(each) or each.early():
                self._leave(each)
                if not each.blockers:
                    self._turns.ready.add(each, first=True)
                    asyncio.get_running_loop().call_soon(self._start)
            elif not candidates:
                is_repeated = _is_repeated(each)
                candidates.append(ranked(each))
            elif _is_repeated(each) is is_repeated:
                candidates.append(ranked(each))
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
            for each in self._turns.queues.following(delivery, taken):
                if (
                    _is_repeated(each) is is_repeated
                    and not self._turns.is_blocked(each)
                    and not each.early()
                ):
                    heappush(candidates, ranked(each))
        return batch

    def _give_back(self) -> None:
        """Let those that wait for others be ready again, as they were before."""
        for each in reversed(list(self._waiting)):
            self._leave(each)
            if not each.blockers:
                self._turns.ready.add(each, first=True)

    def _leave(self, delivery: Delivery) -> None:
        """Remove a delivery from those that wait for others, if it is one."""
        if self._waiting.pop(delivery, None) is not None:
            delivery.is_ready = False

    def _begin_batch(self, batch: Sequence[Delivery]) -> None:
        for each in batch:
            self._leave(each)
        super()._begin_batch(batch)

    # What becomes of a batch

    async def _deliver(self, part: Sequence[Delivery], call: SinkCall) -> Results:
        """Let the sink deliver a batch; raises what it raises."""
        if self._notes_attempt:
            ATTEMPTS.set([self._attempt(each, call) for each in part])
        results = await self._batches.deliver_batch([each.events for each in part])
        if all(isinstance(each, Again) for each in results):
            raise Undelivered("the sink has tried nothing of the batch")
        return results

    def _note_disorder(self) -> None:
        """Log, once, that the destination has done what follows a failed one with its key."""
        if not self._has_warned:
            self._has_warned = True
            log.warning(
                "a transaction of a batch was confirmed although an earlier one of its key had failed, so it is "
                "delivered again: if the destination has done it, set one_of_key: true; if not, let it name both",
                extra={"handler": self._sink.name},
            )

    def _note_call(self, size: int, call: SinkCall, halves: bool) -> None:
        """Let batches grow after one of `size` was answered: a large one may be what was taken for an outage."""
        if self.breaker.is_open and not call.is_answered:
            self._grown = 1
        elif call.is_answered and not halves:
            self._grown = min(self._max_batch, max(self._grown, 2 * size))


def _is_repeated(delivery: Delivery) -> bool:
    return delivery.history.attempts > 0
