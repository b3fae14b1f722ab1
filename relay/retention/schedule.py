"""Runs retention in a thread: notes how far the group's readers are, and removes what all readers are past."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import closing, suppress
from datetime import datetime
from threading import Event

import psycopg

from relay.config.settings import Settings
from relay.faults import ConfigurationError, RelayError, describe
from relay.retention import partitions, removable
from relay.store import actions, advisory_locks, clock, sinks
from relay.store.connections import Connection, connect
from relay.store.groups import APPLICATION_NAME
from relay.threads import Thread

log = logging.getLogger(__name__)


NOTE_SECONDS = 5.0
"""The interval at which positions are noted in the source."""
ROTATE_SECONDS = 60.0
"""The interval at which partitions are created and events removed."""
_PRUNE_PORTION = 10_000


class Schedule:
    """Runs retention in a thread, with connections of its own. After an error of a database, the next turn tries again.

    `failed` is called once, with `error` set, if the group was given up. `clock` returns the time of the source.
    """

    def __init__(
        self,
        settings: Settings,
        failed: Callable[[], None],
        clock: Callable[[Connection], datetime] = clock.present,
        note_seconds: float = NOTE_SECONDS,
        rotate_seconds: float = ROTATE_SECONDS,
    ) -> None:
        self._settings = settings
        self._failed = failed
        self._clock = clock
        self._note_seconds = note_seconds
        self._rotate_seconds = rotate_seconds
        self._next_rotation = 0.0
        self._last_logged = ""
        self._stopping = Event()
        self._thread = Thread(target=self._run, name="retention", daemon=True)
        self.error: RelayError | None = None

    def start(self) -> None:
        """Start the thread; pause sinks that were given up. Raises ConfigurationError if the group was given up."""
        of = self._settings
        with (
            suppress(psycopg.Error),  # the thread tries again
            closing(connect(of.source_dsn)) as source,
            closing(connect(of.target_dsn)) as target,
        ):
            self._stop_given_up(source, target)
        self._thread.start()

    def stop(self) -> None:
        """Ask the thread to end after the statement in flight. Safe in a signal handler."""
        self._stopping.set()

    def close(self) -> None:
        """Stop, and wait up to five seconds for the thread to end."""
        self.stop()
        if self._thread.is_alive():
            self._thread.join(5.0)

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                self._connected()
            except RelayError as error:
                self.error = error
                self._failed()
                return
            except psycopg.errors.ReadOnlySqlTransaction as error:
                # A hot standby, until it is promoted, or a server whose disk is full.
                self._log_once(logging.INFO, "retention waits until it may write", error)
            except psycopg.Error as error:
                self._log_once(logging.WARNING, "retention failed and is retried", error)
            self._stopping.wait(self._note_seconds)

    def _log_once(self, level: int, text: str, error: psycopg.Error) -> None:
        fault = describe(error)
        if fault != self._last_logged:
            self._last_logged = fault
            log.log(level, text, extra={"fault": fault})

    def _connected(self) -> None:
        of = self._settings
        with (
            closing(connect(of.source_dsn, application_name=APPLICATION_NAME)) as source,
            closing(connect(of.target_dsn, application_name=APPLICATION_NAME)) as target,
        ):
            while not self._stopping.is_set():
                self.turn(source, target)
                self._last_logged = ""
                self._stopping.wait(self._note_seconds)

    def turn(self, source: Connection, target: Connection) -> None:
        """Note positions; each minute, remove what all readers are past. Raises psycopg.Error, RelayError."""
        of = self._settings
        noted = removable.note(source, target, of.group, of.source.table)
        self._stop_given_up(source, target)
        now = time.monotonic()
        if now < self._next_rotation:
            return
        self._next_rotation = now + self._rotate_seconds
        self._prune(target)
        key = advisory_locks.retention(of.source.table)
        if not advisory_locks.try_lock(source, key):
            return
        try:
            self._rotate(source, target, noted)
        finally:
            if not source.broken:
                advisory_locks.unlock(source, key)

    def _rotate(self, source: Connection, target: Connection, noted: list[str]) -> None:
        of, present = self._settings.retention, self._clock(source)
        table = self._settings.source.table
        given = partitions.retained(source, table)
        if given is None:
            return
        if given.every is not None:
            created = partitions.create_ahead(source, table, present, of.ahead)
            repaired = partitions.repair_default(source, table, given.every, present, of.ahead)
            if repaired:
                log.warning(
                    "the default partition had rows, because no partition existed for their time",
                    extra={"partition": repaired},
                )
                created += partitions.create_ahead(source, table, present, of.ahead)
            if created:
                log.info("partitions created", extra={"partitions": ", ".join(created)})
        if of.max_lag is not None and self._give_up(source, target, present):
            # The process that runs the reader stops it at its next turn, before events are removed.
            return
        if of.keep is None or (of.archive is not None and of.archive not in noted):
            return
        older_than = present - of.keep
        if given.every is not None:
            dropped = partitions.drop_read(source, table, older_than)
            if dropped:
                log.info("partitions dropped", extra={"partitions": ", ".join(dropped)})
        deleted = partitions.delete_read(source, table, older_than, self._stopping.is_set)
        if deleted:
            log.info("events deleted", extra={"events": deleted})

    def _give_up(self, source: Connection, target: Connection, present: datetime) -> bool:
        """Give up the readers that lag by more than max_lag, except the archive; returns whether there were any."""
        of = self._settings
        assert of.retention.max_lag is not None  # noqa: S101
        readers = removable.readers(source, of)
        any_given_up = False
        for each in removable.lagging(readers, present, of.retention.max_lag):
            if each.reader and each.reader == of.retention.archive and each.group_id == of.group:
                continue
            any_given_up = True
            removable.give_up(source, each)
            detail = {"group": each.group_id, "unread_since": str(each.unread_since)}
            actions.record(target, of.group, each.reader, "give up", "retention.max_lag", detail)
            log.error(
                "a reader was given up: events are no longer kept for it",
                extra={"reader": each.name},
            )
        return any_given_up

    def _stop_given_up(self, source: Connection, target: Connection) -> None:
        """Pause the sinks that were given up. Raises ConfigurationError if the group itself was."""
        group = self._settings.group
        for name in removable.given_up(source, target, group):
            if not name:
                raise given_up_error(group)
            if sinks.pause(target, group, name, True, GIVEN_UP):
                log.error("a sink was paused: retention has given it up", extra={"sink": name})

    def _prune(self, target: Connection) -> None:
        before = clock.present(target) - self._settings.retention.keep_letters
        target.execute(
            "select relay.prune_history(%s, %s, %s)", (self._settings.group, before, _PRUNE_PORTION)
        )


GIVEN_UP = "given up by retention: events may be gone; choose where to go on with `relay sink seek`"


def given_up_error(group: str) -> ConfigurationError:
    """Return the error for a group that retention has given up."""
    return ConfigurationError(
        f"group: {group!r} was given up by retention (max_lag), and events that it has not read may be gone: choose "
        "where to go on with `relay offsets seek --to …`"
    )
