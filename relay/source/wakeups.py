"""Wakes the readers of the log that wait, from a connection of relay's own: publishers never notify.

Readers poll all the same, so nothing depends on it.
"""

from __future__ import annotations

import logging

import psycopg

from relay.config.settings import Settings
from relay.runtime.parts import UNTIL_WOKEN, Condition, Recurring
from relay.store.connections import Connection, connect
from relay.store.groups import APPLICATION_NAME

log = logging.getLogger(__name__)

_NOBODY_SECONDS = 2.0
"""How long the first reader may go unseen: without one, no connection is kept."""


class ReaderWakeups(Recurring):
    """Sends a notification when it is woken after commits, as long as a reader waits for one."""

    def __init__(self, settings: Settings) -> None:
        condition = Condition(
            "readers", log, "readers are not woken, and poll", "readers are woken again"
        )
        super().__init__(condition, first_pause=UNTIL_WOKEN, ends_at_stop=True, close_seconds=5.0)
        self._settings = settings
        self._conn: Connection | None = None

    def turn(self) -> float:
        """Notify the readers of a commit."""
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
        if not any_waits:
            self.release()
            self.stopping.wait(_NOBODY_SECONDS)
        return UNTIL_WOKEN

    def release(self) -> None:
        """Close the connection."""
        conn, self._conn = self._conn, None
        if conn is not None:
            conn.close()
