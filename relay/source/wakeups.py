"""Wakes the readers of the log that wait, from a connection of relay's own: publishers never notify.

Readers poll all the same, so nothing depends on it.
"""

from __future__ import annotations

import logging
from threading import Event

import psycopg

from relay.config.settings import Settings
from relay.runtime.parts import Condition, Recurring
from relay.store.connections import Connection, connect
from relay.store.groups import APPLICATION_NAME

log = logging.getLogger(__name__)

_NOBODY_SECONDS = 2.0
"""How long the first reader may go unseen: without one, no connection is kept."""


class ReaderWakeups(Recurring):
    """Sends a notification after commits, as long as a reader waits for one."""

    def __init__(self, settings: Settings) -> None:
        condition = Condition(
            "readers", log, "readers are not woken, and poll", "readers are woken again"
        )
        super().__init__(condition, close_seconds=5.0)
        self._settings = settings
        self._committed = Event()
        self._conn: Connection | None = None

    def wake(self) -> None:
        """Notify the readers soon. Never blocks."""
        self._committed.set()

    def stop(self) -> None:
        """End after the statement in flight."""
        self.stopping.set()
        self._committed.set()

    def turn(self) -> float:
        """Wait for a commit, and notify the readers."""
        self._committed.wait()
        self._committed.clear()
        if self.stopping.is_set():
            return 0.0
        try:
            if self._conn is None:
                self._conn = connect(self._settings.source_dsn, application_name=APPLICATION_NAME)
            ((any_waits,),) = self._conn.execute("select relay.wake_readers()").fetchall()
        except psycopg.errors.ReadOnlySqlTransaction:
            # A standby, whose readers read elsewhere.
            any_waits = False
        except BaseException:
            self.release()
            raise
        self.condition.works()
        if any_waits:
            return 0.0
        self.release()
        return _NOBODY_SECONDS

    def release(self) -> None:
        """Close the connection."""
        conn, self._conn = self._conn, None
        if conn is not None:
            conn.close()
