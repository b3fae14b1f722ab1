"""Judges whether a running service makes progress and does its work, for /livez, /readyz and /healthz.

A service is not live if only a new process helps: a thread has no heartbeat, a handler neither computes nor lets the
target work, or batches need a Spark session that cannot be built. While a database cannot be reached, or takes long,
relay waits, and is live.

A service is ready while it reads the source, or is a standby, and the target answers. A sink that is down is reported,
and affects neither.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from relay.config.dsn import DatabaseAccess
from relay.config.settings import Settings
from relay.delivery.sinks import Sinks
from relay.observe.databases import Databases
from relay.pipeline.active_jobs import Job
from relay.pipeline.retries import RetryWorker
from relay.pipeline.runner import APPLIES_HERE, WAITS_FOR_SPARK, Pipeline
from relay.runtime.parts import Condition, Due, Heartbeat, faults
from relay.runtime.threads import processor_ticks
from relay.source.hybrid import Source
from relay.source.state import ELSEWHERE, POLLS, STANDBY, STREAMS
from relay.source.stream import receiver
from relay.spark.session import Session
from relay.store import refusals


@dataclass(frozen=True, slots=True, eq=False)
class Parts:
    """The parts of a service. `running` returns whether it relays: False while it starts and once it stops.

    `conditions` are those of all background parts.
    """

    source: Source
    pipeline: Pipeline
    sinks: Sinks
    retry_worker: RetryWorker
    session: Session
    conditions: Sequence[Condition]
    running: Callable[[], bool]


UP_SECONDS = 20.0
"""A database counts as reachable for so many seconds after a successful poll."""


class Level(StrEnum):
    """The state of a part."""

    OK = "ok"
    NOTE = "note"
    """An operator should know, but relay does its work."""
    NOT_READY = "not ready"
    HANGS = "hangs"


@dataclass(frozen=True, slots=True)
class PartState:
    """The state of a part of the service, with a text that is safe to show."""

    part: str
    level: Level
    text: str


@dataclass(frozen=True, slots=True)
class Health:
    """The health of a group in this process."""

    group: str
    states: tuple[PartState, ...]

    @property
    def live(self) -> bool:
        """Whether the group makes progress, or will do so by itself."""
        return not any(each.level is Level.HANGS for each in self.states)

    @property
    def ready(self) -> bool:
        """Whether the group does its work, or is a standby."""
        return not any(each.level in (Level.HANGS, Level.NOT_READY) for each in self.states)


@dataclass(slots=True, eq=False)
class _Seen:
    """When a job last made progress (monotonic clock, seconds), with its processor time and its last statement then."""

    moved: float
    ticks: int | None
    began: datetime | None


class Liveness:
    """Judges a service. One thread calls `sample` every few seconds; any thread may call `health`."""

    def __init__(self, settings: Settings, parts: Parts, databases: Databases) -> None:
        self._settings = settings
        self._limits = settings.observe
        self._parts = parts
        self._databases = databases
        self._seen: dict[Job, _Seen] = {}
        self._sampled = time.monotonic()
        self._ran = False
        self._stopping_since: float | None = None

    def sample(self) -> None:
        """Record which jobs make progress, after a poll of the target."""
        now = time.monotonic()
        self._note_stop(now)
        target = self._databases.target_readings
        seen: dict[Job, _Seen] = {}
        for job in self._parts.pipeline.applier.active_jobs.jobs():
            before = self._seen.get(job)
            ticks = processor_ticks(job.thread)
            began = target.began.get(job.pid) if target and job.pid else None
            if began is None and before is not None:
                # The session may have ended while its thread hangs.
                began = before.began
            moved = before.moved if before else now
            computes = before is not None and ticks is not None and ticks != before.ticks
            may_compute = now - job.at < self._limits.busy_seconds
            # A job counts as progressing while its state is unknown: without the target, and through a pooler, whose
            # sessions have other pids. Reading the source has no limit.
            if (
                target is None
                or (job.pid is not None and began is None)
                or job.reads
                or job.pid in target.active
                or (before and began != before.began)
                or (computes and may_compute)
            ):
                moved = now
            seen[job] = _Seen(moved, ticks, began)
        self._seen, self._sampled = seen, now

    def health(self) -> Health:
        """Return the health of the service now, from memory, without waiting."""
        if not self._parts.running():
            return Health(self._settings.group, (self._service(),))
        return Health(self._settings.group, tuple(self._states()))

    def _note_stop(self, now: float) -> None:
        if self._parts.running():
            self._ran, self._stopping_since = True, None
        elif self._ran and self._stopping_since is None:
            self._stopping_since = now

    def _service(self) -> PartState:
        """Return the state of a service that does not relay. Starting has no limit, since it waits for databases."""
        since = self._stopping_since
        stopping = 0.0 if since is None else time.monotonic() - since
        if stopping > self._limits.busy_seconds:
            return PartState("service", Level.HANGS, f"stops, for {stopping:.0f} s")
        return PartState("service", Level.NOT_READY, "starts or stops")

    def _states(self) -> Iterator[PartState]:
        parts = self._parts
        yield self._loop()
        yield from self._jobs()
        if parts.source.receiver is not None:
            yield self._thread("receiver", parts.source.receiver.heartbeat, True)
        yield self._thread("retries", parts.retry_worker.heartbeat, parts.retry_worker.is_alive)
        yield self._source()
        yield self._target()
        if self._settings.needs_spark:
            yield self._spark()
        for worker in parts.sinks.all_workers:
            thread = self._thread(worker.condition.part, worker.heartbeat, worker.is_alive)
            if thread.level is not Level.OK:
                yield thread
        yield from self._sinks()
        yield from self._stopped()
        yield from self._failing()

    def _loop(self) -> PartState:
        parts = self._parts
        heartbeat = max(
            (parts.source.heartbeat, parts.pipeline.heartbeat, parts.sinks.heartbeat),
            key=lambda each: each.at,
        )
        jobs = parts.pipeline.applier.active_jobs.jobs()
        if heartbeat is parts.pipeline.heartbeat and heartbeat.doing == APPLIES_HERE and jobs:
            # `_jobs` judges each job.
            return PartState("loop", Level.OK, heartbeat.doing)
        return self._thread("loop", heartbeat, True)

    def _thread(self, part: str, heartbeat: Heartbeat, alive: bool) -> PartState:
        if not alive:
            return PartState(part, Level.HANGS, "its thread has ended")
        silent = time.monotonic() - heartbeat.at
        limit = {Due.SOON: self._limits.stall_seconds, Due.LATE: self._limits.busy_seconds}
        if silent > limit.get(heartbeat.due, silent):
            return PartState(
                part, Level.HANGS, f"no heartbeat for {silent:.0f} s: {heartbeat.doing}"
            )
        return PartState(part, Level.OK, heartbeat.doing)

    def _jobs(self) -> Iterator[PartState]:
        """Yield the handlers that neither compute nor let the target work."""
        now = time.monotonic()
        if now - self._sampled > UP_SECONDS:
            # The target does not answer.
            return
        for job, seen in self._seen.items():
            still = now - max(seen.moved, job.at)
            if not job.reads and still > self._limits.stall_seconds:
                what = f"handler {job.handler}" if job.handler else "a task"
                yield PartState(
                    what, Level.HANGS, f"no statement and no computing for {still:.0f} s"
                )

    def _source(self) -> PartState:
        state, part = self._parts.source.state(), "source"
        if (refused := _refused(self._settings.source_dsn)) is not None:
            return PartState(part, Level.NOT_READY, refused)
        silent = state.received.silent if state.received else 0.0
        # relay requests a reply after ASK_SECONDS of silence, and waits as long for it.
        if state.doing == STREAMS and silent > max(
            self._limits.stall_seconds, 2 * receiver.ASK_SECONDS
        ):
            text = f"the server has not replied for {silent:.0f} s: the connection may be half open"
            return PartState(part, Level.NOT_READY, text)
        if state.doing == POLLS and not self._databases.source.is_up(UP_SECONDS):
            fault = self._databases.source.fault or "no answer"
            return PartState(part, Level.NOT_READY, f"cannot be polled: {fault}")
        text = {
            STREAMS: "reads the WAL",
            POLLS: f"polls: {state.reason}",
            STANDBY: f"on standby: {state.reason}",
            ELSEWHERE: f"cannot be read: {state.reason}",
        }[state.doing]
        return PartState(part, Level.NOT_READY if state.doing == ELSEWHERE else Level.OK, text)

    def _target(self) -> PartState:
        if (refused := _refused(self._settings.target_dsn)) is not None:
            return PartState("target", Level.NOT_READY, refused)
        if self._databases.target.is_up(UP_SECONDS):
            return PartState("target", Level.OK, "answers")
        fault = self._databases.target.fault or "no answer"
        return PartState("target", Level.NOT_READY, f"cannot be reached: {fault}")

    def _spark(self) -> PartState:
        session = self._parts.session
        if session.is_ready:
            return PartState("spark", Level.OK, "the session is ready")
        fault, failing = session.condition.fault, session.condition.failing_seconds
        if fault is None:
            return PartState("spark", Level.OK, "no session yet")
        text = f"no session can be built for {failing:.0f} s: {fault.fault}"
        if self._parts.pipeline.heartbeat.doing != WAITS_FOR_SPARK:
            return PartState("spark", Level.NOTE, text)
        # Executors may take minutes to start, and a restart of relay would begin with that again.
        limit = self._limits.busy_seconds if session.is_late else self._limits.stall_seconds
        if failing > limit:
            return PartState("spark", Level.HANGS, f"{text}; batches wait for it")
        return PartState("spark", Level.NOT_READY, text)

    def _sinks(self) -> Iterator[PartState]:
        target = self._databases.target_readings
        failing = {each.part for each in faults(self._parts.conditions)}
        for each in target.state.sinks if target else ():
            part = f"sink {each.sink}"
            if part in failing:
                continue  # `_failing` says more
            if each.fault:
                yield PartState(part, Level.NOTE, f"nothing is delivered: {each.fault}")
            elif each.state == "paused":
                yield PartState(part, Level.NOTE, f"paused by {each.paused_by}")
            else:
                yield PartState(part, Level.OK, each.state)

    def _failing(self) -> Iterator[PartState]:
        """Yield the background parts that do not do their work; they go on by themselves."""
        for each in self._parts.conditions:
            fault, seconds = each.fault, each.failing_seconds
            if fault is not None and each is not self._parts.session.condition:
                text = f"fails for {seconds:.0f} s: {fault.fault}"
                yield PartState(each.part, Level.NOTE, text)

    def _stopped(self) -> Iterator[PartState]:
        target = self._databases.target_readings
        for each in target.state.braked if target else ():
            text = "stopped: too many transactions in a row failed"
            yield PartState(f"handler {each.handler}", Level.NOTE, text)


def _refused(access: DatabaseAccess) -> str | None:
    """Return the text of a database that refuses new sessions, whatever those that are open still do."""
    refusal = refusals.refusal(access)
    if refusal is None:
        return None
    return f"{refusal.text} (for {refusal.seconds:.0f} s)"
