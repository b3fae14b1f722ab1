"""Compares the timeline histories of servers: up to which position two of them share WAL. No I/O.

Source: PostgreSQL's `src/backend/access/transam/timeline.c`, which writes and reads `pg_wal/*.history`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import pairwise

from relay.model.events import Lsn

_SWITCH = re.compile(r"\s*(\d+)\s+([0-9A-Fa-f]{1,8}/[0-9A-Fa-f]{1,8})(?:\s|$)", re.ASCII)


@dataclass(frozen=True, slots=True)
class TimelineSwitch:
    """A former timeline, and the position at which the server left it."""

    timeline: int
    position: Lsn


@dataclass(frozen=True, slots=True)
class TimelineHistory:
    """A server's timeline, and its former timelines, oldest first."""

    timeline: int
    switches: tuple[TimelineSwitch, ...] = ()

    @classmethod
    def parse(cls, timeline: int, text: str) -> TimelineHistory:
        """Parse a timeline's history file: parent, switch point and reason in a line; blank lines; # comments.

        Raises ValueError for a malformed file.
        """
        lines = (line for line in text.splitlines() if line.strip())
        switches = tuple(_switch(line) for line in lines if not line.lstrip().startswith("#"))
        order = [switch.timeline for switch in switches] + [timeline]
        if any(later <= former for former, later in pairwise(order)):
            raise ValueError(f"the history of timeline {timeline} is out of sequence: {order}")
        return cls(timeline, switches)

    def __str__(self) -> str:
        """The history in the form that `parse` reads."""
        return "".join(f"{each.timeline}\t{each.position}\n" for each in self.switches)

    @property
    def timelines(self) -> frozenset[int]:
        """Every timeline of the history."""
        return frozenset(each.timeline for each in self.switches) | {self.timeline}

    def since(self, timeline: int) -> TimelineHistory:
        """The history from a timeline on, without those before it."""
        switches = tuple(each for each in self.switches if each.timeline >= timeline)
        return TimelineHistory(self.timeline, switches)

    def shared_until(self, other: TimelineHistory) -> Lsn | None:
        """The position up to which both histories share WAL; None if both are on the same timeline."""
        shared = Lsn(0)
        for ours, theirs in zip(self._segments(), other._segments(), strict=False):
            if ours[0] != theirs[0]:
                return shared
            if ours[1] != theirs[1]:
                return min(end for end in (ours[1], theirs[1]) if end is not None)
            shared = ours[1] or shared
        return None

    def _segments(self) -> list[tuple[int, Lsn | None]]:
        """Each timeline, and the position at which it was left; None for the current one."""
        return [*((each.timeline, each.position) for each in self.switches), (self.timeline, None)]


def _switch(line: str) -> TimelineSwitch:
    match = _SWITCH.match(line)
    if match is None:
        raise ValueError(f"{line!r} is not a line of a timeline's history")
    return TimelineSwitch(int(match[1]), Lsn.parse(match[2]))
