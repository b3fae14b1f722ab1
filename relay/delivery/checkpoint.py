"""Stores the outcomes of deliveries and the position of a sink in one database transaction of the target.

Outcomes other than a delivery are stored at once, in a transaction of the sink's own. Progress alone is stored together
with that of the other sinks of the instance.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from threading import Event

from relay.config.settings import Settings
from relay.delivery.attempts import AttemptLog, Ended
from relay.delivery.connections import SinkConnections
from relay.delivery.dispatch import Dispatcher
from relay.delivery.feed import Feed, Stream, WalHold
from relay.delivery.order import Delivery
from relay.delivery.outbox_end import OutboxEnd
from relay.delivery.progress import SinkProgress
from relay.model.batch import DeadLetterReport
from relay.model.dispositions import Applied, Blocked, Disposition, RetryLater, is_deferred
from relay.model.events import Lsn
from relay.pipeline.failure_limit import FailureLimit
from relay.pipeline.listeners import Meter
from relay.pipeline.settlement import Settlement, Unsettled, log_dead
from relay.source.server import SourcePosition
from relay.store import activity, brakes
from relay.store.activity import Attempts
from relay.store.brakes import Streak
from relay.store.connections import Connection
from relay.store.positions import sinks
from relay.store.positions.sinks import (
    ATTACHED,
    BEFORE_FIRST,
    LAGGING,
    SinkEntry,
    SinkMoved,
    SinkPosition,
    SinkState,
    Watched,
)

log = logging.getLogger(__name__)

STORE_SECONDS = 1.0
"""How often progress is stored and a pause is read. After a crash, later deliveries are repeated."""
ACTIVITY_SECONDS = 5.0
"""How often it is stored what was attempted."""
IDLE_ADOPTION_SECONDS = 60.0
"""How often a sink that gets no events stores a newer snapshot: each is a write to the target."""
_GATHER_SECONDS = 0.02
"""How long more deliveries may end before it is stored what became of one: a commit for each costs as much again."""


@dataclass(frozen=True, slots=True, eq=False)
class SinkContext:
    """What the parts of a sink's session share.

    `feed` and `hold` are the sink's ends of the `stream`. `ready` is set once the sink has joined the stream, or is
    known not to join it now. `outbox_end` is that of all sinks. `woken` wakes the session: the feed, the claim or the
    operator's wish has changed.
    """

    name: str
    settings: Settings
    stream: Stream
    feed: Feed
    hold: WalHold
    ready: Event
    connections: SinkConnections
    outbox_end: OutboxEnd
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


class Checkpoint:
    """Takes the deliveries that have ended, and stores what became of them with the position. For one event loop.

    `state` is the state of the session, which its row gets at the next store; `paused` is what the operator wants, as
    it was seen last. `retried` are the deferred rows that are being retried, their sizes in bytes by their ids.
    `may_be_due` is set when one of these ends, since the next one with its keys may be due and there is room for
    others, and when others are due.
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
        self._row = _SinkRow(context.name, state)
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
        self.retried: dict[int, int] = {}
        self.may_be_due = asyncio.Event()

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
        done: list[Delivery] = []
        for delivery, disposition in self._dispatcher.take_ended():
            if delivery.due is None and isinstance(disposition, Applied):
                done.append(delivery)
            elif delivery.due is not None and isinstance(disposition, Blocked):
                self._end_retry(delivery.due.id)
            else:
                self._unstored.append((delivery, disposition))
                self._to_store.set()
        self._finish_commits(done)

    def _end_retry(self, number: int) -> None:
        self.retried.pop(number, None)
        self.may_be_due.set()

    @property
    def has_unstored(self) -> bool:
        """Whether it is not stored yet what became of a delivery."""
        self._take_ended()
        return bool(self._unstored)

    @property
    def has_unstored_keys(self) -> bool:
        """Whether it is not stored yet that a delivery was deferred, so that a query misses keys that it holds."""
        self._take_ended()
        return not all(isinstance(disposition, Applied) for _, disposition in self._unstored)

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

    @property
    def has_deferred(self) -> bool:
        """Whether there may be deferred transactions."""
        return self._dispatcher.held.any

    async def finished(self) -> None:
        """Wait until the next delivery is done."""
        self._finished.clear()
        await self._finished.wait()

    async def keep(self) -> None:
        """Store what became of deliveries soon; runs until it is cancelled."""
        while True:
            await self._to_store.wait()
            await asyncio.sleep(_GATHER_SECONDS)
            await self.store()

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
            self._to_store.clear()
            ended, self._unstored = self._unstored, []
            self._finish_commits(delivery for delivery, _ in ended)
            progress = self._next_progress()
            paused, dead = self.paused, list[DeadLetterReport]()
            streak = self._dispatcher.limit.streak(self._context.name)
            is_new = progress.is_new or progress.attempts or streak != self._row.streak
            if ended or is_new or progress.ended:
                try:
                    paused, dead = await self._context.connections.in_target(
                        self._write, ended, progress, streak
                    )
                except Exception as error:
                    self._failure = error
                    raise
            for delivery, _ in ended:
                if delivery.due is not None:
                    self._end_retry(delivery.due.id)
            loop = asyncio.get_running_loop()
            for _, disposition in ended:
                if isinstance(disposition, RetryLater):
                    # Otherwise it is found when the row is looked at.
                    loop.call_later(disposition.after, self.may_be_due.set)
            self._report([disposition for _, disposition in ended], dead)
            self._row.note(progress.entry)
            self._row.note_streak(streak, self._dispatcher.limit)
            self._note_stored(progress)
        self._context.stream.confirm()
        self._obey(paused)

    def _next_progress(self) -> Progress:
        """The progress to store. The caller has `storing`."""
        self._move_to_adopted()
        reached = self._progress.reached
        position, done = self._progress.to_store()
        entry = self._row.entry(position, done, self._row_state, self._dispatcher.destination.fault)
        attempts, is_new = self._row.due_attempts(self._dispatcher), self._row.is_new(entry)
        kept = self._dispatcher.kept
        return Progress(entry, reached, attempts, is_new, kept, kept.take())

    def _note_stored(self, progress: Progress) -> None:
        self._stored_at = time.monotonic()
        self._context.hold.store(progress.reached, progress.entry.state == ATTACHED)

    # Together with other sinks

    async def begin(self) -> Progress | None:
        """The progress to store together with that of other sinks, until `end`; None if the sink stores it itself."""
        if self.storing.locked() or self._failure is not None:
            return None
        if (
            self.has_unstored
            or self._dispatcher.limit.streak(self._context.name) != self._row.streak
        ):
            self._to_store.set()
            return None
        await self.storing.acquire()
        progress = self._next_progress()
        if progress.is_new or progress.attempts:
            return progress
        progress.kept.give_back(progress.ended)
        self._note_stored(progress)
        self.storing.release()
        return None

    def end(self, progress: Progress, stored: bool) -> None:
        """Note whether progress was stored: otherwise somebody has locked the row, moved the sink, or has its claim."""
        if stored:
            self._row.note(progress.entry)
            self._note_stored(progress)
        else:
            progress.kept.give_back(progress.ended)
            if progress.entry.position.snapshot is not None:
                self._progress.give_back(progress.entry.done)
        self.storing.release()

    def fail(self, error: Exception) -> None:
        """End the session with an error of the common store, or since the claim is lost: nothing more can be stored."""
        self._failure = error
        if not self._dispatcher.failure.done():
            self._dispatcher.failure.set_exception(error)

    def see(self, seen: Watched | None) -> None:
        """Obey what others have changed; the session ends where that is the position, or another has the claim."""
        if seen is None or (seen.claim, seen.epoch) != self._row.loaded:
            self.fail(SinkMoved())
            return
        if seen.is_due or (self._dispatcher.held.any and not seen.holds):
            self.may_be_due.set()
        self._obey(seen.paused)

    def _obey(self, paused: bool) -> None:
        """Pause or resume as the operator wants."""
        if paused == self.paused:
            return
        self.paused = paused
        if paused:
            self._dispatcher.pause()
        else:
            self._dispatcher.resume()
        sinks.log_pause(self._context.name, paused)
        self._context.woken.set()

    @property
    def _row_state(self) -> str:
        """The state to store: attached only if the WAL has all that is not done. In mode wal it always has."""
        if not self._context.polls:
            return ATTACHED
        if self.state == ATTACHED and self._progress.polls_any:
            return LAGGING
        return self.state

    def _finish_commits(self, deliveries: Iterable[Delivery]) -> None:
        """Finish the commits of deliveries that have ended; a retry has none."""
        commits = [each.commit for each in deliveries if each.commit is not None]
        if commits:
            self._progress.finish(*commits)
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
        progress: Progress,
        streak: Streak | None,
    ) -> tuple[bool, list[DeadLetterReport]]:
        """Write all in one database transaction; returns whether to pause, and the new dead letters.

        Raises SinkMoved.
        """
        unsettled = (
            Unsettled(
                *(each.rows, each.events.events, disposition, each.keys, each.history, each.due),
                endpoint=each.endpoint,
                part_of=each.part_of,
            )
            for each, disposition in ended
        )
        context, entry = self._context, progress.entry
        with conn.transaction():
            dead = self._settlement.store(conn, unsettled)
            # Last but for what is locked by nobody else: it says whether this process may store anything.
            stored = sinks.store(conn, context.group, [entry])
            if entry.sink not in stored:
                raise SinkMoved
            if progress.attempts:
                activity.add_attempts(conn, context.group, progress.attempts)
            progress.write_ended(conn, context.group)
            if streak != self._row.streak:
                brakes.store(conn, context.group, context.name, streak)
        return stored[entry.sink], dead

    def _report(
        self, dispositions: Collection[Disposition], dead: Sequence[DeadLetterReport]
    ) -> None:
        """Log dead letters and the faults that defer transactions, and count both. Called once they are stored."""
        self._settlement.log_retries(dispositions)
        log_dead(dead)
        self._context.meter.stored(self._context.name, sum(map(is_deferred, dispositions)), dead)


