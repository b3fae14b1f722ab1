"""Polls the outbox: the differences between snapshots of the source, in windows.

A group has a chain of snapshots, and each partition is at one of them: everything that this one sees is applied. A task
that applies a window claims its partitions by locks and reads the rows itself, so any number of instances
share a group, and executors read their own rows.

Source: PgQ (Skype Tools), whose ticks are snapshots and whose batches are differences.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from threading import Event
from typing import Any, Protocol

import psycopg

from relay.config.settings import Settings
from relay.faults import ConfigurationError, RelayError, TransientFault, describe
from relay.model.batch import Batch, Outcome, Window
from relay.model.events import Lsn
from relay.model.snapshots import RowCounts, Xids
from relay.model.transactions import Transactions
from relay.runtime.parts import SOON_SECONDS, Condition, Due, Heartbeat, Part
from relay.runtime.retry import RetryUntilSuccess
from relay.source.outbox.applied import index_of
from relay.source.outbox.cursor import Cursor
from relay.source.outbox.differences import Difference
from relay.source.outbox.interval import Interval
from relay.source.outbox.rows import Portion, prepare_reading
from relay.source.recognition import Recognition
from relay.source.server import SourcePosition, current_position, durable_position
from relay.source.state import POLLS, SourceState
from relay.source.stream.slot import reader_activity, require_published
from relay.source.witnesses import cover
from relay.store import completeness, dead_letters, groups
from relay.store.completeness import Completeness, Moments
from relay.store.connections import Connection, Pool, asking, open_pool, shared_pool
from relay.store.positions import offsets, snapshots
from relay.store.positions.snapshots import ChainLink
from relay.waits import Backoff

log = logging.getLogger(__name__)

BUSY_SECONDS = 0.05
"""How long to wait when other instances hold every partition that has rows to apply."""
LONGEST_BUSY_SECONDS = 1.0
"""The longest wait before a difference is planned again of which other instances hold the rest."""
POLLING_LOCK_TIMEOUT = "5s"
"""How long a poll waits for a lock on the table: until then nobody is told of it, and no stop is heeded."""
COMPARING_LOCK_TIMEOUT = "200ms"
"""How long a comparison of the stream with the outbox waits for a lock on the table, while the stream waits for it."""
GUARDED_EVENTS = 500
"""The most events of a window while guarding: its transactions are applied one at a time, in one commit."""
NOTE_SECONDS = 5.0
"""Seconds between two notes of the time up to which the group is complete."""
_FAR = 1 << 24
"""How many transactions a snapshot may lag while nothing is published: each new one is a write to the target."""


@dataclass(slots=True)
class _Plan:
    """A difference that is being polled: the remaining portions, and the position reached in each partition."""

    before: ChainLink
    after: ChainLink
    portions: Generator[Portion]
    reached: dict[int, int] = field(default_factory=dict)

    def window(self, portion: Portion) -> Window:
        """The window of a portion, with the positions that its partitions must have reached before it."""
        members = {p for share in portion.shares for p in share.partitions}
        lower_bounds = {p: self.reached.get(p, offsets.FIRST) for p in members}
        self.reached.update(dict.fromkeys(members, portion.upto))
        return Window(self.before.id, portion.upto, portion.shares, lower_bounds, portion.left)


class Poller:
    """Finds the committed rows that the group has not applied yet. Raises RelayError if the source is older than it."""

    def __init__(self, settings: Settings, heartbeat: Heartbeat | None = None) -> None:
        """`heartbeat` is that of the thread that polls."""
        self._settings = settings
        self._heartbeat = heartbeat or Heartbeat()
        self._own = settings.poll.partition_ids or range(settings.partitions)
        # One connection holds the plan of a difference open, the other serves queries.
        self._source: Pool = open_pool(settings.source_dsn, 2, _prepare_polling)
        self._cursor = Cursor(settings, self._source.connection)
        self._rows = self._cursor.rows
        self._target: Pool = shared_pool(settings.target_dsn)
        self._plan: _Plan | None = None
        # A process that was killed may have left snapshots before the first one that this one polls from.
        self._pruned = 0
        self._stopping = Event()
        self.condition = Condition(
            "polling", log, "cannot poll yet", "the outbox is polled again", SOON_SECONDS
        )
        self._retrying = RetryUntilSuccess(self._stopping, self.condition)
        self._windows = 0
        self._busy_waits = Backoff(BUSY_SECONDS, LONGEST_BUSY_SECONDS)
        self._guarded_events = 0
        self._moments = Moments()
        self._noted = -NOTE_SECONDS
        self._recognition = Recognition(settings)
        self._marked = self._checked = False
        self._named: tuple[str | None, int | None, str] | None = None

    def stop(self) -> None:
        """End the current wait: `window` then returns None."""
        self._stopping.set()

    def guard(self) -> None:
        """Plan small windows for as many events as one that killed a process may have had.

        Otherwise the next death, or a stop, would undo all that was applied one transaction at a time.
        """
        self._guarded_events = self._settings.batch.max_events

    def note(self, outcome: Outcome) -> None:
        """Note the outcome of the last window: the next wait for other instances is short if it has moved anything."""
        if outcome.did_nothing:
            return
        self._busy_waits.reset()
        if self._guarded_events > 0:
            self._guarded_events -= outcome.applied + outcome.deferred
            if self._guarded_events <= 0:
                # The rest is planned again, in large windows.
                self._drop_plan()

    def close(self) -> None:
        """Close the connections."""
        self.stop()
        self._drop_plan()
        self._source.close()

    def published_position(self) -> tuple[SourcePosition, tuple[int, int | None]]:
        """The current position of the source, and what `require_published` returns.

        Raises ConfigurationError unless the stream can bring all rows of the outbox, and psycopg.Error.
        """
        with self._source.connection() as conn, conn.transaction():
            membership = require_published(conn, self._settings.source)
            return current_position(conn), membership

    def last(self) -> ChainLink | None:
        """The group's last snapshot; None where only the WAL is read, or after `stop`.

        During an outage of the target it retries.
        """
        try:
            links = self._retrying(self._chain)
        except psycopg.Error:
            if self._stopping.is_set():
                return None
            raise
        return links[-1] if links else None

    def _chain(self) -> list[ChainLink]:
        with self._target.connection() as conn:
            return snapshots.chain(conn, self._settings.group)

    def adopt(
        self, seen: SourcePosition, opening: bool, adopted: Callable[[SourcePosition], None]
    ) -> bool:
        """Replace the group's last snapshot by one whose position in the WAL is applied.

        Returns False if the WAL has left out commits, which `opening` adds to the chain as a difference to poll, or if
        a difference is open already. Calls `adopted` if the WAL has brought everything that the snapshot sees. Raises
        psycopg.Error.
        """
        group = self._settings.group
        with self._target.connection() as target, self._source.connection() as source:
            positions, links, noted = self._applied(target)
            if not links:
                return True
            last = links[-1]
            if any(position.snapshot_id != last.id for position in positions):
                return False
            if not seen.snapshot.covers(last.snapshot):
                return True
            between = Difference(last.snapshot, seen.snapshot)
            if self._lacks_rows(source, target, between, noted):
                if opening:
                    cover(source, target, group, seen.snapshot)
                    snapshots.append(target, group, last, seen.snapshot, seen.lsn)
                return False
            if len(noted.xids) or seen.snapshot.xmax - last.snapshot.xmax > _FAR:
                cover(source, target, group, seen.snapshot)
                snapshots.replace(target, group, last, seen.snapshot)
            else:
                # Who has all that the last snapshot sees has all that this one sees, and has a witness of it.
                seen = replace(seen, snapshot=last.snapshot)
            complete = Completeness(seen.snapshot, seen.at)
            completeness.note(target, group, completeness.TARGET, last.snapshot, complete)
            adopted(seen)
            return True

    def lacks(self, seen: SourcePosition) -> bool:
        """Whether the WAL has not brought yet all that a snapshot sees, and all that it brought is applied.

        Raises psycopg.Error.
        """
        with self._target.connection() as target, self._source.connection() as source:
            positions, links, noted = self._applied(target)
            if not links or not seen.snapshot.covers(links[-1].snapshot):
                return False
            if any(position.snapshot_id != links[-1].id for position in positions):
                return True
            between = Difference(links[-1].snapshot, seen.snapshot)
            return self._lacks_rows(source, target, between, noted)

    def _applied(
        self, target: Connection
    ) -> tuple[list[offsets.PartitionPosition], list[ChainLink], RowCounts]:
        """Read where the partitions are, the group's snapshots, and what is noted beside them, in one transaction."""
        group = self._settings.group
        with target.transaction():
            positions, links = offsets.positions_and_chain(target, group)
            return positions, links, snapshots.noted_rows(target, group)

    def reader_activity(self) -> str:
        """Describe what the process does that reads the slot. Raises psycopg.Error."""
        with self._source.connection() as conn:
            return reader_activity(conn, self._settings.source.slot)

    def _lacks_rows(
        self,
        source: psycopg.Connection[Any],
        target: psycopg.Connection[Any],
        between: Difference,
        noted: RowCounts,
    ) -> bool:
        """Whether the WAL has left out a transaction, or a part of one, that is to be polled.

        Raises RelayError for a part that cannot be told from what is applied.
        """
        with source.transaction():
            source.execute("select set_config('lock_timeout', %s, true)", (COMPARING_LOCK_TIMEOUT,))
            inserted, every = self._rows.inserted(source, between)
        applied = noted.of(inserted.xids)
        partial = (applied > 0) & (inserted.rows > applied)
        doubtful = (applied > 0) & (every.rows > applied) & ~partial
        if partial.any():
            self._require_repairable(source, target, inserted.xids[partial])
        if doubtful.any():
            log.warning(
                "the outbox has more rows with the c_xid of a transaction than the WAL brought: they are copies, or a "
                "table was attached within a savepoint, whose rows are not relayed",
                extra={"xid": int(every.xids[doubtful][0])},
            )
        return bool(partial.any()) or not applied.all()

    def _require_repairable(
        self, source: psycopg.Connection[Any], target: psycopg.Connection[Any], xids: Xids
    ) -> None:
        """Raise RelayError if a transaction of which a part is applied has no partition where none of it is.

        Its rows in the other partitions are polled: a process died before it applied them, and they are not in the WAL.
        """
        noted = snapshots.noted_in(target, self._settings.group, range(self._settings.partitions))
        for xid, partitions in self._rows.partitions_of(source, xids).items():
            if all(partition in noted and xid in noted[partition] for partition in partitions):
                raise RelayError(
                    f"source.table: the WAL has brought only a part of transaction {xid}, whose other rows "
                    f"{self._settings.source.table} has too: a table was attached to it in that transaction, or the "
                    f"publication was changed. Compare the rows with c_xid {xid} with what was applied, publish again "
                    "those that are missing there, delete their rows, and start relay again"
                )

    def window(self, opening: bool = True, by_reference: bool = False) -> Batch | None:
        """Return the next window of the open differences or, with `opening`, of a new one up to now.

        None if there is none, or after `stop`. `by_reference`: the payloads of rows above `source.max_event_bytes` are
        not read. During an outage of a database it retries.
        """
        try:
            return self._retrying(self._window, opening, by_reference)
        except (psycopg.Error, TransientFault):
            if self._stopping.is_set():
                return None
            raise

    def _window(self, opening: bool, by_reference: bool) -> Batch | None:
        try:
            while not self._stopping.is_set():
                self._heartbeat.update("polls the outbox", Due.LATE)
                plan = self._plan or self._begin(opening)
                if plan is None:
                    return None
                self._plan = plan
                for portion in plan.portions:
                    window = plan.window(portion)
                    if any(p in self._own for share in portion.shares for p in share.partitions):
                        return self._batch(window, by_reference)
                self._complete(plan)
        except BaseException:
            self._drop_plan()
            raise
        return None

    def _batch(self, window: Window, by_reference: bool) -> Batch:
        if by_reference:
            window = replace(window, by_reference=tuple(self._cursor.large(window.shares)))
        self._windows += 1
        return Batch(
            number=self._windows,
            transactions=Transactions.none(),
            end=Lsn(0),
            events=sum(share.events for share in window.shares),
            size=0,
            window=window,
        )

    def _begin(self, opening: bool) -> _Plan | None:
        """Plan the first open difference or, with `opening`, open one; None without any."""
        with self._target.connection() as target:
            positions, links, applied = self._applied(target)
            origin = groups.origin(target, self._settings.group)
        if not links:
            raise _unchained(self._settings)
        own = [c.snapshot_id or 0 for c in positions if c.partition_id in self._own]
        oldest = links[index_of(links, min(c.snapshot_id or 0 for c in positions))]
        before = links[index_of(links, min(own))]
        with self._source.connection() as source:
            self._recognition.follow_polled(source, origin)
            self._require_marked(source)
            if opening or before != links[-1]:
                self._require_own_xids(source)
        if before == links[-1]:
            opened = self._open(before) if opening else None
            self._note_complete(oldest)
            if opened is None:
                return None
            links.append(opened)
        after = links[index_of(links, before.id) + 1]
        polled = min(c.polled_offset for c in positions if c.snapshot_id == before.id)
        between = Difference(before.snapshot, after.snapshot)
        most = GUARDED_EVENTS if self._guarded_events > 0 else None
        portions = self._cursor.plan(between, polled, whole=True, applied=applied, most=most)
        return _Plan(before, after, portions)

    def _open(self, last: ChainLink) -> ChainLink | None:
        """Add the source's current snapshot to the chain; None if it shows no new rows."""
        group = self._settings.group
        with self._target.connection() as target, self._source.connection() as source:
            now = current_position(source)
            if not now.snapshot.covers(last.snapshot):
                # A standby may lag.
                return None
            if self._rows.is_empty(source, Difference(last.snapshot, now.snapshot)):
                # Who has all that the last snapshot sees has all that this one sees.
                self._moments.note(last.snapshot, now.at)
                return None
            self._name_unassigned(source)
            seen = durable_position(source)
            self._moments.note(seen.snapshot, seen.at)
            cover(source, target, group, seen.snapshot)
            # None if another instance has added one meanwhile: that difference is next.
            return snapshots.append(target, group, last, seen.snapshot, seen.lsn)

    def _name_unassigned(self, source: psycopg.Connection[Any]) -> None:
        """Log the first row whose c_xid no transaction has yet, once: polling passes over it."""
        for row in self._rows.unassigned(source, 1):
            if row != self._named:
                self._named = row
                _, offset, xid = row
                log.error(
                    "a row has a c_xid that the server has not assigned yet, and is not polled: whoever inserted it "
                    "has set it; set it to null, and publish the event again",
                    extra={"c_offset": offset, "c_xid": xid},
                )

    def _note_complete(self, oldest: ChainLink) -> None:
        """Store up to which time the group is complete, whose partitions have all that `oldest` sees, now and then."""
        now = time.monotonic()
        if now - self._noted < NOTE_SECONDS:
            return
        complete = self._moments.reached(oldest.snapshot)
        if complete.before is None:
            return
        with self._target.connection() as target:
            completeness.note(
                target, self._settings.group, completeness.TARGET, oldest.snapshot, complete
            )
        self._noted = now

    def _complete(self, plan: _Plan) -> None:
        """End a plan: move the partitions that have applied all of it to the next snapshot."""
        ends = {p: plan.reached.get(p, offsets.FIRST) for p in self._own}
        self._plan = None
        with self._target.connection() as target:
            group = self._settings.group
            if offsets.complete(target, group, plan.before.id, plan.after.id, ends):
                snapshots.prune(target, group, self._pruned)
                self._pruned = plan.before.id
                self._busy_waits.reset()
                return
        # Another instance still applies a part of it. To plan the rest is a query of the whole difference.
        self._heartbeat.update(
            "waits for other instances, which apply a part of what is polled", Due.LATE
        )
        self._stopping.wait(self._busy_waits.take())

    def _drop_plan(self) -> None:
        plan, self._plan = self._plan, None
        if plan is not None:
            with suppress(psycopg.Error):
                plan.portions.close()

    def _require_marked(self, source: psycopg.Connection[Any]) -> None:
        """Check once that the outbox has the columns that polling needs. Raises ConfigurationError."""
        if not self._marked:
            self._rows.require_marked(source)
            self._marked = True

    def _require_own_xids(self, source: psycopg.Connection[Any]) -> None:
        """Check before the first poll that the rows' c_xid are of this cluster. Raises ConfigurationError."""
        if self._checked:
            return
        with self._target.connection() as target:
            self._rows.require_own_xids(
                source, partial(dead_letters.dead_of, target, self._settings.group)
            )
        self._checked = True


