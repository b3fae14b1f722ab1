"""Reads the state of a group from its databases: slot, partitions, deferred transactions, dead letters, sinks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

import psycopg

from relay.admin.connections import reach_source, reach_target
from relay.config.settings import Settings
from relay.faults import ConfigurationError
from relay.retention import partitions, removable
from relay.source.applied import applied_in
from relay.source.open_transactions import oldest_open
from relay.source.slot import SlotState, slot_reader, slot_state
from relay.source.unread import UnreadRows
from relay.store import (
    brakes,
    clock,
    dead_letters,
    deferred_counts,
    engines,
    groups,
    offsets,
    presence,
    sinks,
    snapshots,
)

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


@dataclass(frozen=True, slots=True)
class Status:
    """The state of the group at one moment.

    `slot_waits_for` describes the oldest open transaction while the slot is being created. `readers` has the readers of
    the outbox, if retention removes events.
    """

    source_mode: str
    source_reason: str | None
    source_since: datetime | None
    active: str | None
    instances: list[str]
    slot: SlotState | None
    slot_reader: str | None
    slot_waits_for: str | None
    partitions: list[offsets.PartitionPosition]
    dead_letters: int
    deferred: deferred_counts.DeferredSummary
    braked: list[brakes.BrakedHandler]
    sinks: list[sinks.StoredSink]
    engines: list[engines.EngineTotals]
    readers: list[removable.OutboxReader]

    def as_json(self) -> dict[str, Any]:
        """Return the state as JSON values; `slot` is null if it does not exist."""
        return {
            "source_mode": self.source_mode,
            "source_reason": self.source_reason,
            "source_since": self.source_since.isoformat() if self.source_since else None,
            "active": self.active,
            "instances": self.instances,
            "slot": self.slot and {**asdict(self.slot), "creating": self.slot.creating},
            "slot_reader": self.slot_reader,
            "slot_waits_for": self.slot_waits_for,
            "partitions": [
                {
                    "partition_id": position.partition_id,
                    "next_offset": position.next_offset,
                    "applied_lsn": str(position.applied_lsn),
                }
                for position in self.partitions
            ],
            "dead_letters": self.dead_letters,
            "deferred": _deferred_as_json(self.deferred),
            "braked": [_as_json(each) for each in self.braked],
            "sinks": [_sink_as_json(each) for each in self.sinks],
            "engines": [_as_json(each) for each in self.engines],
            "readers": [_as_json(each) for each in self.readers],
        }


def _sink_as_json(sink: sinks.StoredSink) -> dict[str, Any]:
    return {
        "sink": sink.sink,
        "state": sink.state,
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


def read(settings: Settings) -> Status:
    """Read the state of the group from both databases.

    Raises ConfigurationError if one cannot be reached or has another schema, or the group is not initialised.
    """
    with reach_source(settings) as source:
        slot = slot_state(source, settings.source.slot)
        reader = slot_reader(source, settings.source.slot)
        oldest = oldest_open(source) if slot and slot.creating else None
        kept = partitions.retained(source, settings.source.table)
        readers = removable.readers(source, settings) if kept else []
    with reach_target(settings) as target:
        positions = offsets.initialised(target, settings.group)
        dead = dead_letters.count(target, settings.group)
        summary = deferred_counts.count(target, settings.group)
        braked = brakes.braked(target, settings.group)
        stored = sinks.read(target, settings.group, settings.sink_handlers)
        group = groups.read(target, settings.group)
        applied = engines.read(target, settings.group)
        running = presence.instances(target, settings.group)
    return Status(
        source_mode=mode_of(settings, group),
        source_reason=group.source_reason if group else None,
        source_since=group.source_since if group else None,
        active=group.active(running) if group else None,
        instances=running,
        slot=slot,
        slot_reader=None if reader is None else reader.removeprefix(groups.PREFIX),
        slot_waits_for=None if oldest is None else str(oldest),
        partitions=positions,
        dead_letters=dead,
        deferred=summary,
        braked=braked,
        sinks=stored,
        engines=applied,
        readers=readers,
    )


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
