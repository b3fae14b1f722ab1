"""One delivery to the outside, with what the configuration puts around it: pace, circuit breaker, short retries."""

from __future__ import annotations

import time
from dataclasses import replace
from threading import BoundedSemaphore, Event, Lock

from pybreaker import CircuitBreaker, CircuitBreakerError
from tenacity import (
    RetryCallState,
    Retrying,
    retry_if_exception,
    sleep_using_event,
    stop_before_delay,
    stop_when_event_set,
)

from relay.events import Transaction
from relay.fates import Failure, History, judge, next_wait
from relay.faults import Action, Undelivered, action_for
from relay.handler_settings import OutsideHandler
from relay.handlers import Outside


class Open(Undelivered):
    """The circuit breaker lets nothing through."""


class Delivery:
    """Delivers one transaction after the other, from as many threads as `concurrency` allows."""

    def __init__(self, handler: Outside, settings: OutsideHandler, stopping: Event) -> None:
        """`stopping`, once set, ends waiting: what is not delivered by then waits for another process."""
        self.name = handler.name
        self._stopping = stopping
        self.settings = settings
        self._handler = handler
        self._places = BoundedSemaphore(settings.concurrency)
        self._pace = Pace(settings.rate_limit) if settings.rate_limit else None
        self._breaker = self._circuit_breaker()

    def close(self) -> None:
        """Let go of the handler's connections."""
        self._handler.close()

    def attempt(self, transaction: Transaction, before: History) -> Failure | None:
        """Deliver, with the retries that need only short waits; returns why it failed, or None."""
        retry = self.settings.retry
        attempts = before.attempts

        def once() -> None:
            nonlocal attempts
            attempts += 1
            try:
                self._through(transaction)
            except Open:
                attempts -= 1
                raise

        def worth_another(error: BaseException) -> bool:
            if isinstance(error, Open) or not self.settings.reliable or attempts == retry.attempts:
                return False
            return action_for(error) is Action.RETRY

        try:
            Retrying(
                retry=retry_if_exception(worth_another),
                wait=lambda state: next_wait(retry, _error(state), attempts),
                stop=stop_before_delay(retry.defer_after) | stop_when_event_set(self._stopping),
                sleep=sleep_using_event(self._stopping),
                reraise=True,
            )(once)
        except Exception as error:
            return judge(self.name, error, attempts, before, retry, self.settings.blocks_key)
        return None

    def held(self, failure: Failure) -> Failure:
        """Instead of dying the transaction is retried, after as long as after a transient fault."""
        after = next_wait(self.settings.retry, failure.error, failure.attempts)
        return replace(failure, after=after, holds=False)

    def _through(self, transaction: Transaction) -> None:
        with self._places:
            if self._pace:
                self._stopping.wait(self._pace.turn())
            if self._breaker is None:
                self._handler.deliver(transaction)
                return
            try:
                self._breaker.call(self._handler.deliver, transaction)
            except CircuitBreakerError:
                raise Open(
                    "the circuit breaker is open", after=self._breaker.reset_timeout
                ) from None

    def _circuit_breaker(self) -> CircuitBreaker | None:
        configured = self.settings.circuit_breaker
        if configured is None:
            return None
        return CircuitBreaker(
            fail_max=configured.failures,
            reset_timeout=configured.cool_down,
            # What is the event's own fault says nothing about the endpoint.
            exclude=[lambda error: action_for(error) is not Action.RETRY],
            throw_new_error_on_trip=False,
        )


class Pace:
    """Lets so many through in a second, evenly."""

    def __init__(self, rate: float) -> None:
        self._interval = 1 / rate
        self._next = 0.0
        self._lock = Lock()

    def turn(self) -> float:
        """In how many seconds it is one's turn, which is taken with that."""
        with self._lock:
            now = time.monotonic()
            turn = max(now, self._next)
            self._next = turn + self._interval
        return turn - now


def _error(state: RetryCallState) -> BaseException | None:
    return state.outcome.exception() if state.outcome else None
