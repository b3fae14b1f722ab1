"""Goes on through an outage: retries without a limit what fails because of it, after waits that grow."""

from __future__ import annotations

from collections.abc import Callable
from threading import Event
from typing import TypeVar

from tenacity import (
    RetryCallState,
    Retrying,
    retry_if_exception,
    sleep_using_event,
    stop_when_event_set,
    wait_exponential_jitter,
)

from relay.faults import describe, is_transient
from relay.runtime.parts import Condition

FIRST_WAIT_SECONDS = 0.1
LONGEST_WAIT_SECONDS = 5.0

Result = TypeVar("Result")

_growing = wait_exponential_jitter(
    multiplier=FIRST_WAIT_SECONDS, max=LONGEST_WAIT_SECONDS, jitter=0.1
)


class RetryUntilSuccess:
    """Repeats a call with a `retryable` fault after growing waits, and raises the fault once `stopping` is set.

    Each fault and each success is reported to `condition`; `failed` reports a fault in another way. `wait` returns the
    seconds to wait after a fault for which the wait does not grow, and None for others.
    Create it once and call it often: each is a reference cycle, and garbage collection stops all threads.
    """

    def __init__(
        self,
        stopping: Event,
        condition: Condition,
        failed: Callable[[BaseException], None] | None = None,
        retryable: Callable[[BaseException], bool] = is_transient,
        wait: Callable[[BaseException], float | None] = lambda error: None,
    ) -> None:
        self._condition = condition
        self._wait = wait
        self._failed = failed or (lambda error: condition.fails(describe(error)))
        self._retrying = Retrying(
            retry=retry_if_exception(retryable),
            wait=self._seconds,
            stop=stop_when_event_set(stopping),
            sleep=sleep_using_event(stopping),
            before_sleep=self._report,
            reraise=True,
        )

    def __call__(self, call: Callable[..., Result], *arguments: object) -> Result:
        """Return the result of the call. Raises its lasting faults."""
        try:
            # Nearly every call is done here, which costs nothing.
            result = call(*arguments)
        except Exception as error:
            result = self._retrying(_raising_first(error, call), *arguments)
        self._condition.works()
        return result

    def _seconds(self, state: RetryCallState) -> float:
        error = state.outcome.exception() if state.outcome else None
        seconds = None if error is None else self._wait(error)
        return float(_growing(state)) if seconds is None else seconds

    def _report(self, state: RetryCallState) -> None:
        error = state.outcome.exception() if state.outcome else None
        if error is not None:
            self._failed(error)


def _raising_first(error: Exception, call: Callable[..., Result]) -> Callable[..., Result]:
    """The call, which at first raises the error that it has raised already."""
    errors = [error]

    def again(*arguments: object) -> Result:
        if errors:
            raise errors.pop()
        return call(*arguments)

    return again
