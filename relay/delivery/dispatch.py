"""Delivers transactions to a sink: in order for each ordering key, concurrently for different keys."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Coroutine, Hashable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

from relay.config.handlers import DeliveryHandler, FunctionHandler, HttpHandler
from relay.delivery.queues import Delivery, HeldKeys, Queues, Ready
from relay.faults import (
    DestinationRefused,
    Drop,
    EndpointBusy,
    EndpointDisabled,
    EndpointDown,
    EndpointFailed,
    EndpointRejected,
    FaultAction,
    NotTried,
    Unauthorized,
    Undelivered,
    action_for,
    asked_of,
    describe,
)
from relay.logs import RepeatedLines
from relay.model.dispositions import (
    APPLIED,
    BLOCKED,
    DeadLetter,
    Disposition,
    Failed,
    RetryLater,
    holds_keys,
)
from relay.pipeline.failure_limit import FailureLimit
from relay.pipeline.retry_policy import DropLog, RetryPolicy
from relay.runtime.retry import LONGEST_WAIT_SECONDS
from relay.sinks import ATTEMPT, Attempt, Sink
from relay.sinks.circuit_breaker import CircuitBreaker
from relay.sinks.destination import Destination
from relay.store.activity import Attempts

log = logging.getLogger(__name__)

MOST_DELIVERIES = 10_000
"""How many deliveries may be in memory, in flight or queued; the others stay in the log."""
MOST_WAITING = 1_000
"""How many deliveries of a sink with many endpoints may be in flight, or wait for a turn at theirs."""
DEFER_BLOCKED_SECONDS = 300.0
"""How long blocked deliveries may fill the memory before they are deferred."""


class Dispatcher:
    """Runs deliveries in the current event loop, and queues those that have ended, with their dispositions.

    `take_ended` takes that queue, which is in order for each key; `has_ended` is set while it is not empty. `failure`
    gets a fault that no retry can repair.

    A delivery is `Blocked` and not tried if an earlier one with the same key is deferred, or a deferred transaction
    holds one of its keys (`held`). While the destination is down, blocked deliveries stay in memory: reading stops, and
    the log is not copied into the table of deferred transactions.
    """

    def __init__(
        self,
        sink: Sink,
        settings: DeliveryHandler,
        most_bytes: int,
        limit: FailureLimit,
        claim: int = 0,
    ) -> None:
        """`claim` is the number of the sink's claim, which functions need for commits of their own."""
        self.limit = limit
        self._claim = claim
        self._sink = sink
        self._settings = settings
        self._retry = RetryPolicy(sink.name, settings.retry)
        self._most_bytes = most_bytes
        self.held = HeldKeys()
        self.has_ended = asyncio.Event()
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._ended: list[tuple[Delivery, Disposition]] = []
        self.destination = Destination(sink.name, settings)
        # A delivery may wait for its endpoint: the sink itself limits how many are posted at once, and how fast.
        has_endpoints = isinstance(settings, HttpHandler) and settings.has_endpoints
        self._notes_attempt = has_endpoints or isinstance(settings, FunctionHandler)
        self._pace = None if has_endpoints else self.destination.pace
        self._most_running = MOST_WAITING if has_endpoints else settings.concurrency
        self._queues = Queues()
        self._ready = Ready()
        self._blocked: deque[Delivery] = deque()
        self._blocked_since = time.monotonic()
        self._pending: dict[int, Delivery] = {}
        self._running: set[asyncio.Task[None]] = set()
        self._new_count = self._new_size = 0
        self._paused = self._defers_new = False
        self._changed = asyncio.Event()
        self._attempts = Attempts()
        self._timer: asyncio.TimerHandle | None = None
        self._drops = DropLog(log)
        self._losses = RepeatedLines(
            log,
            logging.WARNING,
            "not delivered, and not tried again: the handler is not reliable",
            "losses",
        )

    @property
    def breaker(self) -> CircuitBreaker:
        """The circuit breaker of the destination."""
        return self.destination.breaker

    def take_attempts(self) -> Attempts:
        """Return what was attempted since the last call."""
        taken, self._attempts = self._attempts, Attempts()
        return taken

    def take_ended(self) -> list[tuple[Delivery, Disposition]]:
        """Return the deliveries that have ended since the last call, in order, each with its disposition."""
        self.has_ended.clear()
        taken, self._ended = self._ended, []
        return taken

    def end(self, delivery: Delivery, disposition: Disposition) -> None:
        """Put a delivery that is not submitted into the queue of those that have ended."""
        if disposition is not APPLIED:
            if isinstance(disposition, Failed) and not self._settings.reliable:
                self._losses.note(1, handler=self._sink.name, fault=describe(disposition.error))
                disposition = APPLIED
            else:
                holds = holds_keys(disposition) and self._settings.reliable
                self.held.add(delivery.keys if holds else ())
        self._ended.append((delivery, disposition))
        self.has_ended.set()

    @property
    def is_paused(self) -> bool:
        """Whether no delivery starts, until `resume`."""
        return self._paused

    @property
    def count(self) -> int:
        """How many deliveries are in flight or queued."""
        return len(self._pending)

    @property
    def pending(self) -> list[Delivery]:
        """The deliveries that are in flight or queued, in the order of submission."""
        return list(self._pending.values())

    def submit(self, delivery: Delivery) -> None:
        """Queue a delivery; it starts after all before it with its keys, and a retry before new ones with its keys."""
        self._pending[id(delivery)] = delivery
        self._count_new(delivery, 1)
        self._queues.add(delivery)
        if not delivery.blockers:
            self._enqueue(delivery)
            self._start()

    def _enqueue(self, delivery: Delivery) -> None:
        """Make a delivery ready to start or, if it is blocked, to be deferred."""
        if delivery.is_ready:
            return
        if not self._is_blocked(delivery):
            self._ready.add(delivery)
        elif self._keeps_blocked and delivery.due is None:
            self._keep(delivery)
        else:
            self._ready.add_blocked(delivery)

    def _keep(self, delivery: Delivery) -> None:
        """Keep a blocked delivery in memory while the destination is down."""
        delivery.is_ready = True
        self._blocked.append(delivery)

    @property
    def _keeps_blocked(self) -> bool:
        return self.breaker.is_open and not self._defers_new

    def _count_new(self, delivery: Delivery, sign: int) -> None:
        if delivery.due is None:
            self._new_count += sign
            self._new_size += sign * delivery.rows.size

    def pause(self) -> None:
        """Start no delivery until `resume`."""
        self._paused = True

    def resume(self) -> None:
        """Start deliveries again."""
        self._paused = False
        self._start()

    def defer_new(self, on: bool) -> None:
        """Turn the deferral of new deliveries on or off: while it is on, they are not queued in memory."""
        self._defers_new = on
        self._start()

    async def wait_for_room(self) -> None:
        """Wait until there is room for another new delivery."""
        while self._new_count >= MOST_DELIVERIES or self._new_size > self._most_bytes:
            if self._blocked and time.monotonic() - self._blocked_since > DEFER_BLOCKED_SECONDS:
                self._defer_blocked()
            else:
                await self._change()

    def _defer_blocked(self) -> None:
        """Defer the blocked deliveries: later in the log there may be keys that can be delivered."""
        self._blocked_since = time.monotonic()
        while self._blocked:
            delivery = self._blocked.popleft()
            delivery.is_ready = False
            if not delivery.blockers:
                self._defer(delivery)

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
        if self._blocked and not self._keeps_blocked:
            kept, self._blocked = self._blocked, deque()
            for each in kept:
                each.is_ready = False
            self._unblock(kept)
        while self._ready and (self._defers_new or not self._paused):
            delivery = self._ready.next()
            if delivery.blockers:
                # Meanwhile a retry with one of its keys was queued before it.
                self._ready.take()
            elif self._is_blocked(delivery) and self._keeps_blocked and delivery.due is None:
                self._keep(self._ready.take())
            elif self._is_blocked(delivery):
                self._defer(self._ready.take())
            elif self._paused or len(self._running) >= self._most_running or not self._may_begin():
                return
            elif delivery.early():
                # Others may be tried meanwhile.
                self._defer(self._ready.take())
            else:
                self._begin(self._ready.begin())

    def _begin(self, delivery: Delivery) -> None:
        delivery.is_running = True
        self._follow(self._run(delivery))

    def _follow(self, running: Coroutine[Any, Any, None]) -> None:
        """Run an attempt in a task. It is the trial while the breaker is open."""
        is_trial = self.breaker.begin()
        task = asyncio.create_task(running)
        self._running.add(task)
        task.add_done_callback(partial(self._stopped, is_trial))

    def _put_back(self, delivery: Delivery, *, first: bool = True) -> None:
        """Queue a delivery that was tried again, after the retries with its keys, `first` of its kind or last."""
        self._unblock(self._queues.stop(delivery))
        if not delivery.blockers:
            self._ready.add(delivery, first=first)

    def _unblock(self, deliveries: Iterable[Delivery]) -> None:
        for each in deliveries:
            if not each.blockers:
                self._enqueue(each)

    def _is_blocked(self, delivery: Delivery) -> bool:
        # A retry holds its keys itself.
        is_held = delivery.due is None and not self.held.known.isdisjoint(delivery.keys)
        return is_held or delivery.is_blocked or (self._defers_new and delivery.due is None)

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

    async def _run(self, delivery: Delivery) -> None:
        """Deliver, with retries in memory for up to `retry.defer_after` seconds."""
        attempts, started = delivery.history.attempts, time.monotonic()
        while True:
            if self._pace:
                await asyncio.sleep(self._pace.turn())
            is_trial = self.breaker.is_open
            if delivery.events.attempt != attempts + 1:
                delivery.events = replace(delivery.events, attempt=attempts + 1)
            if self._notes_attempt:
                ATTEMPT.set(self._attempt(delivery, attempts, started))
            began = time.monotonic()
            try:
                await self._sink.deliver(delivery.events)
            except Drop as drop:
                self._dropped(delivery, drop, time.monotonic() - began)
                return
            except BaseException as raised:
                error = fault_of(raised)
                attempts += 1
                self._note_failure(error)
                wait = self._after_failure(delivery, error, attempts, started, is_trial)
            else:
                self._attempts.confirm(time.monotonic() - began, len(delivery.rows.tuples))
                self._confirmed(delivery)
                return
            if wait is None:
                return
            await asyncio.sleep(wait)
            if self.breaker.is_open:
                self._put_back(delivery)
                return

    def _attempt(self, delivery: Delivery, attempts: int, started: float) -> Attempt:
        since = delivery.history.since
        if since is None and attempts:
            since = started
        xid = None if delivery.commit is None else delivery.commit.xid
        return Attempt(delivery.keys, since, self._claim, xid, _key(delivery))

    def _dropped(self, delivery: Delivery, drop: Drop, seconds: float) -> None:
        """Complete a delivery that the sink ends as done."""
        self._attempts.confirm(seconds, len(delivery.rows.tuples))
        self._drops.note(self._sink.name, drop, delivery.rows.transaction_id)
        self._confirmed(delivery)

    def _confirmed(self, delivery: Delivery) -> None:
        self.destination.answered(_key(delivery))
        self.limit.succeeded((self._sink.name,))
        self._completed(delivery, APPLIED)

    def _note_failure(self, error: Exception) -> None:
        is_untried = isinstance(error, NotTried) or (
            isinstance(error, EndpointDown) and not error.tried
        )
        if not is_untried:
            self._attempts.fail(describe(error))

    def _after_failure(
        self, delivery: Delivery, error: Exception, attempts: int, started: float, is_trial: bool
    ) -> float | None:
        """Judge a failed attempt; returns the seconds until the retry in memory, None without one."""
        action = action_for(error)
        if action is FaultAction.STOP:
            # What would stop relay stops this sink, until somebody has acted.
            error, cause = DestinationRefused(describe(error)), error
            error.__cause__ = cause
            action = FaultAction.RETRY
        self.destination.last_fault = describe(error)
        if action is not FaultAction.RETRY:
            self.destination.answered(_key(delivery))
        elif not isinstance(error, EndpointFailed | NotTried) and self._is_down(delivery, error):
            self._try_later(delivery, error, is_trial)
            return None
        if isinstance(error, Unauthorized | EndpointDown | NotTried) and self._settings.reliable:
            self._completed(delivery, self._uncounted(delivery, error))
            return None
        blocks_key = self._settings.blocks_key and not isinstance(error, EndpointDisabled)
        disposition = self._retry.disposition_of(error, attempts, delivery.history, blocks_key)
        if (
            isinstance(disposition, RetryLater)
            and time.monotonic() - started + disposition.after <= self._retry.defer_after
            and not self._paused
            and self._settings.reliable
        ):
            return disposition.after
        self._completed(delivery, self._limited(disposition))
        return None

    def _try_later(self, delivery: Delivery, error: Exception, is_trial: bool) -> None:
        """Queue or defer a delivery without counting the attempt, since the destination is down."""
        asked = asked_of(error)
        delivery.asked = (error, time.monotonic() + asked) if asked else None
        if not is_trial:
            self._put_back(delivery)
        elif not delivery.was_trial:
            # The next trial goes to another key.
            delivery.was_trial = True
            self._put_back(delivery, first=False)
        else:
            # All others have failed too. If only these keys fail, deferring them makes room for others.
            self._completed(delivery, self._uncounted(delivery, error))

    def defer_early(self) -> None:
        """Defer the queued deliveries whose destination asked for a time that has not come: a restart keeps to it."""
        for delivery in self._ready.take_early():
            self._defer(delivery)

    def _defer(self, delivery: Delivery) -> None:
        """Defer a delivery that is blocked, or whose destination has asked for a time that has not come."""
        early = delivery.early()
        if delivery.asked is None or not early:
            self._completed(delivery, BLOCKED)
            return
        error, attempts = delivery.asked[0], delivery.history.attempts
        self._completed(delivery, RetryLater(self._sink.name, error, early, attempts))

    def _limited(self, failed: Failed) -> Failed:
        """After too many dead letters in a row, defer the transaction instead and stop the sink."""
        if (
            not isinstance(failed, DeadLetter)
            # One endpoint must not stop the others.
            or isinstance(failed.error, EndpointRejected)
            or not self.limit.stops(self._sink.name, failed.error)
        ):
            return failed
        self.breaker.hold(LONGEST_WAIT_SECONDS)
        return RetryLater(self._sink.name, failed.error, LONGEST_WAIT_SECONDS, failed.attempts)

    def _is_down(self, delivery: Delivery, error: BaseException) -> bool:
        """Count a failure; returns whether the destination counts as down, so that the attempt does not count."""
        stops = isinstance(error, DestinationRefused)
        if self.destination.failed(_key(delivery), error, stop=stops):
            self._blocked_since = time.monotonic()
        return self.breaker.is_open and self._settings.reliable

    def _uncounted(self, delivery: Delivery, error: BaseException) -> RetryLater:
        """The disposition of a failed attempt that does not count. The wait grows with the time since the first one."""
        if isinstance(error, EndpointBusy):
            # It does not grow here: what waits for its turn at an endpoint that works would come later and later.
            return RetryLater(self._sink.name, error, asked_of(error), delivery.history.attempts)
        after = self._retry.wait_uncounted(error, delivery.history)
        return RetryLater(self._sink.name, error, after, delivery.history.attempts)

    def _completed(self, delivery: Delivery, disposition: Disposition) -> None:
        del self._pending[id(delivery)]
        self._count_new(delivery, -1)
        self.end(delivery, disposition)
        following = self._queues.remove(delivery)
        if following:
            holds_up = holds_keys(disposition) and self._settings.reliable
            for follower in following:
                follower.is_blocked |= holds_up
            self._unblock(following)
        self._changed.set()


def fault_of(raised: BaseException) -> Exception:
    """What a sink's call has raised, as a fault of the sink. Raises it if it is the end of the current task.

    A library may wait for a task of its own that somebody has cancelled, and panic or exit: the delivery ends
    nevertheless, and the other sinks go on.
    """
    if isinstance(raised, Exception):
        return raised
    task = asyncio.current_task()
    if isinstance(raised, GeneratorExit) or (task is not None and task.cancelling()):
        raise raised
    if isinstance(raised, asyncio.CancelledError):
        return Undelivered("what the sink waited for was cancelled")
    return DestinationRefused(f"the sink raised {type(raised).__name__}")


def _key(delivery: Delivery) -> Hashable:
    """The key that the breaker counts: the ordering keys together, or the commit if there are none."""
    return delivery.keys or delivery.rows.commit.xid
