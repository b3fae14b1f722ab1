"""What an engine is, and the inline one: it runs tasks in threads of this process, for small batches.

A Spark job costs far more than a small batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import copy_context
from typing import Protocol

from relay.faults import TaskFault
from relay.model.batch import JobName, TaskOutcome, Work
from relay.pipeline.apply import Applier
from relay.runtime.threads import pool

Result = TaskOutcome | TaskFault
"""The result of one task; after a fault the target is unchanged."""


Committed = Callable[[TaskOutcome], None]
"""Is called with the outcome of each task once that is committed, whatever becomes of the other tasks of its batch."""


class Engine(Protocol):
    """Applies tasks, each in its own database transaction of the target."""

    name: str

    @property
    def workers(self) -> int | None:
        """How many tasks run concurrently; None if unknown."""

    def run(self, tasks: Sequence[Work], guarded: bool, name: JobName) -> list[Result]:
        """The result of each task, in order. `guarded` tasks run one at a time, so that a crash has one cause."""


def attempt(applier: Applier, task: Work, guarded: bool) -> Result:
    """Apply one task; returns the fault instead of raising it."""
    try:
        return applier.apply(task, guarded)
    except Exception as error:
        return TaskFault.of(error)


class InlineEngine:
    """Runs tasks in threads, each with a connection of its own."""

    name = "inline"

    def __init__(self, applier: Applier, workers: int, committed: Committed) -> None:
        """`committed` is called in the thread of the task."""
        self.workers: int | None = workers
        self._applier = applier
        self._committed = committed
        self._threads = pool(workers, "apply")

    def run(self, tasks: Sequence[Work], guarded: bool, name: JobName) -> list[Result]:
        """Apply tasks concurrently, guarded ones in turn; returns the results in the order of the tasks."""
        if guarded or len(tasks) == 1:
            return [self._attempt(task, guarded) for task in tasks]
        # The context has the fields that log lines of the batch carry.
        contexts = [copy_context() for _ in tasks]
        return list(
            self._threads.map(
                lambda context, task: context.run(self._attempt, task, False),
                contexts,
                tasks,
            )
        )

    def _attempt(self, task: Work, guarded: bool) -> Result:
        result = attempt(self._applier, task, guarded)
        if isinstance(result, TaskOutcome):
            self._committed(result)
        return result

    def close(self) -> None:
        """Let the threads end, and close the connections."""
        self._threads.shutdown(cancel_futures=True)
        self._applier.close()
