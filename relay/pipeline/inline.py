"""Runs a batch's tasks on threads of this process: a Spark job would cost a small batch a hundred times the work."""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import copy_context

from relay.faults import TaskFault
from relay.model.batch import JobName, TaskOutcome, Work
from relay.pipeline.apply import Applier
from relay.threads import pool

Result = TaskOutcome | TaskFault
"""What became of one task; a fault has left no trace in the target."""


def attempt(applier: Applier, task: Work, guarded: bool) -> Result:
    """Apply one task; a fault becomes a value."""
    try:
        return applier.apply(task, guarded)
    except Exception as error:
        return TaskFault.of(error)


class InlineEngine:
    """Threads of the driver, each with a connection of its own."""

    name = "inline"

    def __init__(self, applier: Applier, workers: int) -> None:
        self.workers: int | None = workers
        self._applier = applier
        self._threads = pool(workers, "apply")

    def run(self, tasks: Sequence[Work], guarded: bool, name: JobName) -> list[Result]:
        """Apply the tasks side by side, guarded ones in turn; results are in the order of the tasks."""
        if guarded or len(tasks) == 1:
            return [attempt(self._applier, task, guarded) for task in tasks]
        # Log lines of a thread name the batch too.
        contexts = [copy_context() for _ in tasks]
        return list(
            self._threads.map(
                lambda context, task: context.run(attempt, self._applier, task, False),
                contexts,
                tasks,
            )
        )

    def close(self) -> None:
        """Let the threads end."""
        self._threads.shutdown(cancel_futures=True)
        self._applier.close()
