"""Whether a failed transaction is retried, and after how many seconds."""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import ModuleType
from typing import Any

import psycopg
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from relay.config.handlers import RetrySettings
from relay.faults import (
    LONGEST_ASKED_SECONDS,
    ConfigurationError,
    Drop,
    Fail,
    InvalidEvent,
    ProcessDied,
    Rejected,
    TransientFault,
    Undelivered,
)
from relay.faults import RetryLater as AskedLater
from relay.model.dispositions import (
    BLOCKED,
    NEW,
    AttemptHistory,
    DeadLetter,
    Failed,
    RetryLater,
    holds_keys,
)
from relay.pipeline import retry_policy
from relay.pipeline.retry_policy import RetryPolicy

OUTAGE = TransientFault()


def policy(**retry: Any) -> RetryPolicy:
    return RetryPolicy("h", RetrySettings(**retry))


def waits(attempts: int, error: BaseException = OUTAGE, **retry: Any) -> list[float]:
    found = policy(**{"jitter": 0, **retry})
    return [found.wait(error, attempt) for attempt in range(1, attempts + 1)]


@pytest.fixture
def function() -> Iterator[Callable[[Callable[[int], Any]], str]]:
    """Give a function a path that the configuration can name."""
    module = ModuleType("backoff_of_a_test")
    sys.modules[module.__name__] = module

    def name(called: Callable[[int], Any]) -> str:
        module.waits = called  # type: ignore[attr-defined]
        return f"{module.__name__}:waits"

    yield name
    del sys.modules[module.__name__]


def test_the_forms_of_a_backoff() -> None:
    """elennick/retry4j#36 (the first wait was 0, the fifth wrong), timgit/pg-boss#520 (without bound),
    riverqueue/river#649 and mozilla/treeherder#341 (nothing linear)."""
    assert waits(6, wait=1, max_wait=5) == [1, 2, 4, 5, 5, 5]
    assert waits(6, wait=2, max_wait=9, backoff="linear") == [2, 4, 6, 8, 9, 9]
    assert waits(3, wait=2, backoff="constant") == [2, 2, 2]
    assert waits(3, wait=9, max_wait=5, backoff="constant") == [5, 5, 5]


def test_a_list_repeats_its_last_wait_and_may_be_longer_than_the_attempts() -> None:
    """Bogdanp/dramatiq#580: a minute, five, an hour."""
    assert waits(5, backoff=[5, 60, 300]) == [5, 60, 300, 300, 300]
    assert waits(2, backoff=[5, 60, 3_600]) == [5, 60]
    assert waits(2, backoff=[0.5]) == [0.5, 0.5]
    # Longer than the default of max_wait, since somebody has written it.
    assert waits(1, backoff=[604_800]) == [604_800]


_WAIT = st.floats(1e-3, 1e6)


@given(
    attempt=st.integers(1, 10**9),
    wait=_WAIT,
    most=_WAIT,
    jitter=st.floats(0, 1e3),
    backoff=st.sampled_from(["exponential", "linear", "constant"])
    | st.lists(_WAIT, min_size=1, max_size=5),
)
def test_every_wait_is_within_its_bounds(
    attempt: int, wait: float, most: float, jitter: float, backoff: str | list[float]
) -> None:
    named = {} if isinstance(backoff, list) else {"wait": wait, "max_wait": most}
    found = policy(backoff=backoff, jitter=jitter, **named)
    least = min(backoff) if isinstance(backoff, list) else min(wait, most)
    assert least <= found.wait(OUTAGE, attempt) <= found.longest + jitter


@given(attempt=st.integers(1, 200), backoff=st.sampled_from(["exponential", "linear"]))
def test_no_wait_is_shorter_than_the_one_before(attempt: int, backoff: str) -> None:
    found = policy(backoff=backoff, jitter=0)
    assert found.wait(OUTAGE, attempt) <= found.wait(OUTAGE, attempt + 1)


