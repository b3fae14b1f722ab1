"""Finds the position at which a new group begins: `relay init --from`."""

from __future__ import annotations

from dataclasses import dataclass

from relay.config.settings import Settings
from relay.faults import ConfigurationError
from relay.model.snapshots import BEGINNING, Snapshot
from relay.source.outbox.table import OutboxTable
from relay.source.server import current_position
from relay.store.connections import Connection
from relay.store.positions import offsets


@dataclass(frozen=True, slots=True)
class Start:
    """The position at which a new group begins: `beginning`, `now` or a c_offset; None if the user gave none."""

    asked: str | None

    def require_possible(self, target: Connection, settings: Settings) -> None:
        """Raise ConfigurationError if the group exists already, or cannot begin at this position."""
        if self.asked is None:
            return
        if offsets.partition_count(target, settings.group):
            raise ConfigurationError(
                f"--from: the group {settings.group!r} has begun already: move it with "
                f"`relay offsets seek --to {self.asked}`"
            )
        if self.asked not in ("beginning", "now") and not self.asked.isdecimal():
            raise ConfigurationError(
                f"--from: {self.asked!r} is neither beginning, now, nor a c_offset"
            )
        if settings.source.mode == "wal" and self.asked != "now":
            raise ConfigurationError(
                "--from: rows older than the slot are read by polling, which source.mode: wal rules out: set it to auto"
            )

    def chain(self, source: Connection, settings: Settings) -> tuple[list[Snapshot], int]:
        """Return the snapshots with which the group begins, and the c_offset up to which it skips their difference.

        There are no snapshots if only the WAL is read. Raises ConfigurationError if rows have no c_offset.
        """
        if settings.source.mode == "wal":
            return [], offsets.FIRST
        now = current_position(source).snapshot
        if self.asked in (None, "now"):
            return [now], offsets.FIRST
        OutboxTable(settings).require_offsets(source, "run `relay init` again")
        first = offsets.FIRST if self.asked == "beginning" else int(self.asked or 1) - 1
        return [BEGINNING, now], first

    def __str__(self) -> str:
        if self.asked is None:
            return "now"
        return f"c_offset {self.asked}" if self.asked.isdecimal() else self.asked
