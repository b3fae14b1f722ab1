"""Reads the state of a group from its databases: slot, partitions, deferred transactions, dead letters, sinks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import numpy as np
import psycopg

from relay.admin.connections import TableLocked, reach_source, reach_target
from relay.config.settings import Settings
from relay.faults import ConfigurationError, Unreachable
from relay.model.snapshots import Xids
from relay.retention import partitions, removable
from relay.source.applied import AppliedPosition, applied_in
from relay.source.backlog import Backlog, Backlogs
from relay.source.stream.open_transactions import oldest_open
from relay.source.stream.slot import SlotState, slot_reader, slot_state
from relay.source.unread import UnreadRows
from relay.store import (
    brakes,
    clock,
    dead_letters,
    engines,
    groups,
    part_faults,
    presence,
    waits,
)
from relay.store.connections import (
    Connection,
    require_writable_by_default,
    sessions_with,
)
from relay.store.deferred import counts as deferred_counts
from relay.store.positions import offsets, sinks, snapshots

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


LOCK_SECONDS = 2.0
"""How long a statement of `read` waits for a lock: a table that another session has locked is then the result."""
COUNT_SECONDS = 2.0
"""How long the count of unread events may take."""


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
    `read`, of `read_at`, or is empty; None stands for a number that is not known. `noted` is what the source knows of
    the group's readers while the target cannot be read.

    `lag` counts the events that the target has not applied, None if it cannot be counted in time. `waits` are sessions
    of relay that wait for a lock of the target. `parts` are background parts that fail. `slot_waits_for` describes the
    oldest open transaction while the slot is being created. `readers` has the readers of the outbox, if retention
    removes events.
    """

    source_mode: str
    source_reason: str | None = None
    source_since: datetime | None = None
    active: str | None = None
    instances: Sequence[str] = ()
    slot: SlotState | None = None
    slot_reader: str | None = None
    slot_waits_for: str | None = None
    partitions: Sequence[offsets.PartitionPosition] = ()
    dead_letters: int | None = None
    deferred: deferred_counts.DeferredSummary | None = None
    braked: Sequence[brakes.BrakedHandler] = ()
    sinks: Sequence[sinks.StoredSink] = ()
    engines: Sequence[engines.EngineTotals] = ()
    readers: Sequence[removable.OutboxReader] = ()
    lag: Backlog | None = None
    waits: Sequence[waits.Wait] = ()
    parts: Sequence[part_faults.StoredPartFault] = ()
    noted: Sequence[NotedReader] = ()
    faults: Mapping[str, str] = field(default_factory=dict)
    read_at: Mapping[str, datetime] = field(default_factory=dict)

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
            "deferred": self.deferred and _deferred_as_json(self.deferred),
            "braked": [_as_json(each) for each in self.braked],
            "sinks": [_sink_as_json(each, self.instances) for each in self.sinks],
            "engines": [_as_json(each) for each in self.engines],
            "readers": [_as_json(each) for each in self.readers],
            "waits": [_as_json(each) for each in self.waits],
            "parts": [_as_json(each) for each in self.parts],
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


def _as_json(item: DataclassInstance) -> dict[str, Any]:
    """Return the fields of a dataclass as JSON values: times in ISO 8601."""
    return {
        key: value.isoformat() if isinstance(value, datetime) else value
        for key, value in asdict(item).items()
    }


def _deferred_as_json(summary: deferred_counts.DeferredSummary) -> dict[str, Any]:
    return {
        "transactions": summary.transactions,
        "holding": summary.holding,
        "reasons": [_as_json(each) for each in summary.reasons],
    }


def read(settings: Settings, last: Status | None = None) -> Status:
    """Read the state of the group from both databases; of one that cannot be read, what `last` has.

    Raises ConfigurationError if neither can be read and there is no `last`, if one has another schema, or if the group
    is not initialised.
    """
    state = last or Status(mode_of(settings, None))
    state = replace(state, faults={}, noted=(), waits=(), lag=None)
    errors: list[Exception] = []
    applied: _Applied | None = None
    with sessions_with({"lock_timeout": f"{LOCK_SECONDS * 1000:.0f}"}):
        try:
            state, applied = _with_target(settings, state)
        except (Unreachable, psycopg.OperationalError) as error:
            state = _without(state, "target.dsn", error)
            if isinstance(error, TableLocked):
                with suppress(ConfigurationError, psycopg.Error), reach_target(settings) as target:
                    state = replace(state, waits=waits.lock_waits(target))
            errors.append(error)
        try:
            state = _with_source(settings, state, applied)
        except (Unreachable, psycopg.OperationalError) as error:
            state = _without(state, "source.dsn", error)
            errors.append(error)
    if len(errors) == 2 and not state.read_at:
        raise errors[0]
    return state


_Applied = tuple[list[AppliedPosition], Xids]
"""What the target has applied: the positions of its partitions, and the transactions after these."""


def _without(state: Status, key: str, error: Exception) -> Status:
    text = str(error).removeprefix(f"{key}: ")
    return replace(state, faults={**state.faults, key: text.splitlines()[0]})


