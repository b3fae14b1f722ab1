"""Reads from the two databases what metrics and health show, in threads and on connections of its own.

A poll is cheap: a row for each sink, slot and handler. The time of counting unread, deferred and dead events grows with
their number, so counts are repeated less often the longer they take, and only in a process that reads the source. A
database that does not answer, or a long count, does not delay the other polls.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Generic, TypeVar

import psycopg

from relay.admin.status import TargetState, if_countable, reading_outbox, target_state
from relay.config.settings import Settings
from relay.faults import describe, kind_of, spoils_session
from relay.model.events import Lsn
from relay.runtime.threads import Thread
from relay.source.outbox.applied import position_of_sink, position_of_target
from relay.source.outbox.unread import Backlog, UnreadRows
from relay.source.stream.slot import SlotState, slot_state
from relay.store import (
    clock,
    dead_letters,
    groups,
    log_readers,
    presence,
    queues,
    schedules,
)
from relay.store.connections import Connection, connect, require_writable_by_default
from relay.store.deferred import selection as deferred_selection
from relay.store.log_readers import ReaderRow
from relay.store.positions import sinks
from relay.store.queues import QueueFigures
from relay.store.schedules import ScheduleFigures

log = logging.getLogger(__name__)

Readings = TypeVar("Readings")

APPLICATION_NAME = "relay observe"
STATEMENT_SECONDS = 5
"""`statement_timeout` of polls and counts."""
ANSWER_SECONDS = 5.0
"""Longest wait for a poll; the readings of a database that takes longer are unknown."""
COUNT_SECONDS = 10.0
"""Shortest interval between two counts."""
COUNTING_SHARE = 0.05
"""Largest share of the time that counting takes."""
_TIMEOUTS: Mapping[str, Any] = {
    "keepalives_idle": 5,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 20_000,
}
"""Options of libpq by which a connection to a vanished peer fails within 20 s."""


@dataclass(frozen=True, slots=True)
class TargetReadings:
    """Readings of the target.

    Of the server processes that a probe names, `active` are those that run a statement, and `began` is when the last
    statement of each began or ended.
    """

    state: TargetState
    recreations: int
    active: frozenset[int]
    began: Mapping[int, datetime]


@dataclass(frozen=True, slots=True)
class SourceReadings:
    """Readings of the source. `end` is the end of its WAL, None on a standby."""

    slot: SlotState | None
    safe_bytes: int | None
    end: Lsn | None


@dataclass(frozen=True, slots=True)
class Counted:
    """Counts; None, or missing, if a count takes too long or is not possible.

    The age of the oldest unread event does not grow until the next count, since the event may be read meanwhile.
    """

    target: Backlog | None = None
    sinks: Mapping[str, Backlog] = field(default_factory=dict)
    deferred: list[deferred_selection.DeferredCount] | None = None
    keys: Mapping[str, int] | None = None
    dead: Mapping[tuple[str, str], int] | None = None
    queues: list[QueueFigures] | None = None
    schedules: list[ScheduleFigures] | None = None
    readers: list[ReaderRow] | None = None
    at: datetime | None = None
    """When they were counted, by the target's clock."""


@dataclass(slots=True, eq=False)
class Probe(Generic[Readings]):
    """The last poll of a database: its readings, when it succeeded (monotonic clock, seconds), or why it failed.

    `readings` is None while they are unknown. `thread` runs the poll.
    """

    readings: Readings | None = None
    succeeded: float | None = None
    fault: str | None = None
    thread: Thread | None = None

    def is_up(self, within: float) -> bool:
        """Return whether the last poll succeeded, `within` so many seconds."""
        if self.succeeded is None or self.fault is not None:
            return False
        return time.monotonic() - self.succeeded <= within


