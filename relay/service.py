"""The loop of a group (take a batch, apply it, acknowledge it), and the start and end of the group's parts."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from threading import Event
from typing import TYPE_CHECKING, Protocol

import psycopg

from relay.config.effects import Effects
from relay.config.settings import Settings
from relay.delivery.sinks import Sinks
from relay.faults import Interrupted, RelayError, TaskFault, is_transient
from relay.intake.configured import intakes
from relay.logs import BATCH
from relay.model.batch import Batch, Outcome
from relay.model.events import Lsn
from relay.observe.batch_log import BatchLog, Summary
from relay.observe.catchup import CatchUp
from relay.observe.engines import EngineCounts
from relay.observe.liveness import Parts
from relay.observe.long_tasks import LongTasks
from relay.observe.traces import open_traces
from relay.pipeline.backfill import QueueFills
from relay.pipeline.deferral import rekey
from relay.pipeline.listeners import Listeners, Meter
from relay.pipeline.retries import RetryWorker
from relay.pipeline.runner import Pipeline
from relay.queues.configured import ConfiguredQueues
from relay.retention.schedule import Schedule
from relay.runtime.parts import Condition, Part, Round, faults
from relay.schedules.ticking import Ticker
from relay.source.hybrid import Source, open_source
from relay.source.wakeups import ReaderWakeups
from relay.spark.engine import SparkEngine
from relay.spark.session import Session
from relay.store import groups, locks
from relay.store.connections import asking, close_asked, connect, sessions_with
from relay.store.positions.unflushed import Unflushed
from relay.store.presence import Presence, instances
from relay.store.refusals import RefusalWatch

if TYPE_CHECKING:
    from relay.observe.observer import Observer

log = logging.getLogger(__name__)

CLOSING_LOCK_TIMEOUT = "2s"
"""The lock_timeout of what parts write when they are closed: if that fails, only a count or a note is lost."""


class Service:
    """The relay of one group. It uses the given Spark session, or creates its own.

    With `accept_configuration` its configuration replaces that of running instances of the group, which end. `ending`
    is called once, in any thread, when the service begins to end.
    """

    def __init__(
        self,
        settings: Settings,
        session: Session | None = None,
        accept_configuration: bool = False,
        ending: Callable[[], None] = lambda: None,
    ) -> None:
        dsn, group = settings.target_dsn, settings.group
        self._source_dsn, self._target_dsn = settings.source_dsn, dsn
        self._relays = False
        self._ending = ending
        self._stopping = Event()
        self._fault: BaseException | None = None
        self._step = "starts"
        own_session = None if session else Session(settings.spark, settings)
        session = session or own_session
        assert session is not None  # noqa: S101
        observer, traces = _observer(settings), open_traces(settings)
        meter = observer.meter if observer else Meter()
        summary, engines, catch_up = Summary(), EngineCounts(dsn, group), CatchUp()
        self._listeners = Listeners(
            [BatchLog(), *([traces] if traces else []), meter, catch_up, summary, engines]
        )
        self._source = open_source(settings)
        around = traces.around if traces else None
        self._sinks = Sinks(settings, self._source.confirm, self.stop, around, meter, session)
        self._unflushed = (
            None
            if settings.target.durable or settings.source.mode == "poll"
            else Unflushed(dsn, group, self._sinks.durable, self.stop)
        )
        lower_bounds = self._unflushed.lower_bounds if self._unflushed else None
        spark = SparkEngine(settings, session, meter)
        self._pipeline = Pipeline(settings, spark, lower_bounds, self._listeners.committed)
        applier, timeout = self._pipeline.applier, settings.shutdown_timeout
        retry_worker = RetryWorker(applier, timeout, self.stop, self._listeners.redelivered)
        self._retry_worker = retry_worker
        presence = Presence(
            dsn,
            group,
            Effects.of(settings),
            accept_configuration,
            partial(rekey, settings),
            self.stop,
            lambda: faults(self.conditions),
        )
        watching = [
            RefusalWatch([settings.source_dsn, dsn], self.stop),
            summary,
            LongTasks(dsn, applier.active_jobs),
            self._sinks.watch(),
        ]
        self._readers = ReaderWakeups(settings) if settings.source.owns_table else None
        parts: list[Part | Source | None] = [
            observer,
            traces,
            Round("watch", [each for each in watching if each is not None]),
            presence,
            ConfiguredQueues(settings) if settings.queues else None,
            catch_up,
            engines,
            _GroupRun(settings, [self._pipeline, self._source, retry_worker]),
            _SparkSession(session, own_session is not None) if settings.needs_spark else None,
            self._pipeline,
            retry_worker,
            Schedule(settings, self.stop),
            QueueFills(settings),
            Ticker(settings, self.stop) if settings.source.owns_table else None,
            self._readers,
            *intakes(settings, meter.taken_in),
            self._source,
            # Closed before the source, to which they confirm.
            self._sinks,
            self._unflushed,
        ]
        self._parts = [each for each in parts if each is not None]
        if observer:
            observer.watch(
                Parts(
                    self._source,
                    self._pipeline,
                    self._sinks,
                    retry_worker,
                    session,
                    self.conditions,
                    lambda: self._relays,
                )
            )

    def stop(self) -> None:
        """End `run` after the batch in flight."""
        self._note_end()
        for part in self._parts:
            part.stop()

    def run(self) -> None:
        """Relay until `stop`. Raises RelayError if the group cannot go on."""
        try:
            self._relay()
        except Interrupted:
            log.warning("stopping with the batch in flight unfinished; it will be delivered again")
        except BaseException as error:
            self._fault = error
            raise
        finally:
            self._note_end()
            unclosed = self._close()
            close_asked(self._source_dsn, self._target_dsn)
        self._raise_faults()
        if unclosed is not None:
            raise unclosed
        flushed = self._source.flushed
        log.info("stopped", extra={"lsn": str(flushed)} if flushed else {})

    def _relay(self) -> None:
        for part in self._parts:
            if self._stopping.is_set():
                break
            self._step = f"starts {_name(part)}"
            part.start()
        else:
            self._take_batches()
        self._raise_faults()

    def _take_batches(self) -> None:
        self._step = ""
        self._relays = not self._stopping.is_set()
        for batch in self._source.batches(self._sinks):
            BATCH.set(batch.number)
            started = time.monotonic()
            if self._readers is not None:
                self._readers.wake()
            outcome = self._apply(batch)
            if outcome.deferred:
                self._retry_worker.wake()
            self._listeners.durable(batch, outcome, time.monotonic() - started)
            BATCH.set(None)

    def _close(self) -> Exception | None:
        """Close the parts in reverse, all of them also if one fails; returns the first fault, and logs each.

        What ends the service is the error to show, not what its end leads to.
        """
        first = None
        with sessions_with({"lock_timeout": CLOSING_LOCK_TIMEOUT}):
            for part in reversed(self._parts):
                self._step = f"closes {_name(part)}"
                try:
                    part.close()
                except Exception as error:
                    fault = TaskFault.of(error).text
                    log.error("cannot close a part", extra={"part": _name(part), "fault": fault})
                    first = first or error
        return first

    def _apply(self, batch: Batch) -> Outcome:
        """Apply a batch, and acknowledge it unless a task was busy. Its WAL is confirmed once it is flushed."""
        self._sinks.offer(batch)
        outcome = self._pipeline.run(batch, self._source.ahead)
        self._sinks.note_applied()
        self._source.ack(batch, outcome)
        if batch.window is not None or outcome.busy:
            return outcome
        if self._unflushed:
            self._unflushed.add(batch.end, outcome.reached)
        else:
            self._sinks.durable(batch.end)
        return outcome

    def _note_end(self) -> None:
        self._relays = False
        if not self._stopping.is_set():
            self._stopping.set()
            self._ending()

    def _raise_faults(self) -> None:
        error = self.error
        if error is not None:
            raise error

    @property
    def error(self) -> RelayError | None:
        """Why the service ends, or a part has ended; None if it is stopped in order, or goes on."""
        if self._fault is not None:
            return TaskFault.of(self._fault).as_error()
        return next((part.error for part in self._parts if part.error is not None), None)

    @property
    def doing(self) -> str:
        """What it does now, and what its end would wait for. Safe in any thread."""
        jobs = self._pipeline.applier.active_jobs.jobs()
        if jobs:
            handler = jobs[0].handler
            return f"applies a batch: {f'handler {handler}' if handler else 'a task'}"
        beats = self._source.heartbeat, self._pipeline.heartbeat, self._sinks.heartbeat
        return self._step or max(beats, key=lambda each: each.at).doing

    @property
    def conditions(self) -> list[Condition]:
        """The conditions of all parts."""
        return [condition for part in self._parts for condition in part.conditions]

    @property
    def flushed(self) -> Lsn:
        """The position up to which PostgreSQL may recycle the WAL."""
        return self._source.flushed

    def lock_waits(self) -> list[str]:
        """The locks of the target that relay's sessions wait for, and who holds them. Raises psycopg.Error."""
        with connect(self._target_dsn) as conn:
            return [str(each) for each in locks.lock_waits(conn)]

    def note_orderly_exit(self) -> None:
        """Record that the process ends itself, so that the batch in flight is not suspected of a crash."""
        with suppress(psycopg.Error):
            self._pipeline.applier.note_orderly_exit()