@dataclass(frozen=True, slots=True, eq=False)
class Progress:
    """Progress that is to be stored: the `entry` if it `is_new`, and `attempts` of the sink, if they are due.

    Everything up to `reached` is done then. `ended` are attempts of the log `kept`, which wait for something else to
    commit with.
    """

    entry: SinkEntry
    reached: Lsn
    attempts: Mapping[str, tuple[Attempts, int | None]]
    is_new: bool
    kept: AttemptLog
    ended: Sequence[Ended]

    def write_ended(self, conn: Connection, group: str) -> None:
        """Store the attempts that have ended in the current database transaction. Raises psycopg.Error."""
        self.kept.write(conn, group, self.entry.sink, self.ended)


class _SinkRow:
    """What the target has of a sink: its row, its activity and its failures. Only what has changed is written."""

    def __init__(self, name: str, state: SinkState) -> None:
        self.loaded = state.claim, state.epoch
        """The numbers of the claim and the move with which the row was loaded."""
        self.streak = state.streaks.get(name)
        self._name = name
        self._written: tuple[SinkPosition, str, str | None] = state.position, "", None
        self._next_activity = 0.0

    def entry(
        self, position: SinkPosition, done: Sequence[int], state: str, fault: str | None
    ) -> SinkEntry:
        """What to store of the sink."""
        return SinkEntry(self._name, *self.loaded, position, done, state, fault)

    def is_new(self, entry: SinkEntry) -> bool:
        """Whether an entry differs from what is stored."""
        return bool(entry.done) or (entry.position, entry.state, entry.fault) != self._written

    def note(self, entry: SinkEntry) -> None:
        """Note that an entry is stored."""
        self._written = entry.position, entry.state, entry.fault

    def note_streak(self, streak: Streak | None, limit: FailureLimit) -> None:
        """Note that a streak is stored, and log whether the handler is stopped now."""
        before, self.streak = self.streak, streak
        was_braked, is_braked = bool(before and before.braked), bool(streak and streak.braked)
        if is_braked and not was_braked:
            log.error("a handler is stopped", extra={"fault": limit.explain(self._name)})
        elif was_braked and not is_braked:
            log.warning("a stopped handler goes on", extra={"handler": self._name})

    def due_attempts(self, dispatcher: Dispatcher) -> Mapping[str, tuple[Attempts, int | None]]:
        """What was attempted since it was stored last, by sink, with its position; empty before it is due again."""
        if time.monotonic() < self._next_activity:
            return {}
        self._next_activity = time.monotonic() + ACTIVITY_SECONDS
        taken, position = dispatcher.take_attempts(), self._written[0]
        if not (taken.confirmed or taken.failed):
            return {}
        is_polling = position.following is not None and position.polled_offset > BEFORE_FIRST
        return {self._name: (taken, position.polled_offset if is_polling else None)}
