"""Keeps lag and throughput of the last hours in memory, for the charts of the console.

A thread of the running relay adds a sample every ten seconds (`relay.observe.observer`), if `observe.listen` or
`observe.console` is set. To read it from another thread of the same process:

    from relay.observe import history

    for sample in history.of("default").samples(since=time.time() - 3600):
        sample.at, sample.values["events_total"], sample.sinks["mail"]["lag_seconds"]

A value that is unknown at a moment, such as while a database cannot be reached, is missing from the mapping.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from threading import Lock

SAMPLE_SECONDS = 10.0
"""Interval between two samples."""
KEPT_SECONDS = 6 * 3600.0
"""Time for which a sample is kept."""

VALUES: Mapping[str, str] = {
    "events_total": "events applied to the target by this process since it started; differences give the rate",
    "lag_bytes": "WAL that the slot has not confirmed",
    "retained_bytes": "WAL that the server keeps for the slot",
    "lag_events": "events that are not applied to the target",
    "lag_seconds": "age of the oldest event that is not applied to the target",
    "deferred": "deferred transactions of the target and of all sinks",
    "dead_letters": "dead transactions of the target and of all sinks, and dead messages of queues",
    "buffered_bytes": "received and not applied yet",
}
"""The keys of `Sample.values` and their meanings."""

SINK_VALUES: Mapping[str, str] = {
    "delivered_total": "transactions delivered by this process since it started",
    "lag_events": "events that the sink has not read",
    "lag_seconds": "age of the oldest event that the sink has not read",
    "deferred": "deferred transactions",
}
"""The keys of a sink's mapping in `Sample.sinks` and their meanings."""


@dataclass(frozen=True, slots=True)
class Sample:
    """The main values of a group at a moment (`at`, seconds since 1970), and those of its sinks by name."""

    at: float
    values: Mapping[str, float]
    sinks: Mapping[str, Mapping[str, float]] = field(default_factory=dict)


class SampleHistory:
    """The samples of one group over the last six hours, oldest first. Safe in several threads."""

    def __init__(self, kept: int = int(KEPT_SECONDS / SAMPLE_SECONDS)) -> None:
        """Keeps the last `kept` samples."""
        self._samples: deque[Sample] = deque(maxlen=kept)
        self._lock = Lock()

    def add(self, sample: Sample) -> None:
        """Append a sample, and drop the oldest one if there are too many."""
        with self._lock:
            self._samples.append(sample)

    def samples(self, since: float = 0.0) -> list[Sample]:
        """Return the samples from `since` on, in seconds since 1970."""
        with self._lock:
            return [each for each in self._samples if each.at >= since]


_histories: dict[str, SampleHistory] = {}
_lock = Lock()


def of(group: str) -> SampleHistory:
    """Return the history of a group in this process; it is empty unless the group runs here."""
    with _lock:
        return _histories.setdefault(group, SampleHistory())
