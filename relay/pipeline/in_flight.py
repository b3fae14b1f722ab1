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

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace

from relay.faults import TaskFault
from relay.model.batch import Batch, Task, TaskOutcome, Work
from relay.model.events import Lsn
from relay.pipeline.apply import advances
from relay.pipeline.inline import Result


@dataclass(frozen=True, slots=True, eq=False)
class BatchInFlight:
    """The later batch in flight: its tasks, and their results in the same order."""

    batch: Batch
    tasks: Sequence[Work]
    results: Future[list[Result]]

    @property
    def died(self) -> bool:
        """Wait for the results; returns whether a process may have died of a task."""
        return any(isinstance(each, TaskFault) and each.died for each in self.results.result())

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
