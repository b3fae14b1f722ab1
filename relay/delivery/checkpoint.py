"""Stores the outcomes of deliveries and the position of a sink in one database transaction of the target."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from threading import Event
from typing import Concatenate, ParamSpec, TypeVar

from relay.config.settings import Settings
from relay.delivery.dispatch import Dispatcher
from relay.delivery.feed import Feed, Stream, WalHold
from relay.delivery.progress import SinkProgress
from relay.delivery.queues import Delivery
from relay.model.batch import DeadLetterReport
from relay.model.dispositions import Applied, Blocked, Disposition, is_deferred
from relay.pipeline.failure_limit import FailureLimit
from relay.pipeline.listeners import Meter
from relay.pipeline.settlement import Settlement, Unsettled
from relay.source.server import SourcePosition
from relay.store import activity, brakes
from relay.store.activity import Attempts
from relay.store.connections import Connection
from relay.store.positions.sinks import (
    ATTACHED,
    BEFORE_FIRST,
    LAGGING,
    Claim,
    SinkMoved,
    SinkPosition,
    SinkState,
)

log = logging.getLogger(__name__)

Given = ParamSpec("Given")
Result = TypeVar("Result")

STORE_SECONDS = 1.0
"""How often progress is stored and a pause is read. After a crash, later deliveries are repeated."""
ACTIVITY_SECONDS = 5.0
"""How often it is stored what was attempted."""
IDLE_ADOPTION_SECONDS = 60.0
"""How often a sink that gets no events stores a newer snapshot: each is a write to the target."""
_CHECK_SECONDS = 0.2
"""How often the checkpoint checks whether it is time to store progress."""


@dataclass(frozen=True, slots=True, eq=False)
class SinkContext:
    """What the parts of a sink's session share.

    `feed` and `hold` are the sink's ends of the `stream`. Statements on the target run in the session of the `claim`,
    in the thread of `target`. `ready` is set once the sink has joined the stream, or is known not to join it now.
    `woken` wakes the session: the feed, the claim or the operator's wish has changed.
    """

    name: str
    settings: Settings
    stream: Stream
    feed: Feed
    hold: WalHold
    ready: Event
    claim: Claim
    target: Executor
    meter: Meter
    woken: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def group(self) -> str:
        """The group that the sink belongs to."""
        return self.settings.group

    @property
    def polls(self) -> bool:
        """Whether the sink may read the outbox; in mode wal it has the stream only."""
        return self.settings.source.mode != "wal"

    async def in_target(
        self,
        call: Callable[Concatenate[Connection, Given], Result],
        *arguments: Given.args,
        **named: Given.kwargs,
    ) -> Result:
        """Run a blocking call with the claim's session; returns its result, and raises its errors."""
        return await asyncio.get_running_loop().run_in_executor(
            self.target, partial(call, self.claim.conn, *arguments, **named)
        )


