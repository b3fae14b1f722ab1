"""Observes one running service: a thread probes it every few seconds, and a listener serves metrics and health."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping

from relay.config.settings import Settings
from relay.observe import history
from relay.observe.databases import Databases
from relay.observe.gauges import ServiceGauges
from relay.observe.liveness import Liveness
from relay.observe.metrics import Metrics
from relay.observe.parts import Parts
from relay.observe.server import HttpListener, listen
from relay.pipeline.listeners import Meter
from relay.runtime.parts import Condition, Recurring
from relay.source.state import POLLS, STREAMS

log = logging.getLogger(__name__)

PROBE_SECONDS = 5.0
"""Interval between two probes of the databases and the jobs."""
_CLOSE_SECONDS = 1.0


class Observer(Recurring):
    """Metrics, health and history of one service, from `start` to `close`.

    The parts of the service report to `meter`.
    """

    def __init__(self, settings: Settings) -> None:
        super().__init__(
            Condition(
                "observe", log, "cannot observe the service", "the service is observed again"
            ),
            longest_pause=PROBE_SECONDS,
            close_seconds=_CLOSE_SECONDS,
        )
        self._settings = settings
        self._metrics = Metrics(settings)
        self.meter: Meter = self._metrics
        self._listener: HttpListener | None = None
        self._next_sample = 0.0

    def watch(self, parts: Parts) -> None:
        """Observe these parts. Call before `start`."""
        self._parts = parts
        self._databases = Databases(self._settings)
        self._liveness = Liveness(self._settings, parts, self._databases)
        self._metrics.supply(ServiceGauges(self._settings, parts, self._databases, self._liveness))

    def start(self) -> None:
        """Start probing, and serve `observe.listen`. Raises ConfigurationError if relay cannot listen there."""
        if self._settings.observe.listen is not None:
            self._listener = listen(self._settings.observe.listen)
            self._listener.add(self._metrics, self._liveness.health)
        super().start()

    def close(self) -> None:
        """Stop. A statement in flight may end later."""
        super().close()
        if not self.is_alive:
            self._databases.close()
        if self._listener is not None:
            self._listener.remove(self._metrics, self._liveness.health)
            self._listener.close()
            self._listener = None

    def turn(self) -> float:
        """Probe the databases and the jobs."""
        self._probe()
        self.condition.works()
        return PROBE_SECONDS

    def _probe(self) -> None:
        pids = [job.pid for job in self._parts.pipeline.applier.active_jobs.jobs() if job.pid]
        reads = self._parts.source.state().doing in (STREAMS, POLLS)
        self._databases.probe(pids, reads)
        self._liveness.sample()
        if time.monotonic() >= self._next_sample:
            self._next_sample = time.monotonic() + history.SAMPLE_SECONDS - PROBE_SECONDS / 2
            history.of(self._settings.group).add(self._sample())

    def _sample(self) -> history.Sample:
        gauges = self._metrics.values()
        names = {
            "lag_bytes": "relay_slot_lag_bytes",
            "retained_bytes": "relay_slot_retained_bytes",
            "lag_events": "relay_target_lag_events",
            "lag_seconds": "relay_target_lag_seconds",
            "deferred": "relay_deferred_transactions",
            "dead_letters": "relay_dead_letters",
            "buffered_bytes": "relay_receive_buffer_bytes",
        }
        values = {
            key: sum(gauges[name].values()) for key, name in names.items() if gauges.get(name)
        }
        values["events_total"] = self._metrics.applied
        sinks = {name: self._of_sink(gauges, name) for name in self._settings.sink_handlers}
        return history.Sample(time.time(), values, sinks)

    def _of_sink(
        self, gauges: Mapping[str, Mapping[tuple[str, ...], float]], sink: str
    ) -> dict[str, float]:
        values: dict[str, float] = {"delivered_total": self._metrics.delivered(sink)}
        for key in ("lag_events", "lag_seconds"):
            value = gauges.get(f"relay_sink_{key}", {}).get((sink,))
            if value is not None:
                values[key] = value
        deferred = gauges.get("relay_deferred_transactions", {})
        if deferred:
            values["deferred"] = sum(count for (name, _), count in deferred.items() if name == sink)
        return values
