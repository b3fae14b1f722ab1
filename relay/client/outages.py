"""Logs the outages of a database, of workers and of readers: once when one begins, and once when it is over."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping

_CAUSE_SECONDS = 30.0
"""How often at most another cause of the same outage is logged."""


class OutageLog:
    """Logs the outages of a database as several callers meet them, in any threads.

    One begins when a caller fails, and is over when the last of those that have failed succeeds. It is logged with
    its cause, and then with its length in seconds; `begins` and `ends` are the texts.
    """

    def __init__(
        self,
        logger: logging.Logger,
        fields: Mapping[str, str],
        begins: str = "the database does not answer",
        ends: str = "the database answers again",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._logger = logger
        self._fields = dict(fields)
        self._begins, self._ends = begins, ends
        self._clock = clock
        self._lock = threading.Lock()
        self._failing: set[object] = set()
        self._succeeded = False
        self._cause = ""
        self._began = self._logged = 0.0

    def fails(self, caller: object, cause: str) -> None:
        """Note that a caller has failed, and tries again."""
        with self._lock:
            now = self._clock()
            begins = not self._failing
            self._failing.add(caller)
            if begins:
                self._began, self._succeeded = now, False
            elif cause == self._cause or now - self._logged < _CAUSE_SECONDS:
                return
            self._cause, self._logged = cause, now
            # In the text: a program that has not set up its logs sees nothing else.
            self._logger.warning(f"{self._begins}: {cause}", extra=self._fields)

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
            # Where all have given up, nobody knows.
            if not self._failing and self._succeeded:
                seconds = round(self._clock() - self._began)
                self._logger.info(self._ends, extra={**self._fields, "seconds": seconds})
