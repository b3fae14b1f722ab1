"""Describes how this process reads the source at a moment, for the service, metrics and health.

The values are immutable and replaced as a whole, so that any thread may read them.
"""

from __future__ import annotations

from dataclasses import dataclass

from relay.model.events import Lsn
from relay.source.decode.assembler import OpenCommit

STREAMS, POLLS, STANDBY, ELSEWHERE = "wal", "poll", "standby", ""
"""What a process does: reads the slot, polls, is on standby while another process reads the slot, or cannot read."""


@dataclass(frozen=True, slots=True)
class NoStream:
    """Why there is no stream, and since when (monotonic clock). `certain` says that retries alone do not help."""

    reason: str
    since: float
    certain: bool


@dataclass(frozen=True, slots=True)
class StreamState:
    """The stream of the slot, as the thread that reads it has published it.

    `connections` counts how many times streaming has begun. `outage` says why there is no stream: None while there is
    one, or while another process reads the slot (`on_standby`). `stuck` is the commit that cannot be received, before
    which the stream stops. `incomplete`: the slot may lack commits, so that a difference is to be polled. `epoch` is
    the group's, `codec` that of the server's encoding, and `next_xid` the server's next full xid when the stream began
    or when it was last compared with the outbox.
    """

    connections: int = 0
    outage: NoStream | None = None
    on_standby: bool = False
    stuck: OpenCommit | None = None
    incomplete: bool = False
    epoch: int | None = None
    codec: str = "utf-8"
    next_xid: int = 0


@dataclass(frozen=True, slots=True)
class Received:
    """What was received. `silent` is the time since the last message in seconds, 0 without a connection.

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
