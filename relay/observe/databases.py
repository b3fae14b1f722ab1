"""What metrics and health show of the two databases: read by threads of their own, on connections of their own.

A look is cheap: a row for each sink, slot and handler. Counts of what is unread, deferred and dead take as long as
there is much of it, so they are read seldom where they take long, and only by a process that reads the source. A
database that does not answer, and a count that takes long, keep nobody waiting who looks at something else.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Generic, TypeVar

import psycopg

from relay.config.settings import Settings
from relay.faults import RelayError, describe, kind_of
from relay.model.events import Lsn
from relay.source.applied import applied_in
from relay.source.slot import SlotState, slot_state
from relay.source.unread import UnreadRows
from relay.store import (
    brakes,
    dead_letters,
    deferred_counts,
    groups,
    presence,
    sinks,
    snapshots,
)
from relay.store.connections import Connection, connect, pin_text_form
from relay.threads import Thread

log = logging.getLogger(__name__)

Found = TypeVar("Found")

APPLICATION_NAME = "relay observe"
STATEMENT_SECONDS = 5
"""How long a statement may take: what takes longer is not shown."""
ANSWER_SECONDS = 5.0
"""Seconds to wait for an answer: of a database that has not answered by then, nothing is shown."""
COUNT_SECONDS = 10.0
"""How often is counted, at most."""
COUNTING_SHARE = 0.05
"""The share of the time that counting may take."""
_REACH = {
    "keepalives_idle": 5,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 20_000,
}
"""Within 20 s it is known that the peer has vanished."""


@dataclass(frozen=True, slots=True)
class TargetReadings:
    """What the target showed. `active` are the server processes, of those asked for, that work on a statement.

    `began` is when the last statement of each began or ended.
    """

    group: groups.GroupState | None
    recreations: int
    instances: list[str]
    sinks: list[sinks.StoredSink]
    stopped: list[str]
    active: frozenset[int]
    began: Mapping[int, datetime]


@dataclass(frozen=True, slots=True)
class SourceReadings:
    """What the source showed. `end` is the position of its WAL, None of a standby."""

    slot: SlotState | None
    safe_bytes: int | None
    end: Lsn | None


@dataclass(frozen=True, slots=True)
class Unread:
    """How many events a reader has not had, and how old the oldest was when they were counted, in seconds.

    An age that grew until the next count would be that of an event which may be long applied.
    """

    events: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Counted:
    """What takes long to count; None, or missing, where it took too long or cannot be told."""

    target: Unread | None = None
    sinks: Mapping[str, Unread] = field(default_factory=dict)
    deferred: list[deferred_counts.Count] | None = None
    keys: Mapping[str, int] | None = None
    dead: Mapping[tuple[str, str], int] | None = None


@dataclass(slots=True, eq=False)
class Probe(Generic[Found]):
    """The last poll of a database: what it found, when it succeeded (monotonic clock, seconds), or why it failed.

    `found` is None while nothing is known; `asking` is the thread that looks.
    """

    found: Found | None = None
    succeeded: float | None = None
    fault: str | None = None
    asking: Thread | None = None

    def is_up(self, within: float) -> bool:
        """Whether it succeeded last, not longer ago than so many seconds."""
        if self.succeeded is None or self.fault is not None:
            return False
        return time.monotonic() - self.succeeded <= within


class Databases:
    """Reads both databases. `look` is for one thread; what it finds may be read in any.

    `counted` is None while nothing is known.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._rows = UnreadRows(settings)
        self._connections: dict[tuple[str, str], Connection] = {}
        self._counts = False
        self._counting: Thread | None = None
        self._next_count = 0.0
        self.source: Probe[SourceReadings] = Probe()
        self.target: Probe[TargetReadings] = Probe()
        self.counted: Counted | None = None

    @property
    def source_readings(self) -> SourceReadings | None:
        """What the last poll of the source found; None while nothing is known."""
        return self.source.found

    @property
    def target_readings(self) -> TargetReadings | None:
        """What the last poll of the target found; None while nothing is known."""
        return self.target.found

    def close(self) -> None:
        """Close the connections, but those on which something is still asked."""
        self._counts = False
        if any(map(_runs, (self.source.asking, self.target.asking, self._counting))):
            return
        for conn in self._connections.values():
            conn.close()

    def probe(self, pids: Iterable[int], counts: bool) -> None:
        """Read both; `pids` are sessions of the target to look at, `counts` says that this process counts."""
        ends = time.monotonic() + ANSWER_SECONDS
        self._ask(self.target, self._read_target, list(pids))
        self._ask(self.source, self._read_source)
        for probe in (self.target, self.source):
            self._await(probe, ends)
        self._counts = counts
        if not counts or None in (self.target_readings, self.source_readings):
            self.counted = None
            return
        if time.monotonic() >= self._next_count and not _runs(self._counting):
            self._counting = Thread(self._count, name="observe counts", daemon=True)
            self._counting.start()

    def _ask(self, probe: Probe[Found], read: Callable[..., Found], *arguments: object) -> None:
        """Poll a database, unless the last poll is still under way."""
        if not _runs(probe.asking):
            probe.asking = Thread(
                self._try, name="observe looks", args=(probe, read, *arguments), daemon=True
            )
            probe.asking.start()

    def _await(self, probe: Probe[Any], ends: float) -> None:
        assert probe.asking is not None  # noqa: S101
        probe.asking.join(max(0.0, ends - time.monotonic()))
        if probe.asking.is_alive():
            probe.found = None

    def _try(self, probe: Probe[Found], read: Callable[..., Found], *arguments: object) -> None:
        try:
            probe.found = read(*arguments)
        except psycopg.Error as error:
            probe.found, probe.fault = None, describe(error)
            log.debug("cannot look at a database", extra={"fault": probe.fault})
            return
        except Exception as error:
            probe.found, probe.fault = None, kind_of(error)
            log.exception("cannot observe")
            return
        probe.succeeded, probe.fault = time.monotonic(), None

    @contextmanager
    def _connected(self, of: str, use: str = "looks") -> Any:
        """The connection to a database for one use, closed where it is of no use any more."""
        conn = self._connections.get((of, use))
        if conn is None or conn.closed:
            dsn = self._settings.source_dsn if of == "source" else self._settings.target_dsn
            conn = connect(dsn, application_name=APPLICATION_NAME, **_REACH)
            self._connections[of, use] = conn
            pin_text_form(conn)
            conn.execute(
                f"set statement_timeout = '{STATEMENT_SECONDS}s'; set lock_timeout = '1s';"
                " set default_transaction_read_only = on".encode()
            )
        try:
            yield conn
        except psycopg.errors.QueryCanceled:
            raise
        except psycopg.Error:
            if conn.broken:
                conn.close()
            raise

    def _read_target(self, pids: list[int]) -> TargetReadings:
        settings, group = self._settings, self._settings.group
        with self._connected("target") as conn:
            activity = conn.execute(
                "select pid, state in ('active', 'fastpath function call'), greatest(query_start, state_change)"
                " from pg_stat_activity where pid = any(%s)",
                (pids,),
            ).fetchall()
            return TargetReadings(
                groups.read(conn, group),
                groups.recreations(conn, group),
                presence.instances(conn, group),
                sinks.read(conn, group, settings.sink_handlers),
                [each.handler for each in brakes.braked(conn, group)],
                frozenset(pid for pid, works, _ in activity if works),
                {pid: began for pid, _, began in activity if began is not None},
            )

    def _read_source(self) -> SourceReadings:
        if self._settings.source.mode == "poll":
            with self._connected("source") as conn:
                conn.execute("select 1")
            return SourceReadings(None, None, None)
        with self._connected("source") as conn:
            slot = slot_state(conn, self._settings.source.slot)
            row = conn.execute(
                """
                select case when not pg_is_in_recovery() then pg_current_wal_lsn()::text end,
                       (select safe_wal_size from pg_replication_slots where slot_name = %s)
                """,
                (self._settings.source.slot,),
            ).fetchone()
            end, safe = row or (None, None)
            return SourceReadings(slot, safe, None if end is None else Lsn.parse(end))

    def _count(self) -> None:
        """Count, and rest after it for as long as that took many times over."""
        began = time.monotonic()
        found = None
        try:
            found = self._counted()
        except psycopg.Error as error:
            log.debug("cannot count", extra={"fault": describe(error)})
        except Exception:
            log.exception("cannot observe")
        took = time.monotonic() - began
        self._next_count = began + max(COUNT_SECONDS, took / COUNTING_SHARE)
        if self._counts and found is not None:
            self.counted = found

    def _counted(self) -> Counted:
        """Count what takes as long as there is much of it. Raises psycopg.OperationalError."""
        group = self._settings.group
        with (
            self._connected("target", "counts") as target,
            self._connected("source", "counts") as source,
        ):
            return Counted(
                _or_none(self._unread, source, target),
                _or_none(self._unread_of_sinks, source, target) or {},
                _or_none(deferred_counts.count_by_kind, target, group),
                _or_none(deferred_counts.count_keys, target, group),
                _or_none(dead_letters.count_by_handler, target, group),
            )

    def _unread(self, source: Connection, target: Connection) -> Unread | None:
        group = self._settings.group
        applied = applied_in(target, group)
        if not applied:
            return None
        found = self._rows.unread(source, applied, snapshots.noted(target, group))
        moments = [moment for _, moment in found.values() if moment is not None]
        return Unread(sum(count for count, _ in found.values()), age(min(moments, default=None)))

    def _unread_of_sinks(self, source: Connection, target: Connection) -> dict[str, Unread]:
        """Of the configured sinks that the stream does not feed."""
        found: dict[str, Unread] = {}
        configured = self._settings.sink_handlers
        running = presence.instances(target, self._settings.group)
        for each in sinks.read(target, self._settings.group, configured):
            if each.sink not in configured or each.position.snapshot is None:
                continue
            if each.is_fed(running):
                continue
            done = sinks.done(target, self._settings.group, each.sink)
            unread = _or_none(self._rows.unread_after, source, each.position, done)
            if unread is not None:
                events, oldest = unread
                found[each.sink] = Unread(events, age(oldest))
        return found


def _or_none(read: Callable[..., Found], *arguments: object) -> Found | None:
    """What is read; None where that takes too long, or the outbox does not tell it."""
    try:
        return read(*arguments)
    except psycopg.OperationalError as error:
        if not isinstance(error, psycopg.errors.QueryCanceled):
            raise
    except (psycopg.Error, RelayError) as error:
        log.debug("cannot count", extra={"fault": describe(error)})
    return None


def _runs(thread: Thread | None) -> bool:
    return thread is not None and thread.is_alive()


def age(moment: datetime | None) -> float:
    """How many seconds ago a moment was; 0 for none."""
    return 0.0 if moment is None else max(0.0, (datetime.now(UTC) - moment).total_seconds())
