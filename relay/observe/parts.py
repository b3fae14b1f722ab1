"""The parts of a running service that metrics and health read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from relay.delivery.sinks import Sinks
from relay.pipeline.retries import RetryWorker
from relay.pipeline.runner import Pipeline
from relay.runtime.parts import Condition
from relay.source.hybrid import Source
from relay.spark.session import Session


@dataclass(frozen=True, slots=True, eq=False)
class Parts:
    """The parts of a service. `running` returns whether it relays: False while it starts and once it stops.

    `conditions` are those of all background parts.
    """

    source: Source
    pipeline: Pipeline
    sinks: Sinks
    retry_worker: RetryWorker
    session: Session
    conditions: Sequence[Condition]
    running: Callable[[], bool]
