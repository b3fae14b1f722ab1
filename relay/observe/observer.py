"""Observes one running service: a thread probes it every few seconds, and a listener serves metrics and health."""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence

from relay.config.settings import Settings
from relay.model.events import Lsn
from relay.observe import api_counts, history
from relay.observe.databases import Databases
from relay.observe.liveness import UP_SECONDS, Liveness, Parts
from relay.observe.metrics import NOT_CONFIGURED, Metrics, Values
from relay.observe.server import HttpListener, listen
from relay.pipeline.listeners import Meter
from relay.pipeline.runner import WAITS_FOR_SPARK
from relay.runtime.parts import Condition, Recurring
from relay.source.state import ELSEWHERE, POLLS, STANDBY, STREAMS, Received
from relay.store import dead_letters, states
from relay.store.completeness import TARGET
from relay.store.schedules import ScheduleFigures

Labels = tuple[str, ...]
Gauges = defaultdict[str, dict[Labels, float]]

MODES: Mapping[str, str] = {STREAMS: "wal", POLLS: "poll", STANDBY: "standby", ELSEWHERE: "none"}


class ServiceGauges:
    """Reads the gauges of a service from memory, without waiting. Safe in several threads."""

    def __init__(
        self, settings: Settings, parts: Parts, databases: Databases, liveness: Liveness
    ) -> None:
        self._settings = settings
        self._parts = parts
        self._databases = databases
        self._liveness = liveness

    def __call__(self) -> Values:
        """Return all gauges whose values are known."""
        gauges: Gauges = defaultdict(dict)
        self._health(gauges)
        self._source(gauges)
        self._buffers(gauges)
        self._spark(gauges)
        self._slot(gauges)
        self._group(gauges)
        self._counts(gauges)
        self._api(gauges)
        return gauges

    def _health(self, gauges: Gauges) -> None:
        health = self._liveness.health()
        gauges["relay_live"][()] = health.live
        gauges["relay_ready"][()] = health.ready
        for name, target in (
            ("source", self._databases.source),
            ("target", self._databases.target),
        ):
            gauges["relay_database_up"][(name,)] = target.is_up(UP_SECONDS)
        for condition in self._parts.conditions:
            gauges["relay_part_failing"][(condition.part,)] = condition.fault is not None

    def _source(self, gauges: Gauges) -> None:
        state = self._parts.source.state()
        for doing, mode in MODES.items():
            gauges["relay_source_mode"][(mode,)] = state.doing == doing
        gauges["relay_takeovers_total"][()] = state.takeovers
        received = state.received
        if received is None:
            return
        gauges["relay_stream_connections_total"][()] = received.connections
        gauges["relay_receive_buffer_bytes"][()] = received.buffered_bytes
        gauges["relay_receive_buffer_limit_bytes"][()] = self._settings.source.buffer_bytes
        if state.doing == STREAMS:
            self._stream(gauges, received)

    def _stream(self, gauges: Gauges, received: Received) -> None:
        gauges["relay_stream_silent_seconds"][()] = received.silent
        gauges["relay_stream_lag_events"][()] = received.buffered_events
        oldest = received.oldest
        lag = 0.0 if oldest is None else max(0.0, time.time() - oldest)
        gauges["relay_stream_lag_seconds"][()] = lag
        source = self._databases.source_readings
        if source is None or source.end is None:
            return
        gauges["relay_stream_lag_bytes"][()] = max(0, source.end - received.position)
        # WAL without events for relay counts as applied.
        durable = self._parts.sinks.durable_lsn if received.buffered_events else received.position
        if durable:
            gauges["relay_target_lag_bytes"][()] = max(0, source.end - durable)

    def _buffers(self, gauges: Gauges) -> None:
        for worker in self._parts.sinks.workers:
            key = (worker.name,)
            session = worker.session
            gauges["relay_sink_feed_bytes"][key] = worker.feed.size
            gauges["relay_sink_deliveries"][key] = session.deliveries if session else 0
            gauges["relay_sink_breaker_open"][key] = session.is_down if session else False
            if session and session.state == "attached":
                since = session.since
                gauges["relay_sink_lag_events"][key] = session.deliveries
                lag = 0.0 if since is None else max(0.0, time.monotonic() - since)
                gauges["relay_sink_lag_seconds"][key] = lag

    def _spark(self, gauges: Gauges) -> None:
        if not self._settings.needs_spark:
            return
        session = self._parts.session
        needs_spark = (
            self._parts.pipeline.heartbeat.doing == WAITS_FOR_SPARK
            or self._parts.sinks.spark_workers
        )
        gauges["relay_spark_ready"][()] = session.is_ready
        gauges["relay_spark_failing"][()] = bool(needs_spark and session.condition.fault)
        gauges["relay_spark_slots"][()] = session.counted_slots or 0

    def _slot(self, gauges: Gauges) -> None:
        source = self._databases.source_readings
        if source is None or self._settings.source.mode == "poll":
            return
        slot = source.slot
        gauges["relay_slot_lost"][()] = slot is None or slot.lost
        gauges["relay_slot_active"][()] = slot is not None and slot.active
        if slot is None:
            return
        known = {
            "relay_slot_lag_bytes": slot.lag_bytes,
            "relay_slot_retained_bytes": slot.retained_bytes,
            "relay_slot_safe_bytes": source.safe_bytes,
        }
        gauges.update({name: {(): value} for name, value in known.items() if value is not None})

    def _group(self, gauges: Gauges) -> None:
        target = self._databases.target_readings
        if target is None:
            return
        state, group = target.state, target.state.group
        gauges["relay_source_epoch"][()] = group.epoch if group else 0
        if group and group.timeline is not None:
            gauges["relay_source_timeline"][()] = group.timeline
        gauges["relay_slot_recreations"][()] = target.recreations
        gauges["relay_instances"][()] = len(state.instances)
        stopped = {each.handler for each in state.braked}
        for handler in self._settings.handlers:
            gauges["relay_handler_stopped"][(handler,)] = handler in stopped
        for each in target.state.sinks:
            if each.sink not in self._settings.sink_handlers:
                continue
            key = (each.sink,)
            gauges["relay_sink_attached"][key] = each.state == "attached"
            gauges["relay_sink_paused"][key] = each.state == "paused"
            gauges["relay_sink_down"][key] = each.fault is not None

        for count in state.endpoints:
            if count.sink in self._settings.sink_handlers:
                gauges["relay_sink_endpoints"][(count.sink, "failing")] = count.failing
                gauges["relay_sink_endpoints"][(count.sink, "disabled")] = count.disabled
        for mark in state.watermarks:
            is_known = mark.reader == TARGET or mark.reader in self._settings.sink_handlers
            if is_known and mark.complete_before is not None:
                moment = mark.complete_before.timestamp()
                gauges["relay_complete_before_timestamp_seconds"][(mark.reader,)] = moment

    def _counts(self, gauges: Gauges) -> None:
        counted, source = self._databases.counted, self._databases.source_readings
        if counted is None:
            return
        sinks, handlers = self._settings.sink_handlers, self._settings.handlers
        if counted.target is not None:
            gauges["relay_target_lag_events"][()] = counted.target.events
            gauges["relay_target_lag_seconds"][()] = _age(counted.target.oldest_seconds)
        for sink, unread in counted.sinks.items():
            if (sink,) in gauges["relay_sink_lag_events"]:
                # The sink has been attached since the count.
                continue
            gauges["relay_sink_lag_events"][(sink,)] = unread.events
            spark = self._settings.spark_handlers.get(sink)
            # It is not late while it may wait for more events.
            waits = spark.every if spark is not None else 0.0
            gauges["relay_sink_lag_seconds"][(sink,)] = _age((unread.oldest_seconds or 0.0) - waits)
        self._sink_bytes(gauges, source.end if source else None)
        self._deferred(gauges)
        if counted.keys is not None:
            for sink in ("", *sinks):
                gauges["relay_deferred_keys"][(sink,)] = counted.keys.get(sink, 0)
        if counted.dead is not None:
            queues = [each.queue for each in counted.queues or ()]
            gauges["relay_dead_letters"].update(_by_handler(counted.dead, handlers, queues))
        for each in counted.queues or ():
            for state in states.FIGURES:
                gauges["relay_queue_messages"][(each.queue, state)] = getattr(each, state)
            gauges["relay_queue_oldest_seconds"][(each.queue,)] = each.oldest_seconds
            gauges["relay_queue_workers"][(each.queue,)] = each.workers
            gauges["relay_queue_paused"][(each.queue,)] = each.paused_at is not None
            gauges["relay_queue_stopped"][(each.queue,)] = each.stopped_at is not None
            gauges["relay_sagas_stuck"][(each.queue,)] = each.stuck
            if each.filled is not None:
                gauges["relay_queue_filled_messages"][(each.queue,)] = each.filled
        for schedule in schedules_shown(counted.schedules or ()):
            key = (schedule.name,)
            gauges["relay_schedule_published"][key] = schedule.published
            gauges["relay_schedule_missed"][key] = schedule.missed_ticks
            gauges["relay_schedule_overdue_seconds"][key] = schedule.overdue_seconds
            gauges["relay_schedule_paused"][key] = schedule.is_paused
            gauges["relay_schedule_stands_still"][key] = schedule.stands_still
        for reader in counted.readers or ():
            gauges["relay_reader_lag_seconds"][(reader.name,)] = reader.lag_seconds
            gauges["relay_reader_given_up"][(reader.name,)] = (
                reader.given_up_at is not None or reader.other_history
            )

    def _api(self, gauges: Gauges) -> None:
        counts = api_counts.of(self._settings.group)
        if counts is None:
            return
        gauges["relay_api_streams"][()] = counts.streams
        gauges["relay_api_waiting"][()] = counts.waiting
        gauges["relay_api_events_sent_total"][()] = counts.sent
        for reason, streams in counts.cut.items():
            gauges["relay_api_streams_cut_total"][(reason,)] = streams
        gauges["relay_api_published_total"][()] = counts.published
        for result, waits in counts.waits.items():
            gauges["relay_api_waits_total"][(result,)] = waits
        for status, requests in counts.requests.items():
            gauges["relay_api_requests_total"][(status,)] = requests
        for part, is_failing in counts.failing.items():
            gauges["relay_api_failing"][(part,)] = is_failing

    def _sink_bytes(self, gauges: Gauges, end: Lsn | None) -> None:
        target = self._databases.target_readings
        if end is None or target is None:
            return
        for each in target.state.sinks:
            key = (each.sink,)
            events = gauges["relay_sink_lag_events"].get(key)
            if events is not None:
                lag = max(0, end - each.position.delivered_lsn) if events else 0
                gauges["relay_sink_lag_bytes"][key] = lag

    def _deferred(self, gauges: Gauges) -> None:
        counted = self._databases.counted
        if counted is None or counted.deferred is None:
            return
        for sink in ("", *self._settings.sink_handlers):
            gauges["relay_deferred_age_seconds"][(sink,)] = 0.0
            for kind in states.DEFERRED:
                gauges["relay_deferred_transactions"][(sink, kind)] = 0
        for each in counted.deferred:
            sink = (
                each.sink
                if not each.sink or each.sink in self._settings.handlers
                else NOT_CONFIGURED
            )
            key = (sink, each.kind)
            numbers, ages = (
                gauges["relay_deferred_transactions"],
                gauges["relay_deferred_age_seconds"],
            )
            numbers[key] = numbers.get(key, 0) + each.transactions
            if each.kind != "scheduled":
                age = _age((counted.at - each.since).total_seconds() if counted.at else None)
                ages[(sink,)] = max(ages.get((sink,), 0.0), age)


