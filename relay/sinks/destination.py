"""Where a sink delivers: a plain sink has one destination, one whose endpoints data choose has one for each of them."""

from __future__ import annotations

import logging
import time
from collections.abc import Hashable

from relay.config.handlers import DeliveryHandler
from relay.faults import asked_of, describe
from relay.sinks.circuit_breaker import CircuitBreaker

log = logging.getLogger(__name__)


class RateLimit:
    """Spaces turns evenly, `rate` a second. No I/O."""

    def __init__(self, rate: float) -> None:
        self.interval = 1 / rate
        self._next = 0.0

    def turn(self) -> float:
        """Take the next turn; returns the seconds until it."""
        now = time.monotonic()
        turn = max(now, self._next)
        self._next = turn + self.interval
        return turn - now

    @property
    def ahead(self) -> float:
        """The seconds until the next turn, which nobody has taken yet."""
        return max(0.0, self._next - time.monotonic())


class Destination:
    """Whether a destination counts as down, for which fault, and how fast it may be asked. For one event loop."""

    def __init__(self, sink: str, settings: DeliveryHandler) -> None:
        self._sink = sink
        self._settings = settings
        self.pace = RateLimit(settings.rate_limit) if settings.rate_limit else None
        self.last_fault = ""
        self.forget()

    def forget(self) -> None:
        """Forget what it has answered."""
        # A sink that is not reliable drops what fails: it would drop what a breaker holds up without a try.
        settings = self._settings
        self.breaker = CircuitBreaker(settings.circuit_breaker if settings.reliable else None)

    @property
    def fields(self) -> dict[str, object]:
        """What a line of the log says of it."""
        return {"handler": self._sink, "fault": self.last_fault}

    @property
    def fault(self) -> str | None:
        """The last fault while the circuit breaker is open; None while it is closed."""
        return self.last_fault if self.breaker.is_open else None

    def answered(self, key: Hashable) -> None:
        """Note that the destination has answered an event with `key`."""
        if self.breaker.succeeded(key):
            log.info("the circuit breaker is closed", extra=self.fields)

    def failed(self, key: Hashable, error: BaseException, *, stop: bool = False) -> bool:
        """Count a failure, or `stop` at once; returns whether that has opened the breaker."""
        self.last_fault = describe(error)
        failed = self.breaker.stop if stop and self._settings.reliable else self.breaker.failed
        opened = failed(key, asked_of(error))
        if opened:
            log.warning("the circuit breaker is open: the destination fails", extra=self.fields)
        return opened