class Databases:
    """Reads both databases. One thread calls `probe`; any thread may read the results.

    `counted` is None while the counts are unknown.
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
        """The readings of the source; None while they are unknown."""
        return self.source.readings

    @property
    def target_readings(self) -> TargetReadings | None:
        """The readings of the target; None while they are unknown."""
        return self.target.readings

    def close(self) -> None:
        """Close the connections, unless a thread still uses one."""
        self._counts = False
        if any(map(_runs, (self.source.thread, self.target.thread, self._counting))):
            return
        for conn in self._connections.values():
            conn.close()

    def probe(self, pids: Iterable[int], counts: bool) -> None:
        """Poll both databases; `pids` are sessions of the target to read, `counts` says whether this process counts."""
        ends = time.monotonic() + ANSWER_SECONDS
        self._start(self.target, self._read_target, list(pids))
        self._start(self.source, self._read_source)
        for probe in (self.target, self.source):
            self._await(probe, ends)
        self._counts = counts
        if not counts or None in (self.target_readings, self.source_readings):
            self.counted = None
            return
        if time.monotonic() >= self._next_count and not _runs(self._counting):
            self._counting = Thread(self._count, name="observe counts")
            self._counting.start()

    def _start(
        self, probe: Probe[Readings], read: Callable[..., Readings], *arguments: object
    ) -> None:
        """Poll a database, unless the last poll is still under way."""
        if not _runs(probe.thread):
            probe.thread = Thread(self._poll, name="observe polls", args=(probe, read, *arguments))
            probe.thread.start()

    def _await(self, probe: Probe[Any], ends: float) -> None:
        assert probe.thread is not None  # noqa: S101
        probe.thread.join(max(0.0, ends - time.monotonic()))
        if probe.thread.is_alive():
            probe.readings = None

    def _poll(
        self, probe: Probe[Readings], read: Callable[..., Readings], *arguments: object
    ) -> None:
        try:
            probe.readings = read(*arguments)
        except psycopg.Error as error:
            probe.readings, probe.fault = None, describe(error)
            log.debug("cannot poll a database", extra={"fault": probe.fault})
            return
        except Exception as error:
            probe.readings, probe.fault = None, kind_of(error)
            log.exception("cannot observe the databases")
            return
        probe.succeeded, probe.fault = time.monotonic(), None

    @contextmanager
    def _connected(self, of: str, use: str = "polls") -> Any:
        """Yield the connection to a database for one use; a broken one is closed."""
        conn = self._connections.get((of, use))
        if conn is None or conn.closed:
            dsn = self._settings.source_dsn if of == "source" else self._settings.target_dsn
            conn = connect(dsn, application_name=APPLICATION_NAME, **_TIMEOUTS)
            self._connections[of, use] = conn
            conn.execute(
                f"set statement_timeout = '{STATEMENT_SECONDS}s'; set lock_timeout = '1s';"
                " set default_transaction_read_only = on".encode()
            )
        try:
            yield conn
        except psycopg.errors.QueryCanceled:
            raise
        except psycopg.Error as error:
            if conn.broken or spoils_session(error):
                conn.close()
            raise

    def _read_target(self, pids: list[int]) -> TargetReadings:
        with self._connected("target") as conn:
            require_writable_by_default(conn)
            activity = conn.execute(
                "select pid, state in ('active', 'fastpath function call'), greatest(query_start, state_change)"
                " from pg_stat_activity where pid = any(%s)",
                (pids,),
            ).fetchall()
            return TargetReadings(
                target_state(conn, self._settings),
                groups.recreations(conn, self._settings.group),
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
        """Count, and schedule the next count so that counting takes COUNTING_SHARE of the time at most."""
        began = time.monotonic()
        counted = None
        try:
            counted = self._counted()
        except psycopg.Error as error:
            log.debug("cannot count", extra={"fault": describe(error)})
        except Exception:
            log.exception("cannot observe the databases")
        took = time.monotonic() - began
        self._next_count = began + max(COUNT_SECONDS, took / COUNTING_SHARE)
        if self._counts:
            # What could not be counted is unknown: an old lag of 0 would hide that nothing is applied.
            self.counted = counted

    def _counted(self) -> Counted:
        """Return the counts. Raises psycopg.OperationalError."""
        group, own = self._settings.group, self._settings.source.owns_table
        with (
            self._connected("target", "counts") as target,
            self._connected("source", "counts") as source,
        ):
            return Counted(
                if_countable(self._unread, source, target),
                if_countable(self._unread_of_sinks, source, target) or {},
                if_countable(deferred_selection.count_by_kind, target, group),
                if_countable(deferred_selection.count_keys, target, group),
                if_countable(dead_letters.count_by_handler, target, group),
                if_countable(queues.figures, target, group),
                if_countable(schedules.figures, source) if own else None,
                if_countable(log_readers.listed, source) if own else None,
                clock.present(target),
            )

    def _unread(self, source: Connection, target: Connection) -> Backlog | None:
        applied = position_of_target(target, self._settings.group)
        return self._rows.count(source, applied) if applied.positions else None

    def _unread_of_sinks(self, source: Connection, target: Connection) -> dict[str, Backlog]:
        """Count the unread events of each configured sink that the stream does not feed."""
        group, configured = self._settings.group, self._settings.sink_handlers
        stored = sinks.read(target, group, configured)
        counts = {
            each.sink: if_countable(self._rows.count, source, position_of_sink(target, group, each))
            for each in reading_outbox(stored, presence.instances(target, group))
            if each.sink in configured
        }
        return {sink: count for sink, count in counts.items() if count is not None}


def _runs(thread: Thread | None) -> bool:
    return thread is not None and thread.is_alive()
