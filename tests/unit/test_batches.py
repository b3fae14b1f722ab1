"""Batches of deliveries: which are together, what a failed one means for the others, and that order holds."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from relay.config.handlers import FunctionHandler
from relay.delivery.batches import BatchDispatcher
from relay.delivery.order import Delivery
from relay.faults import DestinationRefused, Drop, Fail, RetryLater, Undelivered
from relay.model.dispositions import (
    APPLIED,
    AttemptHistory,
    Blocked,
    DeadLetter,
    Disposition,
    holds_keys,
)
from relay.model.dispositions import RetryLater as Later
from relay.model.events import Transaction
from relay.pipeline.failure_limit import FailureLimit
from relay.sinks import ATTEMPTS, Again, OfBatch
from tests.unit.test_dispatch import delivery

Results = Sequence[Exception | None]
Behave = Callable[[list[int]], Awaitable[Results]]


class Scripted:
    """A sink that does with each batch what a test says."""

    name = "scripted"

    def __init__(self, behave: Behave) -> None:
        self.calls: list[list[int]] = []
        self.attempts: dict[int, int] = {}
        self.in_flight: list[list[int]] = []
        self.most = 0
        self._behave = behave

    def resume(self, series: str) -> None:
        pass

    async def deliver(self, transaction: Transaction) -> None:
        raise AssertionError("a batch is delivered as one")

    async def deliver_batch(self, transactions: Sequence[Transaction]) -> Results:
        numbers = [int(each.transaction_id or 0) for each in transactions]
        assert len(ATTEMPTS.get()) == len(numbers)
        self.attempts |= dict(zip(numbers, (each.attempt for each in transactions), strict=True))
        self.calls.append(numbers)
        self.in_flight.append(numbers)
        self.most = max(self.most, len(self.in_flight))
        try:
            return await self._behave(numbers)
        finally:
            self.in_flight.remove(numbers)

    async def close(self) -> None:
        """Nothing is open."""


class Run:
    """Submits deliveries, and keeps what became of each."""

    def __init__(self, behave: Behave, **more: Any) -> None:
        self.sink = Scripted(behave)
        self.dispositions: dict[int, Disposition] = {}
        self.order: list[int] = []
        settings = FunctionHandler(
            type="function",
            callable="a:b",
            **{"each": "batch", "retry": {"defer_after": 0}, "max_wait": 0, **more},
        )
        self.dispatcher = BatchDispatcher(self.sink, settings, 1_000, FailureLimit({}, {}))
        self._taking = asyncio.create_task(self._take())

    async def _take(self) -> None:
        while True:
            await self.dispatcher.has_ended.wait()
            for each, disposition in self.dispatcher.take_ended():
                number = each.rows.commit.xid
                assert number not in self.dispositions
                self.dispositions[number] = disposition
                self.order.append(number)

    async def all(self, deliveries: Iterable[Delivery]) -> None:
        for each in deliveries:
            await self.dispatcher.wait_for_room()
            self.dispatcher.submit(each)
        async with asyncio.timeout(10):
            while self.dispatcher.count or self.dispatcher.has_ended.is_set():
                await asyncio.sleep(0.001)
        await self.dispatcher.close()


def run(behave: Behave, deliveries: Iterable[Delivery], **more: Any) -> Run:
    async def main() -> Run:
        found = Run(behave, **more)
        await found.all(deliveries)
        return found

    return asyncio.run(main())


async def done(numbers: list[int]) -> Results:
    await asyncio.sleep(0)
    return [None] * len(numbers)


# What a batch has


def test_a_batch_is_what_can_be_delivered_in_the_order_of_the_log() -> None:
    keys = "aabbacb"
    found = run(done, [delivery(number, key) for number, key in enumerate(keys)])
    assert found.sink.calls == [list(range(7))]
    assert set(found.dispositions.values()) == {APPLIED}


def test_a_batch_has_at_most_max_batch_transactions_and_keys_are_in_one_batch_at_a_time() -> None:
    async def slow(numbers: list[int]) -> Results:
        await asyncio.sleep(0.01)
        return [None] * len(numbers)

    plan = [delivery(number, "ab"[number % 2]) for number in range(20)]
    found = run(slow, plan, max_batch=4, concurrency=8)
    assert [len(each) for each in found.sink.calls] == [4] * 5
    assert found.sink.most == 1
    assert found.order == list(range(20))


def test_a_batch_that_is_full_does_not_wait() -> None:
    """MassTransit #1696: the message limit is reached, and the time limit is waited for all the same."""
    began = time.monotonic()
    found = run(done, [delivery(each, str(each)) for each in range(10)], max_batch=5, max_wait=60)
    assert [len(each) for each in found.sink.calls] == [5, 5]
    assert time.monotonic() - began < 60


