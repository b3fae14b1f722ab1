"""Runs all sinks of an instance: gives each its part of the stream, and confirms WAL that no sink needs."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from threading import Event, Lock

import numpy as np
import psycopg

from relay.config.handlers import DeliveryHandler
from relay.config.settings import Settings
from relay.delivery.feed import Feed, JoinPoint, Streamed, WalHold
from relay.delivery.loop import LoopWatch, SinkLoop
from relay.delivery.worker import SinkWorker
from relay.event_types.registry import registered
from relay.event_types.upcasting import Upcasting
from relay.faults import RelayError
from relay.model.batch import Batch
from relay.model.events import Lsn
from relay.model.snapshots import Xids, full_xids
from relay.model.transactions import Routed
from relay.pipeline.listeners import Meter
from relay.pipeline.routing import BatchRouter
from relay.runtime.parts import Condition, Due, Heartbeat, Part
from relay.sinks import Sink, Target, build_sinks
from relay.source.server import SourcePosition
from relay.spark.session import Session
from relay.spark.sink_worker import SparkWorker
from relay.store.completeness import CaughtUpNotes
from relay.store.connections import asking
from relay.store.positions import sinks, snapshots

log = logging.getLogger(__name__)

_ROOM_SECONDS = 0.02


class Sinks(Part):
    """The configured sinks, each with a worker. Raises ConfigurationError when one cannot be built.

    The source calls `streaming`, `polling` or `on_standby` when its mode changes. The service offers each batch of the
    stream before it applies it to the target, so that sinks and target do not wait for each other. `confirm` is called
    with the position up to which WAL may be confirmed, `failed` once a worker has a fault that no retry can repair.
    """

    def __init__(
        self,
        settings: Settings,
        confirm: Callable[[Lsn], None],
        failed: Callable[[], None],
        wrap: Callable[[str, Sink, DeliveryHandler], Sink] | None = None,
        meter: Meter | None = None,
        session: Session | None = None,
    ) -> None:
        """`wrap` returns, for each sink, the sink that delivers instead of it. Spark sinks need the `session`."""
        meter = meter or Meter()
        self.heartbeat = Heartbeat()
        self._settings = settings
        self._confirm = confirm
        self._polls = settings.source.mode != "wal"
        self._router = BatchRouter(settings)
        self._lock = Lock()
        self._stopping = Event()
        self._mode = ""
        self._epoch: int | None = None
        self._end = self._durable = Lsn(0)
        self._streamed: list[Xids] = []
        self._begun: float | None = None
        upcaster = Upcasting(registered(settings.events))
        built = build_sinks(settings.handlers, upcaster, Target.of(settings))
        self._loop = SinkLoop(settings, self.confirm)
        self._workers = {
            name: SinkWorker(
                name,
                meter.watched(wrap(name, sink, configured) if wrap else sink),
                configured,
                settings,
                self,
                failed,
                meter,
                self._loop,
            )
            for name, (sink, configured) in built.items()
        }
        notes = CaughtUpNotes(settings.group)
        self._spark = (
            [SparkWorker(name, settings, session, meter, notes) for name in settings.spark_handlers]
            if session
            else []
        )
        self._all: Sequence[SinkWorker | SparkWorker] = [*self._workers.values(), *self._spark]

    def start(self) -> None:
        """Start the workers. The process that reads the source works the sinks that do not lag.

        Spark sinks poll the outbox, and never use the stream.
        """
        if self._workers:
            self._loop.start(self.workers)
        for spark in self._spark:
            spark.start()

    def streaming(self) -> None:
        """Let the sinks join the stream, which this process reads from now on; waits up to `sinks.attach_seconds`."""
        if not self._polls:
            self._log_left_out()
        if not self._workers:
            return
        noted = self._noted()
        with self._lock:
            if not self._mode:
                for worker in self._workers.values():
                    worker.hold.forget()
            self._mode, self._streamed = "wal", [noted]
        self._claim()
        ends = time.monotonic() + self._settings.sinks.attach_seconds
        self.heartbeat.update("waits until the sinks have joined the stream", Due.OPEN)
        for worker in self._workers.values():
            worker.ready.wait(max(0.0, ends - time.monotonic()))

    def polling(self) -> None:
        """Let the sinks poll, since this process polls from now on."""
        with self._lock:
            self._mode = "poll"
            self._interrupt()
        self._claim()

    def on_standby(self) -> None:
        """Leave the sinks that do not lag to the process that reads the stream."""
        with self._lock:
            self._mode = ""
            self._begun = None
        self._claim()

    def _interrupt(self) -> None:
        """Interrupt the feeds: the stream does not bring the events that are polled now."""
        for worker in self._workers.values():
            worker.feed.interrupt()

    def _claim(self) -> None:
        for worker in self._all:
            worker.claim()

    def stop(self) -> None:
        """End once the deliveries in flight have ended. Safe in a signal handler's thread."""
        self._stopping.set()
        for worker in self._all:
            worker.stop()

    def close(self) -> None:
        """Stop, and wait up to `shutdown_timeout` for the deliveries in flight."""
        self.stop()
        ends = time.monotonic() + self._settings.shutdown_timeout
        self._loop.join(self._settings.shutdown_timeout)
        for spark in self._spark:
            spark.join(max(0.0, ends - time.monotonic()))

    def watch(self) -> LoopWatch | None:
        """What tells what holds up all sinks; None without sinks in a loop."""
        return LoopWatch(self._loop) if self._workers else None

    @property
    def workers(self) -> Sequence[SinkWorker]:
        """The workers of all sinks but the Spark sinks."""
        return tuple(self._workers.values())

    @property
    def all_workers(self) -> Sequence[SinkWorker | SparkWorker]:
        """The workers of all sinks."""
        return self._all

    @property
    def spark_workers(self) -> Sequence[SparkWorker]:
        """The workers of the Spark sinks."""
        return self._spark

    @property
    def conditions(self) -> Sequence[Condition]:
        """Whether each sink's worker can use the databases, and a Spark sink's can write.

        Other destinations have a circuit breaker.
        """
        return [each.condition for each in self._all]

    @property
    def durable_lsn(self) -> Lsn:
        """The position up to which the target has stored everything."""
        return self._durable

    @property
    def error(self) -> RelayError | None:
        """The first fault of a worker that no retry can repair; None without one."""
        return next((each.error for each in self._workers.values() if each.error), None)

    def _log_left_out(self) -> None:
        """Log the sinks that are not configured: in mode wal, no events are kept for them."""
        with suppress(psycopg.OperationalError), asking(self._settings.target_dsn) as conn:
            for name in sinks.leave_out(conn, self._settings.group, self._workers):
                log.warning(
                    "a sink is not configured, and without polling nothing is kept for it",
                    extra={"handler": name},
                )

    def _noted(self) -> Xids:
        """The xids that were streamed and may not be visible yet, such as one that waits for a synchronous standby."""
        try:
            with asking(self._settings.target_dsn) as conn:
                return snapshots.noted(conn, self._settings.group)
        except psycopg.OperationalError:
            # Without the target, no worker has claimed its sink: no feed opens.
            return np.zeros(0, np.int64)

    def offer(self, batch: Batch) -> None:
        """Give each sink its part of a batch. A polled batch interrupts the feeds."""
        if not self._workers:
            return
        with self._lock:
            self._begun = None if batch.window else time.monotonic()
            if batch.window:
                self._interrupt()
            elif batch.source_epoch != self._epoch:
                if self._epoch is not None:
                    self._require_polling()
                    # LSNs of another server or timeline cannot be compared with the earlier ones.
                    self._interrupt()
                    for worker in self._workers.values():
                        worker.hold.forget()
                    self._end = self._durable = Lsn(0)
                self._epoch = batch.source_epoch
        transactions = batch.transactions
        ends = transactions.facts["end_lsn"]
        if len(transactions) and int(ends[0]) <= self._end:
            # The batch is offered again, after a difference was polled.
            transactions = transactions.take(np.flatnonzero(ends > self._end))
        if not len(transactions):
            return
        parts = self._router.route(transactions).parts
        xids = np.unique(full_xids(transactions.facts["xid"], batch.next_xid))
        if not self._polls:
            self._wait_for_room(parts)
        now = time.monotonic()
        copies: dict[int, Streamed] = {}
        with self._lock:
            if self._polls:
                self._streamed.append(xids)
            self._end = transactions.end
            for name, worker in self._workers.items():
                if name in parts:
                    worker.hold.require(parts[name].transactions.end)
                    if worker.feed.is_open:
                        # Sinks that get the same share a copy.
                        key = id(parts[name])
                        if key not in copies:
                            copies[key] = _compact(parts[name], batch.next_xid, now)
                        worker.feed.offer(copies[key])

    def _require_polling(self) -> None:
        """Raise RelayError if the sinks have no position but an LSN."""
        if not self._polls:
            raise RelayError(
                "source.mode: wal: the source is another server or timeline now, where the sinks' positions are not "
                "valid: restart relay"
            )

    def _wait_for_room(self, names: Iterable[str]) -> None:
        """Wait until the feeds of sinks are open and have room: in mode wal only the stream has the events."""
        limit = self._settings.sinks.attach_bytes
        for name in names:
            feed = self._workers[name].feed if name in self._workers else None
            while feed and not self._stopping.wait(0) and (not feed.is_open or feed.size > limit):
                self.heartbeat.update(f"waits for room in the buffer of sink {name}")
                self._stopping.wait(_ROOM_SECONDS)

    def note_applied(self) -> None:
        """Note that the target has applied the batch."""
        with self._lock:
            self._begun = None

    def durable(self, end: Lsn) -> None:
        """Note that the target has stored everything up to `end`. Safe in any thread."""
        with self._lock:
            self._durable = max(self._durable, end)
        self.confirm()

    def confirm(self) -> None:
        """Confirm the WAL that neither the target nor a sink needs. Safe in any thread."""
        with self._lock:
            bounds = [each.hold.lower_bound for each in self._workers.values()]
            end = min([self._durable, *(bound for bound in bounds if bound is not None)])
        self._confirm(end)

    def adopt(self, seen: SourcePosition) -> None:
        """Adopt a position: everything up to it was streamed, and the target and the feeds have it."""
        with self._lock:
            streamed = np.concatenate([np.zeros(0, np.int64), *self._streamed])
            self._streamed = [streamed[~seen.snapshot.sees(streamed)]]
            for worker in self._workers.values():
                if worker.feed.is_open and not worker.feed.overflowed:
                    worker.adopt(seen)

    # Called by the workers

    def join(self, feed: Feed, hold: WalHold) -> JoinPoint | None:
        """Open the feed from now on; None if this process does not read the stream now."""
        with self._lock:
            if self._mode != "wal" or self._is_stalled():
                return None
            feed.open()
            hold.join(self._end)
            return JoinPoint(self._end, np.concatenate(self._streamed))

    @property
    def is_stalled(self) -> bool:
        """Whether the stream is stalled, since the target does not apply its last batch."""
        with self._lock:
            return self._is_stalled()

    @property
    def reads(self) -> bool:
        """Whether this process reads the source; it then works the sinks that do not lag."""
        return bool(self._mode)

    def _is_stalled(self) -> bool:
        if not self._polls:
            return False
        limit = self._settings.sinks.attach_seconds
        return self._begun is not None and time.monotonic() - self._begun > limit


def _compact(routed: Routed, next_xid: int, now: float) -> Streamed:
    """A part for sinks, copied, so that it does not keep the batch's buffer in memory."""
    transactions = routed.transactions
    compact = replace(transactions, rows=transactions.rows.compact())
    return Streamed(Routed(compact, routed.decoder), next_xid, now, transactions.held)
