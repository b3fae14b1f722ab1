"""A batch ends, whatever its answer says: what users report of consumers and endpoints that take many at once.

spring-projects/spring-kafka#1382, floci-io/floci#3428: one that always fails is tried without end, and nothing counts.
spring-projects/spring-kafka#1785: the retries of a batch do not wait, and use up their attempts at once.
PostHog/posthog#74531, newrelic/newrelic-telemetry-sdk-java#320, wandb/weave#5895: a batch that is too large for its
receiver is retried as it is, for ever.
dask/distributed#5958, grpc/grpc#21819: a call that ends with what is no Exception never ends.
redpanda-data/connect#1001: a batch that waits to be full delays a stop.
confluentinc/librdkafka#1363, tulios/kafkajs#1694, PostHog/posthog#84459: a limit of messages is none of bytes.
redpanda-data/connect#4387: what follows a failed one in the batch stands before it in the receiver for good.
"""

from __future__ import annotations

import asyncio
import time
from itertools import pairwise
from typing import Any

import pytest

from relay.faults import Fail, RetryLater, Undelivered
from relay.model.dispositions import APPLIED, DeadLetter
from relay.sinks import Again, OfBatch
from tests.unit.test_batches import Results, Run, run
from tests.unit.test_dispatch import delivery


def test_one_that_cannot_be_sent_ends_also_behind_another_one_of_its_key() -> None:
    async def fails(numbers: list[int]) -> Results:
        if 1 in numbers:
            return [Fail("no JSON") if each == 1 else Again() for each in numbers]
        return [None] * len(numbers)

    found = run(fails, [delivery(0, "a"), delivery(1, "a"), delivery(2, "a"), delivery(3, "b")])
    assert isinstance(found.dispositions[1], DeadLetter)
    assert [found.dispositions[each] for each in (0, 2, 3)] == [APPLIED] * 3
    assert len(found.sink.calls) <= 4


def test_one_that_is_done_ends_also_behind_another_one_of_its_key() -> None:
    """As where a function has committed it before, and cannot be called with it again."""

    async def fails(numbers: list[int]) -> Results:
        return [Again() if each == 0 and len(numbers) > 1 else None for each in numbers]

    found = run(fails, [delivery(0, "a"), delivery(1, "a")])
    assert found.order == [0, 1]
    assert found.sink.calls == [[0, 1], [0], [1]]


def test_one_that_is_named_keeps_its_wait_while_the_culprit_of_the_others_is_found() -> None:
    tried: list[float] = []

    async def fails(numbers: list[int]) -> Results:
        if 0 in numbers:
            tried.append(time.monotonic())
        rest = OfBatch(ValueError()) if 37 in numbers else None
        return [RetryLater(after=0.1) if each == 0 else rest for each in numbers]

    retry: dict[str, Any] = {"defer_after": 5, "attempts": 5}
    found = run(fails, [delivery(each, str(each)) for each in range(64)], retry=retry)
    assert isinstance(found.dispositions[0], DeadLetter)
    assert len(tried) == 5
    assert min(after - before for before, after in pairwise(tried)) >= 0.09
    assert sum(each == APPLIED for each in found.dispositions.values()) == 62


@pytest.mark.parametrize("keys", [1, 400])
def test_a_batch_that_is_too_large_for_its_receiver_becomes_smaller(keys: int) -> None:
    """Though the receiver does not say so, and the breaker opens."""

    async def fails(numbers: list[int]) -> Results:
        if len(numbers) > 3:
            raise Undelivered("HTTP 500")
        return [None] * len(numbers)

    found = run(
        fails,
        [delivery(each, str(each % keys)) for each in range(400)],
        concurrency=1,
        circuit_breaker={"cool_down": 0.1},
    )
    assert set(found.dispositions.values()) == {APPLIED}
    for key in range(keys):
        numbers = [each for each in found.order if each % keys == key]
        assert numbers == sorted(numbers)
    assert len(found.sink.calls) < 400
    assert set(found.sink.attempts.values()) == {1}


class Panic(BaseException):
    """As that of a library in Rust."""


@pytest.mark.parametrize("raised", [asyncio.CancelledError, Panic, SystemExit])
def test_a_batch_that_ends_with_what_is_no_exception_is_tried_again(
    raised: type[BaseException],
) -> None:
    raising = [raised]

    async def fails(numbers: list[int]) -> Results:
        await asyncio.sleep(0)
        if raising:
            raise raising.pop()
        return [None] * len(numbers)

    plan = [delivery(each, str(each % 2)) for each in range(6)]
    found = run(fails, plan, circuit_breaker={"cool_down": 0.02})
    assert set(found.dispositions.values()) == {APPLIED}
    assert len(found.dispositions) == 6


def test_a_batch_that_waits_to_be_full_delays_no_stop() -> None:
    async def main() -> None:
        async def never(numbers: list[int]) -> Results:
            raise AssertionError

        found = Run(never, max_wait=600)
        for each in range(5):
            found.dispatcher.submit(delivery(each, "a"))
        await asyncio.sleep(0.01)
        found.dispatcher.pause()
        async with asyncio.timeout(60):
            await found.dispatcher.wait_idle()
            await found.dispatcher.close()
        # They stay in the log.
        assert len(found.dispatcher.pending) == 5
        assert not found.dispositions

    asyncio.run(main())


def test_what_waits_for_a_batch_is_deferred_while_another_one_hangs() -> None:
    """In mode wal, where it would hold back WAL until the batch in flight ends."""

    async def main() -> None:
        async def hang(numbers: list[int]) -> Results:
            await asyncio.sleep(60)
            return []

        found = Run(hang, concurrency=1)
        for each in range(300):
            found.dispatcher.submit(delivery(each, str(each)))
        await asyncio.sleep(0.01)
        found.dispatcher.defer_new(True)
        await asyncio.sleep(0.05)
        assert sorted(found.order) == list(range(100, 300))
        await found.dispatcher.close()

    asyncio.run(main())


def test_a_batch_of_large_transactions_has_no_more_bytes_than_there_is_room() -> None:
    async def done(numbers: list[int]) -> Results:
        await asyncio.sleep(0)
        return [None] * len(numbers)

    plan = [delivery(each, str(each)) for each in range(40)]
    for each in plan:
        # The room of the test's dispatcher is 1,000 bytes.
        each.rows = each.rows._replace(size=300)
    found = run(done, plan, max_batch=1_000, max_wait=0.1)
    assert found.order == list(range(40))
    assert {len(each) for each in found.sink.calls} == {4}


def test_what_follows_a_failed_one_is_delivered_after_it_last() -> None:
    received: list[int] = []
    failing = [1]

    async def fails(numbers: list[int]) -> Results:
        failed = [each for each in numbers if each in failing]
        failing.clear()
        received.extend(each for each in numbers if each not in failed)
        return [Undelivered("leader") if each in failed else None for each in numbers]

    plan = [delivery(each, "a") for each in range(4)]
    found = run(fails, plan, retry={"defer_after": 1, "wait": 0.01})
    assert received == [0, 2, 3, 1, 2, 3]
    assert found.order == [0, 1, 2, 3]
