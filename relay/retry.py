"""Retries without a limit what fails because of an outage."""

from __future__ import annotations

import logging
from collections.abc import Callable
from threading import Event

from tenacity import (
    RetryCallState,
    Retrying,
    retry_if_exception,
    sleep_using_event,
    stop_when_event_set,
    wait_exponential_jitter,
)

from relay.faults import describe, is_transient

FIRST_WAIT_SECONDS = 0.1
LONGEST_WAIT_SECONDS = 5.0


def retry_until_success(
    stopping: Event,
    log_retry: Callable[[RetryCallState], None],
    retryable: Callable[[BaseException], bool] = is_transient,
) -> Retrying:
    """Return a caller that repeats a `retryable` fault after growing waits, and raises it once `stopping` is set.

    Create it once and call it often: each is a reference cycle, and garbage collection stops all threads.
    """
    return Retrying(
        retry=retry_if_exception(retryable),
        wait=wait_exponential_jitter(
            multiplier=FIRST_WAIT_SECONDS, max=LONGEST_WAIT_SECONDS, jitter=0.1
        ),
        stop=stop_when_event_set(stopping),
        sleep=sleep_using_event(stopping),
        before_sleep=log_retry,
        reraise=True,
    )


def log_changes(log: logging.Logger, text: str) -> Callable[[RetryCallState], None]:
    """Return a callback that logs `text` with the first of several faults in a row, and with each that differs."""
    last_logged = ""

    def log_retry(state: RetryCallState) -> None:
        nonlocal last_logged
        error = state.outcome.exception() if state.outcome else None
        fault = describe(error) if error else ""
        if fault != last_logged or state.attempt_number == 1:
            last_logged = fault
            log.warning(text, extra={"fault": fault})

    return log_retry
