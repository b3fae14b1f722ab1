"""Retries as users of other job systems expect them: what is retried, how often, and what a handler may decide."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import Counter
from typing import Any

import pytest

from relay.admin.check import examine
from relay.admin.findings import Severity
from relay.config.handlers import RetrySettings
from relay.config.settings import Settings
from relay.faults import Drop, Fail
from relay.model.dispositions import APPLIED, DeadLetter, Disposition
from relay.model.dispositions import RetryLater as Retried
from relay.pipeline import retry_policy
from relay.pipeline.retry_policy import RetryPolicy
from relay.spark.session import Session
from tests.outbox import APPEND, Outbox, event, host, relaying, wait_until
from tests.unit.test_dispatch import Run, delivery
from tests.unit.test_retry_policy import OUTAGE, policy
from tests.webhook import Answer, Webhook

ANY: dict[str, Any] = {"on": "any", "attempts": 3, "backoff": "tests.callables:wait_briefly"}


def settings(outbox: Outbox, engine: str = "inline", **retry: Any) -> Settings:
    """The function of this module's tests, beside a statement for the same events."""
    outbox.conn.execute(
        "create table if not exists tried (name text, attempt int, at timestamptz default now())"
    )
    outbox.conn.execute("create table if not exists beside (id uuid)")
    outbox.conn.execute("create unique index if not exists once on projection (id)")
    decides = {
        "type": "python",
        "callable": "tests.callables:decide_by_name",
        "retry": {"jitter": 0, **retry},
    }
    beside = {"type": "sql", "statement": "insert into beside values (%(id)s)"}
    return outbox.settings(
        engine,
        handlers={"beside": beside, "decides": decides},
        routes=[{"handlers": ["beside", "decides"]}],
    )


def attempts(outbox: Outbox, name: str) -> list[int]:
    """The attempts that a function saw, without those that are repeated within one, as isolation does."""
    return outbox.column(
        "select distinct attempt from tried where name = %s order by attempt", [name]
    )


def test_any_fault_is_retried_up_to_its_limit_and_the_function_knows_the_attempt(
    outbox: Outbox, engine: str, session: Session | None
) -> None:
    """timgit/pg-boss#29 (failed jobs were not retried), Bogdanp/dramatiq#605 (more retries than configured),
    sidekiq/sidekiq#332 (what is no StandardError was lost), sidekiq/sidekiq#1096 (which attempt is it?).
    """
    names = ["fails 2", "fails 9", "exits 1", "plain"]
    with relaying(settings(outbox, engine, **ANY), session):
        for number, name in enumerate(names):
            outbox.publish(host(number), event(number, aggregate_id=name))
        outbox.wait_handled(60)
    assert {name: attempts(outbox, name) for name in names} == {
        "fails 2": [1, 2, 3],
        "fails 9": [1, 2, 3],
        "exits 1": [1, 2],
        "plain": [1],
    }
    assert outbox.column("select amount from projection order by amount") == [0, 2, 3]
    assert outbox.value("select count(*) from beside") == 3
    assert outbox.column("select handler from relay.dead_letter_queue") == ["decides"]
    assert outbox.value("select count(*) from relay.deferred") == 0


def test_what_follows_of_a_key_waits_for_a_retry_after_any_fault(outbox: Outbox) -> None:
    with relaying(settings(outbox, **ANY)):
        for number, name in enumerate(["fails 1", "plain", "fails 9", "last"]):
            outbox.publish(host(1), event(number, aggregate_id=name))
        outbox.wait_handled()
    tried = outbox.column("select amount from projection order by ctid")
    assert tried == [0, 1, 3]
    assert outbox.value("select count(*) from relay.dead_letter_queue") == 1


def test_what_is_given_up_may_hold_its_key(outbox: Outbox) -> None:
    configured = settings(outbox, **ANY)
    decides = configured.handlers["decides"].model_copy(update={"on_exhausted": "block_key"})
    handlers = {**configured.handlers, "decides": decides}
    with relaying(configured.model_copy(update={"handlers": handlers})):
        for number, name in enumerate(["fails 9", "plain"]):
            outbox.publish(host(1), event(number, aggregate_id=name))
        wait_until(lambda: outbox.value("select count(*) from relay.dead_letter_queue") == 1)
        wait_until(lambda: outbox.value("select count(*) from relay.deferred") == 2)
    assert attempts(outbox, "fails 9") == [1, 2, 3]
    assert attempts(outbox, "plain") in ([], [1])
    assert outbox.value("select count(*) from projection") == 0


