"""Logs the outages of a database, of workers and of readers: once when one begins, and once when it is over."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from relay.outages import Outage

_CAUSE_SECONDS = 30.0
"""How often at most another cause of the same outage is logged."""


class OutageLog:
    """Logs the outages of a database as several callers meet them, in any threads.

    One begins when a caller fails, and is over when the last of those that have failed succeeds.
    """

    def __init__(
        self,
        logger: logging.Logger,
        fields: Mapping[str, str],
        begins: str = "the database does not answer",
        ends: str = "the database answers again",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._outage = Outage(
            logger,
            begins,
            ends,
            change_seconds=_CAUSE_SECONDS,
            # A program that has not set up its logs sees nothing but the text.
            in_text=True,
            clock=clock,
        )
        self._fields: dict[str, Any] = dict(fields)
        self._lock = threading.Lock()
        self._failing: set[object] = set()
        self._succeeded = False

    def fails(self, caller: object, cause: str) -> None:
        """Note that a caller has failed, and tries again."""
        with self._lock:
            if not self._failing:
                self._succeeded = False
            self._failing.add(caller)
            self._outage.fails(cause, **self._fields)

    def ends(self, caller: object) -> None:
        """Note that a caller has succeeded."""
        self._remove(caller, succeeded=True)

    def leaves(self, caller: object) -> None:
        """Note that a caller no longer tries, so that the outage does not go on for it."""
        self._remove(caller, succeeded=False)

    def _remove(self, caller: object, succeeded: bool) -> None:
        with self._lock:
            if caller not in self._failing:
                return
            self._failing.remove(caller)
            self._succeeded |= succeeded
            if self._failing:
                return
            if self._succeeded:
                self._outage.over(**self._fields)
            else:
                # Where all have given up, nobody knows.
                self._outage.clear()
