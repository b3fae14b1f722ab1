"""How this process reads the source at a moment: what metrics and health show of it."""

from __future__ import annotations

from dataclasses import dataclass

from relay.model.events import Lsn

STREAMS, POLLS, STANDBY, ELSEWHERE = "wal", "poll", "standby", ""
"""What a process does: reads the slot, polls, stands by while another process reads the slot, or cannot read."""


@dataclass(frozen=True, slots=True)
class Received:
    """What the stream has brought. `silent` is for how many seconds nothing came that was waited for.

    `oldest` is when the oldest commit happened that is not applied, in seconds since 1970; None if all are.
    """

    connected: bool
    silent: float
    position: Lsn
    buffered_bytes: int
    buffered_events: int
    oldest: float | None
    connections: int


@dataclass(frozen=True, slots=True)
class SourceState:
    """`doing` is one of the constants above, `reason` why it polls or cannot read.

    `takeovers` counts how often it has begun to read a slot that it had waited for. `received` is None without a slot.
    """

    doing: str
    reason: str | None = None
    takeovers: int = 0
    received: Received | None = None