def test_a_batch_waits_for_max_wait_and_no_longer() -> None:
    async def main() -> Run:
        found = Run(done, max_batch=100, max_wait=1)
        found.dispatcher.submit(delivery(0, "a"))
        await asyncio.sleep(0.01)
        assert not found.sink.calls
        await found.all([delivery(1, "a"), delivery(2, "b")])
        return found

    assert asyncio.run(main()).sink.calls == [[0, 1, 2]]


def test_a_batch_begins_without_waiting_where_there_is_no_room_for_another() -> None:
    """MassTransit #2190: a limit above what is fetched at once is never reached."""

    async def main() -> Run:
        found = Run(done, max_batch=2_500, max_wait=60)
        # The room of the test's dispatcher is 1,000 bytes, a delivery has one.
        for number in range(3_000):
            await found.dispatcher.wait_for_room()
            found.dispatcher.submit(delivery(number, "a"))
        await found.dispatcher.close()
        return found

    assert [len(each) for each in asyncio.run(main()).sink.calls] == [1_001, 1_001]


def test_a_key_that_is_in_a_batch_keeps_no_other_from_the_next_one() -> None:
    async def slow(numbers: list[int]) -> Results:
        await asyncio.sleep(0.05 if 0 in numbers else 0)
        return [None] * len(numbers)

    plan = [delivery(0, "a"), delivery(1, "a"), delivery(2, "b"), delivery(3, "c", "a")]
    plan += [delivery(each, str(each)) for each in range(4, 8)]
    found = run(slow, plan, max_batch=2)
    assert found.sink.calls == [[0, 1], [2, 4], [5, 6], [7], [3]]


def test_with_one_of_key_a_batch_has_one_of_each_key_and_the_next_one_does_not_wait() -> None:
    async def main() -> Run:
        found = Run(done, one_of_key=True, max_wait=1)
        keys = "aabbacb" + 20 * "a"
        await found.all([delivery(number, key) for number, key in enumerate(keys)])
        return found

    began = time.monotonic()
    calls = asyncio.run(main()).sink.calls
    assert calls == [[0, 2, 5], [1, 3], [4, 6], *([number] for number in range(7, 27))]
    # The first one waits for others.
    assert time.monotonic() - began < 20


# Faults


@pytest.mark.parametrize("one_of_key", [True, False])
def test_a_destination_that_stores_what_follows_a_failed_one_needs_one_of_key(
    one_of_key: bool, caplog: pytest.LogCaptureFixture
) -> None:
    stored: list[int] = []
    refused: set[int] = set()

    async def one_by_one(numbers: list[int]) -> Results:
        results: list[Exception | None] = []
        for each in numbers:
            busy = each % 7 == 3 and each not in refused
            refused.update({each} if busy else ())
            results.append(Undelivered("busy") if busy else None)
            stored.extend([] if busy else [each])
        return results

    plan = [delivery(number, "ab"[number % 2]) for number in range(60)]
    retry = {"wait": 0.001, "max_wait": 0.001, "jitter": 0, "defer_after": 60}
    found = run(one_by_one, plan, one_of_key=one_of_key, retry=retry, max_batch=10)
    assert set(found.dispositions.values()) == {APPLIED}
    first = list(dict.fromkeys(stored))
    orders = [[each for each in first if each % 2 == key] for key in (0, 1)]
    warnings = [each for each in caplog.records if "one_of_key: true" in each.getMessage()]
    assert (orders == [sorted(each) for each in orders]) is one_of_key
    assert len(warnings) == (0 if one_of_key else 1)


