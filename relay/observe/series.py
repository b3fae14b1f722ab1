"""The series of a group: names, help texts and labels. docs/reference/metrics.md has the output of `table`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

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
        "was received.",
        "sink",
    ),
    # Deferred and dead transactions
    _gauge(
        "relay_deferred_transactions",
        "Deferred transactions of a sink, or (empty) of the target, by kind: retry, holding, replay, scheduled or "
        "blocked.",
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
        "Dead transactions that are not replayed or discarded, by handler (empty: no handler failed).",
        "handler",
    ),
    _gauge(
        "relay_handler_stopped",
        "1 while the brake of a handler is on because too many transactions in a row failed.",
        "handler",
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
    """Return the series as a table in Markdown."""
    lines = ["| series | kind | labels | help |", "|---|---|---|---|"]
    for each in SERIES:
        labels = ", ".join(f"`{label}`" for label in ("group", *each.labels))
        lines.append(f"| `{each.name}` | {each.kind} | {labels} | {each.text} |")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    print(table(), end="")
