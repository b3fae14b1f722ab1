"""Two batches in flight on Spark: while one is applied, the next one is planned, packed and shipped.

What holds:

- The batch in front is the one that the service runs. At most one more is in flight: the batch right after it.
- A task of the later batch has `after`: for each of its partitions that the batch in front touches, the position at
  which that one leaves it. Under the lock of the partitions the task compares them with the offsets. If one is not
  reached, it does nothing and answers busy. So each partition is applied in order, whatever the tasks' order is.
- What a task of the later batch has committed is final. Whatever else it answers, busy or a fault, counts for nothing:
  the task runs again when its batch is in front, without `after`.
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
    """The later batch in flight: its tasks, and what becomes of each, in order."""

    batch: Batch
    tasks: Sequence[Work]
    results: Future[list[Result]]

    @property
    def died(self) -> bool:
        """Wait for the end; whether the process that had a task in flight may have died of it."""
        return any(isinstance(each, TaskFault) and each.died for each in self.results.result())

    def ended(self) -> tuple[list[TaskOutcome], list[Work]]:
        """Wait for the end; returns what is committed and the tasks that are to run again."""
        done: list[TaskOutcome] = []
        again: list[Work] = []
        for task, result in zip(self.tasks, self.results.result(), strict=True):
            if isinstance(result, TaskOutcome) and not result.busy:
                done.append(result)
            else:
                again.append(replace(task, after={}) if isinstance(task, Task) else task)
        return done, again


def ends(tasks: Sequence[Work]) -> dict[int, Lsn]:
    """The positions at which tasks leave their partitions when they are applied."""
    return {
        each.partition_id: each.applied_lsn
        for task in tasks
        if isinstance(task, Task)
        for each in advances(task.transactions, task.touched)
    }


def following(tasks: Sequence[Work], before: Mapping[int, Lsn]) -> list[Work]:
    """The tasks of a batch, each with the positions at which the batch before leaves its partitions."""
    return [
        replace(task, after={p: before[p] for p in task.partitions if p in before})
        if isinstance(task, Task)
        else task
        for task in tasks
    ]
