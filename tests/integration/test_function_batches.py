"""Functions that are called with many transactions at once: what they name, what they complete, what ends a call."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest

from relay import Deliveries, Drop, Fail, RetryLater
from relay.admin import sinks
from relay.admin.check import require
from relay.faults import ConfigurationError
from tests.outbox import Outbox, event, host, relaying, wait_until

QUICK = {"wait": 0.1, "max_wait": 0.2, "jitter": 0.01, "defer_after": 0.05}
EFFECTS = "create table effects (amount int, attempt int)"


class Seen:
    """The calls of this module's functions: for each delivery its amount and attempt."""

    def __init__(self) -> None:
        self.calls: list[list[tuple[int, int]]] = []
        self.done: list[int] = []
        self.behave: Callable[[Deliveries], Any] = lambda deliveries: None

    @property
    def amounts(self) -> list[list[int]]:
        return [[amount for amount, _ in each] for each in self.calls]


SEEN = Seen()


@pytest.fixture(autouse=True)
def seen() -> Seen:
    SEEN.__init__()  # type: ignore[misc]
    return SEEN


def amount_of(delivery: Any) -> int:
    return int(next(iter(delivery.events)).payload["amount"])


def note(deliveries: Deliveries) -> None:
    SEEN.calls.append([(amount_of(each), each.attempt) for each in deliveries])


async def send(deliveries: Deliveries) -> Any:
    """Do what the test says; what is left then is done."""
    note(deliveries)
    found = SEEN.behave(deliveries)
    if asyncio.iscoroutine(found):
        found = await found
    SEEN.done += map(amount_of, deliveries)
    return found


def send_plain(deliveries: Deliveries) -> Any:
    """The same in a thread."""
    note(deliveries)
    found = SEEN.behave(deliveries)
    SEEN.done += map(amount_of, deliveries)
    return found


def calling(name: str = "send", **more: Any) -> dict[str, Any]:
    retry = {**QUICK, **more.pop("retry", {})}
    events = more.pop("events", {})
    handler = {
        "type": "function",
        "callable": f"{__name__}:{name}",
        "each": "batch",
        "max_wait": 0.3,
        "retry": retry,
        **more,
    }
    return {"handlers": {"mail": handler}, "routes": [{"handlers": ["mail"]}], **events}


@pytest.mark.parametrize("name", ["send", "send_plain"])
def test_a_function_gets_many_transactions_in_order(outbox: Outbox, seen: Seen, name: str) -> None:
    settings = outbox.settings(**calling(name, max_batch=10))
    with relaying(settings):
        for number in range(40):
            outbox.publish(host(number % 4), event(number))
        wait_until(lambda: len(seen.done) == 40)
        wait_until(lambda: outbox.value("select state = 'attached' from relay.sinks"))
        outbox.wait_drained()
    assert max(map(len, seen.calls)) > 1
    assert all(len(each) <= 10 for each in seen.calls)
    for key in range(4):
        assert [each for each in seen.done if each % 4 == key] == list(range(key, 40, 4))
    # It was stored, so nothing comes again.
    with relaying(settings):
        outbox.publish(host(1), event(100))
        wait_until(lambda: seen.done[-1] == 100)
    assert len(seen.done) == 41


@pytest.mark.parametrize("name", ["send", "send_plain"])
def test_only_those_that_it_names_are_retried_and_their_keys_wait(
    outbox: Outbox, seen: Seen, name: str
) -> None:
    errors = {1: RetryLater("busy", after=0.2), 2: Fail("no such customer"), 3: Drop("not ours")}

    def behave(deliveries: Deliveries) -> None:
        for each in deliveries:
            error = errors.get(amount_of(each))
            if error is not None and each.attempt == 1:
                deliveries.fail(each, error)

    seen.behave = behave
    with relaying(outbox.settings(**calling(name))):
        # Hosts 0 to 4; 1 fails, and is followed by 11.
        for number in (0, 1, 2, 3, 4, 11, 12):
            outbox.publish(host(number % 10), event(number))
        wait_until(lambda: {0, 1, 4, 11, 12} <= set(seen.done))
        wait_until(lambda: outbox.value("select count(*) from relay.deferred") == 0)
        outbox.wait_drained()
    assert sorted(seen.done) == [0, 1, 4, 11, 12]
    assert seen.done.index(1) < seen.done.index(11)
    attempts = {amount: attempt for each in seen.calls for amount, attempt in each}
    assert attempts == {0: 1, 1: 2, 2: 1, 3: 1, 4: 1, 11: 1, 12: 1}
    dead = outbox.conn.execute(
        "select exception, payload->>'amount' from relay.dead_letter_queue"
    ).fetchall()
    assert [(text.split(":")[0], amount) for text, amount in dead] == [("Fail", "2")]