def test_a_named_one_is_retried_and_what_follows_it_with_its_key_is_not_done() -> None:
    async def fails(numbers: list[int]) -> Results:
        return [Undelivered("away") if each == 1 else None for each in numbers]

    plan = [delivery(0, "a"), delivery(1, "a"), delivery(2, "a"), delivery(3, "b"), delivery(4)]
    found = run(fails, plan)
    assert isinstance(found.dispositions[1], Later)
    assert isinstance(found.dispositions[2], Blocked)
    assert [found.dispositions[each] for each in (0, 3, 4)] == [APPLIED] * 3
    assert found.sink.calls == [[0, 1, 2, 3, 4]]


def test_a_dead_one_lets_its_key_flow_unless_it_holds_it() -> None:
    async def fails(numbers: list[int]) -> Results:
        return [Fail("no") if each == 0 else None for each in numbers]

    plan = [delivery(0, "a"), delivery(1, "a")]
    found = run(fails, plan)
    assert isinstance(found.dispositions[0], DeadLetter)
    assert found.dispositions[1] == APPLIED
    plan = [delivery(0, "a"), delivery(1, "a")]
    found = run(fails, plan, on_exhausted="block_key")
    assert isinstance(found.dispositions[0], DeadLetter)
    assert isinstance(found.dispositions[1], Blocked)


def test_a_dropped_one_is_done() -> None:
    async def fails(numbers: list[int]) -> Results:
        return [Drop("no") if each == 0 else None for each in numbers]

    found = run(fails, [delivery(0, "a"), delivery(1, "a")])
    assert found.dispositions == {0: APPLIED, 1: APPLIED}


def test_one_that_nobody_names_is_found_in_halves_and_costs_the_others_no_attempt() -> None:
    async def fails(numbers: list[int]) -> Results:
        if 37 in numbers:
            raise ValueError("one of these")
        return [None] * len(numbers)

    found = run(fails, [delivery(each, str(each % 50)) for each in range(100)])
    assert isinstance(found.dispositions[37], Later)
    assert found.dispositions[37].attempts == 1
    assert isinstance(found.dispositions[87], Blocked)
    assert sum(each == APPLIED for each in found.dispositions.values()) == 98
    assert set(found.sink.attempts.values()) == {1}
    assert len(found.sink.calls) <= 16


@pytest.mark.parametrize(
    "error", [RetryLater("all"), Undelivered("wait", after=7), Fail("all"), Drop("all")]
)
def test_what_is_said_of_the_batch_is_said_of_each(error: Exception) -> None:
    async def fails(numbers: list[int]) -> Results:
        raise error

    found = run(fails, [delivery(each, str(each)) for each in range(4)])
    kinds = {type(each) for each in found.dispositions.values()}
    of: dict[type, type] = {Fail: DeadLetter, Drop: type(APPLIED)}
    assert kinds == {of.get(type(error), Later)}
    assert len(found.sink.calls) == 1


def test_an_outage_is_one_failure_of_the_destination_a_call_and_defers_nothing() -> None:
    away = [True]

    async def fails(numbers: list[int]) -> Results:
        if away[0]:
            raise Undelivered("away")
        return [None] * len(numbers)

    async def main() -> Run:
        breaker = {"failures": 5, "cool_down": 0.02}
        found = Run(fails, circuit_breaker=breaker)
        for each in range(200):
            found.dispatcher.submit(delivery(each, str(each % 40)))
        while not found.dispatcher.breaker.is_open:
            await asyncio.sleep(0.001)
        assert len(found.sink.calls) == 5
        await asyncio.sleep(0.1)
        # One at a time tries whether it is back.
        assert {len(each) for each in found.sink.calls[5:]} == {1}
        away[0] = False
        await found.all([])
        return found

    found = asyncio.run(main())
    assert sum(each == APPLIED for each in found.dispositions.values()) >= 190
    for key in range(40):
        numbers = [each for each in found.order if each % 40 == key]
        assert numbers == sorted(numbers)


