"""Looks at a group again and again, at little cost to the databases: connections are kept, statements are bounded."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Generic, TypeVar

import numpy as np
import psycopg

from relay.admin.connections import source_sides
from relay.admin.status import mode_of
from relay.config.settings import Settings
from relay.faults import ConfigurationError, first_line
from relay.source.applied import AppliedPosition, applied_in
from relay.source.backlog import Backlog, Backlogs
from relay.source.slot import SlotState, slot_reader, slot_state
from relay.store import (
    brakes,
    dead_letters,
    deferred_counts,
    engines,
    groups,
    migrations,
    offsets,
    presence,
    sinks,
    snapshots,
)
from relay.store.connections import Connection, connect, pin_text_form

T = TypeVar("T")

STATEMENT_TIMEOUT = "2s"
SHARE = 20
"""What reads many rows takes a twentieth of the time at most: it rests for so many times as long as it took."""
_IMPATIENT = {
    "tcp_user_timeout": 5_000,
    "keepalives_idle": 5,
    "keepalives_interval": 2,
    "keepalives_count": 3,
}
"""A server that answers no more is given up within seconds."""


@dataclass(frozen=True, slots=True)
class Picture:
    """A group at one moment. What could not be looked at is as it was seen last; `away` says why, by configuration key.

    None stands for what was never seen, or costs too much to find out. `taken` is when it was complete, by this
    machine's clock. `unread` has the backlog of the target (the key '') and of each sink that reads the outbox itself.
    """

    group: str
    taken: datetime
    away: Mapping[str, str] = field(default_factory=dict)
    mode: str | None = None
    reason: str | None = None
    since: datetime | None = None
    active: str | None = None
    instances: Sequence[str] = ()
    slot: SlotState | None = None
    slot_reader: str | None = None
    partitions: Sequence[offsets.PartitionPosition] = ()
    sinks: Sequence[sinks.StoredSink] = ()
    engines: Sequence[engines.EngineTotals] = ()
    stopped: Sequence[brakes.BrakedHandler] = ()
    deferred: deferred_counts.DeferredSummary | None = None
    dead: Mapping[tuple[str, str], int] | None = None
    unread: Mapping[str, Backlog] = field(default_factory=dict)


class _Throttled(Generic[T]):
    """A question that reads many rows: asked again only after it has rested; in between the last answer counts."""

    def __init__(self, ask: Callable[..., T]) -> None:
        self._ask = ask
        self._due = 0.0
        self.answer: T | None = None

    def __call__(self, *arguments: Any) -> T | None:
        """The answer; None where the server took too long for it. Raises psycopg.Error."""
        begun = time.monotonic()
        if begun >= self._due:
            self.answer = None
            with suppress(psycopg.errors.QueryCanceled):
                self.answer = self._ask(*arguments)
            ended = time.monotonic()
            self._due = ended + SHARE * (ended - begun)
        return self.answer


class Watch:
    """Keeps a connection to each database and looks at the group; not safe in several threads at once."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._group = settings.group
        self._source: Connection | None = None
        self._target: Connection | None = None
        self._seen: dict[str, Any] = {}
        self._away: dict[str, str] = {}
        self._deferred = _Throttled(deferred_counts.count)
        self._dead = _Throttled(dead_letters.count_by_handler)
        self._backlogs = Backlogs(settings)
        self._unread: dict[str, _Throttled[Backlog | None]] = {}

    def read(self) -> Picture:
        """Query both databases. A fault of one is part of the result, and the next poll connects again."""
        self._away = {}
        self._guarded("target.dsn", self._read_target)
        self._guarded("source.dsn", self._read_source)
        return Picture(self._group, datetime.now(UTC), dict(self._away), **self._seen)

    def close(self) -> None:
        """End the connections."""
        for conn in (self._source, self._target):
            if conn is not None:
                conn.close()
        self._source = self._target = None

    def _guarded(self, key: str, read: Callable[[], None]) -> None:
        try:
            read()
        except psycopg.Error as error:
            self._away[key] = first_line(error).removeprefix("connection failed: ")
            self._drop(key)
        except ConfigurationError as error:
            self._away[key] = first_line(error).removeprefix(f"{key}: ")
            self._drop(key)

    def _drop(self, key: str) -> None:
        conn = self._source if key == "source.dsn" else self._target
        if conn is not None:
            conn.close()
        if key == "source.dsn":
            self._source = None
        else:
            self._target = None

    def _read_target(self) -> None:
        if self._target is None:
            self._target = _opened(self._settings.target_dsn, ("target",), "target.dsn")
        conn, group = self._target, self._group
        partitions = offsets.initialised(conn, group)
        running = presence.instances(conn, group)
        found = groups.read(conn, group)
        stored = sinks.read(conn, group, self._settings.sink_handlers)
        self._seen |= {
            "mode": mode_of(self._settings, found),
            "reason": found and found.source_reason,
            "since": found and found.source_since,
            "active": found.active(running) if found else None,
            "instances": running,
            "partitions": partitions,
            "sinks": stored,
            "engines": engines.read(conn, group),
            "stopped": brakes.braked(conn, group),
            "deferred": self._deferred(conn, group),
            "dead": self._dead(conn, group),
        }

    def _read_source(self) -> None:
        if self._source is None:
            sides = source_sides(self._settings)
            self._source = _opened(self._settings.source_dsn, sides, "source.dsn")
        name = self._settings.source.slot
        reader = slot_reader(self._source, name)
        self._seen |= {
            "slot": slot_state(self._source, name),
            "slot_reader": None if reader is None else reader.removeprefix(groups.PREFIX),
        }
        self._seen["unread"] = self._count_unread(self._source)

    def _count_unread(self, source: Connection) -> dict[str, Backlog]:
        """What the target and the sinks that lag have not read. Nothing where positions cannot be read."""
        if self._target is None:
            return {}
        found = {}
        names = ["", *(each.sink for each in self._seen["sinks"] if self._reads_outbox(each))]
        for name in names:
            ask = self._unread.setdefault(name, _Throttled(self._count))
            try:
                backlog = ask(source, name)
            except (psycopg.errors.UndefinedColumn, psycopg.errors.UndefinedTable):
                continue
            if backlog is not None:
                found[name] = backlog
        self._unread = {name: self._unread[name] for name in names}
        return found

    def _reads_outbox(self, sink: sinks.StoredSink) -> bool:
        """Whether the sink has a position in the outbox and the stream does not bring it its events."""
        return sink.position.snapshot is not None and not sink.is_fed(self._seen["instances"])

    def _count(self, source: Connection, name: str) -> Backlog | None:
        target = self._target
        assert target is not None  # noqa: S101
        if not name:
            applied = applied_in(target, self._group)
            noted = snapshots.noted(target, self._group)
        else:
            applied = [_applied_position(each) for each in self._seen["sinks"] if each.sink == name]
            noted = sinks.done(target, self._group, name)
        if not applied:
            return None
        return self._backlogs.count(source, applied, np.sort(noted))


def _applied_position(sink: sinks.StoredSink) -> AppliedPosition:
    position = sink.position
    assert position.snapshot is not None  # noqa: S101
    following = position.following or position.snapshot
    return AppliedPosition(0, position.snapshot, following, position.polled_offset)


def _opened(dsn: str, sides: Sequence[migrations.Side], key: str) -> Connection:
    """A connection that only reads, with this program's schema. Raises ConfigurationError, psycopg.Error."""
    conn = connect(dsn, **_IMPATIENT)
    try:
        pin_text_form(conn)
        conn.execute(
            f"set statement_timeout = '{STATEMENT_TIMEOUT}'; set default_transaction_read_only = on".encode()
        )
        for side in sides:
            migrations.require(conn, side, key)
    except BaseException:
        conn.close()
        raise
    return conn
