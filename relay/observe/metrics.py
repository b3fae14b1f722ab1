"""The series of Prometheus: which there are, and how what happens in the process is counted.

What a process counts is added where it happens (`Metrics` is the `Meter` of a service). Gauges are read when they
are asked for: from memory, or from what `relay.observe.databases` has read last. No scrape asks a database.
"""

from __future__ import annotations

import time
from collections import Counter as Counts
from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.metrics_core import GaugeMetricFamily, Metric

from relay.config.settings import Settings
from relay.handlers import Sink
from relay.meter import Meter
from relay.model.batch import Batch, DeadLettered, Outcome
from relay.model.events import POSTGRES_EPOCH, Transaction
from relay.observe.series import SERIES, Series

GROUP = "group"
NOT_CONFIGURED = "(not configured)"
"""Stands for handlers that databases have something of and the configuration has not."""
OTHER = "(other)"
_KINDS_OF_FAULT = 30
"""How many kinds of fault each handler has in labels; the rest are OTHER."""

_EPOCH = POSTGRES_EPOCH.timestamp()

Values = Mapping[str, Mapping[tuple[str, ...], float]]
"""Gauges, by name and by the values of their labels besides `group`."""
Supplier = Callable[[], Values]
"""Reads gauges from memory: it neither waits nor raises."""


class Metrics(Meter):
    """The series of one group. Safe in several threads.

    `suppliers` give the gauges, and counters that are kept elsewhere; one that is not given is absent.
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
        self._begin(settings)

    def _begin(self, settings: Settings) -> None:
        """Let the series of what is configured begin with 0."""
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
        # To find a child by its labels costs more than to count.
        found = self._counts.get((name, *labels))
        if found is None:
            found = self._counts[name, *labels] = self._counters[name].labels(self._group, *labels)
        return found

    def _histogram(self, name: str, *labels: str) -> Histogram:
        found = self._times.get((name, *labels))
        if found is None:
            found = self._times[name, *labels] = self._histograms[name].labels(self._group, *labels)
        return found

    # What happens

    def batch(self, batch: Batch, outcome: Outcome, seconds: float) -> None:
        """A batch is durable, so many seconds after it was taken."""
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
        self._dead(dead)
        self._sums["events"] += outcome.applied

    def retried(self, sink: str, tried: int, dead: Iterable[DeadLettered]) -> None:
        """Deferred transactions were tried again; some of them are dead now."""
        self._counter("relay_retried_transactions_total").inc(tried)
        self._dead(dead)

    def stored(self, sink: str, deferred: int, dead: Iterable[DeadLettered]) -> None:
        """A sink has stored which deliveries it has deferred, and which are dead."""
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
        """The sink, with its deliveries counted and timed."""
        return _Watched(
            sink,
            self._histogram("relay_handler_duration_seconds", sink.name),
            self._histogram("relay_delivered_latency_seconds", sink.name),
            self._counter("relay_deliveries_total", sink.name, "confirmed"),
            self._counter("relay_deliveries_total", sink.name, "failed"),
            self._sums,
        )

    def spark_job(self, seconds: float, succeeded: bool) -> None:
        """A job of the Spark engine has ended."""
        self._histogram("relay_spark_job_duration_seconds").observe(seconds)
        self._counter("relay_spark_jobs_total", "succeeded" if succeeded else "failed").inc()

    def spark_batch(self, sink: str, seconds: float, events: int) -> None:
        """A sink of type spark has written a batch."""
        self._histogram("relay_spark_batch_duration_seconds", sink).observe(seconds)
        self._counter("relay_spark_batch_events_total", sink).inc(events)
        self._sums[f"delivered {sink}"] += events

    # What is asked for

    def supply(self, supplier: Supplier) -> None:
        """Ask this one too for gauges."""
        self._suppliers.append(supplier)

    def values(self) -> dict[str, Mapping[tuple[str, ...], float]]:
        """The gauges as they are now."""
        found: dict[str, Mapping[tuple[str, ...], float]] = {}
        for supplier in self._suppliers:
            found.update(supplier())
        return found

    @property
    def applied(self) -> int:
        """How many events this process has applied."""
        return self._sums["events"]

    def delivered(self, sink: str) -> int:
        """How many transactions this process has delivered to a sink; of one of type spark, events."""
        return self._sums[f"delivered {sink}"]

    def collect(self) -> Iterator[Metric]:
        """All families, as a collector of prometheus_client gives them."""
        counted = {each.name: each for each in self._registry.collect()}
        for family in counted.values():
            # When a series began is of no use here: it begins with the process.
            family.samples = [each for each in family.samples if not each.name.endswith("_created")]
        values = self.values()
        for each in SERIES:
            found = counted.get(each.name.removesuffix("_total"))
            yield found or self._supplied(each, values.get(each.name, {}))

    def _supplied(self, series: Series, values: Mapping[tuple[str, ...], float]) -> Metric:
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
"""Counters that are kept elsewhere."""


class Site:
    """What one address shows: the series of all groups of the process, and those of the process itself."""

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
        """Show a group's series too."""
        self._groups.append(metrics)

    def remove(self, metrics: Metrics) -> None:
        """Show them no longer."""
        self._groups.remove(metrics)

    def describe(self) -> list[Metric]:
        """Nothing: so that registering does not collect."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Each family once, with the samples of all groups."""
        families: dict[str, Metric] = {}
        for metrics in tuple(self._groups):
            for family in metrics.collect():
                known = families.setdefault(family.name, family)
                if known is not family:
                    known.samples.extend(family.samples)
        yield from families.values()


class _Watched:
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

    async def deliver(self, transaction: Transaction) -> None:
        """Deliver. Raises what the sink raises."""
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
    """How many seconds ago a moment was, in microseconds since 2000. Clocks may differ, and it is never negative."""
    return max(0.0, time.time() - _EPOCH - microseconds / 1_000_000)
