"""The circuit breaker, which stops a sink whose destination is down, so that its events stay in the log. No I/O.

For one event loop: it has no lock.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Hashable

from relay.config.handlers import CircuitBreakerSettings
from relay.waits import doubled

_FIRST_SECONDS = 1.0
LONGEST_ASKED_SECONDS = 3_600.0
"""How long a destination's request to wait (Retry-After) holds up all trials, at most."""


class CircuitBreaker:
    """Opens after `failures` failures in a row; while open, it lets one delivery at a time through, as a trial.

    It opens only if all of the last `failures` keys have failed: a single key that fails is deferred and does not stop
    the others. The time between two trials doubles, up to `cool_down` seconds; no trial begins before the time that the
    destination has asked for in the last failure.
    """

    def __init__(self, settings: CircuitBreakerSettings | None) -> None:
        """Without settings, only `hold` opens it."""
        self._settings = settings or CircuitBreakerSettings()
        self._enabled = settings is not None
        self._failures = 0
        self._failed: set[Hashable] = set()
        self._last: OrderedDict[Hashable, None] = OrderedDict()
        self._wait = 0.0
        self._opened = self._asked_until = 0.0
        self._trying = False

    @property
    def is_open(self) -> bool:
        """Whether the destination counts as down."""
        return self._wait > 0

    def seconds_to_trial(self) -> float | None:
        """Seconds until a delivery may start: 0 is now, None means when the trial in flight has ended."""
        if not self.is_open:
            return 0.0
        if self._trying:
            return None
        return max(0.0, max(self._opened + self._wait, self._asked_until) - time.monotonic())

    def begin(self) -> bool:
        """Note that a delivery starts: while the breaker is open, it is the trial. Returns whether it is."""
        self._trying = self.is_open
        return self._trying

    def give_up(self) -> None:
        """Note that the trial has ended: without an answer, the next one may begin at once."""
        self._trying = False

    def succeeded(self, key: Hashable) -> bool:
        """Close the breaker, since the destination has answered; returns whether it was open."""
        was_open = self.is_open
        self._remember(key)
        self.forget()
        return was_open

    def failed(self, key: Hashable, asked: float = 0.0) -> bool:
        """Count an outage or an overload of the destination; returns whether that has opened the breaker.

        `asked` are the seconds that the destination wants to be left alone.
        """
        self._remember(key)
        self._ask(asked)
        self._failures += 1
        self._failed.add(key)
        if self.is_open:
            if self._trying:
                self._open(doubled(self._wait, 1, self._settings.cool_down))
            return False
        if not self._enabled or self._failures < self._settings.failures:
            return False
        if not self._failed.issuperset(self._last):
            return False
        self._open(min(_FIRST_SECONDS, self._settings.cool_down))
        return True

    def _ask(self, seconds: float) -> None:
        # Only the last one counts: the limit of a single key would hold up a sink whose destination is away meanwhile.
        self._asked_until = time.monotonic() + min(seconds, LONGEST_ASKED_SECONDS)

    def _remember(self, key: Hashable) -> None:
        """Remember a key among the last `failures` keys that were tried."""
        self._last[key] = None
        self._last.move_to_end(key)
        while len(self._last) > self._settings.failures:
            # Forgotten whether it failed, too: an outage of days would leave all its keys here.
            self._failed.discard(self._last.popitem(last=False)[0])

    def stop(self, key: Hashable, asked: float = 0.0) -> bool:
        """Open at once, since the destination refuses every event; returns whether that has opened the breaker."""
        was_open = self.is_open
        self._remember(key)
        self._ask(asked)
        self._failed.add(key)
        self._open(self._settings.cool_down)
        return not was_open

    def forget(self) -> None:
        """Close the breaker without an answer, since nothing is left that could be a trial."""
        self._failures = 0
        self._failed.clear()
        self._wait, self._trying, self._asked_until = 0.0, False, 0.0

    def hold(self, seconds: float) -> None:
        """Open the breaker for `seconds`, whatever it has counted."""
        self._open(seconds)

    def _open(self, seconds: float) -> None:
        self._wait, self._opened, self._trying = seconds, time.monotonic(), False
