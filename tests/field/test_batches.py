"""What users of other tools report of batches, tried on functions and endpoints with `each: batch`.

Reports that are about how a batch is made (MassTransit #800, #1696, #2190) are tried in tests/unit/test_batches.py, and
what an answer with unknown identifiers means (AWS Lambda) in tests/integration/test_http_batches.py.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from relay import Deliveries, Delivery
from relay.admin.dead_letters import DeadLetters
from relay.store.dead_letters.selection import DeadLetterSelection
from tests.outbox import Outbox, event, host, relaying, wait_until
from tests.webhook import Answer, Webhook

QUICK = {"wait": 0.1, "max_wait": 0.2, "jitter": 0.01, "defer_after": 0.05}


class Calls:
    """The calls of this module's function, and what it has handled."""

    def __init__(self) -> None:
        self.begun: list[list[int]] = []
        self.handled: list[int] = []
        self.behave: Callable[[Deliveries], Any] = lambda deliveries: None


CALLS = Calls()


@pytest.fixture(autouse=True)
def calls() -> Calls:
    CALLS.__init__()  # type: ignore[misc]
    return CALLS


def amount_of(delivery: Delivery) -> int:
    return int(next(iter(delivery.events)).payload["amount"])


async def handle(deliveries: Deliveries) -> None:
    """Do what the test says."""
    CALLS.begun.append([amount_of(each) for each in deliveries])
    found = CALLS.behave(deliveries)
    if found is not None:
        await found


def one_by_one(fails: Callable[[Delivery], bool]) -> Callable[[Deliveries], None]:
    """Handle in order, and name what fails."""

    def behave(deliveries: Deliveries) -> None:
        for each in deliveries:
            if fails(each):
                deliveries.fail(each, ValueError(amount_of(each)))
            else:
                CALLS.handled.append(amount_of(each))

    return behave


def calling(**more: Any) -> dict[str, Any]:
    retry = {**QUICK, **more.pop("retry", {})}
    handler = {
        "type": "function",
        "callable": f"{__name__}:handle",
        "each": "batch",
        "max_wait": 0.2,
    }
    return {
        "handlers": {"mail": {**handler, "retry": retry, **more}},
        "routes": [{"handlers": ["mail"]}],
    }


def publish(outbox: Outbox, *amounts: int, hosts: int = 10) -> None:
    with outbox.conn.transaction():
        for amount in amounts:
            outbox.publish(host(amount % hosts), event(amount))


def test_a_batch_that_raises_is_retried_and_not_acknowledged(outbox: Outbox, calls: Calls) -> None:
    """Celery #1498, celery-batches #10: the tasks of a batch that raises are consumed, whatever `retry` says."""
    fails = [True] * 3

    def behave(deliveries: Deliveries) -> None:
        if fails:
            fails.pop()
            raise ZeroDivisionError
        one_by_one(lambda each: False)(deliveries)

    calls.behave = behave
    with relaying(outbox.settings(**calling())):
        publish(outbox, *range(8))
        wait_until(lambda: len(calls.handled) == 8)
    assert Counter(calls.handled) == Counter(range(8))


def test_a_batch_that_returns_is_done(outbox: Outbox, calls: Calls) -> None:
    """pg-boss #312: jobs of a batch are not completed where the promise resolves, and expire; sqs-consumer #315."""
    calls.behave = one_by_one(lambda each: False)
    settings = outbox.settings(**calling())
    with relaying(settings):
        publish(outbox, *range(5))
        wait_until(lambda: len(calls.handled) == 5)
    with relaying(settings):
        publish(outbox, 100)
        wait_until(lambda: 100 in calls.handled)
    assert Counter(calls.handled) == Counter([*range(5), 100])


def test_one_fails_and_the_others_are_not_handled_again(outbox: Outbox, calls: Calls) -> None:
    """pg-boss #474, #821, sqs-consumer #189, #245: to acknowledge some of a batch, users delete messages themselves."""
    calls.behave = one_by_one(lambda each: amount_of(each) == 3 and each.attempt < 3)
    with relaying(outbox.settings(**calling())):
        publish(outbox, *range(8))
        wait_until(lambda: 3 in calls.handled)
        wait_until(lambda: outbox.value("select count(*) from relay.deferred") == 0)
    assert Counter(calls.handled) == Counter(range(8))
    assert calls.begun[1:] == [[3], [3]]


def test_a_failed_one_holds_its_key_only_and_nothing_after_it_is_handled_before_it(
    outbox: Outbox, calls: Calls
) -> None:
    """brefphp/symfony-messenger #81, powertools-lambda-python #1927, #2981: all after a failed one fail, of other
    groups too; brefphp/symfony-messenger #67: they are handled, and then delivered again nevertheless."""
    calls.behave = one_by_one(lambda each: amount_of(each) == 1 and each.attempt == 1)
    with relaying(outbox.settings(**calling())):
        publish(outbox, 0, 1, 2, 11, 12, 21)
        wait_until(lambda: len(calls.handled) == 6)
        wait_until(lambda: outbox.value("select count(*) from relay.deferred") == 0)
    # 2 and 12 are of another host; 11 and 21 follow 1, and are handled once, after it.
    assert calls.handled[:3] == [0, 2, 12]
    assert calls.handled[3:] == [1, 11, 21]


