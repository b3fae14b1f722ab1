"""Publishes what is due: any instance may, streaming or standing by, and a process of its own.

Instances agree on nothing. Each looks at the least time; what it computes counts only for the row from which it was
computed, which `relay.tick` locks, publishes for and moves on in one statement. So a process that is frozen or killed
holds nothing and leaves nothing half done.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from uuid import UUID

import psycopg

from relay.config.settings import Settings
from relay.faults import ConfigurationError, first_line, is_transient
from relay.runtime.parts import SOON_SECONDS, Condition, Recurring
from relay.schedules.steps import MOST_EVENTS, step
from relay.store import locks, schedules
from relay.store.connections import (
    APPLICATION_NAME,
    SHORT_TIMEOUTS,
    Connection,
    connect_pooled,
    sessions_with,
    with_settings,
)
from relay.store.schedules import DueTicks, ScheduleRow

log = logging.getLogger(__name__)

LONGEST_SLEEP = 2.0
"""In seconds: how long a new schedule, or another instance's end, may go unseen."""
_NOTHING_SECONDS = 10.0
"""How long the first schedule of an outbox may go unseen."""
_BUSY_SECONDS = 0.2
"""After so many seconds a schedule that another session has locked is looked at again."""
_RETRY_SECONDS = 60.0
"""After so many seconds a schedule whose event was refused is tried again."""
_PORTION = 100
"""The most schedules that are read, and published for in a commit, at once."""
ANSWER_SECONDS = 15.0
"""How long a statement may take: a peer that is half open, such as a proxy without its server, answers nothing."""
_LIMITS = {"statement_timeout": "10s", "idle_in_transaction_session_timeout": "10s"}
"""The server ends a statement first; and, behind a pooler, the transaction of a process that is frozen in it."""
_Steps = Sequence[tuple[ScheduleRow, DueTicks]]


class _Answering(psycopg.Connection[Any]):
    """A connection that fails if the server does not answer in time, even where the peer keeps it open."""

    def wait(self, gen: Any, interval: float = 0.1, timeout: float | None = None) -> Any:
        """Wait for the server's answer. Raises psycopg.OperationalError."""
        try:
            return super().wait(gen, interval, ANSWER_SECONDS if timeout is None else timeout)
        except psycopg.errors._WaitTimeout:
            raise psycopg.OperationalError(
                f"lost the connection: the server has not answered for {ANSWER_SECONDS:.0f} s"
            ) from None


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
        super().__init__(condition, failed, ends_at_stop=True, close_seconds=5.0)
        self._settings = settings
        self._conn: Connection | None = None
        self._has_declared = False
        self._refused: dict[tuple[UUID, int], float] = {}
        """The schedules, in a version, whose event was refused, and when they are tried again."""

    def turn(self) -> float:
        """Publish what is due; returns the seconds until the next schedule is."""
        try:
            with sessions_with(_LIMITS):
                if self._conn is None:
                    self._conn = connect_pooled(
                        self._settings.source_dsn,
                        _Answering.connect,
                        application_name=APPLICATION_NAME,
                        **SHORT_TIMEOUTS,
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
            # Those that were refused are still due.
            due = schedules.due(conn, _PORTION + len(self._refused)) if wait == 0 else []
        # Not those that were dropped, paused or changed meanwhile.
        still = {(each.id, each.version) for each in due}
        self._refused = {each: again for each, again in self._refused.items() if each in still}
        if due:
            now = time.monotonic()
            tried = [each for each in due if self._refused.get((each.id, each.version), 0.0) <= now]
            for portion in _portions(tried):
                if self.stopping.is_set():
                    break
                has_moved |= self._publish(conn, portion)
            with with_settings(conn):
                wait = schedules.wait(conn)
        if not self._refused:
            self.condition.works()
        if wait == 0:
            return 0.0 if has_moved else _BUSY_SECONDS
        if wait is None:
            return _NOTHING_SECONDS
        return min(max(wait, 0.0), LONGEST_SLEEP)

    def _publish(self, conn: Connection, steps: _Steps) -> bool:
        """Publish the events of schedules that are due, and move them on; returns whether it did for one of them.

        If the event of one is refused, each is tried alone.
        """
        try:
            with with_settings(conn):
                ticked = schedules.tick(conn, steps)
        except psycopg.Error as error:
            if (
                conn.broken
                or is_transient(error)
                or isinstance(error, psycopg.errors.ReadOnlySqlTransaction)
            ):
                raise
            if len(steps) > 1:
                moved = [self._publish(conn, [each]) for each in steps]
                return any(moved)
            ((schedule, _),) = steps
            self._refused[schedule.id, schedule.version] = time.monotonic() + _RETRY_SECONDS
            self.condition.fails(f"{schedule.name}: {first_line(error)}")
            return False
        for schedule, to_do in steps:
            self._refused.pop((schedule.id, schedule.version), None)
            if schedule.id in ticked:
                _log(schedule, to_do)
        return bool(ticked)

    def release(self) -> None:
        """Close the connection."""
        conn, self._conn = self._conn, None
        if conn is not None:
            conn.close()


def _portions(due: Sequence[ScheduleRow]) -> Iterator[_Steps]:
    """Yield what is to be done for schedules, in portions of at most MOST_EVENTS events, or those of one schedule."""
    portion: list[tuple[ScheduleRow, DueTicks]] = []
    events = 0
    for schedule in due:
        to_do = step(schedule, schedule.present)
        if portion and events + len(to_do.times) > MOST_EVENTS:
            yield portion
            portion, events = [], 0
        portion.append((schedule, to_do))
        events += len(to_do.times)
    if portion:
        yield portion


def _log(schedule: ScheduleRow, to_do: DueTicks) -> None:
    if to_do.fault is not None:
        log.error(
            "a schedule is not understood",
            extra={"schedule": schedule.name, "fault": to_do.fault},
        )
    if to_do.missed:
        log.warning(
            "times of a schedule were missed",
            extra={
                "schedule": schedule.name,
                "times": to_do.missed,
                "published": len(to_do.times),
            },
        )


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
