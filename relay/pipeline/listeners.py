"""Who is told of what relay does: of batches and redeliveries, and for metrics also of deliveries and Spark's jobs.

Methods are called in several threads, and neither block nor raise.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from relay.model.batch import Batch, DeadLetterReport, Outcome, TaskOutcome
from relay.pipeline.apply import Handled
from relay.sinks import Sink


class BatchListener:
    """Is told of batches and redeliveries, and ignores them."""

    def committed(self, task: TaskOutcome) -> None:
        """Receive what a task has committed, also if other tasks of its batch are retried for hours."""

    def durable(self, batch: Batch, outcome: Outcome, seconds: float) -> None:
        """Receive a batch that is durable now, `seconds` after it was taken from the source."""

    def redelivered(self, retried: Handled) -> None:
        """Receive what was committed of transactions that had been deferred."""


class Listeners(BatchListener):
    """Tells several listeners, in order."""

    def __init__(self, listeners: Sequence[BatchListener]) -> None:
        self._listeners = listeners

    def committed(self, task: TaskOutcome) -> None:
        """Tell all."""
        for each in self._listeners:
            each.committed(task)

    def durable(self, batch: Batch, outcome: Outcome, seconds: float) -> None:
        """Tell all."""
        for each in self._listeners:
            each.durable(batch, outcome, seconds)

    def redelivered(self, retried: Handled) -> None:
        """Tell all."""
        for each in self._listeners:
            each.redelivered(retried)


class Meter(BatchListener):
    """Receives what metrics count, and ignores it; `relay.observe.metrics` counts."""

    def stored(self, sink: str, deferred: int, dead: Iterable[DeadLetterReport]) -> None:
        """Receive what a sink has stored: its deferred and its dead deliveries."""

    def watched(self, sink: Sink) -> Sink:
        """Return the sink with its deliveries counted and timed."""
        return sink

    def spark_job(self, seconds: float, succeeded: bool) -> None:
        """Receive a job of the Spark engine that has ended."""

    def spark_batch(self, sink: str, seconds: float, events: int) -> None:
        """Receive a batch that a sink of type spark has written."""

    def taken_in(self, intake: str, result: str, messages: int) -> None:
        """Receive how many messages of a broker were published, repeated or rejected."""