def test_one_that_fails_the_batch_is_found_and_dies_alone(outbox: Outbox, seen: Seen) -> None:
    def behave(deliveries: Deliveries) -> None:
        if any(amount_of(each) == 13 for each in deliveries):
            raise ValueError("one of these")

    seen.behave = behave
    with relaying(outbox.settings(**calling(retry={"attempts": 3}))):
        with outbox.conn.transaction():
            for number in range(30):
                outbox.publish(host(number), event(number))
        wait_until(lambda: outbox.value("select count(*) from relay.dead_letter_queue") == 1)
        wait_until(lambda: len(set(seen.done)) == 29)
        outbox.wait_drained()
    found = outbox.value("select payload->>'amount' from relay.dead_letter_queue")
    assert found == "13"
    alone = [each for each in seen.calls if each[0][0] == 13 and len(each) == 1]
    assert [attempt for ((_, attempt),) in alone] == [1, 2, 3]


def test_one_that_hangs_is_found_too(outbox: Outbox, seen: Seen) -> None:
    def behave(deliveries: Deliveries) -> Any:
        return hang(3) if any(amount_of(each) == 2 for each in deliveries) else None

    seen.behave = behave
    more: dict[str, Any] = {"timeout": 0.2, "retry": {"attempts": 1}, "circuit_breaker": None}
    with relaying(outbox.settings(**calling(**more))):
        with outbox.conn.transaction():
            for number in range(4):
                outbox.publish(host(number), event(number))
        wait_until(lambda: outbox.value("select count(*) from relay.dead_letter_queue") == 1)
        wait_until(lambda: sorted(set(seen.done)) == [0, 1, 3])
    assert outbox.value("select payload->>'amount' from relay.dead_letter_queue") == "2"


async def hang(seconds: float) -> None:
    await asyncio.sleep(seconds)


async def insert(deliveries: Deliveries) -> None:
    """Write an effect for each, all in one commit, which completes the batch."""
    note(deliveries)
    SEEN.behave(deliveries)
    async with deliveries.transaction() as conn:
        rows = [(amount_of(each), each.attempt) for each in deliveries]
        await conn.cursor().executemany("insert into effects values (%s, %s)", rows)


def insert_plain(deliveries: Deliveries) -> None:
    """The same in a thread."""
    note(deliveries)
    SEEN.behave(deliveries)
    with deliveries.transaction() as conn:
        rows = [(amount_of(each), each.attempt) for each in deliveries]
        conn.cursor().executemany("insert into effects values (%s, %s)", rows)


async def insert_each(deliveries: Deliveries) -> None:
    """Write an effect for each, in a commit of its own."""
    note(deliveries)
    for each in deliveries:
        async with each.transaction() as conn:
            await conn.execute(
                "insert into effects values (%s, %s)", (amount_of(each), each.attempt)
            )
    SEEN.behave(deliveries)


@pytest.mark.parametrize("name", ["insert", "insert_plain"])
def test_the_effects_of_a_batch_commit_with_all_its_deliveries(
    outbox: Outbox, seen: Seen, name: str
) -> None:
    outbox.conn.execute(EFFECTS)

    def behave(deliveries: Deliveries) -> None:
        for each in deliveries:
            if amount_of(each) == 5 and each.attempt == 1:
                deliveries.fail(each, ValueError("not yet"))

    seen.behave = behave
    settings = outbox.settings(**calling(name))
    with relaying(settings):
        for number in range(20):
            outbox.publish(host(number % 4), event(number))
        wait_until(lambda: outbox.value("select count(*) from effects") == 20)
        wait_until(lambda: outbox.value("select count(*) from relay.deferred") == 0)
        outbox.wait_drained()
    assert outbox.column("select attempt from effects where amount = 5") == [2]
    assert outbox.value("select count(distinct amount) from effects") == 20
    assert outbox.value("select count(*) from relay.dead_letter_queue") == 0


