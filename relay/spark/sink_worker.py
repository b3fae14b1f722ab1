"""The worker thread of one sink of `type: spark`: it claims the sink and writes its events, batch after batch.

The worker stores a batch in `relay.spark_batches` before it writes any row. It repeats a failed write with the same
rows under the same id. One transaction removes the stored batch and moves the sink's position past it.
"""

from __future__ import annotations

import gc
import logging
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import psycopg

from relay.config.handlers import SparkHandler
from relay.config.settings import Settings
from relay.faults import NotNow, Rejected
from relay.model.snapshots import full_xids
from relay.pipeline.failure_limit import FailureLimit
from relay.pipeline.listeners import Meter
from relay.pipeline.settlement import Settlement, log_dead
from relay.retention import restoration
from relay.runtime.parts import Condition, Due, Recurring
from relay.runtime.retry import FIRST_WAIT_SECONDS, LONGEST_WAIT_SECONDS
from relay.source.outbox.rows import prepare_reading
from relay.source.witnesses import require_history
from relay.spark import bad_rows, frames, sink_batches, upkeep
from relay.spark.batch_watch import BatchWatch
from relay.spark.descriptions import is_of_row, row_description, safe_description
from relay.spark.frames import Transform
from relay.spark.reading import MappedTable
from relay.spark.session import Session, close_client, own_session
from relay.spark.writers import (
    BATCH_COLUMN,
    BatchId,
    LostDestination,
    MissingPartition,
    StagingWriter,
    Writer,
    require_last,
    writer,
)
from relay.store import brakes, completeness, dead_letters, deferred
from relay.store.completeness import CaughtUp, CaughtUpNotes, Completeness, Moments
from relay.store.connections import Connection, connect
from relay.store.deferred import due as deferred_due
from relay.store.deferred.due import DueTransaction
from relay.store.positions import sinks, spark_batches
from relay.store.positions.sinks import (
    BEFORE_FIRST,
    CAUGHT_UP,
    LAGGING,
    Claim,
    SinkMoved,
    SinkPosition,
    SinkState,
)
from relay.store.positions.spark_batches import Contents, LastBatch, OpenBatch

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

log = logging.getLogger(__name__)


POLL_SECONDS = 1.0
"""Seconds between two polls for a batch that is due."""
CLAIM_SECONDS = 2.0
"""Seconds between two attempts to claim a sink that another process has claimed."""
LOOK_SECONDS = 30.0
"""Seconds between two looks of a sink that writes nothing at its destination: whether it has the last batch."""
BUILD_SECONDS = 5.0
"""Seconds after which `relay status` shows that the Spark session is still being built."""


