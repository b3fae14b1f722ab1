"""All sinks of an instance, beside the stream: what each gets of it, and how much of the WAL they still need."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from threading import Event, Lock
from typing import Protocol

import numpy as np
import psycopg

from relay import handlers
from relay.config.handlers import DeliveryHandler
from relay.config.settings import Settings
from relay.delivery.feed import Feed, JoinPoint, Streamed
from relay.delivery.worker import Worker
from relay.event_types.loading import registered
from relay.event_types.upcasting import Upcasting
from relay.faults import RelayError
from relay.handlers import Sink
from relay.heartbeat import Due, Heartbeat
from relay.meter import Meter
from relay.model.batch import Batch
from relay.model.events import Lsn
from relay.model.snapshots import Xids, full_xids
from relay.model.transactions import Routed
from relay.pipeline.routing import BatchRouter
from relay.source.server import SourcePosition
from relay.spark.session import Session
from relay.spark.sink import SparkWorker
from relay.store import sinks, snapshots
from relay.store.connections import connect

log = logging.getLogger(__name__)

_ROOM_SECONDS = 0.02


class SinkWorker(Protocol):
    """Works one sink in a thread."""

    def claim(self) -> None:
        """What this process reads has changed: claim the sink again, or leave it."""

    def stop(self) -> None:
        """End after what is under way. Safe in a signal handler's thread."""

    def close(self, timeout: float) -> None:
        """Stop, and wait for what is under way, for so many seconds."""


