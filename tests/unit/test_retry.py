"""The loop that repeats a call during an outage."""

import logging
from threading import Event

import psycopg
import pytest

from relay.runtime.parts import Condition
from relay.runtime.retry import FIRST_WAIT_SECONDS, LONGEST_WAIT_SECONDS, RetryUntilSuccess


class Elsewhere(Exception):
    """A fault after which the wait does not grow."""


def condition() -> Condition:
    return Condition("part", logging.getLogger("relay"), "fails", "over")


def test_waits_are_those_of_the_page_of_guarantees() -> None:
    assert (FIRST_WAIT_SECONDS, LONGEST_WAIT_SECONDS) == (0.1, 5.0)


def test_a_call_is_repeated_and_each_fault_reported() -> None:
    faults: list[Exception] = [Elsewhere(), psycopg.OperationalError("connection refused")]
    waits: list[BaseException] = []

    def call() -> int:
        if faults:
            raise faults.pop(0)
        return 7

    def wait(error: BaseException) -> float | None:
        waits.append(error)
        return 0.0 if isinstance(error, Elsewhere) else None

    part = condition()
    retrying = RetryUntilSuccess(Event(), part, None, lambda error: True, wait)
    assert retrying(call) == 7
    assert [type(each) for each in waits] == [Elsewhere, psycopg.OperationalError]
    assert part.fault is None


def test_a_fault_is_raised_once_relay_stops() -> None:
    stopping, part = Event(), condition()
    stopping.set()

    def call() -> None:
        raise psycopg.OperationalError("connection refused")

    with pytest.raises(psycopg.OperationalError):
        RetryUntilSuccess(stopping, part)(call)