class Follower(Protocol):
    """Is notified of how the source is read."""

    def streaming(self) -> None:
        """Called when the WAL is read from now on, before its first batch is yielded."""

    def polling(self) -> None:
        """Called when the outbox is polled from now on."""

    def on_standby(self) -> None:
        """Called when another process reads the WAL from now on; all batches received here were yielded."""

    def adopt(self, seen: SourcePosition) -> None:
        """Called when the WAL has brought everything that a snapshot sees, and all of it is confirmed."""


class PollSource(Part):
    """The outbox as a source of batches, without logical replication.

    Other instances may get the same window: each applies the partitions that it can claim.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.heartbeat = Heartbeat()
        self._poller = Poller(settings, self.heartbeat)
        self._interval = Interval(settings)
        self._stopping = Event()
        self._progressed = True

    def guard(self) -> None:
        """Poll small windows at first, since a row may have killed a process. Call before `start`."""
        self._poller.guard()

    def start(self) -> None:
        """Log and store the mode; no thread is started."""
        reason = "source.mode is poll"
        log.info("polling", extra={"reason": reason})
        note_mode(self._settings, "poll", reason)

    def stop(self) -> None:
        """Let `batches()` end after the batch in flight. Safe in a signal handler's thread."""
        self._stopping.set()
        self._poller.stop()
        self._interval.wake()

    def close(self) -> None:
        """Close the connections."""
        self._poller.close()
        self._interval.close()

    @property
    def flushed(self) -> Lsn:
        """0/0: nothing is confirmed to the source."""
        return Lsn(0)

    def batches(self, follower: Follower) -> Iterator[Batch]:
        """Yield windows as rows are committed. Ends after `stop()`. Raises RelayError."""
        follower.polling()
        while not self._stopping.is_set():
            batch = self._poller.window()
            if batch is None:
                self.heartbeat.update("waits for events", Due.LATE)
                self._interval.wait()
                continue
            self._interval.shorten()
            yield batch
            if not self._progressed:
                self._stopping.wait(BUSY_SECONDS)

    @property
    def conditions(self) -> Sequence[Condition]:
        """The conditions of polling and of listening."""
        return self._poller.condition, self._interval.condition

    def state(self) -> SourceState:
        """How the source is read now. Safe in any thread."""
        return SourceState(POLLS, "source.mode is poll")

    @property
    def receiver(self) -> None:
        """None: no thread receives."""
        return None

    def ahead(self, events: int) -> Batch | None:
        """Return None: the contents of a window depend on how much of the one before was claimed."""

    def ack(self, batch: Batch, outcome: Outcome) -> None:
        """Note that the window is committed, as far as it could be claimed."""
        self._progressed = any(not task.busy for task in outcome.tasks)
        self._poller.note(outcome)

    def confirm(self, end: Lsn) -> None:
        """Do nothing: the positions are in the target only."""


def _prepare_polling(conn: psycopg.Connection[Any]) -> None:
    prepare_reading(conn)
    conn.execute("select set_config('lock_timeout', %s, false)", (POLLING_LOCK_TIMEOUT,))


def note_mode(settings: Settings, mode: str, reason: str | None, began: bool = True) -> None:
    """Store, for `relay status`, how the source is read from now on; unless it `began` now, the time stays."""
    try:
        with asking(settings.target_dsn) as conn:
            groups.note_mode(conn, settings.group, mode, reason, began)
    except psycopg.Error as error:
        log.debug("cannot note the mode", extra={"fault": describe(error)})


def _unchained(settings: Settings) -> ConfigurationError:
    return ConfigurationError(
        f"group: {settings.group!r} has only a position in the WAL, since it began with source.mode: wal: run "
        "`relay init` with the new mode, run relay with source.mode: wal until it is idle, stop it, and give it a "
        "position in the outbox, `relay offsets seek --to LSN` with what the slot has confirmed (`relay status`)"
    )