class Sinks:
    """The configured sinks, each with a worker. Raises ConfigurationError when one cannot be built.

    The source says how it is read. The service offers each batch of the stream before it is applied to the target, so
    that no consumer waits for another. `confirm` is called with a position up to which nobody needs the WAL, `failed`
    once when a worker has met what no retry mends.
    """

    def __init__(
        self,
        settings: Settings,
        confirm: Callable[[Lsn], None],
        failed: Callable[[], None],
        around: Callable[[str, Sink, DeliveryHandler], Sink] | None = None,
        meter: Meter | None = None,
    ) -> None:
        """`around` is asked for each sink what delivers instead of it."""
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
        built = handlers.build_sinks(settings.handlers, upcaster)
        self._workers = {
            name: Worker(
                name,
                meter.watched(around(name, sink, configured) if around else sink),
                configured,
                settings,
                self,
                failed,
                meter,
            )
            for name, (sink, configured) in built.items()
        }
        self._spark = [SparkWorker(name, settings, meter) for name in settings.spark_handlers]
        self._all: Sequence[SinkWorker] = [*self._workers.values(), *self._spark]

    def start(self, session: Session) -> None:
        """Begin to work the sinks. Those that do not lag are worked by the process that reads the source.

        Those of Spark poll the outbox, and never use the stream.
        """
        for worker in self._workers.values():
            worker.start()
        for spark in self._spark:
            spark.start(session)

    def streaming(self) -> None:
        """This process reads the stream from now on: wait a little until the sinks buffer what it brings."""
        if not self._polls:
            self._log_left_out()
        if not self._workers:
            return
        noted = self._noted()
        with self._lock:
            self._mode, self._streamed = "wal", [noted]
        self._claim()
        ends = time.monotonic() + self._settings.sinks.attach_seconds
        self.heartbeat.update("waits until the sinks have joined the stream", Due.OPEN)
        for worker in self._workers.values():
            worker.ready.wait(max(0.0, ends - time.monotonic()))

    def polling(self) -> None:
        """This process polls from now on, and so do the sinks."""
        with self._lock:
            self._mode = "poll"
            self._interrupt()
        self._claim()

    def on_standby(self) -> None:
        """Another process reads the stream, and so works the sinks."""
        with self._lock:
            self._mode = ""
            self._begun = None
        self._claim()

    def _interrupt(self) -> None:
        """The stream does not bring everything: what is polled now does not come by it."""
        for worker in self._workers.values():
            worker.feed.interrupt()

    def _claim(self) -> None:
        for worker in self._all:
            worker.claim()

    def stop(self) -> None:
        """End after what is under way. Safe in a signal handler's thread."""
        self._stopping.set()
        for worker in self._all:
            worker.stop()

    def close(self) -> None:
        """Stop, and wait for what is under way."""
        self.stop()
        ends = time.monotonic() + self._settings.shutdown_timeout
        for worker in self._all:
            worker.close(max(0.0, ends - time.monotonic()))

    @property
    def workers(self) -> Sequence[Worker]:
        """The workers of all sinks but those of Spark."""
        return tuple(self._workers.values())

    @property
    def spark_workers(self) -> Sequence[SparkWorker]:
        """Those of Spark."""
        return self._spark

    @property
    def durable_lsn(self) -> Lsn:
        """The position up to which the target has everything."""
        return self._durable

    @property
    def error(self) -> RelayError | None:
        """What a worker met that no retry mends."""
        return next((each.error for each in self._workers.values() if each.error), None)

    def _log_left_out(self) -> None:
        """Only the WAL is read: nothing is kept for the sinks that are not configured."""
        with suppress(psycopg.OperationalError), connect(self._settings.target_dsn) as conn:
            for name in sinks.leave_out(conn, self._settings.group, self._workers):
                log.warning(
                    "a sink is not configured, and without polling nothing is kept for it",
                    extra={"handler": name},
                )

    def _noted(self) -> Xids:
        """What was streamed before and may not be visible yet: a commit that waits for a synchronous standby."""
        try:
            with connect(self._settings.target_dsn) as conn:
                return snapshots.noted(conn, self._settings.group)
        except psycopg.OperationalError:
            # Without the target no worker has claimed its sink either.
            return np.zeros(0, np.int64)

    def offer(self, batch: Batch) -> None:
        """Give each sink what of a batch goes to it. A polled batch says that the stream does not bring everything."""
        if not self._workers:
            return
        with self._lock:
            self._begun = None if batch.window else time.monotonic()
            if batch.window:
                self._interrupt()
            elif batch.source_epoch != self._epoch:
                if self._epoch is not None:
                    self._require_polling()
                    # The positions of another server, or of another history of it.
                    self._interrupt()
                    self._end = self._durable = Lsn(0)
                self._epoch = batch.source_epoch
        transactions = batch.transactions
        ends = transactions.facts["end_lsn"]
        if len(transactions) and int(ends[0]) <= self._end:
            # The batch comes again, after a difference was polled.
            transactions = transactions.take(np.flatnonzero(ends > self._end))
        if not len(transactions):
            return
        _, parts, _ = self._router.route(transactions)
        xids = np.unique(full_xids(transactions.facts["xid"], batch.next_xid))
        if not self._polls:
            self._wait_for_room(parts)
        now = time.monotonic()
        with self._lock:
            if self._polls:
                self._streamed.append(xids)
            self._end = transactions.end
            for name, worker in self._workers.items():
                if name in parts and worker.feed.is_open:
                    worker.feed.offer(_compact(parts[name], batch.next_xid, now), self._end)

    def _require_polling(self) -> None:
        """Raise RelayError where positions in the WAL are all there is."""
        if not self._polls:
            raise RelayError(
                "source.mode: wal: the source has another history now, in which the sinks' positions mean nothing: "
                "start relay again"
            )

    def _wait_for_room(self, names: Iterable[str]) -> None:
        """Wait until sinks can take what only the stream has: they are claimed, and their buffers are not full."""
        limit = self._settings.sinks.attach_bytes
        for name in names:
            feed = self._workers[name].feed if name in self._workers else None
            while feed and not self._stopping.wait(0) and (not feed.is_open or feed.size > limit):
                self.heartbeat.update(f"waits for room in the buffer of sink {name}")
                self._stopping.wait(_ROOM_SECONDS)

    def taken(self) -> None:
        """The target has taken the batch."""
        with self._lock:
            self._begun = None

    def durable(self, end: Lsn) -> None:
        """The target has everything up to a position. Safe in any thread."""
        with self._lock:
            self._durable = max(self._durable, end)
        self.confirm()

    def confirm(self) -> None:
        """Let the WAL go that neither the target nor a sink needs. Safe in any thread."""
        with self._lock:
            bounds = [each.feed.lower_bound for each in self._workers.values()]
            end = min([self._durable, *(bound for bound in bounds if bound is not None)])
        self._confirm(end)

    def adopt(self, seen: SourcePosition) -> None:
        """Everything that a sight shows was streamed, and neither the target nor a sink has to get it any more."""
        with self._lock:
            streamed = np.concatenate([np.zeros(0, np.int64), *self._streamed])
            self._streamed = [streamed[~seen.snapshot.sees(streamed)]]
            for worker in self._workers.values():
                if worker.feed.is_open and not worker.feed.overflowed:
                    worker.adopt(seen)

    # What workers ask for

    def join(self, feed: Feed) -> JoinPoint | None:
        """Open the feed from now on; None if this process does not read the stream now."""
        with self._lock:
            if self._mode != "wal" or self._is_stalled():
                return None
            feed.open(self._end)
            return JoinPoint(self._end, np.concatenate(self._streamed))

    @property
    def is_stalled(self) -> bool:
        """Whether the stream does not go on, since the target does not take what it has brought."""
        with self._lock:
            return self._is_stalled()

    @property
    def reads(self) -> bool:
        """Whether this process reads the source, so that it works the sinks that do not lag."""
        return bool(self._mode)

    def _is_stalled(self) -> bool:
        if not self._polls:
            return False
        limit = self._settings.sinks.attach_seconds
        return self._begun is not None and time.monotonic() - self._begun > limit


def _compact(routed: Routed, next_xid: int, now: float) -> Streamed:
    """What goes to a sink, without the rest of the buffer that it lies in."""
    transactions = routed.transactions
    compact = replace(transactions, rows=transactions.rows.compact())
    return Streamed(Routed(compact, routed.decoder), next_xid, now, transactions.held)
