"""The loop of a group (take a batch, apply it, acknowledge it), and the start and end of the group's parts."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

import psycopg

from relay.conditions import Condition, faults
from relay.config.effects import Effects
from relay.config.settings import Settings
from relay.delivery.sinks import Sinks
from relay.faults import Interrupted
from relay.logs import BATCH
from relay.meter import Meter
from relay.model.batch import Batch, Outcome, TaskOutcome
from relay.model.events import Lsn
from relay.observe.catchup import CatchUp
from relay.observe.engines import EngineCounts
from relay.observe.long_tasks import LongTasks
from relay.observe.summary import Summary
from relay.observe.traces import open_traces
from relay.pipeline.apply import Redelivery
from relay.pipeline.rekeying import rekey
from relay.pipeline.retries import RetryWorker
from relay.pipeline.runner import Pipeline
from relay.retention.schedule import Schedule
from relay.source.hybrid import open_source
from relay.spark.session import Session
from relay.store import groups
from relay.store.connections import connect
from relay.store.positions.unflushed import Unflushed
from relay.store.presence import Presence, instances
from relay.store.refusals import RefusalWatch

if TYPE_CHECKING:
    from relay.observe.observer import Observer

log = logging.getLogger(__name__)


class Service:
    """The relay of one group. It uses the given Spark session, or creates its own.

    With `accept_configuration` its configuration replaces that of running instances of the group, which end.
    """

    def __init__(
        self,
        settings: Settings,
        session: Session | None = None,
        accept_configuration: bool = False,
    ) -> None:
        self._settings = settings
        self._observer = _observer(settings)
        self._meter = self._observer.meter if self._observer else Meter()
        self._relays = False
        self._source = open_source(settings)
        self._traces = open_traces(settings)
        around = self._traces.around if self._traces else None
        self._sinks = Sinks(settings, self._source.confirm, self.stop, around, self._meter)
        self._unflushed = (
            None
            if settings.target.durable or settings.source.mode == "poll"
            else Unflushed(settings.target_dsn, settings.group, self._sinks.durable, self.stop)
        )
        lower_bounds = self._unflushed.lower_bounds if self._unflushed else None
        self._owns_session = session is None
        self._session = session or Session(settings.spark, settings)
        self._pipeline = Pipeline(
            settings, self._session, lower_bounds, self._meter, self._note_committed
        )
        self._presence = Presence(
            settings.target_dsn,
            settings.group,
            Effects.of(settings),
            accept_configuration,
            partial(rekey, settings),
            self.stop,
            lambda: faults(self._conditions),
        )
        self._refusals = RefusalWatch([settings.source_dsn, settings.target_dsn], self.stop)
        self._summary = Summary()
        self._engines = EngineCounts(settings.target_dsn, settings.group)
        self._long_tasks = LongTasks(settings.target_dsn, self._pipeline.applier.active_jobs)
        self._retry_worker = RetryWorker(
            self._pipeline.applier,
            settings.shutdown_timeout,
            self.stop,
            self._note_retried,
        )
        self._retention = Schedule(settings, self.stop)
        self._catch_up = CatchUp()
        self._conditions: list[Condition] = [
            self._presence.condition,
            self._pipeline.condition,
            *self._source.conditions,
            self._retry_worker.condition,
            self._retention.condition,
            *self._sinks.conditions,
            self._engines.condition,
            self._long_tasks.condition,
        ]
        if self._unflushed:
            self._conditions.append(self._unflushed.condition)

    def stop(self) -> None:
        """End `run` after the batch in flight."""
        self._relays = False
        self._source.stop()
        self._pipeline.interrupt()
        self._retry_worker.stop()
        self._retention.stop()
        self._sinks.stop()

    def run(self) -> None:
        """Relay until `stop`. Raises RelayError if the group cannot go on."""
        try:
            self._observe()
            self._refusals.start()
            self._presence.start()
            self._summary.start()
            self._engines.start()
            self._long_tasks.start()
            died = self._begin()
            if died:
                self._pipeline.guard()
                self._source.guard()
            self._pipeline.start()
            self._retry_worker.start(guarded=died)
            if self._unflushed:
                self._unflushed.start()
            self._retention.start()
            self._sinks.start(self._session)
            self._source.start()
            self._relays = True
            for batch in self._source.batches(self._sinks):
                self._relay(batch)
            self._raise_faults()
        except Interrupted:
            log.warning("stopping with the batch in flight unfinished; it will be delivered again")
        finally:
            self._relays = False
            if self._unflushed:
                self._unflushed.close()
            self._sinks.close()
            self._retention.close()
            self._source.close()
            self._retry_worker.close()
            self._pipeline.close()
            if self._owns_session:
                self._session.close()
            self._end()
            self._presence.close()
            self._refusals.close()
            self._catch_up.close()
            self._summary.close()
            self._engines.close()
            self._long_tasks.close()
            if self._traces:
                self._traces.close()
            if self._observer:
                self._observer.close()
        self._raise_faults()
        flushed = self._source.flushed
        log.info("stopped", extra={"lsn": str(flushed)} if flushed else {})

    def _observe(self) -> None:
        if self._observer is None:
            return
        # These import prometheus_client.
        from relay.observe.parts import Parts

        self._observer.start(
            Parts(
                self._source,
                self._pipeline,
                self._sinks,
                self._retry_worker,
                self._conditions,
                lambda: self._relays,
            )
        )

    def _note_committed(self, task: TaskOutcome) -> None:
        """Report what a task has committed, also if other tasks of its batch are retried for hours."""
        for fault in task.braked:
            log.error("a handler is stopped", extra={"fault": fault})
        for dead in task.dead:
            log.warning("dead letter", extra={"partition": _partitions([task]), **dead.fields})
        self._meter.dead_lettered(task.dead)

    def _note_retried(self, redelivery: Redelivery) -> None:
        if self._traces:
            self._traces.redelivered(redelivery.trace_record)
        self._summary.note_redelivered(redelivery.applied)
        self._meter.retried("", redelivery.tried, redelivery.dead)

    def _raise_faults(self) -> None:
        """Raise the error that ended a thread beside the loop, if any."""
        lost = self._unflushed.error if self._unflushed else None
        threads = (
            *(self._retry_worker, self._sinks, self._presence, self._retention),
            self._refusals,
        )
        for error in (*(thread.error for thread in threads), lost):
            if error is not None:
                raise error

    def _begin(self) -> bool:
        """Record that the group runs; return whether an instance may have died with the next batch in flight."""
        try:
            with connect(self._settings.target_dsn) as conn:
                living = set(instances(conn, self._settings.group)) - {groups.INSTANCE}
                return groups.begin(conn, self._settings.group, living)
        except psycopg.OperationalError:
            return True

    def _end(self) -> None:
        with suppress(psycopg.Error), connect(self._settings.target_dsn) as conn:
            groups.end(conn, self._settings.group)

    @property
    def flushed(self) -> Lsn:
        """The position up to which PostgreSQL may recycle the WAL."""
        return self._source.flushed

    def _relay(self, batch: Batch) -> None:
        started = time.monotonic()
        BATCH.set(batch.number)
        self._sinks.offer(batch)
        outcome = self._pipeline.run(batch, self._source.ahead)
        self._sinks.note_applied()
        self._source.ack(batch, outcome)
        if batch.window is None and not outcome.busy:
            if self._unflushed:
                self._unflushed.add(batch.end, outcome.reached)
            else:
                self._sinks.durable(batch.end)
        seconds = time.monotonic() - started
        _report(batch, outcome, seconds)
        if self._traces:
            self._traces.note(batch, outcome, seconds)
        BATCH.set(None)
        self._meter.batch(batch, outcome, seconds)
        self._catch_up.note(batch)
        self._summary.note(batch, outcome)
        self._engines.note(batch, outcome)

    def note_orderly_exit(self) -> None:
        """Record that the process ends itself, so that the batch in flight is not suspected of a crash."""
        with suppress(psycopg.Error):
            self._pipeline.applier.note_orderly_exit()


def _observer(settings: Settings) -> Observer | None:
    if not settings.observe.observes:
        return None
    # Its imports take a tenth of a second.
    from relay.observe.observer import Observer

    return Observer(settings)


def _report(batch: Batch, outcome: Outcome, seconds: float) -> None:
    if not log.isEnabledFor(logging.DEBUG):
        return
    log.debug(
        "batch",
        extra={
            "batch": batch.number,
            "engine": outcome.engine,
            "reason": outcome.reason,
            "partition": _partitions(outcome.tasks),
            "lsn": None if batch.window else str(batch.end),
            "upto": batch.window.upto if batch.window else None,
            "events": batch.events,
            "spooled": batch.spooled,
            "transactions": len(batch.transactions),
            "applied": outcome.applied,
            "skipped": outcome.skipped,
            "deferred": outcome.deferred,
            "dead": sum(dead.events for dead in outcome.dead),
            "ms": round(seconds * 1000, 1),
        },
    )


def _partitions(tasks: Sequence[TaskOutcome]) -> str:
    return ",".join(str(p) for p in sorted(p for task in tasks for p in task.partitions))