def test_named_failures_beside_successes_do_not_open_the_breaker() -> None:
    async def fails(numbers: list[int]) -> Results:
        return [None if each == 0 else Undelivered("busy") for each in numbers]

    async def main() -> Run:
        found = Run(fails, circuit_breaker={"failures": 2, "cool_down": 10})
        await found.all([delivery(each, str(each)) for each in range(10)])
        assert not found.dispatcher.breaker.is_open
        return found

    found = asyncio.run(main())
    assert sum(isinstance(each, Later) for each in found.dispositions.values()) == 9


def test_a_destination_that_refuses_everything_stops_the_sink() -> None:
    async def fails(numbers: list[int]) -> Results:
        return [DestinationRefused("gone") if each == 1 else None for each in numbers]

    async def main() -> None:
        found = Run(fails)
        for each in range(3):
            found.dispatcher.submit(delivery(each, str(each)))
        async with asyncio.timeout(5):
            while not found.dispatcher.breaker.is_open:
                await asyncio.sleep(0.001)
        assert found.dispatcher.destination.fault == "DestinationRefused: gone"
        assert [each.rows.commit.xid for each in found.dispatcher.pending] == [1]
        await found.dispatcher.close()

    asyncio.run(main())


def test_new_ones_are_not_in_a_batch_with_those_that_have_failed() -> None:
    """MassTransit #800: a batch that is retried with what makes it fail fails for ever."""
    again = delivery(0, "a")
    again.history = AttemptHistory(3, time.monotonic())
    found = run(done, [again, delivery(1, "a"), delivery(2, "b")])
    assert found.sink.calls == [[0], [2], [1]] or found.sink.calls == [[0], [1, 2]]


def test_what_was_not_tried_is_tried_again_at_once_and_nothing_counts() -> None:
    async def ends(numbers: list[int]) -> Results:
        return [None if each == numbers[0] else Again() for each in numbers]

    found = run(ends, [delivery(each, "a") for each in range(4)])
    assert found.sink.calls == [[0, 1, 2, 3], [1, 2, 3], [2, 3], [3]]
    assert set(found.dispositions.values()) == {APPLIED}
    assert set(found.sink.attempts.values()) == {1}


def test_a_pause_lets_no_batch_begin_and_loses_none() -> None:
    async def main() -> Run:
        found = Run(done, max_wait=0.01)
        for each in range(5):
            found.dispatcher.submit(delivery(each, "a"))
        found.dispatcher.pause()
        await asyncio.sleep(0.05)
        assert not found.sink.calls
        found.dispatcher.resume()
        await found.all([])
        return found

    assert asyncio.run(main()).sink.calls == [[0, 1, 2, 3, 4]]


def test_an_unreliable_sink_tries_once_and_drops_what_fails() -> None:
    async def fails(numbers: list[int]) -> Results:
        raise ValueError

    found = run(fails, [delivery(each) for each in range(8)], reliable=False)
    assert found.sink.calls == [list(range(8))]
    assert set(found.dispositions.values()) == {APPLIED}


KEYS = st.frozensets(st.sampled_from("abcd"), max_size=2)
KIND = st.sampled_from(["done"] * 4 + ["later", "dead", "poison", "outage", "again", "unsent"])


