"""Stops a sink whose destination is down, so that its events stay in the log instead of being copied. No I/O.

For one event loop: no lock, so that deliveries run side by side.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Hashable

from relay.config.handlers import CircuitBreaker

_FIRST_SECONDS = 1.0


class Breaker:
    """Opens after so many failures in a row; then one delivery at a time tries whether the destination is back.

    All keys that were tried last have to be among those that failed: a key that fails alone is deferred, and leaves the
    others alone. The time between two trials doubles, up to `cool_down`.
    """

    def __init__(self, settings: CircuitBreaker | None) -> None:
        """Without settings it never opens by itself."""
        self._settings = settings or CircuitBreaker()
        self._enabled = settings is not None
        self._failures = 0
        self._failed: set[Hashable] = set()
        self._last: OrderedDict[Hashable, None] = OrderedDict()
        self._wait = 0.0
        self._opened = self._tried = 0.0
        self._trying = False

    @property
    def is_open(self) -> bool:
        """Whether the destination counts as down."""
        return self._wait > 0

    def seconds_to_trial(self) -> float | None:
        """When a delivery may begin: 0 is now, None when the trial that runs has ended."""
        if not self.is_open:
            return 0.0
        if self._trying:
            return None
        return max(0.0, self._opened + self._wait - time.monotonic())

    def begin(self) -> None:
        """A delivery begins."""
        self._trying = self.is_open

    def succeeded(self, key: Hashable) -> bool:
        """The destination has answered; returns whether it counted as down."""
        was_open = self.is_open
        self._try(key)
        self._failures = 0
        self._failed.clear()
        self._wait, self._trying = 0.0, False
        return was_open

    def failed(self, key: Hashable) -> bool:
        """The destination could not be reached, or is overloaded; returns whether that has opened the breaker."""
        self._try(key)
        self._failures += 1
        self._failed.add(key)
        if self.is_open:
            if self._trying:
                self._open(min(self._wait * 2, self._settings.cool_down))
            return False
        if not self._enabled or self._failures < self._settings.failures:
            return False
        if not self._failed.issuperset(self._last):
            return False
        self._open(min(_FIRST_SECONDS, self._settings.cool_down))
        return True

    def _try(self, key: Hashable) -> None:
        """Remember the keys that were tried last, as many as failures open the breaker."""
        self._last[key] = None
        self._last.move_to_end(key)
        while len(self._last) > self._settings.failures:
            self._last.popitem(last=False)

    def hold(self, seconds: float) -> None:
        """Let nothing through for so long, whatever was counted."""
        self._open(seconds)

    def _open(self, seconds: float) -> None:
        self._wait, self._opened, self._trying = seconds, time.monotonic(), False
