"""Describes how this process reads the source at a moment, for metrics and health."""

from __future__ import annotations

from dataclasses import dataclass

from relay.model.events import Lsn

STREAMS, POLLS, STANDBY, ELSEWHERE = "wal", "poll", "standby", ""
"""What a process does: reads the slot, polls, is on standby while another process reads the slot, or cannot read."""


@dataclass(frozen=True, slots=True)
class Received:
    """The state of the stream. `silent` is the time since the last message in seconds, 0 without a connection.

    `oldest` is the time of the oldest commit that is not applied, in seconds since 1970; None if all are.
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
    """What this process does: `doing` is one of the constants above, `reason` says why it polls or cannot read.

    `takeovers` counts how often it began to read the slot after another process. `received` is None without a slot.
    """

    doing: str
    reason: str | None = None
    takeovers: int = 0
    received: Received | None = None
