"""Counts what happens in the process, and collects all series for Prometheus: names, help texts and labels.

docs/reference/metrics.md has the output of `table`.

The parts of a service report to `Metrics`, its `Meter`. A scrape reads gauges from memory, or from the last readings of
`relay.observe.databases`; it queries no database.
"""

from __future__ import annotations

import time
from collections import Counter as Counts
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, cast

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.metrics_core import GaugeMetricFamily, Metric

from relay.config.settings import Settings
from relay.model.batch import Batch, DeadLetterReport, Outcome, TaskOutcome
from relay.model.events import POSTGRES_EPOCH, Transaction
from relay.pipeline.apply import Handled
from relay.pipeline.listeners import Meter
from relay.sinks import Again, BatchSink, Sink
from relay.store import states

_LATENCY = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)
_DURATION = (
    0.001,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
    60.0,
    300.0,
)

Kind = Literal["counter", "gauge", "histogram"]


@dataclass(frozen=True, slots=True)
class MetricFamily:
    """A family of series. `labels` are those other than `group`, which every family has."""

    name: str
    kind: Kind
    text: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


def _counter(name: str, text: str, *labels: str) -> MetricFamily:
    return MetricFamily(name, "counter", text, labels)


def _gauge(name: str, text: str, *labels: str) -> MetricFamily:
    return MetricFamily(name, "gauge", text, labels)


def _histogram(
    name: str, text: str, *labels: str, buckets: tuple[float, ...] = _DURATION
) -> MetricFamily:
    return MetricFamily(name, "histogram", text, labels, buckets)