def test_a_function_that_is_not_there_is_found_before_the_start(outbox: Outbox) -> None:
    """For sinks too, whose retries begin at night."""
    retry = {"backoff": "tests.callables:not_there"}
    hook = {"type": "http", "url": "http://127.0.0.1:1/", "retry": retry}
    configured = outbox.settings(handlers={"hook": hook}, routes=[{"handlers": ["hook"]}])
    errors = [each.text for each in examine(configured) if each.level is Severity.ERROR]
    assert errors == ["handlers.hook.retry.backoff: 'tests.callables' has no 'not_there'"]


def test_attempts_go_on_after_a_restart(outbox: Outbox) -> None:
    configured = settings(outbox, on="any", attempts=3, backoff=[1])
    outbox.publish(host(1), event(1, aggregate_id="fails 9"))
    for attempt in (1, 2, 3):
        with relaying(configured):
            wait_until(lambda attempt=attempt: attempt in attempts(outbox, "fails 9"))  # type: ignore[misc]
    with relaying(configured):
        outbox.wait_handled()
    assert attempts(outbox, "fails 9") == [1, 2, 3]


def test_a_function_may_end_its_part_as_done_or_dead(
    outbox: Outbox, engine: str, session: Session | None, caplog: pytest.LogCaptureFixture
) -> None:
    """sidekiq/sidekiq#5406 and #103 (end it without retries, by the error), codingjoe/django-pictures#181 (a job that
    cannot succeed was tried for days), oban-bg/oban#205 (discard).
    """
    names = ["drops", "dies", "repeats", "plain"]
    with relaying(settings(outbox, engine, **ANY), session):
        for number, name in enumerate(names):
            outbox.publish(host(number), event(number, aggregate_id=name))
        wait_until(lambda: outbox.value("select count(*) from beside") == 3)
        wait_until(lambda: outbox.value("select count(*) from relay.dead_letter_queue") == 1)
    # What it did for a dropped transaction is undone; the other handler has all but the dead one.
    assert outbox.column("select amount from projection") == [3]
    (exception,) = outbox.column("select exception from relay.dead_letter_queue")
    assert exception.startswith("Fail: no such customer")
    assert {name: attempts(outbox, name) for name in names} == {name: [1] for name in names}
    assert outbox.value("select count(*) from relay.deferred") == 0
    if engine == "inline":
        reasons = {
            getattr(each, "reason", "")
            for each in caplog.records
            if each.getMessage() == "dropped by the handler"
        }
        assert reasons
        assert reasons <= {"not for this service", "has it already"}


def test_a_wait_that_a_function_names_is_kept(outbox: Outbox) -> None:
    """celery/celery#1124 (the countdown was not kept), celery/celery#313 (nor an eta)."""
    with relaying(settings(outbox, wait=300)):
        outbox.publish(host(1), event(1, aggregate_id="asks 2"))
        outbox.wait_handled()
    first, second = outbox.column("select min(at) from tried group by attempt order by attempt")
    assert 2 <= (second - first).total_seconds() < 15


@pytest.mark.parametrize("attempt", [31, 32, 55, 64, 65, 306, 1_024, 1_075, 1_200, 10**9])
def test_no_number_of_attempts_overflows(attempt: int) -> None:
    """riverqueue/river#697 (at 305 attempts: into the past), oban-bg/oban#245 (1,200 attempts), apache/kafka#23212,
    scylladb/latte#208, zenml-io/zenml#5265, openai/openai-agents-python#3226, Netflix/titus-control-plane#486,
    google/dart-neats#46, aws/aws-sdk-java-v2#1673, thomhurst/Dekaf#3068.
    """
    for backoff in ("exponential", "linear"):
        assert policy(backoff=backoff, wait=60, jitter=0).wait(OUTAGE, attempt) == 300
    assert policy(wait=1e9, max_wait=1e9, jitter=0).wait(OUTAGE, attempt) == 1e9


def test_jitter_spreads_those_that_failed_together() -> None:
    """pathosDev/actor-ts#771: without jitter all come back at the same moment."""
    spread = policy(wait=10, jitter=5)
    found = {spread.wait(OUTAGE, 1) for _ in range(100)}
    assert len(found) > 90
    assert all(10 <= each <= 15 for each in found)