class Checkpoint:
    """Takes the deliveries that have ended, and stores what became of them with the position. For one event loop.

    `state` is the state of the session, which its row gets at the next store; `paused` is what the operator wants, as
    of the last store. `retried` are the ids of the deferred rows that are being retried; `followed` is set when one of
    these ends, since the next one with its keys may be due.
    """

    def __init__(
        self,
        context: SinkContext,
        state: SinkState,
        progress: SinkProgress,
        dispatcher: Dispatcher,
    ) -> None:
        self._context = context
        self._progress = progress
        self._dispatcher = dispatcher
        self._settlement = Settlement(context.settings, context.name)
        self._row = _SinkRow(context, state)
        self._unstored: list[tuple[Delivery, Disposition]] = []
        self._to_store = asyncio.Event()
        self._finished = asyncio.Event()
        self._stored_at = time.monotonic()
        self._failure: Exception | None = None
        self._adopted: SourcePosition | None = None
        self._next_adoption = 0.0
        self.storing = asyncio.Lock()
        self.state = LAGGING
        self.paused = state.paused
        self.retried: set[int] = set()
        self.followed = asyncio.Event()

    def attach(self) -> None:
        """Set the state to attached: the stream feeds the sink from now on."""
        self.state, self._adopted = ATTACHED, None

    def adopt(self, seen: SourcePosition) -> None:
        """Adopt a position of the source at the next store: the stream has brought everything up to it."""
        self._adopted = seen

    async def complete(self) -> None:
        """Take deliveries as they end; runs until it is cancelled."""
        while True:
            await self._dispatcher.has_ended.wait()
            self._take_ended()

    def _take_ended(self) -> None:
        """Take the deliveries that have ended. What was delivered is done; the rest is done once it is stored."""
        for delivery, disposition in self._dispatcher.take_ended():
            if delivery.due is None and isinstance(disposition, Applied):
                self._finish_commit(delivery)
            elif delivery.due is not None and isinstance(disposition, Blocked):
                self.retried.discard(delivery.due.id)
            else:
                self._unstored.append((delivery, disposition))
                self._to_store.set()

    @property
    def has_unstored(self) -> bool:
        """Whether it is not stored yet what became of a delivery."""
        self._take_ended()
        return bool(self._unstored)

    @property
    def lags(self) -> bool:
        """Whether the sink would hold back WAL for too long."""
        feed, hold = self._context.feed, self._context.hold
        if feed.overflowed or self.paused or self._context.stream.is_stalled:
            return True
        if hold.lower_bound is not None and self.is_old(self._stored_at + 2 * STORE_SECONDS):
            # While progress cannot be stored, delivered commits hold back WAL too.
            return True
        return self.is_old(self._progress.since or feed.oldest)

    def is_old(self, since: float | None) -> bool:
        """Whether a time (monotonic clock) is more than `sinks.attach_seconds` ago; False for None."""
        limit = self._context.settings.sinks.attach_seconds
        return since is not None and time.monotonic() - since > limit

    @property
    def has_failed(self) -> bool:
        """Whether a store has failed, so that nothing can be stored any more."""
        return self._failure is not None

    async def finished(self) -> None:
        """Wait until the next delivery is done."""
        self._finished.clear()
        await self._finished.wait()

    async def keep(self) -> None:
        """Store what became of deliveries at once and progress every STORE_SECONDS; runs until it is cancelled."""
        due = time.monotonic() + STORE_SECONDS
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(_CHECK_SECONDS):
                    await self._to_store.wait()
            await self.flush()
            if time.monotonic() >= due:
                await self.store()
                due = time.monotonic() + STORE_SECONDS

    async def flush(self) -> None:
        """Store what became of the deliveries that have ended so far."""
        if self.has_unstored:
            await self.store()

    async def store(self) -> None:
        """Store what became of deliveries, and the position. Raises SinkMoved and psycopg.Error.

        After a store has failed, each raises its error: the position in memory is past what is not stored.
        """
        async with self.storing:
            if self._failure is not None:
                raise self._failure
            self._take_ended()
            self._move_to_adopted()
            self._to_store.clear()
            ended, self._unstored = self._unstored, []
            for delivery, _ in ended:
                self._finish_commit(delivery)
            reached = self._progress.reached
            position, done = self._progress.to_store()
            state = self._row_state
            attempts = self._row.due_attempts(self._dispatcher)
            try:
                paused, dead = await self._context.in_target(
                    self._write, ended, position, done, state, attempts
                )
            except Exception as error:
                self._failure = error
                raise
            for delivery, _ in ended:
                if delivery.due is not None:
                    self.retried.discard(delivery.due.id)
                    self.followed.set()
            self._report([disposition for _, disposition in ended], dead)
            self._stored_at = time.monotonic()
            self._context.hold.store(reached, state == ATTACHED)
        self._context.stream.confirm()
        self._obey(paused)

    def _obey(self, paused: bool) -> None:
        """Pause or resume as the operator wants."""
        if paused == self.paused:
            return
        self.paused = paused
        if paused:
            self._dispatcher.pause()
        else:
            self._dispatcher.resume()
        log.info(
            "a sink is paused" if paused else "a sink is resumed",
            extra={"handler": self._context.name},
        )
        self._context.woken.set()

    @property
    def _row_state(self) -> str:
        """The state to store: attached only if the WAL has all that is not done. In mode wal it always has."""
        if not self._context.polls:
            return ATTACHED
        if self.state == ATTACHED and self._progress.polls_any:
            return LAGGING
        return self.state

    def _finish_commit(self, delivery: Delivery) -> None:
        if delivery.commit is not None:
            self._progress.finish(delivery.commit)
            self._finished.set()

    def _move_to_adopted(self) -> None:
        """Move to the adopted snapshot; every IDLE_ADOPTION_SECONDS only if the sink gets no events."""
        seen, self._adopted = self._adopted, None
        if seen is None or self.state != ATTACHED:
            return
        now = time.monotonic()
        if len(self._progress.known) or now >= self._next_adoption:
            if self._progress.adopt(seen.snapshot):
                self._progress.reach(seen.lsn)
            self._next_adoption = now + IDLE_ADOPTION_SECONDS

    def _write(
        self,
        conn: Connection,
        ended: Sequence[tuple[Delivery, Disposition]],
        position: SinkPosition,
        done: Sequence[int],
        state: str,
        attempts: Attempts | None,
    ) -> tuple[bool, list[DeadLetterReport]]:
        """Write all in one database transaction; returns whether to pause, and the new dead letters.

        Raises SinkMoved.
        """
        unsettled = (
            Unsettled(each.rows, each.events.events, disposition, each.keys, each.history, each.due)
            for each, disposition in ended
        )
        with conn.transaction():
            dead = self._settlement.store(conn, unsettled)
            paused = self._row.write(position, done, state, attempts, self._dispatcher)
        return paused, dead

    def _report(
        self, dispositions: Collection[Disposition], dead: Sequence[DeadLetterReport]
    ) -> None:
        """Log dead letters and the faults that defer transactions, and count both. Called once they are stored."""
        self._settlement.log_retries(dispositions)
        for each in dead:
            log.warning("dead letter", extra=each.fields)
        self._context.meter.stored(self._context.name, sum(map(is_deferred, dispositions)), dead)


