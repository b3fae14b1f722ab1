"""Counts what happens in the process, and collects all series for Prometheus.

The parts of a service report to `Metrics`, its `Meter`. A scrape reads gauges from memory, or from the last readings of
`relay.observe.databases`; it queries no database.
"""

from __future__ import annotations

import time
from collections import Counter as Counts
from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.metrics_core import GaugeMetricFamily, Metric

from relay.config.settings import Settings
from relay.handlers import Sink
from relay.model.batch import Batch, DeadLettered, Outcome, TaskOutcome
from relay.model.events import POSTGRES_EPOCH, Transaction
from relay.observe.series import SERIES, MetricFamily
from relay.pipeline.apply import Redelivery
from relay.pipeline.listeners import Meter

GROUP = "group"
NOT_CONFIGURED = "(not configured)"
"""The label of handlers that occur in a database, but not in the configuration."""
OTHER = "(other)"
_KINDS_OF_FAULT = 30
"""How many kinds of fault a handler has in labels; further ones are OTHER."""

_EPOCH = POSTGRES_EPOCH.timestamp()

Values = Mapping[str, Mapping[tuple[str, ...], float]]
"""Gauges by name and by the values of their labels other than `group`."""
Supplier = Callable[[], Values]
"""Returns gauges from memory; neither waits nor raises."""