def test_an_http_sink_retries_a_refusal_after_the_waits_of_a_list(outbox: Outbox) -> None:
    """timgit/pg-boss#29: three attempts some seconds apart, also after an answer that is final by itself."""
    sent: Counter[str] = Counter()

    def refuse(headers: dict[str, str], body: bytes) -> Answer:
        number = str(json.loads(body)["data"]["amount"])
        sent[number] += 1
        return Answer(400 if number == "9" or sent[number] < 3 else 204)

    retry = {"on": "any", "attempts": 4, "backoff": [0.2, 0.3], "jitter": 0, "defer_after": 0}
    with Webhook(refuse) as webhook:
        hook = {"type": "http", "url": webhook.url, "retry": retry}
        configured = outbox.settings(
            handlers={"projection": {"type": "sql", "statement": APPEND}, "hook": hook},
            routes=[{"handlers": ["projection", "hook"]}],
        )
        with relaying(configured):
            for number in (1, 9):
                outbox.publish(host(number), event(number))
            wait_until(lambda: outbox.value("select count(*) from relay.dead_letter_queue") == 1)
            outbox.wait_delivered("hook")
    assert sent == {"1": 3, "9": 4}


def test_a_sink_is_told_the_attempt_and_may_decide(caplog: pytest.LogCaptureFixture) -> None:
    """sidekiq/sidekiq#5432: kill or discard, from where the fault is known. For a sink that calls a function."""
    seen: list[tuple[int, int]] = []

    async def run() -> dict[int, Disposition]:
        async def behave(number: int) -> None:
            attempt = started.sink.attempts[number]
            seen.append((number, attempt))
            if number == 1 and attempt < 3:
                raise KeyError("x")
            if number == 2:
                raise KeyError("x")
            if number == 3:
                raise Drop("not for us")
            if number == 4:
                raise Fail("never") from ConnectionError()

        retry = {"on": "any", "attempts": 3, "backoff": "constant", "wait": 0.01, "jitter": 0}
        started = Run(behave, retry={**retry, "defer_after": 5})
        await started.all([delivery(number, f"key {number}") for number in (1, 2, 3, 4)])
        return started.dispositions

    with caplog.at_level(logging.WARNING):
        found = asyncio.run(run())
    assert found[1] == found[3] == APPLIED
    assert [type(found[2]), type(found[4])] == [DeadLetter, DeadLetter]
    assert [attempt for number, attempt in seen if number == 1] == [1, 2, 3]
    assert [attempt for number, attempt in seen if number == 2] == [1, 2, 3]
    assert [attempt for number, attempt in seen if number == 4] == [1]
    assert "dropped by the handler" in caplog.messages


def test_faults_of_events_do_not_open_the_circuit_breaker() -> None:
    """With `on: any` every event may fail for its own reason: that is no outage, and each uses up its own attempts."""

    async def run() -> dict[int, Disposition]:
        async def behave(number: int) -> None:
            raise ValueError(number)

        run = Run(
            behave,
            retry={"on": "any", "attempts": 9, "defer_after": 0},
            circuit_breaker={"failures": 2, "cool_down": 30},
        )
        await run.all([delivery(number, f"key {number}") for number in range(9)])
        assert not run.dispatcher.breaker.is_open
        return run.dispositions

    assert all(isinstance(each, Retried) for each in asyncio.run(run()).values())


def test_a_brake_counts_what_is_given_up_and_not_what_is_retried() -> None:
    async def run() -> list[type[Disposition]]:
        async def behave(number: int) -> None:
            raise ValueError(number)

        limited = {"on": "any", "attempts": 1}
        one = Run(behave, brake=2, retry=limited)
        await one.all([delivery(number, "key") for number in range(2)])
        retried = Run(behave, brake=2, retry={**limited, "attempts": 9, "defer_after": 0})
        await retried.all([delivery(number, f"key {number}") for number in range(9)])
        assert not retried.dispatcher.limit.stopped
        return [type(each) for each in one.dispositions.values()]

    assert asyncio.run(run()) == [DeadLetter, DeadLetter]


def slow_wait(attempt: int) -> float:
    """A backoff that takes long each time, but not too long."""
    SLOW_CALLS.append(attempt)
    time.sleep(0.06)
    return 0.5


SLOW_CALLS: list[int] = []


def test_slow_backoffs_together_hold_up_the_sinks_only_for_so_long(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """oban-bg/oban#197, Bogdanp/dramatiq#580: a function says the wait, and it runs where all sinks' deliveries do."""
    monkeypatch.setattr(retry_policy, "FUNCTION_SECONDS", 0.1)
    SLOW_CALLS.clear()
    policy = RetryPolicy("hook", RetrySettings(backoff=f"{__name__}:slow_wait", wait=3, jitter=0))
    waits = [policy.wait(None, 1) for _ in range(10)]
    assert len(SLOW_CALLS) == 2
    assert waits == [0.5, *[3.0] * 9]
    assert [each.getMessage() for each in caplog.records] == [
        "a backoff function failed: the waits double instead"
    ]
