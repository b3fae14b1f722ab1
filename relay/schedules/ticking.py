"""Publishes what is due: any instance may, streaming or standing by, and a process of its own.

Instances agree on nothing. Each looks at the least time; what it computes counts only for the row from which it was
computed, which `relay.tick` locks, publishes for and moves on in one statement. So a process that is frozen or killed
holds nothing and leaves nothing half done.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from uuid import UUID

import psycopg

from relay.config.settings import Settings
from relay.faults import ConfigurationError, first_line, is_transient
from relay.runtime.parts import SOON_SECONDS, Condition, Recurring
from relay.schedules.steps import step
from relay.store import locks, schedules
from relay.store.connections import SHORT_TIMEOUTS, Connection, connect_pooled, with_settings
from relay.store.groups import APPLICATION_NAME

log = logging.getLogger(__name__)

LONGEST_SLEEP = 2.0
"""In seconds: how long a new schedule, or another instance's end, may go unseen."""
_NOTHING_SECONDS = 10.0
"""How long the first schedule of an outbox may go unseen: without one, no connection is kept."""
_BUSY_SECONDS = 0.2
"""After so many seconds a schedule that another session has locked is looked at again."""
_RETRY_SECONDS = 60.0
"""After so many seconds a schedule whose event was refused is tried again."""


class Ticker(Recurring):
    """Declares the schedules of the configuration, and publishes what is due, with a connection of its own.

    A pooler that gives each transaction to another session of the server will do.
    `failed` is called once, with `error` set, if the database refuses a schedule of the configuration.
    """

    def __init__(self, settings: Settings, failed: Callable[[], None] | None = None) -> None:
        condition = Condition(
            "schedules",
            log,
            "schedules fail and are retried",
            "schedules work again",
            SOON_SECONDS,
            longest_pause=1.0,
        )
        super().__init__(condition, failed, close_seconds=5.0)
        self._settings = settings
        self._conn: Connection | None = None
        self._has_declared = False
        self._refused: dict[tuple[UUID, int], float] = {}
        """The schedules, in a version, whose event was refused, and when they are tried again."""

    def stop(self) -> None:
        """End after the statement in flight."""
        self.stopping.set()

    def turn(self) -> float:
        """Publish what is due; returns the seconds until the next schedule is."""
        try:
            if self._conn is None:
                dsn = self._settings.source_dsn
                self._conn = connect_pooled(
                    dsn, application_name=APPLICATION_NAME, **SHORT_TIMEOUTS
                )
            if not self._has_declared:
                self._declare(self._conn)
            return self._tick(self._conn)
        except psycopg.errors.ReadOnlySqlTransaction:
            # A standby; a new session finds out when it is promoted.
            self.release()
            self.condition.works()
            return LONGEST_SLEEP
        except BaseException:
            self.release()
            raise

    def _declare(self, conn: Connection) -> None:
        with with_settings(conn):
            changed, gone = declare(conn, self._settings)
        self._has_declared = True
        if changed:
            log.info("schedules declared", extra={"schedules": ", ".join(changed)})
        if gone:
            log.info(
                "schedules dropped, which the configuration no longer has",
                extra={"schedules": ", ".join(gone)},
            )

    def _tick(self, conn: Connection) -> float:
        has_moved = False
        with with_settings(conn):
            wait = schedules.wait(conn)
            due = schedules.due(conn) if wait == 0 else []
        # Not those that were dropped, paused or changed meanwhile.
        still = {(each.id, each.version) for each in due}
        self._refused = {each: again for each, again in self._refused.items() if each in still}
        if due:
            for each in due:
                if self.stopping.is_set():
                    break
                if self._refused.get((each.id, each.version), 0.0) <= time.monotonic():
                    has_moved |= self._publish(conn, each)
            with with_settings(conn):
                wait = schedules.wait(conn)
        if not self._refused:
            self.condition.works()
        if wait == 0:
            return 0.0 if has_moved else _BUSY_SECONDS
        if wait is None:
            self.release()
            return _NOTHING_SECONDS
        return min(max(wait, 0.0), LONGEST_SLEEP)

    def _publish(self, conn: Connection, schedule: schedules.ScheduleRow) -> bool:
        """Publish the events of a schedule that are due, and move it on; returns whether it did."""
        to_do = step(schedule, schedule.present)
        if to_do.fault is not None:
            log.error(
                "a schedule is not understood",
                extra={"schedule": schedule.name, "fault": to_do.fault},
            )
        try:
            with with_settings(conn):
                ticked = schedules.tick(conn, schedule, to_do)
        except psycopg.Error as error:
            if (
                conn.broken
                or is_transient(error)
                or isinstance(error, psycopg.errors.ReadOnlySqlTransaction)
            ):
                raise
            self._refused[schedule.id, schedule.version] = time.monotonic() + _RETRY_SECONDS
            self.condition.fails(f"{schedule.name}: {first_line(error)}")
            return False
        self._refused.pop((schedule.id, schedule.version), None)
        if ticked and to_do.missed:
            log.warning(
                "times of a schedule were missed",
                extra={
                    "schedule": schedule.name,
                    "times": to_do.missed,
                    "published": len(to_do.times),
                },
            )
        return ticked

    def release(self) -> None:
        """Close the connection."""
        conn, self._conn = self._conn, None
        if conn is not None:
            conn.close()


def declare(conn: Connection, settings: Settings) -> tuple[list[str], list[str]]:
    """Declare the schedules of the configuration, and drop those that it no longer has; returns which had changed.

    Raises ConfigurationError, with its key, for one that is refused, and psycopg.Error.
    """
    group, changed = settings.group, []
    with conn.transaction():
        # Of two instances that start at once, the second finds what the first has declared.
        locks.lock_in_transaction(conn, locks.schedules(group))
        gone = schedules.drop_others(conn, group, settings.schedules)
        for name, each in settings.schedules.items():
            try:
                if schedules.declare(conn, group, name, each.declared):
                    changed.append(name)
            except psycopg.Error as error:
                if (
                    is_transient(error)
                    or conn.broken
                    or isinstance(error, psycopg.errors.ReadOnlySqlTransaction)
                ):
                    raise
                text = first_line(error).removeprefix("relay.declare_schedule: ")
                raise ConfigurationError(f"schedules.{name}: {text}") from None
    return changed, gone
