"""Runs batches: plans the tasks, chooses the engine, and retries until every task is durable.

While Spark applies a batch, the next one is started if it goes to Spark too: see `relay.pipeline.in_flight`. These run
alone: polled windows, spooled and guarded batches, batches after one of which something failed or was deferred, and
retries.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from threading import Event

from relay.config.settings import Settings
from relay.faults import (
    Braked,
    FaultAction,
    Interrupted,
    NotNow,
    TaskFault,
    TransientFault,
    describe,
    is_transient,
)
from relay.model.batch import Batch, JobName, Outcome, Task, TaskOutcome, Work
from relay.model.events import Lsn
from relay.pipeline.apply import Applier
from relay.pipeline.in_flight import IN_FLIGHT, Ahead, BatchesInFlight, SideEngine
from relay.pipeline.inline import Committed, Engine, InlineEngine, Result
from relay.pipeline.plan import Planner
from relay.runtime.parts import SOON_SECONDS, Condition, Due, Heartbeat, Part
from relay.runtime.retry import RetryUntilSuccess

log = logging.getLogger(__name__)

SINGLE_WORKER_EVENTS = 100
"""Up to so many events, a batch is one task: another commit costs more than concurrency saves."""

PLANS = "plans a batch"
APPLIES_HERE = "applies a batch"
APPLIES = "applies a batch with Spark"
WAITS_FOR_SPARK = "waits for the Spark session"
"""What the heartbeat of a pipeline reports, besides waiting for a retry."""

LARGE = "large"
GUARDED = "guarded"


LowerBounds = Callable[[Iterable[int]], Mapping[int, Lsn]]


class Pipeline(Part):
    """Applies batches: large ones on Spark, small ones in threads of this process.

    `close` leaves `spark`, the engine for large batches, running. `lower_bounds` returns, for partitions whose last
    commits the target may have lost in a crash, the LSN that they must have reached.
    """

    def __init__(
        self,
        settings: Settings,
        spark: SideEngine,
        lower_bounds: LowerBounds | None = None,
        committed: Committed = lambda _: None,
    ) -> None:
        """`committed` is called in several threads, before `run` returns or raises."""
        self._lower_bounds = lower_bounds
        self._limit = settings.inline_max_events
        self._stopping = Event()
        workers = settings.batch.inline_workers
        # One more connection for the retry worker.
        self.applier = Applier(settings, workers + 1)
        self._inline = InlineEngine(self.applier, workers, committed)
        self._spark = spark
        self._planner = Planner(settings.partitions, settings.poll.partition_ids)
        self._settings = settings
        self._batch_events = settings.batch.max_events
        self._guarded_events = 0
        self._on_spark = BatchesInFlight(settings, spark, self._plan, self._stopping)
        self._smooth = True
        self._stalled: str | None = None
        self.condition = Condition(
            "batches",
            log,
            "a batch failed and is retried",
            "batches are applied again",
            SOON_SECONDS,
        )
        self._retrying = RetryUntilSuccess(self._stopping, self.condition, self._note_fault)
        self._number = 0
        self._committed = committed
        self.heartbeat = Heartbeat()

    def start(self) -> None:
        """Start the Spark session in the background if it is eager or takes every batch; else a large batch does."""
        eager = self._settings.spark.eager and self._settings.needs_spark
        if eager or self._limit == 0:
            self._spark.start()

    def guard(self) -> None:
        """Guard the next events after a crash: as many as the process can have had in flight."""
        in_flight = IN_FLIGHT if self._settings.needs_spark else 1
        self._guarded_events = in_flight * self._batch_events

    def stop(self) -> None:
        """Stop retrying: the first batch ends or raises Interrupted, and no other one is started."""
        self._stopping.set()

    @property
    def conditions(self) -> Sequence[Condition]:
        """Whether batches are applied."""
        return (self.condition,)

    def close(self) -> None:
        """Wait for the later batch on Spark, up to `shutdown_timeout`; close the inline engine and its connections."""
        self._stopping.set()
        self._on_spark.close()
        self._inline.close()

    def run(self, batch: Batch, ahead: Ahead | None = None) -> Outcome:
        """Apply the batch; returns when each task has committed, or is busy (`Outcome.busy`).

        `ahead` is asked for the next batch, which is started too; the next call must be with it, or with what has to be
        applied before it. Transient faults are retried. Raises RelayError for other faults, and Interrupted if the
        service is stopping; then nothing may be acknowledged.
        """
        done: list[TaskOutcome] = []
        todo: Sequence[Work] | None = None
        engine: Engine = self._inline
        reason = ""
        attempt = 0
        self.heartbeat.update(PLANS, Due.LATE)
        flight = self._on_spark.take(batch)
        if self._stalled and not self._spark.is_busy:
            self._stalled = None

        def once() -> None:
            nonlocal todo, engine, reason, attempt, flight
            attempt += 1
            self.heartbeat.update(PLANS, Due.LATE)
            if flight is not None:
                landed, flight = flight, None
                engine, reason = self._spark, LARGE
                finished, again = self._on_spark.finish(landed, self._if_smooth(ahead))
                self._note_unfinished(landed.faults)
                self._report(finished)
                done.extend(finished)
                todo = self._with_lower_bounds(again)
                if not todo:
                    return
                attempt += 1
            engine, reason = self._engine(batch)
            if todo is None:
                workers = 1 if batch.events <= SINGLE_WORKER_EVENTS else engine.workers
                todo = self._plan(batch, workers)
            guarded = self._guarded_events > 0
            reason = GUARDED if guarded else reason
            name = JobName.of(self._settings.group, batch, attempt)
            following = self._if_smooth(ahead) if attempt == 1 else None
            results = self._results(engine, todo, guarded, name, batch, following)
            todo, faults = _sort(todo, results, done)
            self._note_unfinished(faults)
            if faults:
                self._smooth = False
                raise _worst(faults)

        self._retry_until_success(once, batch)
        outcome = Outcome(engine.name, tuple(done), reason)
        dead = sum(dead.events for dead in outcome.dead)
        self._guarded_events -= outcome.applied + outcome.deferred + dead
        braked = any(task.braked for task in done)
        self._smooth = not (outcome.deferred or dead or braked or outcome.busy)
        return outcome

    def _results(
        self,
        engine: Engine,
        tasks: Sequence[Work],
        guarded: bool,
        name: JobName,
        batch: Batch,
        ahead: Ahead | None,
    ) -> list[Result]:
        """Run the tasks; while Spark applies them, start the next batch."""
        if engine is self._inline:
            self.heartbeat.update(APPLIES_HERE)
            return engine.run(tasks, guarded, name)
        self.heartbeat.update(APPLIES, Due.LATE)
        results = self._on_spark.run(batch, tasks, guarded, name, ahead)
        self._report(results)
        return results

    def _note_unfinished(self, faults: Sequence[TaskFault]) -> None:
        """Guard the next events if a process may have died of a task; note why Spark did not get on with one."""
        if any(each.died for each in faults):
            self.guard()
        for each in faults:
            self._stalled = each.stalled or self._stalled

    def _if_smooth(self, ahead: Ahead | None) -> Ahead | None:
        """`ahead` if the next batch may be started before the current one is durable."""
        return ahead if self._smooth and self._guarded_events <= 0 else None

    def _report(self, results: Iterable[Result]) -> None:
        """Report the tasks that Spark has committed; those of this process report themselves."""
        for result in results:
            if isinstance(result, TaskOutcome):
                self._committed(result)

    def _plan(self, batch: Batch, workers: int | None) -> Sequence[Work]:
        return self._with_lower_bounds(self._planner.work(batch, workers))

    def _with_lower_bounds(self, tasks: Sequence[Work]) -> Sequence[Work]:
        if self._lower_bounds is None:
            return tasks
        return [
            replace(task, lower_bounds=self._lower_bounds(task.partitions))
            if isinstance(task, Task)
            else task
            for task in tasks
        ]

    def _retry_until_success(self, attempt: Callable[[], None], batch: Batch) -> None:
        self._number = batch.number
        try:
            self._retrying(attempt)
        except Exception as error:
            if is_transient(error):
                raise Interrupted from None
            raise

    def _note_fault(self, error: BaseException) -> None:
        """Report why the batch is retried."""
        text = str(error) if isinstance(error, Braked) else describe(error)
        self.heartbeat.update(f"retries a batch: {text}", Due.LATE)
        if isinstance(error, Braked):
            self.condition.fails(text, logging.ERROR, "a handler is stopped", batch=self._number)
        else:
            self.condition.fails(text, batch=self._number)

    def _engine(self, batch: Batch) -> tuple[Engine, str]:
        """Choose the engine for the batch, and say why. Waits until Spark is ready if that takes every batch."""
        if batch.spooled:
            # A spooled transaction is a file on this machine.
            return self._inline, "spooled"
        if batch.events <= self._limit:
            return self._inline, "small"
        if self._stalled:
            # Inline nothing waits for a Spark slot, or for a process that is frozen.
            return self._inline, self._stalled
        if self._limit == 0:
            while not self._spark.is_ready(timeout=0.5) and not self._stopping.is_set():
                self.heartbeat.update(WAITS_FOR_SPARK)
            return self._spark, LARGE
        if self._spark.is_ready():
            return self._spark, LARGE
        self._spark.start()
        return self._inline, "session not ready"


def _sort(
    tasks: Sequence[Work], results: Sequence[Result], done: list[TaskOutcome]
) -> tuple[list[Work], list[TaskFault]]:
    """Move results to `done`; returns the tasks to retry, and their faults. Raises RelayError for other faults."""
    todo: list[Work] = []
    faults: list[TaskFault] = []
    for task, result in zip(tasks, results, strict=True):
        if isinstance(result, TaskOutcome):
            done.append(result)
        elif result.action is FaultAction.STOP:
            raise result.as_error()
        else:
            todo.append(task)
            faults.append(result)
    return todo, faults


def _worst(faults: Sequence[TaskFault]) -> TransientFault:
    for fault in faults:
        if fault.braked:
            return Braked(fault.text)
    return NotNow(faults[0].text)