def _read_now(state: Status, key: str) -> dict[str, datetime]:
    return {**state.read_at, key: datetime.now(UTC)}


def _with_target(settings: Settings, state: Status) -> tuple[Status, _Applied]:
    name = settings.group
    with reach_target(settings) as target:
        group = groups.read(target, name)
        running = presence.instances(target, name)
        state = replace(
            state,
            source_mode=mode_of(settings, group),
            source_reason=group.source_reason if group else None,
            source_since=group.source_since if group else None,
            active=group.active(running) if group else None,
            instances=running,
            partitions=offsets.initialised(target, name),
            dead_letters=dead_letters.count(target, name),
            deferred=deferred_counts.count(target, name),
            braked=brakes.braked(target, name),
            sinks=sinks.read(target, name, settings.sink_handlers),
            engines=engines.read(target, name),
            waits=waits.lock_waits(target),
            parts=part_faults.read(target, name, running),
            read_at=_read_now(state, "target.dsn"),
        )
        try:
            require_writable_by_default(target)
        except psycopg.errors.ReadOnlySqlTransaction as error:
            why = (
                f"{error}: nothing can be applied or delivered, and running instances are not shown"
            )
            state = replace(state, faults={**state.faults, "target.dsn": why})
        return state, (applied_in(target, name), snapshots.noted(target, name))


def _with_source(settings: Settings, state: Status, applied: _Applied | None) -> Status:
    slot_name, table = settings.source.slot, settings.source.table
    with reach_source(settings) as source:
        slot = slot_state(source, slot_name)
        reader = slot_reader(source, slot_name)
        oldest = oldest_open(source) if slot and slot.creating else None
        kept = partitions.retained(source, table)
        state = replace(
            state,
            slot=slot,
            slot_reader=None if reader is None else reader.removeprefix(groups.PREFIX),
            slot_waits_for=None if oldest is None else str(oldest),
            read_at=_read_now(state, "source.dsn"),
        )
        with suppress(psycopg.errors.QueryCanceled, psycopg.errors.LockNotAvailable):
            # These read the outbox, which may be locked; the slot needs no table.
            state = replace(state, readers=removable.readers(source, settings) if kept else [])
        backlogs = Backlogs(settings)
        if applied is not None:
            positions, done = applied
            return replace(state, lag=_counted(source, backlogs, positions, np.sort(done)))
        nothing = np.zeros(0, np.int64)
        return replace(
            state,
            noted=[
                NotedReader(
                    name,
                    noted_at,
                    _counted(
                        source,
                        backlogs,
                        [AppliedPosition(0, snapshot, snapshot, sinks.BEFORE_FIRST)],
                        nothing,
                    ),
                )
                for name, snapshot, noted_at in removable.noted(source, settings.group, table)
            ],
        )


def _counted(
    source: Connection, backlogs: Backlogs, positions: Sequence[AppliedPosition], done: Xids
) -> Backlog | None:
    """Count the events after positions; None if that takes too long, or the outbox cannot be polled."""
    if not positions:
        return None
    try:
        with source.transaction():
            source.execute(
                "select set_config('statement_timeout', %s, true)", (f"{COUNT_SECONDS * 1000:.0f}",)
            )
            return backlogs.count(source, positions, done)
    except (
        psycopg.errors.QueryCanceled,
        psycopg.errors.LockNotAvailable,
        psycopg.errors.InsufficientPrivilege,
        psycopg.errors.UndefinedColumn,
        psycopg.errors.UndefinedTable,
    ):
        return None


def lag_seconds(settings: Settings, positions: Sequence[offsets.PartitionPosition]) -> float:
    """Return the age in seconds of the oldest event that is not applied, by its event_ts; 0 if there is none.

    Raises ConfigurationError if a database cannot be reached, or the outbox has no event_ts or cannot be polled.
    """
    if not positions:
        return 0.0
    rows = UnreadRows(settings.model_copy(update={"partitions": len(positions)}))
    with reach_target(settings) as target:
        applied = applied_in(target, settings.group)
        noted = snapshots.noted(target, settings.group)
    if not applied:
        raise _unknown_lag(settings, "c_xid")
    with reach_source(settings) as source:
        try:
            unread = rows.unread(source, applied, noted)
            now = clock.present(source)
        except psycopg.errors.UndefinedColumn:
            raise _unknown_lag(settings, "c_offset") from None
    moments = [moment for _, moment in unread.values()]
    oldest = [moment for moment in moments if moment is not None]
    if len(oldest) < len(moments):
        raise _unknown_lag(settings, "event_ts")
    return max((max(0.0, (now - moment).total_seconds()) for moment in oldest), default=0.0)


def _unknown_lag(settings: Settings, field: str) -> ConfigurationError:
    return ConfigurationError(
        f"--max-lag-seconds: {settings.source.outbox}: without {field} there is no lag in seconds: limit the lag in "
        "bytes instead (--max-lag-bytes)"
    )


def mode_of(settings: Settings, group: groups.GroupState | None) -> str:
    """Return the mode in which a group reads the source or will read it: `wal` or `poll`."""
    configured = "poll" if settings.source.mode == "poll" else "wal"
    return (group and group.source_mode) or configured