class _SinkRow:
    """What the target has of a sink: its row, its activity and its failures. Only what has changed is written."""

    def __init__(self, context: SinkContext, state: SinkState) -> None:
        self._context = context
        self._epoch = state.epoch
        self._written = state.position, ""
        self._streak = state.streaks.get(context.name)
        self._fault: str | None = ""
        self._next_activity = 0.0

    def due_attempts(self, dispatcher: Dispatcher) -> Attempts | None:
        """What was attempted since it was stored last; None before it is due again."""
        if time.monotonic() < self._next_activity:
            return None
        self._next_activity = time.monotonic() + ACTIVITY_SECONDS
        taken = dispatcher.take_attempts()
        return taken if taken.confirmed or taken.failed else None

    def write(
        self,
        position: SinkPosition,
        done: Sequence[int],
        state: str,
        attempts: Attempts | None,
        dispatcher: Dispatcher,
    ) -> bool:
        """Write in the current database transaction; returns whether the sink is to pause. Raises SinkMoved."""
        claim = self._context.claim
        if (position, state) != self._written or done:
            paused = claim.store(position, self._epoch, done, state)
        else:
            paused = claim.is_paused(self._epoch)
        if paused is None:
            raise SinkMoved
        if attempts is not None:
            self._write_attempts(attempts, position)
        self._write_streak(dispatcher.limit)
        fault = dispatcher.fault
        if fault != self._fault:
            claim.note_fault(fault)
        self._written, self._fault = (position, state), fault
        return paused

    def _write_attempts(self, attempts: Attempts, position: SinkPosition) -> None:
        is_polling = position.following is not None and position.polled_offset > BEFORE_FIRST
        polled_offset = position.polled_offset if is_polling else None
        context = self._context
        activity.add_attempts(
            context.claim.conn, context.group, context.name, attempts, polled_offset
        )

    def _write_streak(self, limit: FailureLimit) -> None:
        name = self._context.name
        streak = limit.streak(name)
        if streak == self._streak:
            return
        brakes.store(self._context.claim.conn, self._context.group, name, streak)
        was_braked = self._streak is not None and self._streak.braked
        self._streak = streak
        if streak is not None and streak.braked and not was_braked:
            log.error("a handler is stopped", extra={"fault": limit.explain(name)})
        elif was_braked and not (streak and streak.braked):
            log.warning("a stopped handler goes on", extra={"handler": name})
