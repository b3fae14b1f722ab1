"""Outages: since when and why something does not work, and the lines of the log that say so."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from threading import Lock


class Outage:
    """Something that may fail for a while. Safe in several threads.

    It is logged when that begins, when it fails otherwise (after `change_seconds`), again every `remind_seconds`, and
    once it is over, with its length; `begins` and `ends` are the texts, `level` is that of the first. `in_text` puts
    the fault into the text. A fault counts after `least_attempts` in a row. `attempts` are those, `last` is the last
    fault's text, None without one, and `since` is when it began.
    """

    def __init__(
        self,
        log: logging.Logger,
        begins: str,
        ends: str,
        *,
        remind_seconds: float = math.inf,
        change_seconds: float = 0.0,
        level: int = logging.WARNING,
        least_attempts: int = 1,
        in_text: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.attempts = 0
        self.last: str | None = None
        self.since = datetime.now(UTC)
        self._log = log
        self._begins, self._ends = begins, ends
        self._remind_seconds, self._change_seconds = remind_seconds, change_seconds
        self._level = level
        self._least_attempts = least_attempts
        self._in_text = in_text
        self._clock = clock
        self._began = self._logged_at = 0.0
        self._logged: str | None = None
        self._lock = Lock()

    @property
    def failing_seconds(self) -> float:
        """For how many seconds the fault has stayed, whatever the system's clock says; 0 without one."""
        return 0.0 if self.last is None else self._clock() - self._began

    def fails(
        self,
        fault: str,
        level: int | None = None,
        text: str | None = None,
        *,
        lasts: float = 0.0,
        **fields: object,
    ) -> None:
        """Record a fault. `lasts` is for how many seconds its cause has lasted already when it is noticed."""
        now = self._clock()
        with self._lock:
            self.attempts += 1
            if self.attempts == 1:
                self._began = now - lasts
                self.since = datetime.now(UTC) - timedelta(seconds=lasts)
            if self.attempts < self._least_attempts:
                return
            self.last = fault
            wait = self._remind_seconds if fault == self._logged else self._change_seconds
            if self._logged is not None and now < self._logged_at + wait:
                return
            self._logged, self._logged_at = fault, now
            seconds = round(now - self._began)
        line = text or self._begins
        shown = {**fields, "seconds": seconds or None}
        if self._in_text:
            line = f"{line}: {fault}"
        else:
            shown["fault"] = fault
        self._log.log(level or self._level, line, extra=shown)

    def clear(self) -> None:
        """Forget the fault without a log line: nobody knows whether it is over."""
        with self._lock:
            self.attempts, self.last, self._logged = 0, None, None

    def over(self, **fields: object) -> None:
        """Record that it works."""
        if not self.attempts:
            return
        with self._lock:
            logged, seconds = self._logged, round(self._clock() - self._began)
            self.attempts, self.last, self._logged = 0, None, None
        if logged is not None:
            level = min(self._level, logging.INFO)
            self._log.log(level, self._ends, extra={**fields, "seconds": seconds})
