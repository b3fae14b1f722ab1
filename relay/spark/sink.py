"""A thread for one sink of `type: spark`: claims it, and writes what the outbox has for it, batch after batch.

A batch is stored before anything of it is written, and the sink's position moves in the same transaction that ends it.
In between it is written until that has worked, with the same rows under the same id.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from threading import Event
from typing import TYPE_CHECKING, Any

import psycopg
from psycopg import sql

from relay.config.handlers import SparkHandler
from relay.config.settings import Settings
from relay.faults import TransientFault
from relay.meter import Meter
from relay.retry import FIRST_WAIT_SECONDS, LONGEST_WAIT_SECONDS
from relay.source.differences import Difference, condition, cut
from relay.source.rows import prepare_reading
from relay.source.server import durable_position
from relay.spark import frames, replays
from relay.spark.faults import safe_description
from relay.spark.reading import OutboxTable
from relay.spark.session import Session
from relay.spark.transform import Transform
from relay.spark.writers import BATCH_COLUMN, BatchId, MissingPartition, writer
from relay.store import dead_letters, deferred, deferred_due, sinks, spark_batches
from relay.store.connections import Connection, connect
from relay.store.sinks import BEFORE_FIRST, CAUGHT_UP, LAGGING, Claim, Moved, Position, SinkState
from relay.store.spark_batches import Contents, OpenBatch
from relay.threads import Thread

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

log = logging.getLogger(__name__)


POLL_SECONDS = 1.0
"""Seconds between two checks whether a batch is due."""
CLAIM_SECONDS = 2.0
"""Seconds between two attempts to claim a sink that another process works."""
BUILD_SECONDS = 5.0
"""Seconds after which `relay status` tells that the sink waits for the Spark session."""


@dataclass(frozen=True, slots=True)
class _PendingBatch:
    """What the next batch would have."""

    contents: Contents
    due: list[deferred_due.Due]
    is_full: bool


class SparkWorker:
    """Works a sink from `start` to `close`. What fails is tried until it works: the events are safe in the outbox."""

    def __init__(self, name: str, settings: Settings, meter: Meter | None = None) -> None:
        """Raises ConfigurationError for a callable that cannot be imported."""
        self.name = self._name = name
        self._meter = meter or Meter()
        self._settings = settings
        self._handler: SparkHandler = settings.spark_handlers[name]
        self._table = OutboxTable(settings.source.table_name, settings.source.mapping)
        self._transform = Transform(name, self._handler)
        writer(name, self._handler)
        self._claim = Claim(settings.target_dsn, settings.group, name)
        self._source: Connection | None = None
        self._session: Session | None = None
        self._checked: Any = None
        self._since: float | None = None
        self._stopping = Event()
        self._woken = Event()
        self._thread = Thread(target=self._run, name=f"sink {name}", daemon=True)

    def start(self, session: Session) -> None:
        """Begin, with a session that may still have to be started."""
        self._session = session
        self._thread.start()

    def stop(self) -> None:
        """End after the batch in flight. Safe in a signal handler's thread."""
        self._stopping.set()
        self._woken.set()

    def claim(self) -> None:
        """Another process may have left the sink: try to claim it now."""
        self._woken.set()

    def close(self, timeout: float) -> None:
        """Stop, and wait for the batch in flight, for so many seconds; else the next process writes it."""
        self.stop()
        if self._thread.is_alive():
            self._thread.join(timeout)

    def _run(self) -> None:
        wait, last_logged = FIRST_WAIT_SECONDS, ""
        while not self._stopping.is_set():
            try:
                if not self._claim.take():
                    self._pause(CLAIM_SECONDS)
                    continue
                while not self._stopping.is_set():
                    self.work()
                    wait, last_logged = FIRST_WAIT_SECONDS, ""
            except Moved:
                log.info("a sink goes on from what is stored", extra={"handler": self._name})
            except Exception as error:
                # A function may have written values into its query.
                fault = safe_description(error, quoted=not self._transform.has_function)
                if self._stopping.is_set():
                    break
                if fault != last_logged:
                    last_logged = fault
                    log.warning(
                        f"handlers.{self._name}: cannot write with Spark yet",
                        extra={"handler": self._name, "fault": fault},
                    )
                self._fail(fault)
                self._pause(wait)
                wait = min(wait * 2, LONGEST_WAIT_SECONDS)
        self._disconnect()

    def _pause(self, seconds: float) -> None:
        self._woken.wait(seconds)
        if not self._stopping.is_set():
            self._woken.clear()

    def _fail(self, fault: str) -> None:
        """Tell a fault, and begin with new connections."""
        self._checked = None
        with suppress(psycopg.Error, AssertionError):
            self._claim.note_fault(fault)
        self._disconnect()

    def _disconnect(self) -> None:
        self._claim.release()
        source, self._source = self._source, None
        if source is not None:
            source.close()

    def work(self) -> None:
        """Write the batch that is begun or due; without one, wait a little. Raises Moved, and whatever fails."""
        state = self._load()
        batch, tried = None, True
        if not state.paused:
            batch = self._begun(state)
            if batch is None:
                batch, tried = self._begin(state), False
        if batch is not None:
            self._write(batch, tried)
        else:
            self._pause(min(POLL_SECONDS, max(self._handler.every / 4, FIRST_WAIT_SECONDS)))

    def _load(self) -> SinkState:
        conn, group, start = self._claim.conn, self._settings.group, self._handler.start
        state = self._claim.load()
        if state is None:
            if sinks.begin(conn, group, self._name, start):
                log.info("a new sink begins", extra={"handler": self._name, "from": start})
            state = self._claim.load()
        if state is not None and state.position.snapshot is None:
            sinks.give_snapshot(conn, group, self._name)
            state = self._claim.load()
        if state is None:
            raise Moved
        return state

    def _begun(self, state: SinkState) -> OpenBatch | None:
        """The batch that is begun for the destination, unless somebody has moved the sink since."""
        conn, group = self._claim.conn, self._settings.group
        batch = spark_batches.begun(conn, group, self._name, self._handler.target)
        if batch is None or batch.epoch == state.epoch:
            return batch
        spark_batches.end(conn, group, self._name, batch.id)
        log.info(
            "a batch is given up: the sink was moved",
            extra={"handler": self._name, "batch": batch.number},
        )
        return None

    # Beginning a batch

    def _begin(self, state: SinkState) -> OpenBatch | None:
        """Begin a batch if one is due. Raises Moved and psycopg.Error."""
        pending = self._pending(state)
        if pending is None:
            self._since = None
            return None
        now = time.monotonic()
        self._since = now if self._since is None else self._since
        if not pending.is_full and now - self._since < self._handler.every:
            return None
        self._since = None
        conn, group, each = self._claim.conn, self._settings.group, self._handler
        contents = pending.contents
        if pending.due:
            contents = replace(
                contents,
                deferred=[row.id for row in pending.due],
                data=replays.packed(conn, self._settings, pending.due, each.host_buckets),
            )
        layout = each.partition_by, each.host_buckets
        before = state.position
        # What is written tells the source's server how far it must be, should it be replaced by another one.
        reading = replace(
            before,
            following=before.following or contents.after,
            delivered_lsn=max(before.delivered_lsn, contents.lsn),
        )
        with conn.transaction():
            if self._claim.store(reading, state.epoch, (), LAGGING) is None:
                raise Moved
            spark_batches.begin(conn, group, self._name, each.target, state.epoch, layout, contents)
        return spark_batches.begun(conn, group, self._name, each.target)

    def _pending(self, state: SinkState) -> _PendingBatch | None:
        """What the next batch would have; None if there is nothing. An empty difference is passed at once."""
        position = state.position
        if position.snapshot is None:
            return None
        conn = self._connected()
        seen = durable_position(conn)
        end = position.following or seen.snapshot
        if not (seen.snapshot.covers(position.snapshot) and seen.snapshot.covers(end)):
            # A standby may lag.
            return None
        between, most = Difference(position.snapshot, end), self._handler.max_events
        after, count = cut(conn, self._table.identifier, between, most)
        contents = Contents(
            position.snapshot,
            after,
            position.polled_offset if position.following else BEFORE_FIRST,
            state.done.tolist(),
            seen.lsn,
            count,
        )
        due = replays.due(self._claim.conn, self._settings, self._name)
        if count and not self._has_rows(conn, contents):
            contents = replace(contents, rows=0)
        if not (contents.rows or due):
            if count or position.following is not None:
                self._store(state, contents)
            return None
        if not contents.rows and not count:
            contents = replace(contents, after=position.snapshot, left_out=())
        is_full = count >= most or position.following is not None
        return _PendingBatch(contents, due, is_full)

    def _has_rows(self, conn: Connection, contents: Contents) -> bool:
        """Whether a difference has rows that the sink has not had before."""
        wanted = frames.left_out(self._table, contents)
        if wanted is None:
            return True
        found = conn.execute(
            sql.SQL("select from {} where {} and {} limit 1").format(
                self._table.identifier,
                condition(Difference(contents.before, contents.after)),
                wanted,
            ),
            prepare=False,
        )
        return found.rowcount > 0

    def _connected(self) -> Connection:
        if self._source is None or self._source.closed:
            self._source = connect(self._settings.source_dsn, application_name="relay spark")
            prepare_reading(self._source)
        return self._source

    # Writing it

    def _write(self, batch: OpenBatch, tried: bool = True) -> None:
        """Write a batch and move past it; `tried`: an earlier attempt may have written something of it."""
        session = self._ready_session()
        started = time.monotonic()
        each = self._handler.model_copy(
            update={"partition_by": batch.partition_by, "host_buckets": batch.host_buckets}
        )
        destination = writer(self._name, each)
        try:
            if self._checked is not session:
                destination.check(session)
                self._checked = session
            with self._frame(session, batch) as frame:
                destination.write(frame, BatchId(batch.application, batch.number, batch.id, tried))
        except MissingPartition:
            configured = self._handler.partition_by
            if batch.partition_by == configured:
                raise
            # It was begun with another query, or with a name that is corrected now.
            spark_batches.lay_out(
                self._claim.conn, self._settings.group, self._name, batch.id, configured
            )
            return
        except Exception:
            assert self._session is not None  # noqa: S101
            self._session.replace_if_dead(session)
            raise
        finally:
            # What py4j holds of the JVM is in cycles.
            gc.collect(1)
        self._finish(batch)
        self._meter.spark_batch(self._name, time.monotonic() - started, batch.contents.rows)

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    @contextmanager
    def _frame(self, session: SparkSession, batch: OpenBatch) -> Iterator[DataFrame]:
        """The frame that is written."""
        from pyspark.sql import functions

        assert self._session is not None  # noqa: S101
        frame = frames.frame(
            session,
            self._session.slots,
            self._connected(),
            self._settings,
            self._name,
            batch,
        )
        if self._settings.spark.remote is None:
            # This thread runs no other jobs.
            session.sparkContext.setJobGroup(
                f"relay sink {self._name}",
                f"sink {self._name}, batch {batch.number}: {batch.contents.rows:,} rows",
            )
        with self._transform.applied(session, frame) as found:
            if found is not frame:
                found = found.withColumn(BATCH_COLUMN, functions.lit(batch.id))
            yield found

    def _ready_session(self) -> SparkSession:
        assert self._session is not None  # noqa: S101
        session = self._session.get()
        began, noted = time.monotonic(), ""
        while session is None:
            if self._stopping.is_set():
                raise TransientFault("stopping")
            if time.monotonic() - began >= BUILD_SECONDS:
                why = self._session.fault
                fault = f"the Spark session is being built{f': {why}' if why else ''}"
                if fault != noted:
                    self._claim.note_fault(fault)
                    noted = fault
            self._session.start()
            session = self._session.get(timeout=0.5)
        return session

    def _finish(self, batch: OpenBatch) -> None:
        """Move the position past a batch that is written. Raises Moved and psycopg.Error."""
        state = self._load()
        if state.epoch != batch.epoch:
            raise Moved
        conn, group = self._claim.conn, self._settings.group
        taken = batch.contents.deferred
        with conn.transaction():
            self._store(state, batch.contents)
            if not spark_batches.end(conn, group, self._name, batch.id):
                raise Moved
            if taken:
                replayed = spark_batches.dead_transactions(conn, taken)
                dead_letters.mark(conn, group, replayed, "replayed", "replayed")
                deferred.remove(conn, taken)
            self._claim.note_fault(None)
        log.info(
            "written with Spark",
            extra={
                "handler": self._name,
                "batch": batch.number,
                "events": batch.contents.rows,
                "deferred": len(taken),
            },
        )

    def _store(self, state: SinkState, contents: Contents) -> None:
        """Stand at the end of what was read. Raises Moved and psycopg.Error."""
        before = state.position
        is_over = before.following is None or contents.after == before.following
        position = Position(
            contents.after,
            None if is_over else before.following,
            BEFORE_FIRST if is_over else before.polled_offset,
            before.applied_lsn,
            max(before.delivered_lsn, contents.lsn),
        )
        lags = not is_over or contents.rows >= self._handler.max_events
        stored = self._claim.store(position, state.epoch, (), LAGGING if lags else CAUGHT_UP)
        if stored is None:
            raise Moved
