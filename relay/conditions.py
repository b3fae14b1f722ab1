"""The condition of each background part: whether it does its work, and if not, since when and why.

A part goes on by itself after a fault and ends with the process only. It reports each success and each fault to its
condition, which `relay status`, health and metrics show. No I/O but the log.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from threading import Event, Lock

from relay.faults import RelayError, TaskFault
from relay.threads import Thread

SOON_SECONDS = 30.0
LATE_SECONDS = 600.0
"""After how many seconds a fault that stays is logged again: soon if relay stands still meanwhile."""
FIRST_PAUSE_SECONDS = 1.0
LONGEST_PAUSE_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class PartFault:
    """Why a part does not do its work: a text that is safe in a log, since when, and after how many attempts."""

    part: str
    fault: str
    since: datetime
    attempts: int

    @property
    def key(self) -> tuple[str, str]:
        """What tells it from another fault, however often that has happened."""
        return self.part, self.fault


class Condition:
    """The condition of one part. The part reports; any thread may read.

    `failing` and `over` are the log lines at a fault and once the part works again. `level` is that of the first one.
    A fault counts after `least_attempts` attempts in a row: a session that was ended meanwhile costs a single one.
    """

    def __init__(
        self,
        part: str,
        log: logging.Logger,
        failing: str,
        over: str,
        remind_seconds: float = LATE_SECONDS,
        level: int = logging.WARNING,
        least_attempts: int = 1,
    ) -> None:
        self.part = part
        self._least_attempts = least_attempts
        self._attempts = 0
        self._remind_seconds = remind_seconds
        self._level = level
        self._log = log
        self._failing = failing
        self._over = over
        self._fault: PartFault | None = None
        self._since = datetime.now(UTC)
        self._began = self._next_reminder = 0.0
        self._lock = Lock()

    @property
    def fault(self) -> PartFault | None:
        """The fault that stays; None while the part works."""
        return self._fault

    @property
    def pause(self) -> float:
        """Seconds until the next attempt is due: they grow with each fault in a row."""
        if not self._attempts:
            return 0.0
        return min(LONGEST_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2.0 ** min(self._attempts - 1, 16))

    def fails(
        self, fault: str, level: int | None = None, text: str | None = None, **fields: object
    ) -> None:
        """Record a fault. It is logged if it is another one than before, and again while it stays."""
        now = time.monotonic()
        with self._lock:
            self._attempts += 1
            if self._attempts == 1:
                self._began, self._since = now, datetime.now(UTC)
            if self._attempts < self._least_attempts:
                return
            before = self._fault
            self._fault = PartFault(self.part, fault, self._since, self._attempts)
            if before is not None and before.fault == fault and now < self._next_reminder:
                return
            self._next_reminder = now + self._remind_seconds
            seconds = round(now - self._began)
        shown = {**fields, "fault": fault, "seconds": seconds or None}
        self._log.log(level or self._level, text or self._failing, extra=shown)

    def clear(self) -> None:
        """Forget the fault without a log line: the part has nothing to do now."""
        self._fault, self._attempts = None, 0

    def works(self) -> None:
        """Record that the part has done its work."""
        if not self._attempts:
            return
        with self._lock:
            fault, self._fault, self._attempts = self._fault, None, 0
            seconds = round(time.monotonic() - self._began)
        if fault is not None:
            self._log.log(min(self._level, logging.INFO), self._over, extra={"seconds": seconds})


class Recurring:
    """A part that calls `turn` again and again in a thread; `turn` returns the seconds until the next call.

    After a fault of whatever kind it goes on, later each time. Only a RelayError, which no retry can repair, ends it:
    it is `error` then, and `failed` is called once.
    """

    def __init__(
        self,
        turn: Callable[[], float],
        condition: Condition,
        failed: Callable[[], None] = lambda: None,
        longest_pause: float = LONGEST_PAUSE_SECONDS,
    ) -> None:
        self.condition = condition
        self.error: RelayError | None = None
        self.stopping = Event()
        self._turn = turn
        self._failed = failed
        self._longest_pause = longest_pause
        self._thread = Thread(target=self._run, name=condition.part, daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Ask the thread to end after the call in flight. Safe in a signal handler."""
        self.stopping.set()

    def close(self, timeout: float) -> None:
        """Stop, and wait for the call in flight, `timeout` seconds at most."""
        self.stop()
        if self._thread.is_alive():
            self._thread.join(timeout)

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def _run(self) -> None:
        while not self.stopping.is_set():
            try:
                pause = self._turn()
            except RelayError as error:
                self.error = error
                self._failed()
                return
            except Exception as error:
                self.condition.fails(TaskFault.of(error).text)
                pause = min(self.condition.pause, self._longest_pause)
            self.stopping.wait(pause)


def faults(conditions: Sequence[Condition]) -> list[PartFault]:
    """Return the faults of the parts that do not do their work."""
    return [each.fault for each in conditions if each.fault is not None]
