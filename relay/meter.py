"""The interface to which relay's parts report what metrics count; `relay.observe.metrics` implements it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from relay.handlers import Sink
    from relay.model.batch import Batch, DeadLettered, Outcome


class Meter:
    """Receives what metrics count, and ignores it. Safe in several threads; its methods neither block nor raise."""

    def batch(self, batch: Batch, outcome: Outcome, seconds: float) -> None:
        """Record a durable batch, and the seconds since it was taken from the source."""

    def dead_lettered(self, dead: Iterable[DeadLettered]) -> None:
        """Record what a task of a batch has dead-lettered, once that is committed."""

    def retried(self, sink: str, tried: int, dead: Iterable[DeadLettered]) -> None:
        """Record retries of deferred transactions of a sink, or of the target (''), and those that are dead now."""

    def stored(self, sink: str, deferred: int, dead: Iterable[DeadLettered]) -> None:
        """Record that a sink has stored its deferred and its dead deliveries."""

    def watched(self, sink: Sink) -> Sink:
        """Return the sink with its deliveries counted and timed."""
        return sink

    def spark_job(self, seconds: float, succeeded: bool) -> None:
        """Record a job of the Spark engine that has ended."""

    def spark_batch(self, sink: str, seconds: float, events: int) -> None:
        """Record a batch that a sink of type spark has written."""
