"""What of a group needs a person: one list for `relay status`, its checks, the console and its API.

Each trouble names the alert that tells of it, whose runbook is the section of docs/operations.md with that name.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from enum import StrEnum
from shlex import quote
from typing import Any

from relay.admin.phrases import counted, duration
from relay.admin.readers import other_history
from relay.admin.status import SOURCE, TARGET, Status
from relay.source.stream.slot import SlotState
from relay.store.positions.sinks import StoredSink


class Urgency(StrEnum):
    """How urgent a trouble is: the severity of its alert."""

    CRITICAL = "critical"
    WARNING = "warning"


ALERTS = {
    "RelayDown": Urgency.CRITICAL,
    "RelaySourceUnreachable": Urgency.CRITICAL,
    "RelayTargetUnreachable": Urgency.CRITICAL,
    "RelaySlotLost": Urgency.CRITICAL,
    "RelayStreamStalled": Urgency.CRITICAL,
    "RelayHandlerStopped": Urgency.CRITICAL,
    "RelayPolling": Urgency.WARNING,
    "RelaySlotRetainsWal": Urgency.WARNING,
    "RelaySparkUnavailable": Urgency.WARNING,
    "RelayPartFailing": Urgency.WARNING,
    "RelaySinkDown": Urgency.WARNING,
    "RelaySinkLagging": Urgency.WARNING,
    "RelayEndpointDisabled": Urgency.WARNING,
    "RelayDeferredOld": Urgency.WARNING,
    "RelayDeadLetters": Urgency.WARNING,
    "RelayQueueStopped": Urgency.WARNING,
    "RelayQueueOld": Urgency.WARNING,
    "RelayQueueDead": Urgency.WARNING,
    "RelaySagaStuck": Urgency.WARNING,
    "RelayScheduleMissed": Urgency.WARNING,
    "RelayReaderGivenUp": Urgency.WARNING,
}
"""The alerts of config/prometheus/relay.rules.yaml whose cause the status shows, in the order of troubles."""

MOST = 10
"""How many troubles of one alert are shown."""
RETAINED_BYTES = 10e9
"""This and the following are the limits of the alerts."""
POLLING_SECONDS = 900
STALLED_SECONDS = 300
DEFERRED_SECONDS = 3600
QUEUE_SECONDS = 300
OVERDUE_SECONDS = 60


@dataclass(frozen=True, slots=True)
class Trouble:
    """A part of a group that needs a person: what is wrong, since when, and what cures it or shows more of it."""

    alert: str
    text: str
    cure: str | None = None
    since: datetime | None = None

    @property
    def urgency(self) -> Urgency:
        """How urgent it is."""
        return ALERTS[self.alert]

    @property
    def line(self) -> str:
        """What is wrong and what to do, on one line."""
        return f"{self.text}: {self.cure}" if self.cure else self.text

    def as_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        since = self.since and self.since.isoformat()
        return {**asdict(self), "since": since, "urgency": str(self.urgency)}


def troubles(status: Status, mode: str) -> list[Trouble]:
    """Return the troubles of a group, in the order of ALERTS; `mode` is the configured `source.mode`.

    A database that cannot be read is one; of what it has there is none. Of one alert there are at most MOST, and how
    many more there are.
    """
    by_alert: dict[str, list[Trouble]] = {alert: [] for alert in ALERTS}
    for each in (
        *standstills(status),
        *_slowness(status, mode),
        *_target(status),
        *_queues(status),
        *_schedules(status),
    ):
        by_alert[each.alert].append(each)
    return [each for found in by_alert.values() for each in _bounded(found)]


def _bounded(found: list[Trouble]) -> list[Trouble]:
    if len(found) <= MOST:
        return found
    return [*found[:MOST], replace(found[MOST], text=f"and {len(found) - MOST} more", since=None)]


def standstills(status: Status) -> Iterator[Trouble]:
    """Yield what `relay status --check` fails for: databases, instances, the slot, another history."""
    unreachable = {SOURCE: "RelaySourceUnreachable", TARGET: "RelayTargetUnreachable"}
    for key, why in status.faults.items():
        yield Trouble(unreachable[key], f"{key}: {why}", since=status.read_at.get(key))
    if status.is_known(TARGET) and not status.instances:
        yield Trouble(
            "RelayDown", f"no instance of group {status.group!r} runs", "start `relay run`"
        )
    if status.source_mode != "poll" and status.is_known(SOURCE):
        yield from _slot(status, status.slot)
    for name in status.other_histories:
        yield Trouble("RelayReaderGivenUp", other_history(name))


def _slot(status: Status, slot: SlotState | None) -> Iterator[Trouble]:
    if slot is None:
        yield Trouble("RelaySlotLost", "the replication slot is missing", "run `relay init`")
    elif slot.lost:
        yield Trouble(
            "RelaySlotLost", f"the slot {slot.name!r} is lost ({slot.invalidation_reason})"
        )
    elif slot.creating:
        waits_for = f"is still being created, and waits for {status.slot_waits_for}"
        yield Trouble("RelayStreamStalled", f"the slot {slot.name!r} {waits_for}")
    elif not slot.active:
        yield Trouble("RelayStreamStalled", f"no process reads the slot {slot.name!r}")
    elif status.is_known(TARGET) and status.slot_reader not in status.instances:
        reader = status.slot_reader or "a client without a name"
        foreign = f"is read by {reader}, which is not an instance of group {status.group!r}"
        yield Trouble("RelayStreamStalled", f"the slot {slot.name!r} {foreign}")


def _slowness(status: Status, mode: str) -> Iterator[Trouble]:
    age = status.lag.oldest_seconds if status.lag else None
    if age is not None and age > STALLED_SECONDS:
        yield Trouble("RelayStreamStalled", f"an event of {duration(age)} ago is not applied")
    retained = status.slot.retained_bytes if status.slot else None
    if retained is not None and retained > RETAINED_BYTES:
        yield Trouble("RelaySlotRetainsWal", f"the slot retains {retained / 1e9:.0f} GB of WAL")
    since = status.source_since
    if mode == "poll" or status.source_mode != "poll" or since is None:
        return
    if (status.completed - since).total_seconds() > POLLING_SECONDS:
        why = status.source_reason or "the WAL cannot be read"
        yield Trouble("RelayPolling", f"relay polls: {why}", since=since)


def _target(status: Status) -> Iterator[Trouble]:
    for braked in status.braked:
        stopped = f"handler {braked.handler} is stopped with {braked.fault}, after {braked.count}"
        yield Trouble("RelayHandlerStopped", stopped, since=braked.braked_at)
    for part in status.parts:
        alert = "RelaySparkUnavailable" if part.part == "spark" else "RelayPartFailing"
        failing = f"{part.part} fails on {part.instance}: {part.fault}"
        yield Trouble(alert, failing, since=part.since)
    for sink in status.sinks:
        yield from _sink(sink)
    for given_up in (each for each in status.readers if each.given_up_at):
        name = f"sink {given_up.reader}" if given_up.reader else "the target"
        yield Trouble(
            "RelaySinkLagging",
            f"events that {name} of group {given_up.group_id} has not read are removed",
            "see `relay check`",
            given_up.given_up_at,
        )
    for counts in status.endpoints:
        if counts.failing or counts.disabled:
            failing = counted(counts.failing, "endpoint fails", "endpoints fail")
            disabled = counted(counts.disabled, "is disabled", "are disabled")
            yield Trouble(
                "RelayEndpointDisabled",
                f"sink {counts.sink}: {failing}, {disabled}",
                "see `relay endpoint list`",
            )
    yield from _undelivered(status)


def _sink(sink: StoredSink) -> Iterator[Trouble]:
    if sink.state == "paused":
        paused = f"sink {sink.sink} is paused by {sink.paused_by}"
        cure = f"`relay sink resume {sink.sink}`"
        yield Trouble("RelaySinkLagging", paused, cure, sink.paused_at)
    elif sink.fault:
        down = f"sink {sink.sink} delivers nothing: {sink.fault}"
        yield Trouble("RelaySinkDown", down, since=sink.fault_since)


def _undelivered(status: Status) -> Iterator[Trouble]:
    dead = (status.dead_letters or 0) - status.dead_messages
    if dead > 0:
        yield Trouble(
            "RelayDeadLetters", counted(dead, "dead letter", "dead letters"), "see `relay dlq list`"
        )
    for each in status.deferred.reasons if status.deferred else ():
        age = (status.completed - each.since).total_seconds()
        if each.kind != "scheduled" and age > DEFERRED_SECONDS:
            count = counted(each.transactions, "transaction is", "transactions are")
            where = f" for sink {each.sink}" if each.sink else ""
            yield Trouble(
                "RelayDeferredOld",
                f"{count} deferred{where}: {each.reason or each.kind}",
                "see `relay deferred list`",
                each.since,
            )


def _queues(status: Status) -> Iterator[Trouble]:
    for queue in status.queues:
        name = quote(queue.queue)
        if queue.stopped_at is not None:
            stopped = f"queue {queue.queue} gets no events: {queue.fault}"
            cure = f"declare it otherwise, then `relay queue rebuild {name}`"
            yield Trouble("RelayQueueStopped", stopped, cure, queue.stopped_at)
        if queue.oldest_seconds > QUEUE_SECONDS:
            why = "paused" if queue.paused_at else counted(queue.workers, "worker", "workers")
            waits = f"a message of queue {queue.queue} waits for {duration(queue.oldest_seconds)} ({why})"
            yield Trouble("RelayQueueOld", waits, "see `relay queue list`")
        if queue.dead:
            dead = counted(queue.dead, "message", "messages")
            cure = f"see `relay dlq list --queue {name}`"
            yield Trouble("RelayQueueDead", f"queue {queue.queue}: {dead} dead", cure)
        if queue.stuck:
            stuck = counted(queue.stuck, "run is", "runs are")
            cure = f"see `relay saga list {name} --state stuck`"
            yield Trouble("RelaySagaStuck", f"saga {queue.queue}: {stuck} stuck", cure)


def _schedules(status: Status) -> Iterator[Trouble]:
    for schedule in status.schedules:
        if schedule.fault:
            yield Trouble(
                "RelayScheduleMissed",
                f"schedule {schedule.name} has no next time: {schedule.fault}",
                "see `relay schedule list`",
            )
        elif schedule.overdue_seconds > OVERDUE_SECONDS:
            late = f"schedule {schedule.name} is due for {duration(schedule.overdue_seconds)}"
            yield Trouble("RelayScheduleMissed", late, "see `relay schedule list`")