class Metrics(Meter):
    """The series of one group. Safe in several threads.

    Suppliers give the gauges, and counters that are kept elsewhere; values that none gives are absent.
    """

    def __init__(self, settings: Settings) -> None:
        self._group = settings.group
        self._registry = CollectorRegistry()
        self._suppliers: list[Supplier] = []
        self._kinds: dict[str, set[str]] = {}
        self._sums: Counts[str] = Counts()
        self._counters: dict[str, Counter] = {}
        self._histograms: dict[str, Histogram] = {}
        self._counts: dict[tuple[str, ...], Counter] = {}
        self._times: dict[tuple[str, ...], Histogram] = {}
        for each in SERIES:
            names = (GROUP, *each.labels)
            if each.kind == "counter" and each.name not in _SUPPLIED:
                self._counters[each.name] = Counter(
                    each.name, each.text, names, registry=self._registry
                )
            elif each.kind == "histogram":
                self._histograms[each.name] = Histogram(
                    each.name, each.text, names, buckets=each.buckets, registry=self._registry
                )
        self._create_configured(settings)

    def _create_configured(self, settings: Settings) -> None:
        """Create the series of the configured engines and handlers, so that they start at 0."""
        for engine in ("inline", "spark") if settings.needs_spark else ("inline",):
            for outcome in ("applied", "skipped", "deferred", "dead"):
                self._counter("relay_events_total", engine, outcome)
            self._counter("relay_transactions_total", engine)
            self._histogram("relay_batch_duration_seconds", engine)
        self._histogram("relay_applied_latency_seconds")
        self._counter("relay_retried_transactions_total")
        if settings.needs_spark:
            self._histogram("relay_spark_job_duration_seconds")
            for result in ("succeeded", "failed"):
                self._counter("relay_spark_jobs_total", result)
        for name in settings.handlers:
            if name in settings.spark_handlers:
                self._histogram("relay_spark_batch_duration_seconds", name)
                self._counter("relay_spark_batch_events_total", name)
                continue
            self._histogram("relay_handler_duration_seconds", name)
            if name in settings.sink_handlers:
                self._histogram("relay_delivered_latency_seconds", name)
                self._counter("relay_sink_deferred_total", name)
                for result in ("confirmed", "failed"):
                    self._counter("relay_deliveries_total", name, result)

    def _counter(self, name: str, *labels: str) -> Counter:
        # Cached, since prometheus_client takes longer to find a child by its labels than to count.
        child = self._counts.get((name, *labels))
        if child is None:
            child = self._counts[name, *labels] = self._counters[name].labels(self._group, *labels)
        return child

    def _histogram(self, name: str, *labels: str) -> Histogram:
        child = self._times.get((name, *labels))
        if child is None:
            child = self._times[name, *labels] = self._histograms[name].labels(self._group, *labels)
        return child

    # Reports

    def durable(self, batch: Batch, outcome: Outcome, seconds: float) -> None:
        """Count a durable batch, and time it since it was taken from the source."""
        engine, dead = outcome.engine, outcome.dead
        counts = {
            "applied": outcome.applied,
            "skipped": outcome.skipped,
            "deferred": outcome.deferred,
            "dead": sum(each.events for each in dead),
        }
        for kind, count in counts.items():
            if count:
                self._counter("relay_events_total", engine, kind).inc(count)
        transactions = sum(task.transactions for task in outcome.tasks)
        self._counter("relay_transactions_total", engine).inc(transactions)
        self._counter("relay_batches_total", engine, outcome.reason).inc()
        self._histogram("relay_batch_duration_seconds", engine).observe(seconds)
        if len(batch.transactions):
            latency = _age(int(batch.transactions.facts["ts"][0]))
            self._histogram("relay_applied_latency_seconds").observe(latency)
        for task in outcome.tasks:
            for handler, took in task.seconds.items():
                self._histogram("relay_handler_duration_seconds", handler).observe(took)
        self._sums["events"] += outcome.applied

    def committed(self, task: TaskOutcome) -> None:
        """Count what a task of a batch has dead-lettered."""
        self._dead(task.dead)

    def redelivered(self, redelivery: Redelivery) -> None:
        """Count retries of deferred transactions, and those that are dead now."""
        self._counter("relay_retried_transactions_total").inc(redelivery.tried)
        self._dead(redelivery.dead)

    def stored(self, sink: str, deferred: int, dead: Iterable[DeadLettered]) -> None:
        """Count the deferred and the dead deliveries that a sink has stored."""
        if deferred:
            self._counter("relay_sink_deferred_total", sink).inc(deferred)
        self._dead(dead)

    def _dead(self, dead: Iterable[DeadLettered]) -> None:
        for each in dead:
            handler = each.handler or ""
            known = self._kinds.setdefault(handler, set())
            kind = each.kind
            if kind not in known and len(known) >= _KINDS_OF_FAULT:
                kind = OTHER
            known.add(kind)
            self._counter("relay_dead_lettered_total", handler, kind).inc()

    def watched(self, sink: Sink) -> Sink:
        """Return the sink with its deliveries counted and timed."""
        return _MeteredSink(
            sink,
            self._histogram("relay_handler_duration_seconds", sink.name),
            self._histogram("relay_delivered_latency_seconds", sink.name),
            self._counter("relay_deliveries_total", sink.name, "confirmed"),
            self._counter("relay_deliveries_total", sink.name, "failed"),
            self._sums,
        )

    def spark_job(self, seconds: float, succeeded: bool) -> None:
        """Count and time a job of the Spark engine that has ended."""
        self._histogram("relay_spark_job_duration_seconds").observe(seconds)
        self._counter("relay_spark_jobs_total", "succeeded" if succeeded else "failed").inc()

    def spark_batch(self, sink: str, seconds: float, events: int) -> None:
        """Count and time a batch that a sink of type spark has written."""
        self._histogram("relay_spark_batch_duration_seconds", sink).observe(seconds)
        self._counter("relay_spark_batch_events_total", sink).inc(events)
        self._sums[f"delivered {sink}"] += events

    # Collection

    def supply(self, supplier: Supplier) -> None:
        """Add a supplier of gauges."""
        self._suppliers.append(supplier)

    def values(self) -> dict[str, Mapping[tuple[str, ...], float]]:
        """Return the current gauges."""
        gauges: dict[str, Mapping[tuple[str, ...], float]] = {}
        for supplier in self._suppliers:
            gauges.update(supplier())
        return gauges

    @property
    def applied(self) -> int:
        """The number of events that this process has applied."""
        return self._sums["events"]

    def delivered(self, sink: str) -> int:
        """Return how many transactions, or for type spark events, this process has delivered to a sink."""
        return self._sums[f"delivered {sink}"]

    def collect(self) -> Iterator[Metric]:
        """Yield all families, as a collector of prometheus_client."""
        counted = {each.name: each for each in self._registry.collect()}
        for family in counted.values():
            # All series are created when the process starts.
            family.samples = [each for each in family.samples if not each.name.endswith("_created")]
        values = self.values()
        for each in SERIES:
            family_of_series = counted.get(each.name.removesuffix("_total"))
            yield family_of_series or self._supplied(each, values.get(each.name, {}))

    def _supplied(self, series: MetricFamily, values: Mapping[tuple[str, ...], float]) -> Metric:
        labels = (GROUP, *series.labels)
        if series.kind == "gauge":
            gauge = GaugeMetricFamily(series.name, series.text, labels=labels)
            for key, value in values.items():
                gauge.add_metric([self._group, *key], value)
            return gauge
        family = Metric(series.name.removesuffix("_total"), series.text, "counter")
        for key, value in values.items():
            family.add_sample(
                series.name, dict(zip(labels, (self._group, *key), strict=True)), value
            )
        return family