def _age(seconds: float | None) -> float:
    return max(0.0, seconds or 0.0)


def _by_handler(
    numbers: Mapping[tuple[str, str], int], configured: Collection[str], queues: Iterable[str]
) -> dict[Labels, float]:
    """Return a sum for each configured handler, for '' and for each queue, and one for all other handlers."""
    known = ("", *configured, *map(dead_letters.of_queue, queues))
    sums: dict[Labels, float] = {(name,): 0 for name in known}
    for (consumer, handler), number in numbers.items():
        name = handler if dead_letters.queue_of(consumer) is None else consumer
        key = (name if (name,) in sums else NOT_CONFIGURED,)
        sums[key] = sums.get(key, 0) + number
    return sums


log = logging.getLogger(__name__)

PROBE_SECONDS = 5.0
"""Interval between two probes of the databases and the jobs."""


class Observer(Recurring):
    """Metrics, health and history of one service, from `start` to `close`.

    The parts of the service report to `meter`.
    """

    def __init__(self, settings: Settings) -> None:
        super().__init__(
            Condition(
                "observe",
                log,
                "cannot observe the service",
                "the service is observed again",
                longest_pause=PROBE_SECONDS,
            )
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
        if self._listener is not None:
            self._listener.remove(self._metrics, self._liveness.health)
            self._listener.close()
            self._listener = None

    def release(self) -> None:
        """Close the connections to the databases."""
        self._databases.close()

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


MOST_SCHEDULES = 1_000
"""So many schedules have series of their own."""


def schedules_shown(figures: Sequence[ScheduleFigures]) -> list[ScheduleFigures]:
    """Return the figures of the first MOST_SCHEDULES, and those of all others as one, which is called `(others)`."""
    others = figures[MOST_SCHEDULES:]
    if not others:
        return list(figures)
    together = ScheduleFigures(
        "(others)",
        sum(each.published for each in others),
        sum(each.missed_ticks for each in others),
        max(each.overdue_seconds for each in others),
        any(each.is_paused for each in others),
        next((each.fault for each in others if each.fault is not None), None),
    )
    return [*figures[:MOST_SCHEDULES], together]
