"""The parts of a running service: their start and end, their condition, and their heartbeat.

A part goes on by itself after a fault and ends with the process only. It reports each success and each fault to its
condition (whether it does its work, and if not, since when and why), which `relay status`, health and metrics show.
No I/O but the log.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import Enum
from threading import TIMEOUT_MAX, Event

from relay.faults import RelayError, TaskFault
from relay.outages import Outage
from relay.runtime.threads import Thread
from relay.waits import doubled

SOON_SECONDS = 30.0
LATE_SECONDS = 600.0
"""After how many seconds a fault that stays is logged again: soon if relay stands still meanwhile."""
FIRST_PAUSE_SECONDS = 1.0
LONGEST_PAUSE_SECONDS = 60.0
UNTIL_WOKEN = TIMEOUT_MAX
"""A pause that only `Recurring.wake` ends."""
_ROUND_SECONDS = 1.0
"""How long the end of a round waits for the call in flight."""


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


class Condition(Outage):
    """The condition of one part. The part reports; any thread may read.

    `failing` and `over` are the log lines at a fault and once the part works again. A session that was ended meanwhile
    costs a single attempt: `least_attempts`. Pauses grow from `first_pause` seconds, by default FIRST_PAUSE_SECONDS, to
    `longest_pause`.
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
        first_pause: float | None = None,
        longest_pause: float = LONGEST_PAUSE_SECONDS,
    ) -> None:
        super().__init__(
            log,
            failing,
            over,
            remind_seconds=remind_seconds,
            level=level,
            least_attempts=least_attempts,
        )
        self.part = part
        self._first_pause = first_pause
        self._longest_pause = longest_pause

    @property
    def fault(self) -> PartFault | None:
        """The fault that stays; None while the part works."""
        fault = self.last
        return None if fault is None else PartFault(self.part, fault, self.since, self.attempts)

    @property
    def pause(self) -> float:
        """Seconds until the next attempt is due: they grow with each fault in a row."""
        if not self.attempts:
            return 0.0
        first = self._first_pause or FIRST_PAUSE_SECONDS
        return doubled(first, self.attempts - 1, self._longest_pause)

    def works(self) -> None:
        """Record that the part has done its work."""
        self.over(part=self.part)


class Due(Enum):
    """When a healthy thread makes its next step."""

    SOON = "soon"
    """Within seconds: everything that it waits for has a short timeout."""
    LATE = "late"
    """Within minutes: it may read or write something large first."""
    OPEN = "open"
    """Unknown: it waits for another system, or another check watches it."""


class Heartbeat:
    """The last step of a thread: when it was (`at`, monotonic clock in seconds), what follows, when the next is due.

    The thread itself updates it; any thread may read it.
    """

    __slots__ = ("at", "doing", "due")

    def __init__(self) -> None:
        self.at = time.monotonic()
        self.doing = "starts"
        self.due = Due.OPEN

    def update(self, doing: str, due: Due = Due.SOON) -> None:
        """Record a step, and what the thread does from now on."""
        self.doing, self.due = doing, due
        self.at = time.monotonic()


class Part:
    """A part of a service, which starts its parts in order and closes them in reverse; by default it does nothing.

    `close` is called once, also if `start` was not.
    """

    def start(self) -> None:
        """Begin to work. Raises RelayError if the group cannot go on."""

    def stop(self) -> None:
        """Begin nothing new; what is in flight may end. Safe in a signal handler's thread."""

    def close(self) -> None:
        """Stop, and release what the part holds."""

    @property
    def error(self) -> RelayError | None:
        """Why the group cannot go on; None if it can."""
        return None

    @property
    def conditions(self) -> Sequence[Condition]:
        """Whether what the part does in the background works."""
        return ()


