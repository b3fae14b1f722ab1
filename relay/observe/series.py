"""All series of a group: names, help texts and labels. The table of docs/reference/metrics.md is made of it."""

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
class Series:
    """A family of series. `labels` besides `group`, which all of them have."""

    name: str
    kind: Kind
    text: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


def _counter(name: str, text: str, *labels: str) -> Series:
    return Series(name, "counter", text, labels)


def _gauge(name: str, text: str, *labels: str) -> Series:
    return Series(name, "gauge", text, labels)


def _histogram(
    name: str, text: str, *labels: str, buckets: tuple[float, ...] = _DURATION
) -> Series:
    return Series(name, "histogram", text, labels, buckets)


SERIES: Sequence[Series] = (
    # What goes through
    _counter(
        "relay_events_total",
        "Events of batches, by the engine that applied them and what became of them: applied, skipped (they "
        "were in the target already), deferred or dead.",
        "engine",
        "outcome",
    ),
    _counter(
        "relay_transactions_total",
        "Business transactions of batches that were not in the target already.",
        "engine",
    ),
    _counter(
        "relay_batches_total",
        "Batches that are durable, by engine and the reason for which it was chosen.",
        "engine",
        "reason",
    ),
    _histogram(
        "relay_batch_duration_seconds",
        "From taking a batch to its durable commit.",
        "engine",
    ),
    _histogram(
        "relay_applied_latency_seconds",
        "From the oldest commit of a batch of the stream, by the source's clock, to the durable commit in the"
        " target.",
        buckets=_LATENCY,
    ),
    _histogram(
        "relay_delivered_latency_seconds",
        "From the commit of a transaction that the stream brought, by the source's clock, to the confirmation"
        " of its delivery.",
        "sink",
        buckets=_LATENCY,
    ),
    _histogram(
        "relay_handler_duration_seconds",
        "Of a transactional handler: its share of each task. Of a sink: each attempt of a delivery.",
        "handler",
    ),
    _counter(
        "relay_deliveries_total",
        "Attempts of deliveries to a sink, confirmed or failed.",
        "sink",
        "result",
    ),
    _counter(
        "relay_sink_deferred_total",
        "Deliveries that a sink has deferred: to another attempt, to a time, or since an earlier one of the "
        "same key is.",
        "sink",
    ),
    _counter(
        "relay_retried_transactions_total",
        "Attempts of deferred transactions of the target.",
    ),
    _counter(
        "relay_dead_lettered_total",
        "Transactions that were dead-lettered, by handler (empty: none is to blame) and kind of fault.",
        "handler",
        "fault",
    ),
    # The source
    _gauge(
        "relay_source_mode",
        "1 for how this process reads the source: wal, poll, standby (another process reads the slot), or "
        "none (it cannot read now).",
        "mode",
    ),
    _gauge(
        "relay_source_epoch",
        "How many histories of the source the group has followed: servers and timelines.",
    ),
    _gauge("relay_source_timeline", "The timeline of the source that the group follows."),
    _counter(
        "relay_stream_connections_total",
        "How often this process has begun to stream the slot.",
    ),
    _counter(
        "relay_takeovers_total",
        "How often this process has begun to read a slot that it had waited for.",
    ),
    _gauge(
        "relay_stream_silent_seconds",
        "For how long the walsender has sent nothing while it was waited for.",
    ),
    _gauge("relay_stream_lag_bytes", "WAL of the source that this process has not received."),
    _gauge("relay_stream_lag_events", "Events received and not applied."),
    _gauge(
        "relay_stream_lag_seconds",
        "Age of the oldest commit that is received and not applied; 0 if there is none.",
    ),
    _gauge(
        "relay_target_lag_bytes",
        "WAL of the source after the position up to which the target has everything.",
    ),
    _gauge("relay_target_lag_events", "Events of the outbox that are not applied to the target."),
    _gauge(
        "relay_target_lag_seconds",
        "Age of the oldest event that is not applied to the target, by its event_ts; 0 if there is none.",
    ),
    _gauge("relay_slot_active", "1 while a connection reads the slot."),
    _gauge(
        "relay_slot_lost",
        "1 if the server has removed WAL that the slot needs, or the slot is not there.",
    ),
    _gauge("relay_slot_lag_bytes", "WAL that the slot has not confirmed."),
    _gauge("relay_slot_retained_bytes", "WAL that the server keeps for the slot."),
    _gauge(
        "relay_slot_safe_bytes",
        "WAL that may still be written before the server removes what the slot needs "
        "(max_slot_wal_keep_size).",
    ),
    _gauge("relay_slot_recreations", "How often the slot was recreated within the last hour."),
    # Buffers
    _gauge("relay_receive_buffer_bytes", "Memory of what is received and not applied."),
    _gauge(
        "relay_receive_buffer_limit_bytes",
        "source.buffer_bytes: when the buffer is full, reading stops.",
    ),
    _gauge(
        "relay_sink_feed_bytes",
        "Memory of what the stream has brought for a sink and its worker has not taken.",
        "sink",
    ),
    _gauge(
        "relay_sink_deliveries",
        "Deliveries that are under way or wait for their turn in memory.",
        "sink",
    ),
    # Sinks
    _gauge("relay_sink_attached", "1 while the stream feeds the sink.", "sink"),
    _gauge("relay_sink_paused", "1 while an operator has paused the sink.", "sink"),
    _gauge(
        "relay_sink_down",
        "1 while nothing is delivered: the circuit breaker is open, the brake is on, or Spark cannot write.",
        "sink",
    ),
    _gauge(
        "relay_sink_breaker_open",
        "1 while the circuit breaker of the sink is open in this process.",
        "sink",
    ),
    _gauge(
        "relay_sink_lag_bytes",
        "WAL of the source after what the sink has had; 0 if it has had everything.",
        "sink",
    ),
    _gauge(
        "relay_sink_lag_events",
        "Events of the outbox that the sink has not looked at; while the stream feeds it, its deliveries in "
        "memory.",
        "sink",
    ),
    _gauge(
        "relay_sink_lag_seconds",
        "Age of the oldest of them, by its event_ts; while the stream feeds it, since it came.",
        "sink",
    ),
    # What needs somebody
    _gauge(
        "relay_deferred_transactions",
        "Deferred transactions, of a sink or (empty) of the target, by kind: retry, holding, replay, "
        "scheduled or blocked.",
        "sink",
        "kind",
    ),
    _gauge(
        "relay_deferred_keys",
        "Ordering keys that deferred transactions hold, of a sink or (empty) of the target.",
        "sink",
    ),
    _gauge(
        "relay_deferred_age_seconds",
        "Since when the oldest deferred transaction is that is not scheduled, of a sink or (empty) of the "
        "target.",
        "sink",
    ),
    _gauge(
        "relay_dead_letters",
        "Dead transactions that nobody has replayed or discarded, by handler (empty: none is to blame).",
        "handler",
    ),
    _gauge(
        "relay_handler_stopped",
        "1 while the brake of a handler is on: too many transactions in a row failed.",
        "handler",
    ),
    # Spark
    _histogram(
        "relay_spark_job_duration_seconds",
        "Jobs of the Spark engine, one for each attempt of a batch.",
    ),
    _counter("relay_spark_jobs_total", "Jobs of the Spark engine, succeeded or failed.", "result"),
    _histogram(
        "relay_spark_batch_duration_seconds",
        "Batches that a sink of type spark has written.",
        "sink",
    ),
    _counter(
        "relay_spark_batch_events_total",
        "Events that a sink of type spark has written.",
        "sink",
    ),
    _gauge("relay_spark_ready", "1 while there is a Spark session."),
    _gauge(
        "relay_spark_failing",
        "1 while no Spark session can be built and something waits for it.",
    ),
    _gauge(
        "relay_spark_slots",
        "Tasks that the Spark session runs side by side, as it was asked last.",
    ),
    # The group
    _gauge("relay_instances", "Running instances of the group."),
    _gauge(
        "relay_database_up",
        "1 if the last look at the database succeeded, not long ago.",
        "database",
    ),
    _gauge("relay_live", "1 while /livez is good."),
    _gauge("relay_ready", "1 while /readyz is good."),
)
"""All series of a group."""


def table() -> str:
    """The series as a table in Markdown."""
    lines = ["| series | kind | labels | help |", "|---|---|---|---|"]
    for each in SERIES:
        labels = ", ".join(f"`{label}`" for label in ("group", *each.labels))
        lines.append(f"| `{each.name}` | {each.kind} | {labels} | {each.text} |")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    print(table(), end="")