class SparkWorker(Recurring):
    """Writes the batches of one sink from `start` to `close`. It retries every fault: the outbox keeps the events.

    The session may still be unstarted; a batch that is due starts it.
    """

    def __init__(
        self,
        name: str,
        settings: Settings,
        session: Session,
        meter: Meter | None = None,
        notes: CaughtUpNotes | None = None,
    ) -> None:
        """`notes` are those of all sinks of the process.

        Raises ConfigurationError for a callable that cannot be imported.
        """
        super().__init__(
            Condition(
                f"sink {name}",
                log,
                f"handlers.{name}: cannot write with Spark yet",
                f"handlers.{name}: writes with Spark again",
                first_pause=FIRST_WAIT_SECONDS,
                longest_pause=LONGEST_WAIT_SECONDS,
            ),
            ends_at_stop=True,
        )
        self._name = name
        self._meter = meter or Meter()
        self._settings = settings
        self._handler: SparkHandler = settings.spark_handlers[name]
        self._table = MappedTable(settings.source.table_name, settings.source.mapping)
        self._transform = Transform(name, self._handler)
        self._destination = writer(name, self._handler)
        self._claim = Claim(settings.target_dsn, settings.group, name)
        self._source: Connection | None = None
        self._session = session
        self._checked: Any = None
        self._own: tuple[SparkSession, SparkSession] | None = None
        self._since: float | None = None
        self._paused: bool | None = None
        self._moments = Moments()
        self._epoch: int | None = None
        self._notes = notes or CaughtUpNotes(settings.group)
        self._looked = -math.inf
        self._is_known_archive = False
        self._watch = BatchWatch(name, settings)
        self._refused = "", ""

    def claim(self) -> None:
        """Try to claim the sink now: another process may have released it."""
        self.wake()

    def turn(self) -> float:
        """Work the sink until `stop`, or a fault; pause if another process works it."""
        try:
            if not self._claim.take():
                self.condition.clear()
                self.pause(CLAIM_SECONDS)
                return 0.0
            while not self.stopping.is_set():
                self.heartbeat.update("writes", Due.OPEN)
                self.work()
                self.condition.works()
                if self._watch.shows_fault:
                    self._note_fault(None)
        except SinkMoved:
            sinks.log_move(self._name)
        except Exception as error:
            if not self.stopping.is_set():
                self._fail(error)
                self.pause(self.condition.pause)
        return 0.0

    def release(self) -> None:
        """Close the connections, with them the claim, and this sink's session."""
        self._disconnect()
        self._leave_own_session()

    def _fail(self, error: Exception) -> None:
        """Report the fault, store it for `relay sink list`, and close the connections."""
        # The user's function may have put values of events into its query.
        fault = safe_description(error, quoted=not self._transform.has_function)
        self.condition.fails(fault, handler=self._name)
        self._checked = None
        self._looked = -math.inf
        self._notes.discard(self._name)
        with suppress(psycopg.Error, AssertionError):
            if isinstance(error, LostDestination):
                completeness.withdraw(self._claim.conn, self._settings.group, self._name)
            self._note_fault(fault)
        self._disconnect()

    def _note_fault(self, fault: str | None) -> None:
        """Store a fault for `relay sink list`, or that there is none."""
        self._claim.note_fault(fault)
        self._watch.shows_fault = fault is not None

    def _disconnect(self) -> None:
        self._claim.release()
        source, self._source = self._source, None
        if source is not None:
            source.close()

    def work(self) -> None:
        """Write the stored batch, else one that is due; wait a poll interval where there is none.

        Raises SinkMoved where an operator has moved the sink, LostDestination, and every fault of the write.
        """
        state = self._load()
        if not state.paused and time.monotonic() - self._looked >= LOOK_SECONDS:
            session = self._session.get()
            with self._noticing_death(session):
                self._look(state.epoch, session)
        stored = None if state.paused else self._stored_batch(state)
        if stored is not None:
            require_history(self._connected(), self._claim.conn, self._settings.group)
            self._write(stored)
            return
        due = None if state.paused else self._store_due_batch(state)
        if due is not None:
            self._write(due)
            return
        self.pause(min(POLL_SECONDS, max(self._handler.every / 4, FIRST_WAIT_SECONDS)))

    def _load(self) -> SinkState:
        state = self._claim.load(self._handler.start)
        if state.paused is not self._paused:
            if self._paused is not None:
                sinks.log_pause(self._name, state.paused)
            self._paused = state.paused
        return state

    def _stored_batch(self, state: SinkState) -> OpenBatch | None:
        """The stored batch of the destination; None where there is none, or an operator has moved the sink since."""
        conn, group = self._claim.conn, self._settings.group
        batch = spark_batches.begun(conn, group, self._name, self._handler.target)
        if batch is None or batch.epoch == state.epoch:
            return batch
        spark_batches.end(conn, group, self._name, batch.id)
        log.info(
            "dropped a batch, because the sink was moved",
            extra={"handler": self._name, "batch": batch.number},
        )
        return None

    # The destination

    def _look(self, epoch: int, session: SparkSession | None) -> LastBatch | None:
        """Return the last finished batch; the destination may have it. Raises LostDestination where it does not.

        None where there is none since the sink began, or was moved: the destination may be a new one. Without a
        session, a destination that only Spark can read is not looked at.
        """
        conn, group = self._claim.conn, self._settings.group
        last = spark_batches.last(conn, group, self._name, epoch)
        own = None if session is None else self._own_session(session)
        if last is not None and last.facts is None:
            last = replace(
                last,
                kind=self._destination.kind,
                facts=self._destination.left(own, last, None) or {},
            )
            spark_batches.adopt(conn, group, self._name, epoch, last)
            log.warning(
                "nothing was noted of the destination with the last batch, so what is there now counts as what was "
                "left there; it is not proved that it has all batches before",
                extra={"handler": self._name, "batch": last.number},
            )
        elif last is not None:
            require_last(self._destination, self._name, own, last)
        self._looked = time.monotonic()
        return last

    # Storing a batch

    def _store_due_batch(self, state: SinkState) -> OpenBatch | None:
        """Store and return a batch if one is due. Raises SinkMoved and psycopg.Error."""
        found = sink_batches.find(
            self._connected(),
            self._claim.conn,
            self._settings,
            self._name,
            self._table,
            state,
            self._known_moments(state),
        )
        if found is None or found.is_empty:
            self._since = None
            if found is not None and found.moves:
                self._store(state, found.contents)
            elif found is not None:
                self._note_complete(state, found.complete)
            return None
        now = time.monotonic()
        self._since = now if self._since is None else self._since
        if not found.is_full and now - self._since < self._handler.every:
            return None
        self._since = None
        handler = self._handler
        contents = self._without_scheduled(found.contents)
        with self._claim.conn.transaction():
            contents, replayed, done = self._without_undelivered(contents)
            state = replace(state, done=np.union1d(state.done, [*replayed, *done]))
            if not (found.due or contents.rows):
                self._store(state, contents)
                return None
            self._begin(state, contents, found.due, replayed)
        return spark_batches.begun(
            self._claim.conn, self._settings.group, self._name, handler.target
        )

    def _begin(
        self,
        state: SinkState,
        contents: Contents,
        due: list[DueTransaction],
        replayed: Sequence[int],
    ) -> None:
        """Store a batch, in the open database transaction. `replayed` are commits that a replay delivers."""
        conn, group, handler = self._claim.conn, self._settings.group, self._handler
        if due:
            contents = replace(
                contents,
                deferred=[row.id for row in due],
                data=sink_batches.packed_events(conn, self._settings, due, handler.host_buckets),
            )
        layout = handler.partition_by, handler.host_buckets
        before = state.position
        # After a failover, recovery compares the new server with the position that was read.
        reading = replace(
            before,
            following=before.following or contents.after,
            delivered_lsn=max(before.delivered_lsn, contents.lsn),
        )
        self._claim.store(reading, state.epoch, LAGGING, replayed)
        spark_batches.begin(conn, group, self._name, handler.target, state.epoch, layout, contents)

    def _without_undelivered(self, contents: Contents) -> tuple[Contents, list[int], list[int]]:
        """Leave dead letters of the target that no sink has had out of a batch: their replay delivers them.

        Locks them, in the open database transaction, and returns the batch and their commits, full xids; then those
        that a replay has delivered since the sink's state was read.
        """
        before, after = contents.before, contents.after
        if not contents.rows:
            return contents, [], []
        conn, group = self._claim.conn, self._settings.group
        dead = dead_letters.lock_undelivered(conn, group, before.xmin, after.xmax - 1)
        xids = full_xids(np.array([xid for xid, _, _ in dead], np.uint32), after.xmax)
        between = after.sees(xids) & ~before.sees(xids)
        # The xids of another cluster, or of a timeline that ended in a failover, are those of other events here.
        replayed = sink_batches.published(
            self._connected(),
            self._table,
            [
                (int(xid), offset, event)
                for xid, (_, offset, event), is_between in zip(xids, dead, between, strict=True)
                if is_between
            ],
        )
        known = sinks.done(conn, group, self._name)
        done = np.setdiff1d(known[after.sees(known)], contents.left_out).tolist()
        if not (replayed or done):
            return contents, [], []
        return self._without(contents, [*replayed, *done]), replayed, done

    def _known_moments(self, state: SinkState) -> Moments:
        """The moments at which the source was read for the sink, of its present epoch."""
        if self._epoch != state.epoch:
            self._moments.clear()
            conn, group = self._claim.conn, self._settings.group
            completeness.expect(conn, group, [self._name])
            known = completeness.stored(conn, group, self._name)
            if known is not None:
                self._moments.note(known.snapshot, known.before)
            self._epoch = state.epoch
        return self._moments

    def _note_complete(self, state: SinkState, complete: Completeness) -> None:
        """Store that a sink without new rows is complete up to a later time; its position stays. Raises SinkMoved."""
        position = state.position
        if state.lags or not state.needs_outbox:
            self._claim.store(position, state.epoch, CAUGHT_UP)
        if complete.before is not None:
            assert position.snapshot is not None  # noqa: S101
            self._notes.note(
                self._claim.conn,
                CaughtUp(self._name, state.claim, state.epoch, position.snapshot, complete),
            )

    def _without_scheduled(self, contents: Contents) -> Contents:
        """Leave commits with an event for later out of a batch; `_store` defers them when it moves past them.

        Those with one that is cancelled, too: they are deleted when they are due.
        """
        for found in (sink_batches.scheduled_commits, sink_batches.cancelled_commits):
            if contents.rows:
                commits = found(self._connected(), self._claim.conn, self._table, contents)
                contents = self._without(contents, commits) if commits else contents
        return contents

    def _without(self, contents: Contents, commits: Iterable[int]) -> Contents:
        """Leave commits, full xids, out of a batch."""
        contents = replace(contents, left_out=[*contents.left_out, *commits])
        has_rows = sink_batches.has_rows(self._connected(), self._table, contents)
        return contents if has_rows else replace(contents, rows=0)

    def _connected(self) -> Connection:
        if self._source is None or self._source.closed:
            self._source = connect(self._settings.source_dsn, application_name="relay spark")
            prepare_reading(self._source)
        return self._source

    # Writing it

    def _write(self, batch: OpenBatch) -> None:
        """Write a batch and move past it."""
        session = self._ready_session()
        started = time.monotonic()
        handler = self._handler.model_copy(
            update={"partition_by": batch.partition_by, "host_buckets": batch.host_buckets}
        )
        destination = writer(self._name, handler)
        try:
            with self._noticing_death(session), self._watch.during(session, batch.number):
                is_first = self._look(batch.epoch, session) is None
                # Files that are decided only have to be moved, and a check removes old ones that are staged.
                if batch.files is None and self._checked is not session:
                    destination.check(session)
                    self._checked = session
                written = self._deliver(session, destination, batch, is_first)
        except MissingPartition:
            configured = self._handler.partition_by
            if batch.partition_by == configured:
                raise
            # The batch was stored under another configuration, whose query had the column.
            spark_batches.lay_out(
                self._claim.conn, self._settings.group, self._name, batch.id, configured
            )
            return
        except Exception as error:
            if not self._is_of_rows(batch, error):
                raise
            with self._noticing_death(session), self._watch.during(session, batch.number):
                if not self._dead_letter_refused(session, batch):
                    raise
            return
        finally:
            # py4j's references to objects of the JVM are in cycles.
            gc.collect(1)
        self._finish(batch, written)
        self._meter.spark_batch(self._name, time.monotonic() - started, batch.contents.rows)
        upkeep.after_batch(
            self._name,
            handler,
            destination,
            batch.number,
            self._own_session(session),
            self._watch.during(session, batch.number),
        )

    def _is_of_rows(self, batch: OpenBatch, error: Exception) -> bool:
        """Whether a batch has failed for what its rows have. Raises NotNow where no commit may become a dead letter."""
        if (
            self._handler.on_bad_row == "stop"
            or not (self._handler.sql or self._transform.has_function)
            or batch.files is not None
            or not is_of_row(error)
        ):
            return False
        refused, fault = self._refused
        if refused == batch.id:
            raise NotNow(fault) from error
        return True

    def _dead_letter_refused(self, session: SparkSession, batch: OpenBatch) -> bool:
        """Make dead letters of what the query or the function refuses, and give the batch up; False if that is nothing.

        The next batch has the others. Raises NotNow where that would be too many, SinkMoved and psycopg.Error.
        """
        conn, source, group = self._claim.conn, self._connected(), self._settings.group
        quoted = not self._transform.has_function
        try:
            found = self._refused_of(session, batch)
        except bad_rows.TooManyRefused as error:
            fault = row_description(error.__cause__ or error, quoted)
            raise self._at_fault(
                batch,
                f"handlers.{self._name}: more than {bad_rows.MOST} commits of a batch fail with {fault}: mend the "
                "query or the function, and restart",
            ) from error
        if not found:
            return False
        state = self._load()
        if state.epoch != batch.epoch:
            raise SinkMoved
        faults = [
            (item, Rejected(row_description(error, quoted), detail=str(error)))
            for item, error in found
        ]
        limit = FailureLimit(self._settings.brakes, state.streaks)
        if any(limit.stops(self._name, fault) for _, fault in faults):
            raise self._at_fault(batch, limit.explain(self._name))
        unsettled = list(bad_rows.dead_letters(source, conn, self._settings, self._name, faults))
        with conn.transaction():
            dead = Settlement(self._settings, self._name).store(conn, unsettled)
            commits = [item for item, _ in found if isinstance(item, int)]
            # Rejects a worker that has lost its claim.
            self._claim.store(state.position, state.epoch, LAGGING, commits)
            brakes.store(conn, group, self._name, limit.streak(self._name))
            if not spark_batches.end(conn, group, self._name, batch.id):
                raise SinkMoved
        log_dead(dead)
        self._meter.stored(self._name, 0, dead)
        return True

    def _refused_of(
        self, session: SparkSession, batch: OpenBatch
    ) -> list[tuple[bad_rows.Item, Exception]]:
        """What of a batch the query or the function refuses, each with its fault. Raises every other fault."""
        conn, contents = self._claim.conn, batch.contents
        items: list[bad_rows.Item] = [
            *sink_batches.commits(self._connected(), self._table, contents),
            *deferred_due.of_ids(conn, contents.deferred),
        ]

        def fault_of(wanted: Sequence[bad_rows.Item]) -> Exception | None:
            if self.stopping.is_set():
                raise NotNow("stopping")
            part = bad_rows.part_of(
                conn, self._settings, contents, items, wanted, batch.host_buckets
            )
            try:
                frame = self._frame(session, replace(batch, contents=part))
                frame.write.format("noop").mode("overwrite").save()
            except Exception as error:
                if is_of_row(error):
                    return error
                raise
            return None

        return bad_rows.find(items, fault_of)

    def _at_fault(self, batch: OpenBatch, fault: str) -> NotNow:
        """The fault of a batch whose rows are not looked at again by this process."""
        self._refused = batch.id, fault
        return NotNow(fault)

    @contextmanager
    def _noticing_death(self, session: SparkSession | None) -> Iterator[None]:
        """Have a session built again that has died in the context. Raises TransientFault then."""
        try:
            yield
        except MissingPartition:
            raise
        except Exception as error:
            if session is not None and self._session.replace_if_dead(session):
                raise NotNow("the Spark session has died, and is built again") from error
            raise

    def _deliver(
        self, session: SparkSession, destination: Writer, batch: OpenBatch, is_first: bool
    ) -> LastBatch:
        """Write a batch; staged files become visible after one attempt's have been stored as the batch's.

        Returns it with what tells that the destination has it.
        """
        contents = batch.contents
        identity = BatchId(
            batch.application,
            batch.number,
            batch.id,
            str(contents.after),
            contents.complete_before,
            str(contents.before),
            is_first,
        )
        files = batch.files
        if files is None:
            files = destination.write(self._frame(session, batch), identity)
            if files is not None:
                files = spark_batches.decide(
                    self._claim.conn, self._settings.group, self._name, batch.id, files
                )
                if files is None:
                    raise SinkMoved
        if files is not None:
            assert isinstance(destination, StagingWriter)  # noqa: S101
            destination.publish(self._own_session(session), identity, files)
        last = LastBatch(batch.application, batch.number, batch.id, destination.kind)
        return replace(last, facts=destination.left(self._own_session(session), last, files))

    def _frame(self, session: SparkSession, batch: OpenBatch) -> DataFrame:
        """The frame to write: the batch's events after `sql` and `transform`."""
        from pyspark.sql import functions

        own = self._own_session(session)
        frame = frames.frame(
            own,
            self._session.slots,
            self._connected(),
            self._settings,
            self._name,
            batch,
        )
        is_classic = self._settings.spark.remote is None
        if is_classic:
            # This thread runs no other jobs.
            session.sparkContext.setJobGroup(
                self._watch.job_group,
                f"sink {self._name}, batch {batch.number}: {batch.contents.rows:,} rows",
            )
            frames.read_only_needed(own, self._settings.source, None, batch)
        transformed = self._transform.applied(own, frame)
        if transformed is frame:
            return frame
        self._warn_of_archive(transformed.columns)
        if is_classic and self._handler.callable is None:
            frames.read_only_needed(own, self._settings.source, transformed, batch)
        return transformed.withColumn(BATCH_COLUMN, functions.lit(batch.id))

    def _warn_of_archive(self, columns: Sequence[str]) -> None:
        """Log once that an archive with these columns could not be restored, before retention removes the events."""
        if self._is_known_archive or self._settings.retention.archive != self._name:
            return
        self._is_known_archive = True
        unfit = restoration.unfit(self._settings, columns)
        if unfit is not None:
            log.warning("retention.archive: %s", unfit, extra={"handler": self._name})

    def _own_session(self, session: SparkSession) -> SparkSession:
        """This sink's session on the same Spark: its view and its settings are no other sink's."""
        if self._own is None or self._own[0] is not session:
            self._leave_own_session()
            self._own = session, own_session(session, bool(self._settings.spark.remote))
        return self._own[1]

    def _leave_own_session(self) -> None:
        """Close the channel that this sink's session has of its own on Spark Connect."""
        if self._own is not None and self._settings.spark.remote:
            close_client(self._own[1])
        self._own = None

    def _ready_session(self) -> SparkSession:
        session = self._session.get()
        started, noted = time.monotonic(), ""
        while session is None:
            if self.stopping.is_set():
                raise NotNow("stopping")
            if time.monotonic() - started >= BUILD_SECONDS:
                why = self._session.condition.fault
                fault = f"the Spark session is being built{f': {why.fault}' if why else ''}"
                if fault != noted:
                    self._note_fault(fault)
                    noted = fault
            self._session.start()
            session = self._session.get(timeout=0.5)
        return session

    def _finish(self, batch: OpenBatch, written: LastBatch | None = None) -> None:
        """Move the position past a batch, `written` with what tells that it is there.

        Raises SinkMoved and psycopg.Error.
        """
        state = self._load()
        if state.epoch != batch.epoch:
            raise SinkMoved
        conn, group = self._claim.conn, self._settings.group
        retried = batch.contents.deferred
        with conn.transaction():
            self._store(state, batch.contents)
            if not spark_batches.end(conn, group, self._name, batch.id, written):
                raise SinkMoved
            if self._name in state.streaks:
                brakes.forget(conn, group, self._name)
            if retried:
                replayed = spark_batches.dead_transactions(conn, retried)
                dead_letters.mark(conn, group, replayed, "replayed", "replayed")
                if len(deferred.remove(conn, retried)) < len(retried):
                    # Only those that were cancelled while they were written are noted.
                    ids = frames.packed_ids(batch.contents.data)
                    deferred.note_delivered(conn, group, self._name, ids)
        log.info(
            "wrote a batch with Spark",
            extra={
                "handler": self._name,
                "batch": batch.number,
                "events": batch.contents.rows,
                "deferred": len(retried),
            },
        )

    def _store(self, state: SinkState, contents: Contents) -> None:
        """Move the sink's position to the end of the contents, and defer what is left out of them for later.

        Raises SinkMoved, psycopg.Error, and the errors of `sink_batches.scheduled`.
        """
        before = state.position
        is_over = before.following is None or contents.after == before.following
        position = SinkPosition(
            contents.after,
            None if is_over else before.following,
            BEFORE_FIRST if is_over else before.polled_offset,
            before.applied_lsn,
            max(before.delivered_lsn, contents.lsn),
        )
        lags = not is_over or contents.rows >= self._handler.max_events
        conn, group = self._claim.conn, self._settings.group
        # A sink that begins in the middle of a difference has all of the next one.
        is_part = bool(state.done.size) or contents.polled_offset != BEFORE_FIRST
        later = set(contents.left_out).difference(state.done.tolist())
        self._notes.discard(self._name)
        with conn.transaction():
            if later:
                entries = sink_batches.scheduled(
                    self._connected(), self._settings, self._name, later
                )
                deferred.defer(conn, group, entries, self._name)
            self._claim.store(position, state.epoch, LAGGING if lags else CAUGHT_UP)
            completeness.note(
                conn,
                group,
                self._name,
                contents.after if is_part else contents.before,
                Completeness(contents.after, contents.complete_before),
                is_part,
            )
