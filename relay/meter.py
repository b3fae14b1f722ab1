"""The events that metrics count. This meter ignores them; `relay.observe.metrics` counts them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from relay.handlers import Sink
    from relay.model.batch import Batch, DeadLettered, Outcome


class Meter:
    """Is told what happens. Safe in several threads; its methods neither block nor raise."""

    def batch(self, batch: Batch, outcome: Outcome, seconds: float) -> None:
        """A batch is durable, so many seconds after it was taken."""

    def retried(self, sink: str, tried: int, dead: Iterable[DeadLettered]) -> None:
        """Deferred transactions were tried again, for a sink or ('') for the target; some of them are dead now."""

    def stored(self, sink: str, deferred: int, dead: Iterable[DeadLettered]) -> None:
        """A sink has stored which deliveries it has deferred, and which are dead."""

    def watched(self, sink: Sink) -> Sink:
        """The sink, with its deliveries counted and timed."""
        return sink

    def spark_job(self, seconds: float, succeeded: bool) -> None:
        """A job of the Spark engine has ended."""

    def spark_batch(self, sink: str, seconds: float, events: int) -> None:
        """A sink of type spark has written a batch."""