def _name(part: object) -> str:
    return type(part).__name__.lstrip("_")


class _Guarded(Protocol):
    """A part that may have had the cause of a crash in flight."""

    def guard(self) -> None:
        """Handle what comes again one by one, each under a note in the target. Called before `start`."""


class _GroupRun(Part):
    """Records that the group runs. If an instance may have died, what it had in flight is guarded."""

    def __init__(self, settings: Settings, guarded: Sequence[_Guarded]) -> None:
        self._settings = settings
        self._guarded = guarded
        self._has_begun = False

    def start(self) -> None:
        """Record the start, and guard what is delivered again after a crash."""
        self._has_begun = True
        if self._begin():
            for each in self._guarded:
                each.guard()

    def close(self) -> None:
        """Record the orderly end. Without a start it would end what a process of the same name left at its death."""
        if not self._has_begun:
            return
        with suppress(psycopg.Error), asking(self._settings.target_dsn) as conn:
            groups.end(conn, self._settings.group)

    def _begin(self) -> bool:
        """Record that the group runs; return whether an instance may have died with the next batch in flight."""
        try:
            with asking(self._settings.target_dsn) as conn:
                return groups.begin(conn, self._settings.group, partial(instances, conn))
        except psycopg.Error as error:
            # While the target cannot be read or written, an instance may have died.
            if not is_transient(error):
                raise
            return True


class _SparkSession(Part):
    """The Spark session, which the first large batch starts. Several groups may share it; then it is not closed."""

    def __init__(self, session: Session, owned: bool) -> None:
        self._session = session
        self._owned = owned

    def stop(self) -> None:
        """Rebuild no session that dies from now on. Groups that share it stop together."""
        self._session.end()

    def close(self) -> None:
        """End the session of this service alone."""
        if self._owned:
            self._session.close()

    @property
    def conditions(self) -> Sequence[Condition]:
        """Whether the session can be built."""
        return (self._session.condition,)


def _observer(settings: Settings) -> Observer | None:
    if not settings.observe.observes:
        return None
    # Its imports take a tenth of a second.
    from relay.observe.observer import Observer

    return Observer(settings)
