"""What a running or a stopped relay looks like from outside: slot, partitions, dead letters."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from relay.config import Settings
from relay.preflight import reach
from relay.source.slot import SlotState, slot_state
from relay.store import dead_letters, migrations, offsets


@dataclass(frozen=True, slots=True)
class Status:
    """A picture of the group at one moment."""

    source_mode: str
    slot: SlotState | None
    partitions: list[offsets.Cursor]
    dead_letters: int

    @property
    def healthy(self) -> bool:
        """Whether somebody reads the slot, and the slot has all of its WAL."""
        return self.slot is not None and self.slot.active and self.slot.wal_status != "lost"

    def as_json(self) -> dict[str, Any]:
        """The picture as JSON values; `slot` is null where there is none."""
        return {
            "source_mode": self.source_mode,
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
        }


def read(settings: Settings) -> Status:
    """Look at both databases. Raises ConfigurationError if one cannot be reached."""
    with reach(settings.source_dsn, "source.dsn") as source:
        slot = slot_state(source, settings.source.slot)
    with reach(settings.target_dsn, "target.dsn") as target:
        installed = not migrations.pending(target, "target")
        cursors = offsets.all_cursors(target, settings.group) if installed else []
        dead = dead_letters.count(target, settings.group) if installed else 0
    return Status("wal", slot, cursors, dead)
