"""Reads the state of a group from its two databases, for `relay status`, `relay top`, metrics and the console.

`read` opens sessions and reads everything once. `Watch` keeps its sessions, and bounds the time of each statement and
the share of the time that counting takes. `relay.observe.databases` reads for metrics and health, in threads.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, Generic, TypeVar

import numpy as np
import psycopg

from relay.admin.connections import TableLocked, reach_source, reach_target, source_sides
from relay.config.settings import Settings
from relay.faults import ConfigurationError, RelayError, Unreachable, describe, first_line
from relay.model.json_fields import json_fields
from relay.retention import partitions, reader_positions
from relay.source.outbox.applied import (
    AppliedPosition,
    ReadPosition,
    position_of_sink,
    position_of_target,
)
from relay.source.outbox.unread import Backlog, UnreadRows
from relay.source.stream.slot import SlotState, oldest_open, slot_reader, slot_state
from relay.store import (
    activity,
    brakes,
    completeness,
    dead_letters,
    endpoints,
    groups,
    locks,
    log_readers,
    migrations,
    presence,
    queues,
    schedules,
)
from relay.store.connections import (
    INSTANCE_PREFIX,
    SHORT_TIMEOUTS,
    Connection,
    Dsn,
    connect,
    require_writable_by_default,
    sessions_with,
)
from relay.store.deferred import selection as deferred_selection
from relay.store.positions import offsets, sinks

log = logging.getLogger(__name__)

T = TypeVar("T")

SOURCE, TARGET = "source.dsn", "target.dsn"
"""The keys of `Status.faults` and `Status.read_at`."""
LOCK_SECONDS = 2.0
"""How long a statement of `read` waits for a lock: a table that another session has locked is then the result."""
COUNT_SECONDS = 2.0
"""How long the count of unread events may take."""
STATEMENT_TIMEOUT = "2s"
"""`statement_timeout` of `Watch`."""
REST_FACTOR = 20
"""A query of `Watch` that reads many rows rests for so many times its duration: it takes a twentieth of the time."""


@dataclass(frozen=True, slots=True)
class NotedReader:
    """A reader of the group as the source knows it: a sink, or the target (''), its position noted at `noted_at`."""

    reader: str
    noted_at: datetime
    backlog: Backlog | None


@dataclass(frozen=True, slots=True)
class Status:
    """The state of the group at one moment.

    `faults` says by configuration key why a database could not be read. What it has then keeps the value of an earlier
    read, of `read_at`, or is empty; None stands for a number that is not known. `noted` is what the source knows of the
    group's readers while the target cannot be read. `completed` is when the read ended, by this machine's clock.

    `unread` counts the events that readers have not read: the target (''), and sinks that read the outbox themselves,
    which only `Watch` counts; a number that cannot be counted in time is missing. `waits` are sessions of relay that
    wait for a lock of the target. `parts` are background parts that fail. `slot_waits_for` describes the oldest open
    transaction while the slot is being created. `readers` has the readers of the outbox, if retention removes events.
    `other_histories` names the readers of the log whose positions are of another history of the database.
    Only `read` reads `queues`, and `schedules`, which are those of the outbox. `watermarks` say up to when readers have
    everything; only `read` counts what is dead or deferred of it. `dead_letters` counts events, also messages of
    queues; `dead` counts transactions by consumer and handler, which only `Watch` reads. `witnessed_at` is when the
    newest witness was noted, by which another history of the source is known.
    """

    group: str
    source_mode: str
    source_reason: str | None = None
    source_since: datetime | None = None
    active: str | None = None
    witnessed_at: datetime | None = None
    instances: Sequence[str] = ()
    slot: SlotState | None = None
    slot_reader: str | None = None
    slot_waits_for: str | None = None
    partitions: Sequence[offsets.PartitionPosition] = ()
    dead_letters: int | None = None
    dead: Mapping[tuple[str, str], int] | None = None
    deferred: deferred_selection.DeferredSummary | None = None
    braked: Sequence[brakes.BrakedHandler] = ()
    sinks: Sequence[sinks.StoredSink] = ()
    endpoints: Sequence[endpoints.EndpointCounts] = ()
    engines: Sequence[activity.EngineTotals] = ()
    readers: Sequence[reader_positions.OutboxReader] = ()
    other_histories: Sequence[str] = ()
    queues: Sequence[queues.QueueFigures] = ()
    schedules: Sequence[schedules.ScheduleFigures] = ()
    unread: Mapping[str, Backlog] = field(default_factory=dict)
    watermarks: Sequence[completeness.Watermark] = ()
    waits: Sequence[locks.Wait] = ()
    parts: Sequence[presence.StoredPartFault] = ()
    noted: Sequence[NotedReader] = ()
    faults: Mapping[str, str] = field(default_factory=dict)
    read_at: Mapping[str, datetime] = field(default_factory=dict)
    completed: datetime = field(default_factory=lambda: datetime.now(UTC))

    @property
    def lag(self) -> Backlog | None:
        """The events that the target has not applied; None if they cannot be counted in time."""
        return self.unread.get("")

    @property
    def dead_messages(self) -> int:
        """How many of the dead letters are messages of work queues, of each queue as many as its figure counts."""
        return sum(each.dead for each in self.queues)

    @property
    def mode(self) -> str:
        """How the source is read, in words; while it cannot be reached, how it was read before."""
        return (
            f"unknown, {self.source_mode} before"
            if "source.dsn" in self.faults
            else self.source_mode
        )

    def is_known(self, key: str) -> bool:
        """Return whether a database was read, now or earlier: `source.dsn` or `target.dsn`."""
        return key in self.read_at

    def as_json(self) -> dict[str, Any]:
        """Return the state as JSON values; `slot` is null if it does not exist."""
        return {
            "source_mode": self.source_mode,
            "source_reason": self.source_reason,
            "source_since": self.source_since.isoformat() if self.source_since else None,
            "active": self.active,
            "witnessed_at": self.witnessed_at and self.witnessed_at.isoformat(),
            "instances": list(self.instances),
            "slot": self.slot and {**asdict(self.slot), "creating": self.slot.creating},
            "slot_reader": self.slot_reader,
            "slot_waits_for": self.slot_waits_for,
            "lag": self.lag and _backlog_as_json(self.lag),
            "partitions": [
                {
                    "partition_id": position.partition_id,
                    "next_offset": position.next_offset,
                    "applied_lsn": str(position.applied_lsn),
                }
                for position in self.partitions
            ],
            "dead_letters": self.dead_letters,
            "deferred": self.deferred
            and {
                "transactions": self.deferred.transactions,
                "holding": self.deferred.holding,
                "reasons": [json_fields(each) for each in self.deferred.reasons],
            },
            "braked": [json_fields(each) for each in self.braked],
            "sinks": [_sink_as_json(each, self.instances) for each in self.sinks],
            "endpoints": [json_fields(each) for each in self.endpoints],
            "engines": [json_fields(each) for each in self.engines],
            "readers": [json_fields(each) for each in self.readers],
            "other_histories": list(self.other_histories),
            "queues": [json_fields(each) for each in self.queues],
            "schedules": [json_fields(each) for each in self.schedules],
            "watermarks": [json_fields(each) for each in self.watermarks],
            "waits": [json_fields(each) for each in self.waits],
            "parts": [json_fields(each) for each in self.parts],
            "noted": [
                {
                    "reader": each.reader,
                    "noted_at": each.noted_at.isoformat(),
                    "lag": each.backlog and _backlog_as_json(each.backlog),
                }
                for each in self.noted
            ],
            "faults": dict(self.faults),
            "read_at": {key: moment.isoformat() for key, moment in self.read_at.items()},
        }


def _backlog_as_json(backlog: Backlog) -> dict[str, Any]:
    return {
        "events": backlog.events,
        "more": backlog.more,
        "oldest_seconds": backlog.oldest_seconds,
    }


def _sink_as_json(sink: sinks.StoredSink, running: Sequence[str]) -> dict[str, Any]:
    return {
        "sink": sink.sink,
        "state": sink.state_in(running),
        "paused_at": sink.paused_at and sink.paused_at.isoformat(),
        "paused_by": sink.paused_by,
        "reason": sink.reason,
        "fault": sink.fault,
        "fault_since": sink.fault_since and sink.fault_since.isoformat(),
        "instance": sink.instance,
    }


# What each reader of the state asks


@dataclass(frozen=True, slots=True)
class TargetState:
    """What the target has of a group in a few rows: one for each instance, sink and stopped handler."""

    group: groups.GroupState | None
    instances: list[str]
    sinks: list[sinks.StoredSink]
    braked: list[brakes.BrakedHandler]
    watermarks: list[completeness.Watermark]
    endpoints: list[endpoints.EndpointCounts]


def target_state(target: Connection, settings: Settings) -> TargetState:
    """Read the state of a group from the target, in six statements. Raises psycopg.Error."""
    name = settings.group
    return TargetState(
        groups.read(target, name),
        presence.instances(target, name),
        sinks.read(target, name, settings.sink_handlers),
        brakes.braked(target, name),
        completeness.watermarks(target, name, counts=False),
        endpoints.counts(target, name),
    )


def reading_outbox(
    stored: Sequence[sinks.StoredSink], running: Collection[str]
) -> list[sinks.StoredSink]:
    """Return the sinks that have a position in the outbox, and that the stream does not feed."""
    return [
        each for each in stored if each.position.snapshot is not None and not each.is_fed(running)
    ]


def if_countable(count: Callable[..., T], *arguments: object) -> T | None:
    """Return what `count` returns; None if it takes too long, a table is locked, or the outbox lacks what it needs.

    Raises psycopg.OperationalError where the session is the problem.
    """
    try:
        return count(*arguments)
    except psycopg.OperationalError as error:
        if not isinstance(error, psycopg.errors.QueryCanceled | psycopg.errors.LockNotAvailable):
            raise
    except (psycopg.Error, RelayError) as error:
        log.debug("cannot count", extra={"fault": describe(error)})
    return None


def mode_of(settings: Settings, group: groups.GroupState | None) -> str:
    """Return the mode in which a group reads the source or will read it: `wal` or `poll`."""
    configured = "poll" if settings.source.mode == "poll" else "wal"
    return (group and group.source_mode) or configured


def _with_target(state: Status, target: Connection, settings: Settings) -> Status:
    """Return the state with what both `read` and `Watch` ask the target. Raises ConfigurationError, psycopg.Error."""
    found = target_state(target, settings)
    group = found.group
    return replace(
        state,
        source_mode=mode_of(settings, group),
        source_reason=group.source_reason if group else None,
        source_since=group.source_since if group else None,
        active=group.active(found.instances) if group else None,
        witnessed_at=group.witnessed_at if group else None,
        instances=found.instances,
        partitions=offsets.initialised(target, settings.group),
        sinks=found.sinks,
        engines=activity.engine_totals(target, settings.group),
        endpoints=found.endpoints,
        braked=found.braked,
        watermarks=found.watermarks,
        read_at={**state.read_at, TARGET: datetime.now(UTC)},
    )


def _with_slot(state: Status, source: Connection, settings: Settings) -> Status:
    """Return the state with what both ask the source. Raises psycopg.Error."""
    name = settings.source.slot
    reader = slot_reader(source, name)
    return replace(
        state,
        slot=slot_state(source, name),
        slot_reader=None if reader is None else reader.removeprefix(INSTANCE_PREFIX),
        read_at={**state.read_at, SOURCE: datetime.now(UTC)},
    )


def _without(state: Status, key: str, error: Exception) -> Status:
    """Return the state with the reason why a database could not be read."""
    why = first_line(error).removeprefix("connection failed: ").removeprefix(f"{key}: ")
    return replace(state, faults={**state.faults, key: why})


# Reading once


def read(settings: Settings, last: Status | None = None) -> Status:
    """Read the state of the group from both databases; of one that cannot be read, what `last` has.

    Raises ConfigurationError if neither can be read and there is no `last`, if one has another schema, or if the group
    is not initialised.
    """
    state = last or Status(settings.group, mode_of(settings, None))
    state = replace(state, faults={}, noted=(), waits=(), unread={})
    errors: list[Exception] = []
    applied: ReadPosition | None = None
    with sessions_with({"lock_timeout": f"{LOCK_SECONDS * 1000:.0f}"}):
        try:
            state, applied = _read_target(settings, state)
        except (Unreachable, psycopg.OperationalError) as error:
            state = _without(state, TARGET, error)
            if isinstance(error, TableLocked):
                with suppress(ConfigurationError, psycopg.Error), reach_target(settings) as target:
                    state = replace(state, waits=locks.lock_waits(target))
            errors.append(error)
        try:
            state = _read_source(settings, state, applied)
        except (Unreachable, psycopg.OperationalError) as error:
            state = _without(state, SOURCE, error)
            errors.append(error)
    if len(errors) == 2 and not state.read_at:
        raise errors[0]
    return replace(state, completed=datetime.now(UTC))


def _read_target(settings: Settings, state: Status) -> tuple[Status, ReadPosition]:
    name = settings.group
    with reach_target(settings) as target:
        state = _with_target(state, target, settings)
        state = replace(
            state,
            dead_letters=dead_letters.count(target, name),
            deferred=deferred_selection.count(target, name),
            watermarks=completeness.watermarks(target, name),
            waits=locks.lock_waits(target),
            parts=presence.read_faults(target, name, state.instances),
            queues=if_countable(queues.figures, target, name) or (),
        )
        try:
            require_writable_by_default(target)
        except psycopg.errors.ReadOnlySqlTransaction as error:
            why = (
                f"{error}: nothing can be applied or delivered, and running instances are not shown"
            )
            state = replace(state, faults={**state.faults, TARGET: why})
        return state, position_of_target(target, name)


def _read_source(settings: Settings, state: Status, applied: ReadPosition | None) -> Status:
    table = settings.source.table
    with reach_source(settings) as source:
        state = _with_slot(state, source, settings)
        oldest = oldest_open(source) if state.slot and state.slot.creating else None
        state = replace(state, slot_waits_for=None if oldest is None else str(oldest))
        if settings.source.owns_table:
            found = if_countable(schedules.figures, source)
            state = replace(
                state,
                schedules=state.schedules if found is None else found,
                other_histories=if_countable(log_readers.of_other_histories, source) or (),
            )
        kept = partitions.retained(source, table)
        with suppress(psycopg.errors.QueryCanceled, psycopg.errors.LockNotAvailable):
            # These read the outbox, which may be locked; the slot needs no table.
            state = replace(
                state, readers=reader_positions.readers(source, settings) if kept else []
            )
        rows = UnreadRows(settings)
        if applied is not None:
            lag = _estimated(rows, source, applied)
            return state if lag is None else replace(state, unread={"": lag})
        nothing = np.zeros(0, np.int64)
        noted = []
        for name, snapshot, noted_at in reader_positions.noted(source, settings.group, table):
            at = AppliedPosition(0, snapshot, snapshot, sinks.BEFORE_FIRST)
            backlog = _estimated(rows, source, ReadPosition([at], nothing))
            noted.append(NotedReader(name, noted_at, backlog))
        return replace(state, noted=noted)


def _estimated(rows: UnreadRows, source: Connection, position: ReadPosition) -> Backlog | None:
    """Count the events after a position; None if that takes too long, or the outbox cannot be polled."""

    def count() -> Backlog:
        with source.transaction():
            source.execute(
                "select set_config('statement_timeout', %s, true)", (f"{COUNT_SECONDS * 1000:.0f}",)
            )
            return rows.estimate(source, position)

    return if_countable(count) if position.positions else None


def lag_seconds(settings: Settings) -> float:
    """Return the age in seconds of the oldest event that is not applied, by its event_ts; 0 if there is none.

    Raises ConfigurationError if a database cannot be reached, or the outbox has no event_ts or cannot be polled.
    """
    with reach_target(settings) as target:
        applied = position_of_target(target, settings.group)
    if not applied.positions:
        raise _unknown_lag(settings, "c_xid")
    with reach_source(settings) as source:
        try:
            unread = UnreadRows(settings).by_partition(source, applied)
        except psycopg.errors.UndefinedColumn:
            raise _unknown_lag(settings, "c_offset") from None
    ages = [each.oldest_seconds for each in unread.values()]
    known = [age for age in ages if age is not None]
    if len(known) < len(ages):
        raise _unknown_lag(settings, "event_ts")
    return max([0.0, *known])


def _unknown_lag(settings: Settings, field: str) -> ConfigurationError:
    return ConfigurationError(
        f"--max-lag-seconds: {settings.source.outbox}: without {field} there is no lag in seconds: limit the lag in "
        "bytes instead (--max-lag-bytes)"
    )


# Polling


class _Throttled(Generic[T]):
    """A query that reads many rows: it is repeated only after its rest; until then its last result is returned."""

    def __init__(self, query: Callable[..., T]) -> None:
        self._query = query
        self._due = 0.0
        self._result: T | None = None

    def __call__(self, *arguments: Any) -> T | None:
        """Return the result; None if it cannot be counted in time. Raises psycopg.Error."""
        begun = time.monotonic()
        if begun >= self._due:
            self._result = if_countable(self._query, *arguments)
            ended = time.monotonic()
            self._due = ended + REST_FACTOR * (ended - begun)
        return self._result


class Watch:
    """Polls a group on a connection to each of its databases. For one thread at a time."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._state = Status(settings.group, mode_of(settings, None))
        self._connections: dict[str, Connection] = {}
        self._deferred = _Throttled(deferred_selection.count)
        self._dead = _Throttled(dead_letters.count_by_handler)
        self._rows = UnreadRows(settings)
        self._unread: dict[str, _Throttled[Backlog | None]] = {}

    def read(self) -> Status:
        """Query both databases. A fault of one is part of the result; the next poll connects again."""
        state = replace(self._state, faults={})
        for key, poll in ((TARGET, self._poll_target), (SOURCE, self._poll_source)):
            try:
                state = poll(state)
            except (psycopg.Error, ConfigurationError) as error:
                state = _without(state, key, error)
                if key in self._connections:
                    self._connections.pop(key).close()
        self._state = replace(state, completed=datetime.now(UTC))
        return self._state

    def close(self) -> None:
        """Close the connections."""
        while self._connections:
            self._connections.popitem()[1].close()

    def _connected(self, key: str, dsn: Dsn, sides: Sequence[migrations.Side]) -> Connection:
        if key not in self._connections:
            self._connections[key] = _opened(key, dsn, sides)
        return self._connections[key]

    def _poll_target(self, state: Status) -> Status:
        target = self._connected(TARGET, self._settings.target_dsn, ("target",))
        state = _with_target(state, target, self._settings)
        return replace(
            state,
            deferred=self._deferred(target, state.group),
            dead=self._dead(target, state.group),
        )

    def _poll_source(self, state: Status) -> Status:
        source = self._connected(SOURCE, self._settings.source_dsn, source_sides(self._settings))
        state = _with_slot(state, source, self._settings)
        # While the target cannot be read, nothing says what is unread.
        target = self._connections.get(TARGET)
        if target is None:
            return replace(state, unread={})
        lagging = {each.sink: each for each in reading_outbox(state.sinks, state.instances)}
        names = ["", *lagging]
        self._unread = {name: self._unread.get(name) or _Throttled(self._count) for name in names}
        counts = {name: self._unread[name](source, target, lagging.get(name)) for name in names}
        return replace(
            state, unread={name: count for name, count in counts.items() if count is not None}
        )

    def _count(
        self, source: Connection, target: Connection, sink: sinks.StoredSink | None
    ) -> Backlog | None:
        if sink is None:
            position = position_of_target(target, self._settings.group)
        else:
            position = position_of_sink(target, self._settings.group, sink)
        return self._rows.estimate(source, position) if position.positions else None


def _opened(key: str, dsn: Dsn, sides: Sequence[migrations.Side]) -> Connection:
    """Return a read-only connection to a database whose schema is this program's.

    Raises ConfigurationError, psycopg.Error.
    """
    conn = connect(dsn, **SHORT_TIMEOUTS)
    try:
        conn.execute(
            f"set statement_timeout = '{STATEMENT_TIMEOUT}'; set default_transaction_read_only = on".encode()
        )
        for side in sides:
            migrations.require(conn, side, key)
    except BaseException:
        conn.close()
        raise
    return conn