_SUPPLIED = frozenset({"relay_stream_connections_total", "relay_takeovers_total"})
"""Counters that are kept elsewhere, and given by suppliers."""


class Site:
    """The metrics of one address: the series of its groups, and of the process."""

    def __init__(self, version: str) -> None:
        from prometheus_client import ProcessCollector

        self._groups: list[Metrics] = []
        self.registry = CollectorRegistry()
        self.registry.register(self)
        ProcessCollector(registry=self.registry)
        build = Gauge(
            "relay_build_info", "1, with relay's version.", ["version"], registry=self.registry
        )
        build.labels(version).set(1)

    def add(self, metrics: Metrics) -> None:
        """Add a group's series."""
        self._groups.append(metrics)

    def remove(self, metrics: Metrics) -> None:
        """Remove a group's series."""
        self._groups.remove(metrics)

    def describe(self) -> list[Metric]:
        """Return nothing, so that registration does not collect."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield each family once, with the samples of all groups."""
        families: dict[str, Metric] = {}
        for metrics in tuple(self._groups):
            for family in metrics.collect():
                known = families.setdefault(family.name, family)
                if known is not family:
                    known.samples.extend(family.samples)
        yield from families.values()


class _MeteredSink:
    """A sink whose deliveries are counted and timed."""

    def __init__(
        self,
        sink: Sink,
        duration: Histogram,
        latency: Histogram,
        confirmed: Counter,
        failed: Counter,
        sums: Counts[str],
    ) -> None:
        self.name = sink.name
        self._sink = sink
        self._duration = duration
        self._latency = latency
        self._confirmed = confirmed
        self._failed = failed
        self._sums = sums
        self._sum = f"delivered {sink.name}"

    def resume(self, series: str) -> None:
        """Prepare for deliveries from the sink's stored position."""
        self._sink.resume(series)

    async def deliver(self, transaction: Transaction) -> None:
        """Deliver a transaction. Raises what the sink raises."""
        started = time.monotonic()
        try:
            await self._sink.deliver(transaction)
        except Exception:
            self._failed.inc()
            raise
        finally:
            self._duration.observe(time.monotonic() - started)
        self._confirmed.inc()
        self._sums[self._sum] += 1
        if transaction.commit.ts:
            self._latency.observe(_age(transaction.commit.ts))

    async def close(self) -> None:
        """Close the connections."""
        await self._sink.close()


def _age(microseconds: int) -> float:
    """Return the seconds since a moment in microseconds since 2000; 0 if the source's clock is ahead."""
    return max(0.0, time.time() - _EPOCH - microseconds / 1_000_000)
