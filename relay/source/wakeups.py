"""Wakes the readers of the log that wait, from a connection of relay's own: publishers never notify.

Readers poll all the same, so nothing depends on it.
"""

from __future__ import annotations

import logging

import psycopg

from relay.config.settings import Settings
from relay.runtime.parts import UNTIL_WOKEN, Condition, Recurring
from relay.store.connections import asking

log = logging.getLogger(__name__)

_NOBODY_SECONDS = 2.0
"""How long the first reader may go unseen."""


class ReaderWakeups(Recurring):
    """Sends a notification when it is woken after commits, as long as a reader waits for one."""

    def __init__(self, settings: Settings) -> None:
        condition = Condition(
            "readers", log, "readers are not woken, and poll", "readers are woken again"
        )
        super().__init__(condition, first_pause=UNTIL_WOKEN, ends_at_stop=True, close_seconds=5.0)
        self._settings = settings

    def turn(self) -> float:
        """Notify the readers of a commit."""
        try:
            with asking(self._settings.source_dsn) as conn:
                ((any_waits,),) = conn.execute("select relay.wake_readers()").fetchall()
        except psycopg.errors.ReadOnlySqlTransaction:
            # A standby, whose readers read elsewhere.
            any_waits = False
        self.condition.works()
        if not any_waits:
            self.stopping.wait(_NOBODY_SECONDS)
        return UNTIL_WOKEN