@given(
    st.lists(st.tuples(KEYS, KIND, st.integers(0, 2)), max_size=40),
    st.integers(1, 12),
    st.integers(1, 3),
    st.booleans(),
)
def test_order_holds_for_each_key_whatever_fails(
    plan: list[tuple[frozenset[str], str, int]], most: int, concurrency: int, waits: bool
) -> None:
    accepted: list[int] = []
    """What the sink was told is done, in order of the calls, of those that counted."""
    first: set[int] = set()

    async def behave(numbers: list[int]) -> Results:
        for each in [n for some in found[0].sink.in_flight if some is not numbers for n in some]:
            for other in numbers:
                assert plan[each][0].isdisjoint(plan[other][0])
        assert len(numbers) <= most
        for _ in range(max(plan[each][2] for each in numbers)):
            await asyncio.sleep(0)
        kinds = [plan[each][1] for each in numbers]
        if "unsent" in kinds:
            # As a sink does that cannot make a message of an event.
            return [Fail("unsent") if kind == "unsent" else Again() for kind in kinds]
        if "poison" in kinds:
            raise ValueError
        if "outage" in kinds:
            raise Undelivered("away")
        results: list[Exception | None] = []
        tries = any(kind != "again" for kind in kinds)
        for each, kind in zip(numbers, kinds, strict=True):
            if kind == "again" and tries and each not in first:
                first.add(each)
                results.append(Again())
            elif kind == "later":
                results.append(Undelivered("later"))
            elif kind == "dead":
                results.append(Fail("dead"))
            else:
                results.append(None)
        accepted.extend(numbers)
        return results

    found: list[Run] = []

    async def main() -> Run:
        wait = 0.001 if waits else 0
        found.append(
            Run(
                behave, max_batch=most, concurrency=concurrency, circuit_breaker=None, max_wait=wait
            )
        )
        await found[0].all(delivery(number, *keys) for number, (keys, *_) in enumerate(plan))
        return found[0]

    ended = asyncio.run(main())
    assert sorted(ended.order) == list(range(len(plan)))
    held: set[str] = set()
    for number, (keys, kind, _) in enumerate(plan):
        disposition = ended.dispositions[number]
        if held & keys:
            assert isinstance(disposition, Blocked)
        elif kind in ("later", "poison", "outage"):
            assert isinstance(disposition, Later)
            assert disposition.attempts == 1
        elif kind in ("dead", "unsent"):
            assert isinstance(disposition, DeadLetter)
        else:
            assert disposition == APPLIED
        if holds_keys(disposition):
            held |= keys
    # What is done was done after all before it with one of its keys.
    for key in "abcd":
        ranks = [ended.order.index(each) for each, (keys, *_) in enumerate(plan) if key in keys]
        assert ranks == sorted(ranks)
        last = [n for n in accepted if key in plan[n][0] and ended.dispositions[n] == APPLIED]
        final = sorted(set(last), key=lambda each: len(last) - 1 - last[::-1].index(each))
        assert final == sorted(final)


@given(
    st.lists(KEYS, max_size=30),
    st.lists(st.booleans(), max_size=30),
    st.integers(1, 8),
    st.integers(1, 3),
)
def test_order_holds_for_each_key_while_the_destination_comes_and_goes(
    plan: list[frozenset[str]], fails: list[bool], most: int, concurrency: int
) -> None:
    coming = iter(fails)

    async def behave(numbers: list[int]) -> Results:
        await asyncio.sleep(0)
        if next(coming, False):
            raise Undelivered("away")
        return [None] * len(numbers)

    async def main() -> Run:
        breaker = {"failures": 2, "cool_down": 0.001}
        found = Run(behave, max_batch=most, concurrency=concurrency, circuit_breaker=breaker)
        for number, keys in enumerate(plan):
            found.dispatcher.submit(delivery(number, *keys))
        for _ in range(20):
            if found.dispatcher.count:
                await asyncio.sleep(0.001)
        # What is blocked by deferred ones stays in memory while the breaker is open.
        found.dispatcher.defer_new(True)
        await found.all([])
        return found

    ended = asyncio.run(main())
    assert sorted(ended.order) == list(range(len(plan)))
    held: set[str] = set()
    for number, keys in enumerate(plan):
        disposition = ended.dispositions[number]
        assert isinstance(disposition, Blocked) or not held & keys
        if holds_keys(disposition):
            held |= keys
    for key in "abcd":
        ranks = [ended.order.index(each) for each, keys in enumerate(plan) if key in keys]
        assert ranks == sorted(ranks)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"max_batch": 5}, "max_batch has no effect without each: batch"),
        ({"each": "batch", "max_batch": 0}, "greater than 0"),
        ({"each": "batch", "max_batch": 100_000}, "less than or equal to 10000"),
        ({"each": "batch", "max_wait": -1}, "greater than or equal to 0"),
    ],
)
def test_wrong_settings_are_refused(given: dict[str, Any], text: str) -> None:
    with pytest.raises(ValidationError, match=text):
        FunctionHandler(type="function", callable="a:b", **given)


def test_a_fault_of_a_batch_has_the_fault_itself() -> None:
    fault = ValueError("x")
    assert OfBatch(fault).fault is fault
