"""Trying again, for as long as it takes, what fails because of the surroundings."""

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
    say: Callable[[RetryCallState], None],
    passes: Callable[[BaseException], bool] = is_transient,
) -> Retrying:
    """Calls again after a fault that `passes`, first soon and then seldom; `stopping`, once set, lets the last one out.

    To be made once and called often: each is a reference cycle, and while those are looked for nothing else goes on.
    """
    return Retrying(
        retry=retry_if_exception(passes),
        wait=wait_exponential_jitter(
            multiplier=FIRST_WAIT_SECONDS, max=LONGEST_WAIT_SECONDS, jitter=0.1
        ),
        stop=stop_when_event_set(stopping),
        sleep=sleep_using_event(stopping),
        before_sleep=say,
        reraise=True,
    )


def log_first(log: logging.Logger, text: str) -> Callable[[RetryCallState], None]:
    """Say that something cannot be done yet, with the first fault of a row of them."""

    def say(state: RetryCallState) -> None:
        error = state.outcome.exception() if state.outcome else None
        if error is not None and state.attempt_number == 1:
            log.warning(text, extra={"fault": describe(error)})

    return say


def log_changes(log: logging.Logger, text: str) -> Callable[[RetryCallState], None]:
    """Say that something cannot be done yet, once for each fault that differs from the one before."""
    last_logged = ""

    def say(state: RetryCallState) -> None:
        nonlocal last_logged
        error = state.outcome.exception() if state.outcome else None
        fault = describe(error) if error else ""
        if fault != last_logged:
            last_logged = fault
            log.warning(text, extra={"fault": fault})

    return say
