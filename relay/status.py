"""What a running or a stopped relay looks like from outside: slot, partitions, dead letters."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

from relay.config import Settings
from relay.preflight import reach_source, reach_target
from relay.source.slot import SlotState, slot_state
from relay.store import dead_letters, deferred, groups, offsets, presence, spark_batches


@dataclass(frozen=True, slots=True)
class Status:
    """A picture of the group at one moment."""

    source_mode: str
    source_reason: str | None
    source_since: datetime | None
    active: str | None
    instances: list[str]
    slot: SlotState | None
    partitions: list[offsets.Cursor]
    dead_letters: int
    deferred: deferred.Waiting
    staged: int

    @property
    def healthy(self) -> bool:
        """Whether an instance runs and, unless it polls, reads a slot that has all of its WAL."""
        if self.source_mode == "poll":
            return bool(self.instances)
        return self.slot is not None and self.slot.active and not self.slot.lost

    def as_json(self) -> dict[str, Any]:
        """The picture as JSON values; `slot` is null where there is none."""
        return {
            "source_mode": self.source_mode,
            "source_reason": self.source_reason,
            "source_since": self.source_since.isoformat() if self.source_since else None,
            "active": self.active,
            "instances": self.instances,
            "slot": None if self.slot is None else asdict(self.slot),
            "partitions": [
                {
                    "partition_id": cursor.partition_id,
                    "next_offset": cursor.next_offset,
                    "applied_lsn": str(cursor.applied_lsn),
                }
                for cursor in self.partitions
            ],
            "dead_letters": self.dead_letters,
            "deferred": asdict(self.deferred),
            "staged": self.staged,
        }


def read(settings: Settings) -> Status:
    """Look at both databases. Raises ConfigurationError if one cannot be reached or has another schema."""
    with reach_source(settings) as source:
        slot = slot_state(source, settings.source.slot)
    with reach_target(settings) as target:
        cursors = offsets.all_cursors(target, settings.group)
        dead = dead_letters.count(target, settings.group)
        waiting = deferred.count(target, settings.group)
        staged = spark_batches.staged(target, settings.group)
        group = groups.read(target, settings.group)
        running = presence.instances(target, settings.group)
    return Status(
        source_mode=(group and group.source_mode) or _configured(settings),
        source_reason=group.source_reason if group else None,
        source_since=group.source_since if group else None,
        active=group.instance if group and group.instance in running else None,
        instances=running,
        slot=slot,
        partitions=cursors,
        dead_letters=dead,
        deferred=waiting,
        staged=staged,
    )


def _configured(settings: Settings) -> str:
    return "poll" if settings.source.mode == "poll" else "wal"