@given(asked=st.floats() | st.integers(-(10**400), 10**400))
def test_no_fault_asks_for_a_wait_that_never_ends(asked: float) -> None:
    for error in (TransientFault(after=asked), AskedLater(after=asked)):
        assert 0.1 <= policy(jitter=0).wait(error, 1) <= LONGEST_ASKED_SECONDS


def test_an_endpoint_asks_for_a_least_wait() -> None:
    assert waits(4, Undelivered("HTTP 429", after=3)) == [3, 3, 4, 8]


def test_a_handler_says_the_wait_itself() -> None:
    """celery/celery#313 (the default took its place), packit/packit-service#1632 (without one, no backoff),
    Bogdanp/dramatiq#388 and riverqueue/river#1037 (0 counted as none)."""
    assert waits(3, AskedLater("no stock", after=30), jitter=5, wait=100) == [30, 30, 30]
    assert waits(1, AskedLater(after=timedelta(minutes=5))) == [300]
    assert waits(1, AskedLater(after=0)) == [0.1]
    assert waits(3, AskedLater("no stock")) == [1, 2, 4]
    assert waits(3, AskedLater(after=-1)) == [1, 2, 4]
    assert waits(3, AskedLater(after=math.nan)) == [1, 2, 4]


@pytest.mark.parametrize("after", ["5", object()])
def test_a_wait_that_is_no_number_fails_where_it_is_raised(after: Any) -> None:
    with pytest.raises(TypeError, match="give seconds or a timedelta"):
        AskedLater(after=after)


def test_attempts_and_time_exhaust() -> None:
    def disposition(
        error: Exception, made: int, since: float | None = None, blocks: bool = False, **retry: Any
    ) -> Failed:
        before = AttemptHistory(0, since)
        return policy(jitter=0, **retry).disposition_of(error, made, before, blocks)

    retried = disposition(OUTAGE, 5)
    assert isinstance(retried, RetryLater)
    assert retried.after == 16
    assert isinstance(disposition(OUTAGE, 5, attempts=5), DeadLetter)
    assert isinstance(disposition(OUTAGE, 4, attempts=5), RetryLater)
    assert isinstance(disposition(OUTAGE, 1, time.monotonic() - 100, max_elapsed=100), DeadLetter)
    assert isinstance(disposition(OUTAGE, 1, time.monotonic() - 50, max_elapsed=100), RetryLater)
    assert isinstance(disposition(Rejected("HTTP 400"), 1), DeadLetter)
    assert holds_keys(disposition(Rejected(), 1, blocks=True))
    assert not holds_keys(disposition(Rejected(), 1))
    assert holds_keys(BLOCKED)


@pytest.mark.parametrize(
    ("error", "outages", "any_fault"),
    [
        (OUTAGE, True, True),
        (ConnectionError(), True, True),
        (KeyError("sku"), False, True),
        (psycopg.errors.ForeignKeyViolation(), False, True),
        (Rejected("HTTP 400"), False, True),
        (RuntimeError("the function called sys.exit(1)"), False, True),
        (Fail("no such customer"), False, False),
        (InvalidEvent("payload.sku is missing"), False, False),
        (ProcessDied(), False, False),
        (ConfigurationError("x"), False, False),
    ],
)
def test_what_is_retried(error: Exception, outages: bool, any_fault: bool) -> None:
    assert policy().retries(error) is outages
    assert policy(on="any", attempts=3).retries(error) is any_fault


def test_any_fault_is_retried_up_to_the_limit() -> None:
    found = policy(on="any", attempts=3)
    made = [found.disposition_of(KeyError("sku"), attempt, NEW, False) for attempt in (1, 2, 3)]
    assert [type(each) for each in made] == [RetryLater, RetryLater, DeadLetter]