@pytest.mark.parametrize("name", ["insert", "insert_plain"])
def test_a_batch_of_which_a_part_has_committed_is_called_with_the_others(
    outbox: Outbox, seen: Seen, name: str
) -> None:
    outbox.conn.execute(EFFECTS)
    settings = outbox.settings(**calling(name))
    with relaying(settings):
        for number in range(20):
            outbox.publish(host(number % 4), event(number))
        wait_until(lambda: outbox.value("select count(*) from effects") == 20)
        outbox.wait_drained()
    # As after a crash before progress was stored: all come again, with one that is new.
    outbox.publish(host(1), event(100))
    outbox.set_sinks_back()
    seen.calls.clear()
    with relaying(settings):
        wait_until(lambda: outbox.value("select count(*) from effects") == 21)
        outbox.wait_drained()
    assert outbox.value("select count(distinct amount) from effects") == 21
    # In one batch, or in more where the sink reads faster than it is called.
    *all_again, rest = (len(each) for each in seen.calls)
    assert (sum(all_again), rest) == (21, 1)
    assert seen.calls[1] == [(100, 1)]


def test_what_commits_alone_is_done_alone(outbox: Outbox, seen: Seen) -> None:
    outbox.conn.execute(EFFECTS)
    fails = [True]

    def behave(deliveries: Deliveries) -> None:
        if fails and fails.pop():
            raise ValueError("after the commits")

    seen.behave = behave
    settings = outbox.settings(**calling("insert_each"))
    with relaying(settings):
        for number in range(8):
            outbox.publish(host(number % 4), event(number))
        wait_until(lambda: outbox.value("select count(*) from effects") == 8)
        outbox.wait_drained()
    outbox.set_sinks_back()
    with relaying(settings):
        outbox.publish(host(1), event(100))
        wait_until(lambda: outbox.value("select count(*) from effects") == 9)
    assert outbox.value("select count(distinct amount) from effects") == 9


def test_nothing_is_named_after_the_transaction_was_entered(outbox: Outbox, seen: Seen) -> None:
    said: list[str] = []

    def behave(deliveries: Deliveries) -> None:
        (first, *_) = deliveries
        for wrong in ("no exception", None):
            with pytest.raises(TypeError):
                deliveries.fail(first, wrong)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="none of this batch"):
            deliveries.fail(object(), Fail("x"))  # type: ignore[arg-type]
        deliveries.transaction()
        try:
            deliveries.fail(first, Fail("x"))
        except RuntimeError as error:
            said.append(str(error))

    seen.behave = behave
    with relaying(outbox.settings(**calling())):
        outbox.publish(host(1), event(1))
        wait_until(lambda: seen.done == [1])
    assert said == [
        "name what has failed before deliveries.transaction(), which completes the others"
    ]


@pytest.mark.rare
def test_a_returned_value_is_refused_since_it_may_name_failures(outbox: Outbox, seen: Seen) -> None:
    """Lambda's batchItemFailures is returned; relay would take the batch for done."""
    seen.behave = lambda deliveries: returned({"batchItemFailures": []})
    with relaying(outbox.settings(**calling())):
        outbox.publish(host(1), event(1))
        wait_until(
            lambda: bool(outbox.column("select fault from relay.sinks where fault is not null"))
        )
        fault = outbox.value("select fault from relay.sinks")
        assert "name them with deliveries.fail(delivery, error)" in fault
        seen.behave = lambda deliveries: None
        wait_until(lambda: outbox.value("select fault from relay.sinks") is None, 60)
    assert outbox.value("select count(*) from relay.dead_letter_queue") == 0


async def returned(value: Any) -> Any:
    return value


def test_operators_pause_and_seek_batches(outbox: Outbox, seen: Seen) -> None:
    settings = outbox.settings(**calling())
    with relaying(settings):
        outbox.publish(host(1), event(1))
        wait_until(lambda: seen.done == [1])
        assert sinks.pause(settings, "mail", "maintenance").changed
        time.sleep(1.2)
        outbox.publish(host(1), event(2))
        outbox.publish(host(2), event(3))
        outbox.wait_drained()
        assert seen.done == [1]
        sinks.resume(settings, "mail")
        wait_until(lambda: sorted(seen.done) == [1, 2, 3])
        sinks.rebuild(settings, "mail")
        wait_until(lambda: sorted(seen.done) == [1, 1, 2, 2, 3, 3])
    assert [len(each) for each in seen.calls[1:]] == [2, 3]


NO_BATCH: list[tuple[dict[str, Any], str]] = [
    ({"max_wait": 5}, "handlers.mail.max_wait: must be less than sinks.attach_seconds (5)"),
    ({"each": "transaction"}, "max_wait has no effect without each: batch"),
    ({"each": "event"}, "each"),
]


def test_settings_that_no_batch_can_have_are_refused(
    outbox: Outbox, subtests: pytest.Subtests
) -> None:
    for more, fault in NO_BATCH:
        with subtests.test(str(more)):
            with pytest.raises((ConfigurationError, ValueError)) as refused:
                require(outbox.settings(**calling(**more)))
            assert fault in str(refused.value)
