"""Polls a group at little cost to its databases: it keeps its connections and bounds the time of its statements."""

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
from relay.source.stream.slot import SlotState, slot_reader, slot_state
from relay.store import (
    brakes,
    dead_letters,
    engines,
    groups,
    migrations,
    presence,
)
from relay.store.connections import Connection, Dsn, connect
from relay.store.deferred import counts as deferred_counts
from relay.store.positions import offsets, sinks, snapshots

T = TypeVar("T")

STATEMENT_TIMEOUT = "2s"
REST_FACTOR = 20
"""A query that reads many rows rests for so many times its duration, and so takes a twentieth of the time at most."""
_SHORT_TIMEOUTS: Mapping[str, Any] = {
    "tcp_user_timeout": 5_000,
    "keepalives_idle": 5,
    "keepalives_interval": 2,
    "keepalives_count": 3,
}
"""Options of libpq by which a connection to a server that does not answer fails within seconds."""


@dataclass(frozen=True, slots=True)
class Observation:
    """The state of a group at one moment, `completed` by this machine's clock.

    `faults` says why a database could not be read, by configuration key; its fields then keep their last values. None
    stands for a value that was never read, or takes too long to read. `unread` has the backlog of the target ('') and
    of each sink that polls the outbox.
    """

    group: str
    completed: datetime
    faults: Mapping[str, str] = field(default_factory=dict)
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
    """A query that reads many rows: it is repeated only after its rest; until then its last result is returned."""

    def __init__(self, query: Callable[..., T]) -> None:
        self._query = query
        self._due = 0.0
        self._result: T | None = None

    def __call__(self, *arguments: Any) -> T | None:
        """Return the result; None if the query exceeded `statement_timeout`. Raises psycopg.Error."""
        begun = time.monotonic()
        if begun >= self._due:
            self._result = None
            with suppress(psycopg.errors.QueryCanceled):
                self._result = self._query(*arguments)
            ended = time.monotonic()
            self._due = ended + REST_FACTOR * (ended - begun)
        return self._result


class Watch:
    """Polls a group on a connection to each of its databases. For one thread at a time."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._group = settings.group
        self._source: Connection | None = None
        self._target: Connection | None = None
        self._seen: dict[str, Any] = {}
        self._faults: dict[str, str] = {}
        self._deferred = _Throttled(deferred_counts.count)
        self._dead = _Throttled(dead_letters.count_by_handler)
        self._backlogs = Backlogs(settings)
        self._unread: dict[str, _Throttled[Backlog | None]] = {}

    def read(self) -> Observation:
        """Query both databases. A fault of one is part of the result; the next poll connects again."""
        self._faults = {}
        self._guarded("target.dsn", self._read_target)
        self._guarded("source.dsn", self._read_source)
        return Observation(self._group, datetime.now(UTC), dict(self._faults), **self._seen)

    def close(self) -> None:
        """Close the connections."""
        for conn in (self._source, self._target):
            if conn is not None:
                conn.close()
        self._source = self._target = None

    def _guarded(self, key: str, read: Callable[[], None]) -> None:
        try:
            read()
        except psycopg.Error as error:
            self._faults[key] = first_line(error).removeprefix("connection failed: ")
            self._drop(key)
        except ConfigurationError as error:
            self._faults[key] = first_line(error).removeprefix(f"{key}: ")
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
        state = groups.read(conn, group)
        stored = sinks.read(conn, group, self._settings.sink_handlers)
        self._seen |= {
            "mode": mode_of(self._settings, state),
            "reason": state and state.source_reason,
            "since": state and state.source_since,
            "active": state.active(running) if state else None,
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
        """Return the backlogs of the target and of lagging sinks; none while the target cannot be read."""
        if self._target is None:
            return {}
        backlogs = {}
        names = ["", *(each.sink for each in self._seen["sinks"] if self._reads_outbox(each))]
        for name in names:
            count = self._unread.setdefault(name, _Throttled(self._count))
            try:
                backlog = count(source, name)
            except (psycopg.errors.UndefinedColumn, psycopg.errors.UndefinedTable):
                continue
            if backlog is not None:
                backlogs[name] = backlog
        self._unread = {name: self._unread[name] for name in names}
        return backlogs

    def _reads_outbox(self, sink: sinks.StoredSink) -> bool:
        """Return whether the sink has a position in the outbox, and the stream does not feed it."""
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


def _opened(dsn: Dsn, sides: Sequence[migrations.Side], key: str) -> Connection:
    """Return a read-only connection to a database whose schema is this program's.

    Raises ConfigurationError, psycopg.Error.
    """
    conn = connect(dsn, **_SHORT_TIMEOUTS)
    try:
        conn.execute(
            f"set statement_timeout = '{STATEMENT_TIMEOUT}'; set default_transaction_read_only = on".encode()
        )
        for side in sides:
            migrations.require(conn, side, key)
    except BaseException:
        conn.close()
        raise
    return conn
