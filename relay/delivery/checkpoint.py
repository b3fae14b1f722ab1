"""Stores the outcomes of deliveries and the position of a sink in one database transaction of the target."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import suppress
from typing import Any, Protocol

from relay.config.settings import Settings
from relay.delivery.hold import WalHold
from relay.delivery.progress import SinkProgress
from relay.delivery.queues import Delivery
from relay.faults import describe
from relay.logs import RepeatedLines
from relay.model.batch import DeadLettered
from relay.model.dispositions import (
    APPLIED,
    Applied,
    Blocked,
    DeadLetter,
    Disposition,
    RetryLater,
    is_deferred,
)
from relay.pipeline.failure_limit import FailureLimit
from relay.pipeline.listeners import Meter
from relay.pipeline.settlement import Settlement, Unsettled
from relay.source.server import SourcePosition
from relay.store import activity, brakes
from relay.store.activity import Attempts
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

STORE_SECONDS = 1.0
"""How often progress is stored and a pause is read. After a crash, later deliveries are repeated."""
ACTIVITY_SECONDS = 5.0
"""How often it is stored what was attempted."""
IDLE_ADOPTION_SECONDS = 60.0
"""How often a sink that gets no events stores a newer snapshot: each is a write to the target."""
_CHECK_SECONDS = 0.2
"""How often the checkpoint checks whether it is time to store progress."""


class Blocking(Protocol):
    """Runs blocking calls in a thread."""

    def __call__(self, call: Callable[..., Any], *arguments: object) -> Awaitable[Any]:
        """Run `call` in the thread; returns its result, and raises its errors."""


class Checkpoint:
    """Collects the outcomes of a sink's deliveries and stores them with its position. For one event loop.

    `state` is the state of the session, which its row gets at the next store; `at` is the time of the last store
    (monotonic clock, seconds). `held_any`: a deferred transaction may hold a key; `records` counts outcomes that may
    add one. `retried` are the ids of the deferred rows that are being retried; `followed` is set when one of these
    ends, since the next one with its keys may be due.
    """

    def __init__(
        self,
        name: str,
        settings: Settings,
        claim: Claim,
        state: SinkState,
        progress: SinkProgress,
        limit: FailureLimit,
        hold: WalHold,
        in_target: Blocking,
        fault: Callable[[], str | None],
        stored: Callable[[bool], None],
        attempts: Callable[[], Attempts],
        meter: Meter,
    ) -> None:
        """`fault` returns why nothing is delivered; `stored` is called after each store, with whether to pause.

        `attempts` returns what was attempted since its last call.
        """
        self._name = name
        self._settings = settings
        self._claim = claim
        self._epoch = state.epoch
        self._progress = progress
        self._settlement = Settlement(settings, name)
        self._meter = meter
        self._limit = limit
        self._hold = hold
        self._in_target = in_target
        self._fault = fault
        self._stored = stored
        self._attempts = attempts
        self._next_activity = 0.0
        self._outcomes: list[tuple[Delivery, Disposition]] = []
        self._recorded = asyncio.Event()
        self._finished = asyncio.Event()
        self._written = state.position, ""
        self._failure: Exception | None = None
        self._streak = state.streaks.get(name)
        self._reported_fault: str | None = ""
        self._adopted: SourcePosition | None = None
        self._next_adoption = 0.0
        self._losses = RepeatedLines(
            log,
            logging.WARNING,
            "not delivered, and not tried again: the handler is not reliable",
            "losses",
        )
        self.storing = asyncio.Lock()
        self.at = time.monotonic()
        self.state = LAGGING
        self.held_any = True
        self.records = 0
        self.retried: set[int] = set()
        self.followed = asyncio.Event()

    def attach(self) -> None:
        """Set the state to attached: the stream feeds the sink from now on."""
        self.state, self._adopted = ATTACHED, None

    def adopt(self, seen: SourcePosition) -> None:
        """Adopt a position of the source at the next store: the stream has brought everything up to it."""
        self._adopted = seen

    def complete(self, delivery: Delivery, disposition: Disposition) -> None:
        """Finish a delivery, or record its disposition to be stored."""
        if (
            isinstance(disposition, RetryLater | DeadLetter)
            and not self._settings.sink_handlers[self._name].reliable
        ):
            self._losses.note(1, handler=self._name, fault=describe(disposition.error))
            disposition = APPLIED
        if delivery.due is not None and isinstance(disposition, Blocked):
            self.retried.discard(delivery.due.id)
        elif isinstance(disposition, Applied) and delivery.due is None:
            self._finish_commit(delivery)
        else:
            self.record(delivery, disposition)

    def record(self, delivery: Delivery, disposition: Disposition) -> None:
        """Record an outcome, to be stored at once."""
        self._outcomes.append((delivery, disposition))
        self.records += 1
        self.held_any = True
        self._recorded.set()

    @property
    def has_outcomes(self) -> bool:
        """Whether a recorded outcome is not stored yet."""
        return bool(self._outcomes)

    @property
    def has_failed(self) -> bool:
        """Whether a store has failed, so that nothing can be stored any more."""
        return self._failure is not None

    async def finished(self) -> None:
        """Wait until the next delivery is done."""
        self._finished.clear()
        await self._finished.wait()

    async def keep(self) -> None:
        """Store outcomes at once and progress every STORE_SECONDS; runs until it is cancelled."""
        due = time.monotonic() + STORE_SECONDS
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(_CHECK_SECONDS):
                    await self._recorded.wait()
            await self.flush()
            if time.monotonic() >= due:
                await self.store()
                due = time.monotonic() + STORE_SECONDS

    async def flush(self) -> None:
        """Store the outcomes recorded so far."""
        if self._outcomes:
            await self.store()

    async def store(self) -> None:
        """Store the recorded outcomes and the position. Raises SinkMoved and psycopg.Error.

        After a store has failed, each raises its error: the position in memory is past outcomes that are not stored.
        """
        async with self.storing:
            if self._failure is not None:
                raise self._failure
            self._move_to_adopted()
            self._recorded.clear()
            outcomes, self._outcomes = self._outcomes, []
            for delivery, _ in outcomes:
                self._finish_commit(delivery)
            reached = self._progress.reached
            position, done = self._progress.to_store()
            state = self._row_state
            attempts = self._due_attempts()
            try:
                paused, dead = await self._in_target(
                    self._write, outcomes, position, done, state, attempts
                )
            except Exception as error:
                self._failure = error
                raise
            for delivery, _ in outcomes:
                if delivery.due is not None:
                    self.retried.discard(delivery.due.id)
                    self.followed.set()
            self._report([disposition for _, disposition in outcomes], dead)
            self.at = time.monotonic()
            self._hold.store(reached, state == ATTACHED)
        self._stored(paused)

    @property
    def _row_state(self) -> str:
        """The state to store: attached only if the WAL has all that is not done. In mode wal it always has."""
        if self._settings.source.mode == "wal":
            return ATTACHED
        if self.state == ATTACHED and self._progress.polls_any:
            return LAGGING
        return self.state

    def _due_attempts(self) -> Attempts | None:
        """What was attempted since it was stored last; None before it is due again."""
        if time.monotonic() < self._next_activity:
            return None
        self._next_activity = time.monotonic() + ACTIVITY_SECONDS
        taken = self._attempts()
        return taken if taken.confirmed or taken.failed else None

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
        outcomes: Sequence[tuple[Delivery, Disposition]],
        position: SinkPosition,
        done: Sequence[int],
        state: str,
        attempts: Attempts | None,
    ) -> tuple[bool, list[DeadLettered]]:
        """Write outcomes and position in one database transaction; returns whether to pause, and the new dead letters.

        Raises SinkMoved.
        """
        changed = (position, state) != self._written or bool(done)
        with self._claim.conn.transaction():
            dead = self._settlement.store(
                self._claim.conn,
                (
                    Unsettled(
                        each.rows,
                        each.events.events,
                        disposition,
                        each.keys,
                        each.history,
                        each.due,
                    )
                    for each, disposition in outcomes
                ),
            )
            paused = (
                self._claim.store(position, self._epoch, done, state)
                if changed
                else self._claim.is_paused(self._epoch)
            )
            if paused is None:
                raise SinkMoved
            if attempts is not None:
                self._write_attempts(attempts, position)
            self._write_streak()
            fault = self._fault()
            if fault != self._reported_fault:
                self._claim.note_fault(fault)
        self._written, self._reported_fault = (position, state), fault
        return paused, dead

    def _report(self, dispositions: Collection[Disposition], dead: Sequence[DeadLettered]) -> None:
        """Log dead letters and the faults that defer transactions, and count both. Called once they are stored."""
        self._settlement.log_retries(dispositions)
        for each in dead:
            log.warning("dead letter", extra=each.fields)
        self._meter.stored(self._name, sum(map(is_deferred, dispositions)), dead)

    def _write_attempts(self, attempts: Attempts, position: SinkPosition) -> None:
        is_polling = position.following is not None and position.polled_offset > BEFORE_FIRST
        polled_offset = position.polled_offset if is_polling else None
        activity.add_attempts(
            self._claim.conn, self._settings.group, self._name, attempts, polled_offset
        )

    def _write_streak(self) -> None:
        streak = self._limit.streak(self._name)
        if streak == self._streak:
            return
        brakes.store(self._claim.conn, self._settings.group, self._name, streak)
        was_braked = self._streak is not None and self._streak.braked
        self._streak = streak
        if streak is not None and streak.braked and not was_braked:
            log.error("a handler is stopped", extra={"fault": self._limit.explain(self._name)})
        elif was_braked and not (streak and streak.braked):
            log.warning("a stopped handler goes on", extra={"handler": self._name})
