"""Keeps two batches in flight on Spark: while one is applied, the next one is planned, packed and shipped.

Invariants:

- The first batch is the one that the service runs. At most one more is in flight: the batch right after it.
- A task of the later batch has `after`: for each of its partitions that the first batch touches, the position to
  which that batch moves it. Under the lock of the partitions the task compares these with the offsets. If one is not
  reached, it does nothing and returns busy. So each partition is applied in order, whatever the order of the tasks.
- What a task of the later batch has committed is final. Any other result, busy or a fault, is ignored: the task runs
  again when its batch is the first, without `after`.
- Batches are acknowledged in order, each when all of it is durable. What the later batch has committed when relay dies
  is delivered again and recognised by the offsets.
- Nothing else is applied while the later batch is in flight: a window that comes between waits until it has ended.
- Both batches are in the source's buffer until they are acknowledged, so `source.buffer_bytes` bounds them together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from threading import Event
from typing import Protocol

from relay.config.settings import Settings
from relay.faults import TaskFault
from relay.model.batch import Batch, JobName, Task, TaskOutcome, Work
from relay.model.events import Lsn
from relay.pipeline.apply import advances
from relay.pipeline.inline import Engine, Result
from relay.runtime.threads import pool

IN_FLIGHT = 2
"""How many batches are in flight on Spark at most."""

POLL_SECONDS = 0.02
"""How often the source is polled for the batch after the one that Spark applies."""

Ahead = Callable[[int], Batch | None]
"""Asks the source for the batch after the current one, if it has about as many events as the argument says."""


class SideEngine(Engine, Protocol):
    """An engine that applies tasks in other processes, so that the next batch can be planned meanwhile."""

    def start(self) -> None:
        """Begin to start the processes, unless they run or are being started; returns at once."""

    def is_ready(self, timeout: float = 0.0) -> bool:
        """Whether it can apply tasks, within `timeout` seconds. Raises ConfigurationError if it never can."""

    def abandon(self, name: JobName) -> None:
        """Let a job in flight fail. Safe in any thread."""

    @property
    def is_busy(self) -> bool:
        """Whether others have all of its workers."""


@dataclass(frozen=True, slots=True, eq=False)
class BatchInFlight:
    """The later batch in flight: its tasks, and their results in the same order."""

    batch: Batch
    tasks: Sequence[Work]
    results: Future[list[Result]]

    @property
    def faults(self) -> list[TaskFault]:
        """Wait for the results; returns the faults of tasks."""
        return [each for each in self.results.result() if isinstance(each, TaskFault)]

    def ended(self) -> tuple[list[TaskOutcome], list[Work]]:
        """Wait for the results; returns those that are committed, and the tasks that have to run again."""
        done: list[TaskOutcome] = []
        again: list[Work] = []
        for task, result in zip(self.tasks, self.results.result(), strict=True):
            if isinstance(result, TaskOutcome) and not result.busy:
                done.append(result)
            else:
                again.append(replace(task, after={}) if isinstance(task, Task) else task)
        return done, again


def ends(tasks: Sequence[Work]) -> dict[int, Lsn]:
    """The LSNs to which tasks move their partitions."""
    return {
        each.partition_id: each.applied_lsn
        for task in tasks
        if isinstance(task, Task)
        for each in advances(task.transactions, task.touched)
    }


def following(tasks: Sequence[Work], before: Mapping[int, Lsn]) -> list[Work]:
    """The tasks of a batch with `after`: the LSNs to which the batch before moves their partitions (`before`)."""
    return [
        replace(task, after={p: before[p] for p in task.partitions if p in before})
        if isinstance(task, Task)
        else task
        for task in tasks
    ]


class BatchesInFlight:
    """The batches on Spark: the current one and, at most, the one after it. For the thread that runs batches.

    `plan` returns the tasks of a batch for a number of workers. Once `stopping` is set, no other batch is started.
    """

    def __init__(
        self,
        settings: Settings,
        spark: SideEngine,
        plan: Callable[[Batch, int | None], Sequence[Work]],
        stopping: Event,
    ) -> None:
        self._group = settings.group
        self._inline_events = settings.inline_max_events
        self._batch_events = settings.batch.max_events
        self._shutdown_timeout = settings.shutdown_timeout
        self._spark = spark
        self._plan = plan
        self._stopping = stopping
        self._threads = pool(IN_FLIGHT, "spark-batch")
        self._later: BatchInFlight | None = None

    def run(
        self,
        batch: Batch,
        tasks: Sequence[Work],
        guarded: bool,
        name: JobName,
        ahead: Ahead | None,
    ) -> list[Result]:
        """Apply tasks of the current batch; meanwhile start the batch that `ahead` brings."""
        results = self._threads.submit(self._spark.run, tasks, guarded, name)
        self._start_next(results, batch, tasks, ahead)
        return results.result()

    def take(self, batch: Batch) -> BatchInFlight | None:
        """The batch if it is in flight already, otherwise None; waits for another one that is in flight."""
        flight = self._later
        if flight is None:
            return None
        if flight.batch is not batch:
            wait([flight.results])
            return None
        self._later = None
        return flight

    def finish(
        self, flight: BatchInFlight, ahead: Ahead | None
    ) -> tuple[list[TaskOutcome], list[Work]]:
        """Wait for the current batch, which was started ahead; meanwhile start the one that `ahead` brings.

        Returns what `BatchInFlight.ended` does.
        """
        self._start_next(flight.results, flight.batch, flight.tasks, ahead)
        return flight.ended()

    def _start_next(
        self,
        results: Future[list[Result]],
        batch: Batch,
        tasks: Sequence[Work],
        ahead: Ahead | None,
    ) -> None:
        """Start the next batch as soon as the source has it; returns when `results`, of the current batch, are there.

        The next batch must be as large, since otherwise ever smaller ones would go to Spark.
        """
        least = max(self._inline_events + 1, min(batch.events, self._batch_events))
        while ahead is not None and self._may_start and not results.done():
            found = ahead(least)
            if found is not None:
                self._start(found, tasks)
                break
            wait([results], POLL_SECONDS)
        wait([results])

    @property
    def _may_start(self) -> bool:
        return self._later is None and not self._stopping.is_set()

    def _start(self, batch: Batch, before: Sequence[Work]) -> None:
        if batch.spooled or batch.events <= self._inline_events:
            return
        tasks = following(self._plan(batch, self._spark.workers), ends(before))
        name = JobName.of(self._group, batch, 1)
        results = self._threads.submit(self._spark.run, tasks, False, name)
        self._later = BatchInFlight(batch, tasks, results)

    def close(self) -> None:
        """Wait up to `shutdown_timeout` for the later batch. What it has committed is recognised at redelivery."""
        flight, self._later = self._later, None
        if flight is not None and wait([flight.results], self._shutdown_timeout).not_done:
            self._spark.abandon(JobName.of(self._group, flight.batch, 1))
        self._threads.shutdown(wait=False, cancel_futures=True)