SERIES: Sequence[MetricFamily] = (
    # Throughput
    _counter(
        "relay_events_total",
        "Events of batches, by engine and outcome: applied, skipped (the target had them already), deferred or "
        "dead.",
        "engine",
        "outcome",
    ),
    _counter(
        "relay_transactions_total",
        "Business transactions of batches that the target did not have already.",
        "engine",
    ),
    _counter(
        "relay_batches_total",
        "Durable batches, by engine and the reason why it was chosen.",
        "engine",
        "reason",
    ),
    _histogram(
        "relay_batch_duration_seconds",
        "Time from taking a batch from the source to its durable commit.",
        "engine",
    ),
    _histogram(
        "relay_applied_latency_seconds",
        "Time from the oldest commit of a batch of the stream, by the source's clock, to the durable commit in "
        "the target.",
        buckets=_LATENCY,
    ),
    _histogram(
        "relay_delivered_latency_seconds",
        "Time from the commit of a transaction of the stream, by the source's clock, to the confirmation of its "
        "delivery.",
        "sink",
        buckets=_LATENCY,
    ),
    _histogram(
        "relay_handler_duration_seconds",
        "Time of a transactional handler in each task, or of each delivery attempt of a sink.",
        "handler",
    ),
    _counter(
        "relay_deliveries_total",
        "Delivery attempts of a sink, confirmed or failed.",
        "sink",
        "result",
    ),
    _counter(
        "relay_sink_deferred_total",
        "Deliveries that a sink has deferred: for a retry, to their deliver_at, or because an earlier one blocks "
        "them.",
        "sink",
    ),
    _counter(
        "relay_retried_transactions_total",
        "Retries of deferred transactions of the target.",
    ),
    _counter(
        "relay_dead_lettered_total",
        "Transactions that were dead-lettered, by handler (empty: no handler failed) and kind of fault.",
        "handler",
        "fault",
    ),
    # The source
    _gauge(
        "relay_source_mode",
        "1 for the mode in which this process reads the source: wal, poll, standby (another process reads the "
        "slot), or none (it cannot read now).",
        "mode",
    ),
    _gauge(
        "relay_source_epoch",
        "Number of histories of the source (servers and timelines) that the group has followed.",
    ),
    _gauge("relay_source_timeline", "The timeline of the source that the group follows."),
    _counter(
        "relay_stream_connections_total",
        "Number of times that this process started to stream from the slot.",
    ),
    _counter(
        "relay_takeovers_total",
        "Number of times that this process took over a slot that it had waited for.",
    ),
    _gauge(
        "relay_stream_silent_seconds",
        "Time for which the walsender has sent nothing while this process waited for it.",
    ),
    _gauge("relay_stream_lag_bytes", "WAL of the source that this process has not received."),
    _gauge("relay_stream_lag_events", "Events received and not applied."),
    _gauge(
        "relay_stream_lag_seconds",
        "Age of the oldest commit received and not applied; 0 if there is none.",
    ),
    _gauge(
        "relay_target_lag_bytes",
        "WAL of the source after the position up to which everything is applied to the target.",
    ),
    _gauge("relay_target_lag_events", "Events of the outbox that are not applied to the target."),
    _gauge(
        "relay_target_lag_seconds",
        "Age of the oldest event that is not applied to the target, by its event_ts; 0 if there is none.",
    ),
    _gauge("relay_slot_active", "1 while a connection reads the slot."),
    _gauge(
        "relay_slot_lost",
        "1 if the server has removed WAL that the slot needs, or the slot does not exist.",
    ),
    _gauge("relay_slot_lag_bytes", "WAL that the slot has not confirmed."),
    _gauge("relay_slot_retained_bytes", "WAL that the server keeps for the slot."),
    _gauge(
        "relay_slot_safe_bytes",
        "WAL that can be written before the server removes WAL that the slot needs (max_slot_wal_keep_size).",
    ),
    _gauge(
        "relay_slot_recreations",
        "Number of times that the slot was recreated within the last hour.",
    ),
    # Buffers
    _gauge("relay_receive_buffer_bytes", "Memory of events received and not applied."),
    _gauge(
        "relay_receive_buffer_limit_bytes",
        "source.buffer_bytes: when the buffer is full, reading stops.",
    ),
    _gauge(
        "relay_sink_feed_bytes",
        "Memory of events that the stream has brought for a sink and its worker has not read.",
        "sink",
    ),
    _gauge(
        "relay_sink_deliveries",
        "Deliveries in memory, in flight or queued.",
        "sink",
    ),
    # Sinks
    _gauge("relay_sink_attached", "1 while the stream feeds the sink.", "sink"),
    _gauge("relay_sink_paused", "1 while an operator has paused the sink.", "sink"),
    _gauge(
        "relay_sink_down",
        "1 while the sink delivers nothing: its circuit breaker is open, its brake is on, or Spark cannot write.",
        "sink",
    ),
    _gauge(
        "relay_sink_endpoints",
        "Endpoints that data choose which have failed for a minute or longer, are disabled or paused.",
        *("sink", "state"),
    ),
    _gauge(
        "relay_sink_breaker_open",
        "1 while the circuit breaker of the sink is open in this process.",
        "sink",
    ),
    _gauge(
        "relay_sink_lag_bytes",
        "WAL of the source after the sink's position; 0 if it has read everything.",
        "sink",
    ),
    _gauge(
        "relay_sink_lag_events",
        "Events of the outbox that the sink has not read; while the stream feeds it, its deliveries in memory.",
        "sink",
    ),
    _gauge(
        "relay_sink_lag_seconds",
        "Age of the oldest event that the sink has not read, by its event_ts; while the stream feeds it, since it "
        "was received; of a sink of type spark, beyond the seconds `every`.",
        "sink",
    ),
    _gauge(
        "relay_complete_before_timestamp_seconds",
        "The time before which every committed event is in a sink of type spark, or (empty) the target, delivered, "
        "deferred or dead-lettered, by the clock of the source.",
        "sink",
    ),
    # Deferred and dead transactions
    _gauge(
        "relay_deferred_transactions",
        f"Deferred transactions of a sink, or (empty) of the target, by kind: {states.listed(states.DEFERRED)}.",
        "sink",
        "kind",
    ),
    _gauge(
        "relay_deferred_keys",
        "Ordering keys that deferred transactions of a sink, or (empty) of the target, hold.",
        "sink",
    ),
    _gauge(
        "relay_deferred_age_seconds",
        "Age of the oldest deferred transaction of a sink, or (empty) of the target, that is not scheduled.",
        "sink",
    ),
    _gauge(
        "relay_dead_letters",
        "Dead transactions that are not replayed or discarded, by handler (empty: no handler failed), and dead "
        "messages of a work queue, with queue:NAME for the handler.",
        "handler",
    ),
    _gauge(
        "relay_handler_stopped",
        "1 while the brake of a handler is on because too many transactions in a row failed.",
        "handler",
    ),
    # Work queues
    _gauge(
        "relay_queue_messages",
        f"Messages of a queue, counted to 100,001 at most, by state: {states.listed(states.FIGURES)}. Those that "
        "transactions have taken are ready, too.",
        "queue",
        "state",
    ),
    _gauge(
        "relay_queue_oldest_seconds",
        "How long the oldest message that can be taken has been in the queue, or due; 0 without one.",
        "queue",
    ),
    _gauge(
        "relay_queue_workers",
        "Connections of workers in Python (relay.client.worker).",
        "queue",
    ),
    _gauge("relay_queue_paused", "1 while nobody can take from the queue.", "queue"),
    _gauge(
        "relay_queue_stopped",
        "1 while relay puts no events of the log into the queue, for it cannot evaluate match or where.",
        "queue",
    ),
    _gauge("relay_sagas_stuck", "Sagas whose undo has failed for good, 0 without one.", "queue"),
    _gauge(
        "relay_queue_filled_messages",
        "Messages that relay has put into the queue from the log so far, while it fills it; absent at other times.",
        "queue",
    ),
    # Schedules
    _gauge(
        "relay_schedule_published",
        "Events that the schedule has published since it was declared.",
        "schedule",
    ),
    _gauge(
        "relay_schedule_missed",
        "Times of the schedule for which nothing was published within a minute, since it was declared.",
        "schedule",
    ),
    _gauge(
        "relay_schedule_overdue_seconds",
        "How long the schedule has been due, 0 while it is not, or paused.",
        "schedule",
    ),
    _gauge("relay_schedule_paused", "1 while the schedule is paused.", "schedule"),
    _gauge(
        "relay_schedule_stands_still",
        "1 while the schedule has no next time, since relay does not understand what SQL declared.",
        "schedule",
    ),
    # Readers
    _gauge(
        "relay_reader_lag_seconds",
        "Age of the oldest event that the reader has not read, whether it matches or not; 0 without any.",
        "reader",
    ),
    _gauge(
        "relay_reader_given_up",
        "1 while retention keeps no events for the reader, or its position is of another history of the database.",
        "reader",
    ),
    # Intake
    _counter(
        "relay_intake_messages_total",
        "Messages of a broker, by result: published, repeated (published before) or rejected.",
        "intake",
        "result",
    ),
    # The HTTP API
    _counter(
        "relay_api_requests_total",
        "Responses of the HTTP API, by the class of their status: 2xx, 3xx, 4xx or 5xx.",
        "status",
    ),
    _gauge(
        "relay_api_failing",
        "1 while a part of the HTTP API fails again and again: tokens, streams or publishing.",
        "part",
    ),
    _gauge("relay_api_streams", "Streams of the HTTP API that are open."),
    _counter(
        "relay_api_events_sent_total",
        "Events that were put into streams of the HTTP API, once for each stream.",
    ),
    _counter(
        "relay_api_streams_cut_total",
        "Streams of the API that relay has ended, by reason: slow, revoked, gap, unavailable, refused or stopping.",
        "reason",
    ),
    _counter(
        "relay_api_published_total",
        "Events that requests to the HTTP API have published, without repetitions.",
    ),
    _gauge("relay_api_waiting", "Requests to the HTTP API that wait for an answer now."),
    _counter(
        "relay_api_waits_total",
        "Requests to the HTTP API that have waited for an answer, by result: answered or unanswered.",
        "result",
    ),
    # Spark
    _histogram(
        "relay_spark_job_duration_seconds",
        "Time of each job of the Spark engine, one for each attempt of a batch.",
    ),
    _counter("relay_spark_jobs_total", "Jobs of the Spark engine, succeeded or failed.", "result"),
    _histogram(
        "relay_spark_batch_duration_seconds",
        "Time of each batch that a sink of type spark has written.",
        "sink",
    ),
    _counter(
        "relay_spark_batch_events_total",
        "Events that a sink of type spark has written.",
        "sink",
    ),
    _gauge("relay_spark_ready", "1 while a Spark session is ready."),
    _gauge(
        "relay_spark_failing",
        "1 while no Spark session can be built and batches or sinks wait for one.",
    ),
    _gauge(
        "relay_spark_slots",
        "Number of tasks that the Spark session runs concurrently, when it was last read.",
    ),
    # The group
    _gauge("relay_instances", "Running instances of the group."),
    _gauge(
        "relay_database_up",
        "1 if the last poll of the database succeeded, within 20 s.",
        "database",
    ),
    _gauge(
        "relay_part_failing",
        "1 while a background part of this process fails and is tried again: /healthz and `relay status` say why.",
        "part",
    ),
    _gauge("relay_live", "1 while /livez succeeds."),
    _gauge("relay_ready", "1 while /readyz succeeds."),
)
"""All series of a group."""


