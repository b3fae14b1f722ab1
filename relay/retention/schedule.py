"""Runs retention in a thread: notes how far the group's readers are, and removes what all readers are past."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime, timedelta

import psycopg

from relay.config.settings import Settings
from relay.faults import ConfigurationError, describe
from relay.retention import partitions, reader_positions
from relay.runtime.parts import Condition, Recurring
from relay.source.server import is_standby
from relay.store import actions, attempts, clock, completeness, locks
from relay.store.connections import (
    APPLICATION_NAME,
    Connection,
    asking_both,
    connect,
    sessions_with,
)
from relay.store.positions import offsets, sinks
from relay.store.session_settings import LOCK_TIMEOUT

log = logging.getLogger(__name__)


NOTE_SECONDS = 5.0
"""The interval at which positions are noted in the source; twice as long while no position moves."""
FIRST_SECONDS = 1.0
"""After how long that is done first: relay has other things to do when it starts."""
ROTATE_SECONDS = 60.0
"""The interval at which partitions are created and events removed."""
_PRUNE_PORTION = 10_000
_REMOVE_DONE = """
    delete from relay.queue_done where ctid = any (array(
        select d.ctid
          from relay.queues as q
          cross join lateral (
               select o.ctid from relay.queue_done as o
                where o.queue_id = q.id and o.done_at <= now() - coalesce(q.keep_done, '0 s')
                order by o.done_at limit %s) as d
         where q.group_id = %s))
"""
_REMOVE_ENDED = """
    delete from relay.sagas where id = any (array(
        select d.id
          from relay.queues as q
          cross join lateral (
               select s.id from relay.sagas as s
                where s.saga = q.name and s.ended_at <= now() - coalesce(q.keep_done, '0 s')
                order by s.ended_at limit %s) as d
         where q.group_id = %s))
"""
_REMOVE_ORPHANS = "select relay.remove_orphans(%s)"
_REMOVE_CANCELLATIONS = """
    delete from relay.cancellations where ctid = any (array(
        select c.ctid from relay.cancellations as c
         where c.noted_at < now() - interval '7 days'
           and not exists (select from relay.deferred as d where d.event_ids @> array[c.event_id])
         order by c.noted_at limit %s for update skip locked))