class Recurring(Part):
    """A part that calls `turn` again and again in a thread, after the pause that it returns or a `wake`, until `close`.

    After a fault it goes on, after the pause of its condition. Only a fault that `is_final` ends it, by default a
    RelayError: it is `error` then, and `failed` is called once, which ends relay. Without `failed` no fault ends it.
    The first call comes after `first_pause` seconds. The thread ends at `close` or, if it `ends_at_stop`, at `stop`.
    `close` waits `close_seconds` for the call in flight.
    """

    def __init__(
        self,
        condition: Condition,
        failed: Callable[[], None] | None = None,
        *,
        is_final: Callable[[Exception], bool] = lambda error: isinstance(error, RelayError),
        first_pause: float = 0.0,
        ends_at_stop: bool = False,
        close_seconds: float = 0.0,
    ) -> None:
        self.condition = condition
        self.stopping = Event()
        self.heartbeat = Heartbeat()
        self._failed = failed
        self._is_final = is_final
        self._ends_at_stop = ends_at_stop
        self._first_pause = first_pause
        self._woken = Event()
        self._close_seconds = close_seconds
        self._error: RelayError | None = None
        self._thread = Thread(target=self._run, name=condition.part)

    def turn(self) -> float:
        """Do the work once; returns the seconds until the next call. It reports to `condition` that it works."""
        raise NotImplementedError

    def release(self) -> None:
        """Release what `turn` holds. The thread calls it when it ends; by default there is nothing."""

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def wake(self) -> None:
        """End the pause before the next call, now or once the call in flight has returned; not one after a fault."""
        self._woken.set()

    def pause(self, seconds: float) -> None:
        """Wait in the thread for some seconds, until `wake`, or until it is to end."""
        if not self.stopping.is_set():
            self._woken.wait(seconds)
            self._woken.clear()

    def stop(self) -> None:
        """Ask the thread to end after the call in flight, if it is to end before `close`."""
        if self._ends_at_stop:
            self._end()

    def close(self) -> None:
        """Let the thread end after the call in flight, and wait for that; `stop` ends what `turn` itself waits for."""
        self._end()
        self.stop()
        self.join(self._close_seconds)

    def join(self, seconds: float) -> None:
        """Wait up to `seconds` until the thread has ended."""
        if self._thread.is_alive():
            self._thread.join(seconds)

    @property
    def error(self) -> RelayError | None:
        """The fault that has ended the thread."""
        return self._error

    @property
    def conditions(self) -> Sequence[Condition]:
        """The condition of the thread."""
        return (self.condition,)

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def step(self) -> float | None:
        """Call `turn`, in another thread; returns the seconds until the next call, None after a final fault."""
        try:
            return self.turn()
        except Exception as error:
            if self._is_last(error):
                self._note_end(error)
                return None
            return self.condition.pause

    def _run(self) -> None:
        pause = self._first_pause
        try:
            while not self.stopping.is_set():
                self.pause(pause)
                if not self.stopping.is_set():
                    pause = self._turn()
        except Exception as error:
            self._note_end(error)
        finally:
            self.release()

    def _turn(self) -> float:
        """Call `turn`, and wait after a fault; returns the seconds until the next call. Raises a final one."""
        try:
            return self.turn()
        except Exception as error:
            if self._is_last(error):
                raise
            self.stopping.wait(self.condition.pause)
            return 0.0

    def _is_last(self, error: Exception) -> bool:
        """Whether a fault ends the part; reports it otherwise."""
        if self._failed is not None and self._is_final(error):
            return True
        if not self.stopping.is_set():  # the end of others may cause it
            self.condition.fails(TaskFault.of(error).text)
        return False

    def _end(self) -> None:
        self.stopping.set()
        self.wake()

    def _note_end(self, error: Exception) -> None:
        if self.stopping.is_set() and not isinstance(error, RelayError):
            return  # the end of others may cause it
        self._error = error if isinstance(error, RelayError) else TaskFault.of(error).as_error()
        if self._failed is not None:
            self._failed()


class Round(Part):
    """Several recurring parts whose turns take no time: they share a thread, which calls each when it is due."""

    def __init__(self, name: str, parts: Sequence[Recurring]) -> None:
        self._parts = parts
        self._closing = Event()
        self._thread = Thread(target=self._run, name=name)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Stop the parts."""
        for part in self._parts:
            part.stop()

    def close(self) -> None:
        """Let the thread end after the call in flight, and close the parts."""
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join(_ROUND_SECONDS)
        for part in self._parts:
            part.close()

    @property
    def error(self) -> RelayError | None:
        """The fault that has ended a part."""
        return next((part.error for part in self._parts if part.error is not None), None)

    @property
    def conditions(self) -> Sequence[Condition]:
        """The conditions of the parts."""
        return [condition for part in self._parts for condition in part.conditions]

    def _run(self) -> None:
        due = dict.fromkeys(self._parts, 0.0)
        while due and not self._closing.wait(max(0.0, min(due.values()) - time.monotonic())):
            for part, at in list(due.items()):
                if at > time.monotonic():
                    continue
                pause = part.step()
                if pause is None:
                    del due[part]
                else:
                    due[part] = time.monotonic() + pause


def faults(conditions: Sequence[Condition]) -> list[PartFault]:
    """Return the faults of the parts that do not do their work."""
    return [each.fault for each in conditions if each.fault is not None]