def table() -> str:
    """Return the series as a table in Markdown, with the labels beside `group`."""
    lines = ["| series | kind | labels | help |", "|---|---|---|---|"]
    for each in SERIES:
        labels = ", ".join(f"`{label}`" for label in each.labels)
        lines.append(f"| `{each.name}` | {each.kind} | {labels} | {each.text} |")
    return "\n".join([*lines, ""])


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
        for name in settings.intake:
            for result in ("published", "repeated", "rejected"):
                self._counter("relay_intake_messages_total", name, result)
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
            self._handled(task.seconds)
        self._sums["events"] += outcome.applied

    def committed(self, task: TaskOutcome) -> None:
        """Count what a task of a batch has dead-lettered."""
        self._dead(task.dead)

    def redelivered(self, retried: Handled) -> None:
        """Count retries of deferred transactions, and those that are dead now."""
        self._counter("relay_retried_transactions_total").inc(retried.tried)
        self._handled(retried.seconds)
        self._dead(retried.dead)

    def _handled(self, seconds: Mapping[str, float]) -> None:
        for handler, took in seconds.items():
            self._histogram("relay_handler_duration_seconds", handler).observe(took)

    def stored(self, sink: str, deferred: int, dead: Iterable[DeadLetterReport]) -> None:
        """Count the deferred and the dead deliveries that a sink has stored."""
        if deferred:
            self._counter("relay_sink_deferred_total", sink).inc(deferred)
        self._dead(dead)

    def _dead(self, dead: Iterable[DeadLetterReport]) -> None:
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

    def taken_in(self, intake: str, result: str, messages: int) -> None:
        """Count messages of a broker."""
        self._counter("relay_intake_messages_total", intake, result).inc(messages)

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


_SUPPLIED = frozenset(
    {
        "relay_stream_connections_total",
        "relay_takeovers_total",
        "relay_api_events_sent_total",
        "relay_api_streams_cut_total",
        "relay_api_published_total",
        "relay_api_requests_total",
        "relay_api_waits_total",
    }
)
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
        self._count_confirmed(transaction)

    async def deliver_batch(
        self, transactions: Sequence[Transaction]
    ) -> Sequence[Exception | None]:
        """Deliver many transactions: one duration, and for each transaction whether it was confirmed."""
        started = time.monotonic()
        try:
            results = await cast(BatchSink, self._sink).deliver_batch(transactions)
        except Exception:
            self._failed.inc(len(transactions))
            raise
        finally:
            self._duration.observe(time.monotonic() - started)
        for transaction, error in zip(transactions, results, strict=True):
            if error is None:
                self._count_confirmed(transaction)
            elif not isinstance(error, Again):
                self._failed.inc()
        return results

    def _count_confirmed(self, transaction: Transaction) -> None:
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


if __name__ == "__main__":
    print(table(), end="")