"""


class Schedule(Recurring):
    """Runs retention in a thread, with connections of its own. After a fault it goes on with the next step or turn.

    `failed` is called once, with `error` set, if the group was given up. `clock` returns the time of the source.
    """

    def __init__(
        self,
        settings: Settings,
        failed: Callable[[], None],
        clock: Callable[[Connection], datetime] = clock.present,
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._next_rotation = 0.0
        self._connections: tuple[Connection, Connection] | None = None
        self._faults: list[str] = []
        self._superseded = offsets.Superseded(settings.group)
        self._upkeep = partitions.Upkeep(settings.source.table)
        self._on_standby = False
        condition = Condition(
            "retention",
            log,
            "retention fails and is retried",
            "retention works again",
        )
        super().__init__(
            condition,
            failed,
            first_pause=FIRST_SECONDS,
            ends_at_stop=True,
            close_seconds=5.0,
        )

    def start(self) -> None:
        """Start the thread; pause sinks that were given up. Raises ConfigurationError if the group was given up."""
        of = self._settings
        with (
            suppress(psycopg.Error),  # the thread tries again
            asking_both(of.source_dsn, of.target_dsn) as (source, target),
        ):
            self._stop_given_up(target, reader_positions.given_up(source, target, of.group))
        super().start()

    def turn(self) -> float:
        """Run retention once, on connections that are kept until a fault."""
        of = self._settings
        try:
            if self._connections is None:
                # A step that waits for a row of somebody's open transaction fails, and the others are done.
                with sessions_with({"lock_timeout": LOCK_TIMEOUT}):
                    self._connections = _connect(of)
            has_moved = self.retain(*self._connections)
        except psycopg.errors.ReadOnlySqlTransaction:
            opened = self._connections
            if opened is None or opened[0].broken or not is_standby(opened[0]):
                self._disconnect()
                raise
            self._disconnect()
            # No fault: the events are on the primary, where they are removed.
            self.condition.works()
            if not self._on_standby:
                log.info("retention waits until the source, a standby, is promoted")
            self._on_standby = True
        except BaseException:
            self._disconnect()
            raise
        else:
            self._on_standby = False
            return NOTE_SECONDS if has_moved else 2 * NOTE_SECONDS
        return NOTE_SECONDS

    def release(self) -> None:
        """Close the connections."""
        self._disconnect()

    def _disconnect(self) -> None:
        connections, self._connections = self._connections, None
        for each in connections or ():
            each.close()

    def retain(self, source: Connection, target: Connection) -> bool:
        """Delete superseded positions, and note the newest; each minute, remove what all readers are past.

        Returns whether there were superseded ones. Raises psycopg.Error, RelayError.
        """
        of = self._settings
        superseded = self._superseded.delete(target)
        noted, given_up = reader_positions.note(source, target, of.group, of.source.table)
        self._stop_given_up(target, given_up)
        now = time.monotonic()
        if now >= self._next_rotation:
            self._next_rotation = now + ROTATE_SECONDS
            self._remove(source, target, noted)
        if not self._faults:
            self.condition.works()
        return superseded > 0

    def _remove(self, source: Connection, target: Connection, noted: list[str]) -> None:
        """Create partitions, and remove what all readers are past; a step that fails is reported."""
        self._faults = []
        with self._step("history", target):
            self._prune(target)
        with self._step("done messages of queues", target):
            self._remove_done(target, _REMOVE_DONE)
        with self._step("sagas that have ended", target):
            self._remove_done(target, _REMOVE_ENDED)
        with self._step("messages of queues that were dropped", target):
            self._remove_orphans(target)
        with self._step("cancellations", target):
            self._remove_cancellations(target)
        with self._step("attempts", target):
            of = self._settings
            attempts.prune(target, of.group, of.attempts)
        key = locks.retention(self._settings.source.table)
        if locks.try_lock(source, key):
            try:
                self._rotate(source, target, noted)
            finally:
                if not source.broken:
                    locks.unlock(source, key)
        if self._faults:
            more = f"; and {len(self._faults) - 1} more" if len(self._faults) > 1 else ""
            self.condition.fails(f"{self._faults[0]}{more}")

    @contextmanager
    def _step(self, what: str, conn: Connection) -> Iterator[None]:
        """Record a fault of a step, so that the others are done; raises it if the connection is lost."""
        try:
            yield
        except psycopg.errors.ReadOnlySqlTransaction:
            # A standby, until it is promoted, or a server whose disk is full; a new session finds out.
            raise
        except psycopg.Error as error:
            if conn.broken:
                raise
            self._faults.append(f"{what}: {describe(error)}")

    def _rotate(self, source: Connection, target: Connection, noted: list[str]) -> None:
        of, present = self._settings.retention, self._clock(source)
        self._maintain(source, target, "readers", present, None)
        if partitions.retained(source, self._settings.source.table) is None:
            return
        if self._give_up(source, target, present):
            # The process that runs the reader stops it at its next turn, before events are removed.
            return
        if of.keep is not None and self._is_archived(target, noted):
            self._maintain(source, target, "drop", present, of.keep)

    def _maintain(
        self,
        source: Connection,
        target: Connection,
        first: str,
        present: datetime,
        keep: timedelta | None,
    ) -> None:
        """Take the steps of the outbox's upkeep from one on, and report what they have done."""
        found = dict[str, list[str]]()
        ahead, stopping = self._settings.retention.ahead, self.stopping.is_set
        steps = self._upkeep.steps(source, first, present, keep, ahead, stopping)
        with self._step("upkeep", source):
            for step, done, fault in steps:
                if done is not None:
                    found.setdefault(step, []).append(done)
                if fault is not None:
                    self._faults.append(fault)
        for name in "\n".join(found.get("readers", ())).splitlines():
            actions.record(target, self._settings.group, "", "give up", "expires", {"reader": name})
            log.warning(
                "a reader has expired: events are no longer kept for it", extra={"reader": name}
            )
        if created := found.get("partitions"):
            log.info("partitions created", extra={"partitions": ", ".join(created)})
        for repaired in found.get("exchange", ()):
            log.warning(
                "the default partition had rows, because no partition existed for their time",
                extra={"partition": repaired},
            )
        if dropped := found.get("drop"):
            log.info("partitions dropped", extra={"partitions": ", ".join(dropped)})
        if deleted := found.get("delete"):
            log.info("events deleted", extra={"events": sum(map(int, deleted))})

    def _is_archived(self, target: Connection, noted: list[str]) -> bool:
        """Whether the archive, if there is one, has begun, and has not lost what was written to it."""
        archive = self._settings.retention.archive
        if archive is None:
            return True
        return archive in noted and not completeness.is_lost(target, self._settings.group, archive)

    def _give_up(self, source: Connection, target: Connection, present: datetime) -> bool:
        """Give up the readers that lag by more than max_lag, except the archive; returns whether there were any."""
        of = self._settings
        readers = reader_positions.readers(source, of)
        any_given_up = False
        for each in reader_positions.lagging(readers, present, of.retention.max_lag):
            if each.reader and each.reader == of.retention.archive and each.group_id == of.group:
                continue
            if not reader_positions.give_up(source, each):
                self._faults.append(
                    f"the reader {each.name} cannot be given up: another session has it in an open transaction"
                )
                continue
            any_given_up = True
            detail = {"group": each.group_id, "unread_since": str(each.unread_since)}
            actions.record(target, of.group, each.reader, "give up", "retention.max_lag", detail)
            log.error(
                "a reader was given up: events are no longer kept for it",
                extra={"reader": each.name},
            )
        return any_given_up

    def _stop_given_up(self, target: Connection, names: list[str]) -> None:
        """Pause the sinks that were given up. Raises ConfigurationError if the group itself was."""
        group = self._settings.group
        _require_other_than_group(names, group)
        for name in names:
            if sinks.pause(target, group, name, True, GIVEN_UP):
                log.error("a sink was paused: retention has given it up", extra={"sink": name})

    def _prune(self, target: Connection) -> None:
        before = clock.present(target) - self._settings.retention.keep_letters
        target.execute(
            "select relay.prune_history(%s, %s, %s)", (self._settings.group, before, _PRUNE_PORTION)
        )

    def _remove_done(self, target: Connection, statement: str) -> None:
        """Remove what is done and older than its queue's `keep_done`, in portions."""
        group, removed = self._settings.group, _PRUNE_PORTION
        while removed >= _PRUNE_PORTION and not self.stopping.is_set():
            with target.transaction():
                # Row locks would need a right to update, which nobody has.
                if not locks.try_lock_in_transaction(target, locks.done(group)):
                    return
                removed = target.execute(statement.encode(), (_PRUNE_PORTION, group)).rowcount

    def _remove_orphans(self, target: Connection) -> None:
        """Remove what tasks and workers that knew a queue have left for it since it was dropped, in portions."""
        removed = 1
        while removed and not self.stopping.is_set():
            (removed,) = target.execute(_REMOVE_ORPHANS, (_PRUNE_PORTION,)).fetchone() or (0,)

    def _remove_cancellations(self, target: Connection) -> None:
        """Remove cancellations of a week ago but those of events that are still deferred, a portion of them."""
        target.execute(_REMOVE_CANCELLATIONS, (_PRUNE_PORTION,))


def _connect(of: Settings) -> tuple[Connection, Connection]:
    """Connect to source and target, once where they are configured as one database."""
    source = connect(of.source_dsn, application_name=APPLICATION_NAME)
    if of.source_dsn == of.target_dsn:
        return source, source
    try:
        return source, connect(of.target_dsn, application_name=APPLICATION_NAME)
    except BaseException:
        source.close()
        raise


GIVEN_UP = "given up by retention: events may be gone; choose where to go on with `relay sink seek`"


def require_not_given_up(source: Connection, target: Connection, group: str) -> None:
    """Raise ConfigurationError if retention has given up the group. Raises psycopg.Error."""
    _require_other_than_group(reader_positions.given_up(source, target, group), group)


def _require_other_than_group(given_up: Collection[str], group: str) -> None:
    """Raise ConfigurationError if the group itself is among the readers that were given up, and not only sinks."""
    if "" not in given_up:
        return
    raise ConfigurationError(
        f"group: {group!r} was given up by retention (max_lag), and events that it has not read may be gone: choose "
        "where to go on with `relay offsets seek --to …`"
    )