@pytest.mark.parametrize("verdict", [Drop, Fail])
def test_what_a_handler_decides_is_no_outage_whatever_has_caused_it(
    verdict: type[Exception],
) -> None:
    error = verdict("gone")
    error.__cause__ = ConnectionError()
    assert not policy().retries(error)


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ({"on": "any"}, "needs attempts or max_elapsed"),
        ({"on": "some"}, "'outages' or 'any'"),
        ({"backoff": "cubic"}, "exponential, linear, constant, a list"),
        ({"backoff": 5}, "exponential, linear, constant, a list"),
        ({"backoff": True}, "exponential, linear, constant, a list"),
        ({"backoff": []}, "waits of more than 0 seconds"),
        ({"backoff": [5, 0]}, "waits of more than 0 seconds"),
        ({"backoff": [5, "60"]}, "waits of more than 0 seconds"),
        ({"backoff": [True]}, "waits of more than 0 seconds"),
        ({"backoff": [math.inf]}, "waits of more than 0 seconds"),
        ({"backoff": [math.nan]}, "waits of more than 0 seconds"),
        ({"backoff": [5], "max_wait": 60}, "max_wait has no effect"),
        ({"backoff": [5], "wait": 60}, "wait has no effect"),
    ],
)
def test_wrong_settings_are_refused(bad: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        RetrySettings(**bad)


def test_yaml_reads_the_key_on_as_a_boolean() -> None:
    found = RetrySettings.model_validate(yaml.safe_load("{on: any, attempts: 3}"))
    assert (found.on, found.attempts) == ("any", 3)


def test_a_function_says_the_wait(function: Callable[[Callable[[int], Any]], str]) -> None:
    assert waits(3, backoff=function(lambda attempt: attempt * 10)) == [10, 20, 30]
    assert waits(2, backoff=function(lambda attempt: timedelta(hours=attempt))) == [3_600, 7_200]
    assert waits(1, backoff=function(lambda attempt: 10**400)) == [LONGEST_ASKED_SECONDS]
    assert waits(1, backoff=function(lambda attempt: math.inf)) == [LONGEST_ASKED_SECONDS]
    assert waits(1, backoff=function(lambda attempt: 0)) == [0.1]


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        (math.nan, "NaN or a negative"),
        (-1, "NaN or a negative"),
        (timedelta(-1), "NaN or a negative"),
        (None, "returned a NoneType"),
        ("5", "returned a str"),
        (True, "returned a bool"),
    ],
)
def test_what_is_no_wait_doubles(
    function: Callable[[Callable[[int], Any]], str],
    caplog: pytest.LogCaptureFixture,
    returned: Any,
    words: str,
) -> None:
    assert waits(3, wait=2, backoff=function(lambda attempt: returned)) == [2, 4, 8]
    (record,) = caplog.records
    assert words in record.fault  # type: ignore[attr-defined]
    assert record.key == "handlers.h.retry.backoff"  # type: ignore[attr-defined]


@pytest.mark.parametrize("error", [KeyError("secret"), SystemExit(1), KeyboardInterrupt()])
def test_a_function_that_raises_harms_nothing(
    function: Callable[[Callable[[int], Any]], str],
    caplog: pytest.LogCaptureFixture,
    error: BaseException,
) -> None:
    def raising(attempt: int) -> float:
        raise error

    assert waits(2, backoff=function(raising)) == [1, 2]
    assert "secret" not in caplog.text + str([vars(each) for each in caplog.records])


def test_a_function_that_hangs_is_called_once(
    function: Callable[[Callable[[int], Any]], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retry_policy, "FUNCTION_SECONDS", 0.05)
    ended, calls = threading.Event(), []

    def hanging(attempt: int) -> float:
        calls.append(attempt)
        ended.wait()
        return 1

    try:
        assert waits(3, backoff=function(hanging)) == [1, 2, 4]
        assert calls == [1]
    finally:
        ended.set()


def test_a_function_that_cannot_be_called_is_refused_with_its_key(
    function: Callable[[Callable[[int], Any]], str],
) -> None:
    with pytest.raises(ConfigurationError, match=r"handlers\.h\.retry\.backoff: importing"):
        policy(backoff="not.there:waits")
    with pytest.raises(ConfigurationError, match=r"calls it with \(attempt\)"):
        policy(backoff=function(lambda: 1))  # type: ignore[arg-type, misc]

    async def waiting(attempt: int) -> float:
        return 1

    with pytest.raises(ConfigurationError, match="is async"):
        policy(backoff=function(waiting))