def test_what_runs_beside_a_failed_one_is_not_taken_for_done(outbox: Outbox, calls: Calls) -> None:
    """spring-kafka #4436: an exception that names one record commits all before it, which may still be running."""
    failed: list[int] = []

    async def work(each: Delivery) -> None:
        if amount_of(each) == 2 and not failed:
            failed.append(2)
            raise OSError("the third fails first")
        await asyncio.sleep(0.05)
        CALLS.handled.append(amount_of(each))

    async def side_by_side(deliveries: Deliveries) -> None:
        async with asyncio.TaskGroup() as group:
            for each in deliveries:
                group.create_task(work(each))

    calls.behave = side_by_side
    with relaying(outbox.settings(**calling())):
        publish(outbox, *range(5))
        wait_until(lambda: set(calls.handled) == set(range(5)))
    assert outbox.value("select count(*) from relay.dead_letter_queue") == 0


def test_a_batch_of_which_all_fail_leaves_all_as_dead_letters(outbox: Outbox, calls: Calls) -> None:
    """spring-kafka #3297: of five bad records one a poll; MassTransit #3542: the first is not moved to the queue."""

    def behave(deliveries: Deliveries) -> None:
        raise NotImplementedError

    calls.behave = behave
    with relaying(outbox.settings(**calling(retry={"attempts": 2}))):
        publish(outbox, *range(5))
        wait_until(lambda: outbox.value("select count(*) from relay.dead_letter_queue") == 5)
    dead = outbox.column("select (payload->>'amount')::int from relay.dead_letter_queue order by 1")
    assert dead == list(range(5))
    alone = Counter(each[0] for each in calls.begun if len(each) == 1)
    assert set(alone.values()) == {2}


def test_no_transaction_of_a_batch_is_lost_or_runs_twice_at_once_while_calls_time_out(
    outbox: Outbox, calls: Calls
) -> None:
    """MassTransit #2016: after time-outs some messages of a batch come twice at once, and others never again."""
    running: list[int] = []
    twice: list[int] = []
    late = [True, True]

    async def behave(deliveries: Deliveries) -> None:
        amounts = [amount_of(each) for each in deliveries]
        twice.extend(set(amounts) & set(running))
        running.extend(amounts)
        try:
            if late:
                late.pop()
                await asyncio.sleep(30)
            calls.handled.extend(amounts)
        finally:
            for each in amounts:
                running.remove(each)

    calls.behave = behave
    more: dict[str, Any] = {"timeout": 0.2, "max_batch": 4}
    with relaying(outbox.settings(**calling(**more))):
        publish(outbox, *range(12), hosts=4)
        wait_until(lambda: set(calls.handled) == set(range(12)))
    assert twice == []
    for key in range(4):
        assert [each for each in calls.handled if each % 4 == key] == list(range(key, 12, 4))


def test_an_answer_of_200_with_failures_loses_none(outbox: Outbox) -> None:
    """vector #140, serilog-sinks-elasticsearch #25, OpenCTI #17134: a bulk request that succeeds in part is a success,
    and what it names is lost; or all is sent again."""
    posted: list[list[int]] = []

    def answers(headers: dict[str, str], body: bytes) -> Answer:
        events = json.loads(body)
        posted.append([each["data"]["amount"] for each in events])
        failed = [each["id"] for each in events if each["data"]["amount"] == 2]
        names = [{"itemIdentifier": each} for each in failed if len(posted) < 3]
        return Answer(200, body=json.dumps({"batchItemFailures": names}).encode())

    with Webhook(answers) as webhook:
        handler = {
            "type": "http",
            "url": webhook.url,
            "each": "batch",
            "max_wait": 0.2,
            "retry": QUICK,
        }
        config: dict[str, Any] = {
            "handlers": {"shop": handler},
            "routes": [{"handlers": ["shop"]}],
        }
        with relaying(outbox.settings(**config)):
            publish(outbox, *range(5))
            wait_until(lambda: len(posted) == 3)
            wait_until(lambda: outbox.value("select count(*) from relay.deferred") == 0)
    assert posted == [[0, 1, 2, 3, 4], [2], [2]]


def test_a_batch_that_is_refused_for_the_rate_waits_and_is_not_split(outbox: Outbox) -> None:
    """next-moe/nextmoe-infra#53, #55: a 429 says nothing of the size, and halves are twice as many requests."""
    posted: list[int] = []

    def answers(headers: dict[str, str], body: bytes) -> Answer:
        posted.append(len(json.loads(body)))
        return Answer(429 if len(posted) < 4 else 200)

    with Webhook(answers) as webhook:
        handler = {
            "type": "http",
            "url": webhook.url,
            "each": "batch",
            "max_wait": 0.2,
            "retry": {**QUICK, "defer_after": 5},
        }
        config: dict[str, Any] = {
            "handlers": {"shop": handler},
            "routes": [{"handlers": ["shop"]}],
        }
        with relaying(outbox.settings(**config)):
            publish(outbox, *range(16))
            wait_until(lambda: len(posted) == 4)
            outbox.wait_drained()
    assert posted == [16] * 4


def test_dead_members_of_batches_are_replayed_in_batches_and_once(
    outbox: Outbox, calls: Calls
) -> None:
    """brefphp/symfony-messenger #67: what was handled beside a failed one is delivered again with it."""
    dead = {3, 13, 7}
    calls.behave = one_by_one(lambda each: amount_of(each) in dead)
    settings = outbox.settings(**calling(retry={"attempts": 1}))
    with relaying(settings):
        publish(outbox, *range(20))
        wait_until(lambda: outbox.value("select count(*) from relay.dead_letter_queue") == 3)
        wait_until(lambda: len(calls.handled) == 17)
        dead.clear()
        dead_letters = DeadLetters(settings, outbox.conn)
        assert len(dead_letters.replay(dead_letters.find(DeadLetterSelection()), None)) == 3
        wait_until(lambda: len(calls.handled) == 20)
        wait_until(lambda: outbox.value("select count(*) from relay.deferred") == 0)
    assert Counter(calls.handled) == Counter(range(20))
    assert calls.handled.index(3) < calls.handled.index(13)
