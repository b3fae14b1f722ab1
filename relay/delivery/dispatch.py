"""Delivers transactions to a sink: in order for each ordering key, side by side for different ones."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable
from dataclasses import replace

from relay.config.handlers import DeliveryHandler
from relay.delivery.breaker import Breaker
from relay.delivery.pace import ProcessorShare, RateLimit
from relay.delivery.queues import Delivery, Queues
from relay.faults import Action, action_for, describe
from relay.handlers import Sink
from relay.model.dispositions import (
    Blocked,
    Disposition,
    Failure,
    holds_up_followers,
    is_dead,
    judge,
    retry_delay,
)
from relay.pipeline.brake import Brake
from relay.retry import LONGEST_WAIT_SECONDS

log = logging.getLogger(__name__)

MOST_DELIVERIES = 10_000
"""How many deliveries may be under way; the rest stays in the log."""
_LAGGING_SHARE = 0.5
"""How much of a processor a sink may take that lags."""
DEFER_BLOCKED_SECONDS = 300.0
"""How long the destination is down until blocked deliveries that fill the room are deferred, to reach other keys."""


class Dispatcher:
    """Runs deliveries in the current event loop. `settle` is called with each that is over and what became of it.

    It is called in order for each key: None says that the destination has confirmed. A delivery that follows on one
    with the same key that has to wait is `Blocked`, and is not tried; so is one whose key is held (`hold`). While the
    destination is down such deliveries are kept in memory, so that the log waits and is not copied.
    """

    def __init__(
        self,
        sink: Sink,
        settings: DeliveryHandler,
        most_bytes: int,
        brake: Brake,
        complete: Callable[[Delivery, Disposition | None], None],
        failed: Callable[[BaseException], None],
    ) -> None:
        """`failed` is called with a fault that no retry mends."""
        self._brake = brake
        self._sink = sink
        self._settings = settings
        self._most_bytes = most_bytes
        self._complete = complete
        self._failed = failed
        # Nothing waits for a sink that is not reliable.
        self.breaker = Breaker(settings.circuit_breaker if settings.reliable else None)
        self._pace = RateLimit(settings.rate_limit) if settings.rate_limit else None
        self._queues = Queues()
        self._held: set[str] = set()
        self._held_since: set[str] = set()
        self._ready: deque[Delivery] = deque()
        self._kept: deque[Delivery] = deque()
        self._relieved = time.monotonic()
        self._pending: dict[int, Delivery] = {}
        self._running: set[asyncio.Task[None]] = set()
        self._size = 0
        self._paused = self._spills = False
        self._changed = asyncio.Event()
        self._last_fault: str | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._share: ProcessorShare | None = None

    @property
    def fault(self) -> str | None:
        """Why nothing is delivered now; None if something is."""
        return self._last_fault if self.breaker.is_open else None

    @property
    def is_paused(self) -> bool:
        """Whether no delivery is begun."""
        return self._paused

    @property
    def count(self) -> int:
        """How many deliveries are under way or wait for their turn."""
        return len(self._pending)

    @property
    def pending(self) -> list[Delivery]:
        """The deliveries that are under way or wait for their turn, in the order in which they were submitted."""
        return list(self._pending.values())

    def submit(self, delivery: Delivery) -> None:
        """Deliver when everything before it with one of its keys is over; what was deferred goes before what is new."""
        self._pending[id(delivery)] = delivery
        self._size += delivery.rows.size
        self._queues.add(delivery)
        if not delivery.blockers:
            self._enqueue(delivery)
            self._start()

    def _enqueue(self, delivery: Delivery) -> None:
        """What holds its keys goes first, and so does what is deferred after it: until then it is not retried."""
        if delivery.is_ready:
            return
        delivery.is_ready = True
        is_first = delivery.due is not None or (
            self._is_blocked(delivery) and not self.breaker.is_open
        )
        if is_first:
            self._ready.appendleft(delivery)
        else:
            self._ready.append(delivery)

    def asking(self) -> None:
        """It is asked from now on which keys are held; who answers does not know what begins to wait meanwhile."""
        self._held_since.clear()

    def hold(self, keys: Collection[str], asked: Collection[str]) -> None:
        """Of the keys `asked`, these are held by a deferred transaction, and those that were added since `asking`."""
        self._held.difference_update(asked)
        self._held.update(keys, self._held_since)

    def release(self) -> None:
        """No key is held by a deferred transaction."""
        self._held.clear()

    def pause(self) -> None:
        """Begin no delivery until `resume`."""
        self._paused = True

    def resume(self) -> None:
        """Deliver again."""
        self._paused = False
        self._start()

    def spill(self, on: bool) -> None:
        """Let everything that is not under way be deferred, instead of waiting in memory; or no longer."""
        self._spills = on
        self._start()

    async def room(self) -> None:
        """Wait until more may be submitted."""
        while self.count >= MOST_DELIVERIES or self._size > self._most_bytes:
            if self._kept and time.monotonic() - self._relieved > DEFER_BLOCKED_SECONDS:
                self._defer_blocked()
            else:
                await self._change()

    def _defer_blocked(self) -> None:
        """Let what is blocked be deferred: other keys may be behind it in the log, whose destination is not down."""
        self._relieved = time.monotonic()
        while self._kept:
            kept = self._kept.popleft()
            kept.is_ready = False
            if not kept.blockers:
                self._completed(kept, Blocked())
            while self._ready and self._is_blocked(self._ready[-1]):
                self._kept.append(self._ready.pop())

    async def wait_idle(self) -> None:
        """Wait until nothing is under way, whatever waits for its turn."""
        while self._running:
            await self._change()

    async def close(self) -> None:
        """Cancel what is under way."""
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
        """Begin as many deliveries as may run side by side."""
        keeps = self.breaker.is_open and not self._spills
        if self._kept and not keeps:
            self._ready.extendleft(reversed(self._kept))
            self._kept.clear()
        while self._ready and (self._spills or not self._paused):
            delivery = self._ready[0]
            if delivery.blockers:
                # Something that was deferred has been put before it.
                self._take()
            elif self._is_blocked(delivery) and keeps and delivery.due is None:
                self._kept.append(self._ready.popleft())
            elif self._is_blocked(delivery):
                self._completed(self._take(), Blocked())
            elif (
                self._paused
                or len(self._running) >= self._settings.concurrency
                or not self._may_begin()
            ):
                return
            else:
                self._begin(self._take())

    def _take(self) -> Delivery:
        delivery = self._ready.popleft()
        delivery.is_ready = False
        return delivery

    def _begin(self, delivery: Delivery) -> None:
        delivery.is_running = True
        task = asyncio.create_task(self._run(delivery))
        self._running.add(task)
        task.add_done_callback(self._ended)

    def _put_back(self, delivery: Delivery, queue: Callable[[Delivery], None]) -> None:
        """Let a delivery that was tried wait for its turn again."""
        self._unblock(self._queues.stop(delivery))
        if not delivery.blockers:
            delivery.is_ready = True
            queue(delivery)

    def _unblock(self, deliveries: Iterable[Delivery]) -> None:
        for each in deliveries:
            if not each.blockers:
                self._enqueue(each)

    def _is_blocked(self, delivery: Delivery) -> bool:
        # A deferred transaction is one of those that hold its keys.
        is_held = delivery.due is None and not self._held.isdisjoint(delivery.keys)
        return is_held or delivery.is_blocked or (self._spills and delivery.due is None)

    def _may_begin(self) -> bool:
        seconds = self.breaker.seconds_to_trial()
        if seconds == 0 and self._share is not None:
            seconds = self._share.wait()
        if seconds:
            if self._timer is None:
                self._timer = asyncio.get_running_loop().call_later(seconds, self._try_again)
            return False
        if seconds is None:
            return False
        self.breaker.begin()
        return True

    def yield_to_others(self, on: bool) -> None:
        """Leave the processor to other threads half of the time, or no longer."""
        if on != (self._share is not None):
            self._share = ProcessorShare(_LAGGING_SHARE) if on else None

    def _try_again(self) -> None:
        self._timer = None
        self._start()

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failed(error)
        self._changed.set()
        self._start()

    async def _run(self, delivery: Delivery) -> None:
        """Deliver, with the retries that need only short waits."""
        attempts, started = delivery.history.attempts, time.monotonic()
        while True:
            if self._pace:
                await asyncio.sleep(self._pace.turn())
            is_trial = self.breaker.is_open
            try:
                await self._sink.deliver(delivery.events)
            except Exception as error:
                attempts += 1
                wait = self._after_failure(delivery, error, attempts, started, is_trial)
            else:
                self._confirmed(delivery)
                return
            if wait is None:
                return
            await asyncio.sleep(wait)
            if self.breaker.is_open:
                self._put_back(delivery, self._ready.appendleft)
                return

    def _confirmed(self, delivery: Delivery) -> None:
        if self.breaker.succeeded(_key(delivery)):
            log.info("delivering again", extra={"handler": self._sink.name})
        self._brake.succeeded((self._sink.name,))
        self._completed(delivery, None)

    def _after_failure(
        self, delivery: Delivery, error: Exception, attempts: int, started: float, is_trial: bool
    ) -> float | None:
        """Decide what becomes of it. Returns in how many seconds it is tried again in place, None if it is not.

        Raises what no retry mends.
        """
        retry = self._settings.retry
        self._last_fault = describe(error)
        action = action_for(error)
        if action is Action.STOP:
            raise error
        if action is not Action.RETRY:
            self.breaker.succeeded(_key(delivery))
        elif self._is_down(delivery, error):
            self._try_later(delivery, error, is_trial)
            return None
        wait = retry_delay(retry, error, attempts)
        if (
            action is Action.RETRY
            and time.monotonic() - started + wait <= retry.defer_after
            and not self._paused
            and self._settings.reliable
            and attempts != retry.attempts
        ):
            return wait
        blocks_key = self._settings.blocks_key
        disposition = judge(self._sink.name, error, attempts, delivery.history, retry, blocks_key)
        self._completed(delivery, self._braked(disposition))
        return None

    def _try_later(self, delivery: Delivery, error: Exception, is_trial: bool) -> None:
        """No attempt is spent: the destination is down."""
        if not is_trial:
            self._put_back(delivery, self._ready.appendleft)
        elif not delivery.was_trial:
            # The next trial is another key's.
            delivery.was_trial = True
            self._put_back(delivery, self._ready.append)
        else:
            # All others have failed too, perhaps since only their keys do: room for what follows them.
            self._completed(delivery, self._unspent(delivery, error))

    def _braked(self, failure: Failure) -> Failure:
        """What becomes of a transaction that is to be dead-lettered: too many in a row are not, and the sink stops."""
        if not is_dead(failure) or not self._brake.stops(self._sink.name, failure.error):
            return failure
        self.breaker.hold(LONGEST_WAIT_SECONDS)
        return replace(failure, after=LONGEST_WAIT_SECONDS, holds=False)

    def _is_down(self, delivery: Delivery, error: BaseException) -> bool:
        """Count a failure; returns whether the destination counts as down, so that no attempt is spent."""
        if self.breaker.failed(_key(delivery)):
            self._relieved = time.monotonic()
            log.warning(
                "nothing is delivered for now: the destination fails",
                extra={"handler": self._sink.name, "fault": describe(error)},
            )
        return self.breaker.is_open and self._settings.reliable

    def _unspent(self, delivery: Delivery, error: BaseException) -> Failure:
        attempts = delivery.history.attempts
        after = retry_delay(self._settings.retry, error, attempts)
        return Failure(self._sink.name, error, attempts, after)

    def _completed(self, delivery: Delivery, disposition: Disposition | None) -> None:
        del self._pending[id(delivery)]
        self._size -= delivery.rows.size
        holds_up = (
            disposition is not None and holds_up_followers(disposition) and self._settings.reliable
        )
        if holds_up:
            self._held |= delivery.keys
            self._held_since |= delivery.keys
        self._complete(delivery, disposition)
        following = self._queues.remove(delivery)
        for follower in following:
            follower.is_blocked |= holds_up
        self._unblock(following)
        self._changed.set()


def _key(delivery: Delivery) -> Hashable:
    """What the breaker takes for one key: the delivery itself where it has none."""
    return delivery.keys or delivery.rows.commit.xid
