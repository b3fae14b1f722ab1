"""Lag and throughput of the last hours, in memory: what the console draws.

A thread of the running relay adds a sample every ten seconds (`relay.observe.observer`), if `observe.listen` or
`observe.console` is set. To read it from another thread of the same process:

    from relay.observe import history

    for sample in history.of("default").samples(since=time.time() - 3600):
        sample.at, sample.values["events_total"], sample.sinks["mail"]["lag_seconds"]

A value that nobody knows at that moment, as while a database is away, is not in the mapping.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from threading import Lock

SAMPLE_SECONDS = 10.0
"""How often a sample is added."""
KEPT_SECONDS = 6 * 3600.0
"""How long a sample is kept."""

VALUES: Mapping[str, str] = {
    "events_total": "events applied to the target by this process since it started; differences give the rate",
    "lag_bytes": "WAL that the slot has not confirmed",
    "retained_bytes": "WAL that the server keeps for the slot",
    "lag_events": "events that are not applied to the target",
    "lag_seconds": "age of the oldest event that is not applied to the target",
    "deferred": "deferred transactions of the target and of all sinks",
    "dead_letters": "dead transactions of the target and of all sinks",
    "buffered_bytes": "received and not applied yet",
}
"""What `Sample.values` may have."""

SINK_VALUES: Mapping[str, str] = {
    "delivered_total": "transactions delivered by this process since it started",
    "lag_events": "events that the sink has not had",
    "lag_seconds": "age of the oldest event that the sink has not had",
    "deferred": "deferred transactions",
}
"""What the mapping of a sink in `Sample.sinks` may have."""


@dataclass(frozen=True, slots=True)
class Sample:
    """The main figures of a group at a moment, `at` in seconds since 1970; those of each sink by its name."""

    at: float
    values: Mapping[str, float]
    sinks: Mapping[str, Mapping[str, float]] = field(default_factory=dict)


class SampleHistory:
    """The samples of one group, oldest first, those of the last six hours. Safe in several threads."""

    def __init__(self, kept: int = int(KEPT_SECONDS / SAMPLE_SECONDS)) -> None:
        """`kept` is how many samples it holds at most."""
        self._samples: deque[Sample] = deque(maxlen=kept)
        self._lock = Lock()

    def add(self, sample: Sample) -> None:
        """Append a sample; the oldest one leaves where there are too many."""
        with self._lock:
            self._samples.append(sample)

    def samples(self, since: float = 0.0) -> list[Sample]:
        """The samples that are not older than `since`, in seconds since 1970."""
        with self._lock:
            return [each for each in self._samples if each.at >= since]


_histories: dict[str, SampleHistory] = {}
_lock = Lock()


def of(group: str) -> SampleHistory:
    """The history of a group in this process; empty until the group has run here for ten seconds."""
    with _lock:
        return _histories.setdefault(group, SampleHistory())
