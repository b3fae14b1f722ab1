"""While a circuit breaker is open, one delivery at a time is a trial: the next one begins, however that one ends.

A trial that neither succeeds nor fails kept the place of all others for ever: getnora-io/nora#585 (an error that is not
the destination's), decocms/studio#5322 (refused credentials), diegosouzapw/OmniRoute#13836,
afreidah/s3-orchestrator#424, connor4312/cockatiel#91.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from relay.faults import (
    DestinationRefused,
    Drop,
    EndpointBusy,
    EndpointDown,
    EndpointFailed,
    EndpointRejected,
    Fail,
    NotTried,
    Rejected,
    RetryLater,
    SecretUnavailable,
    Unauthorized,
    Undelivered,
)
from relay.model.dispositions import APPLIED
from tests.outbox import Outbox, event, host, relaying, wait_until
from tests.unit.test_batches import Results
from tests.unit.test_batches import Run as BatchRun
from tests.unit.test_dispatch import Run, delivery
from tests.webhook import Answer, Webhook

ENDS = [
    NotTried("an earlier call has not ended"),
    EndpointFailed("one endpoint"),
    EndpointDown("one endpoint is down", tried=False),
    EndpointBusy("at its rate", after=0.01),
    EndpointRejected("one endpoint refuses it"),
    Unauthorized("HTTP 401"),
    SecretUnavailable("no file"),
    DestinationRefused("HTTP 403"),
    Rejected("HTTP 422"),
    RetryLater("later", after=0.01),
    Drop("not wanted"),
    Fail("broken"),
    Undelivered("away"),
    ValueError("a defect"),
    TimeoutError(),
]
BREAKER = {"failures": 2, "cool_down": 0.001}
AT_ONCE = {"defer_after": 0}
EVENTS = 12
AWAY = {0, 1}
"""The deliveries that open the breaker."""


def ended(begun: Sequence[int], end: Exception) -> bool:
    """Raise what the destination does; returns True for a delivery that it accepts."""
    if begun[-1] in AWAY and begun.count(begun[-1]) == 1:
        raise Undelivered("away")
    # The first two trials end so.
    if len(begun) <= len(AWAY) + 2:
        raise end
    return True


@pytest.mark.parametrize("end", ENDS, ids=lambda each: type(each).__name__)
@pytest.mark.parametrize("seconds", [0.0, 0.05])
def test_the_next_trial_begins_however_one_ends(end: Exception, seconds: float) -> None:
    begun: list[int] = []

    async def behave(number: int) -> None:
        begun.append(number)
        await asyncio.sleep(seconds)
        ended(begun, end)

    async def main() -> Run:
        run = Run(behave, concurrency=1, circuit_breaker=BREAKER, retry=AT_ONCE)
        await run.all(delivery(number, str(number)) for number in range(EVENTS))
        return run

    run = asyncio.run(main())
    assert sorted(run.dispositions) == list(range(EVENTS))
    assert sum(each == APPLIED for each in run.dispositions.values()) >= EVENTS - 4
    assert not run.dispatcher.breaker.is_open


@pytest.mark.parametrize("end", ENDS, ids=lambda each: type(each).__name__)
def test_the_next_batch_begins_however_a_trial_ends(end: Exception) -> None:
    begun: list[int] = []

    async def behave(numbers: list[int]) -> Results:
        begun.append(numbers[0])
        await asyncio.sleep(0)
        ended(begun, end)
        return [None] * len(numbers)

    async def main() -> BatchRun:
        run = BatchRun(behave, concurrency=1, max_batch=1, circuit_breaker=BREAKER)
        await run.all(delivery(number, str(number)) for number in range(EVENTS))
        return run

    run = asyncio.run(main())
    assert sorted(run.dispositions) == list(range(EVENTS))
    assert sum(each == APPLIED for each in run.dispositions.values()) >= EVENTS - 4
    assert not run.dispatcher.breaker.is_open


def test_a_destination_counts_as_down_only_while_something_is_left_to_try(outbox: Outbox) -> None:
    """What failed was cancelled, and nothing is published: the fault, and its alert, stayed until the next event."""
    away = True
    retry = {"defer_after": 0, "wait": 0.05, "max_wait": 0.1}
    fault = "select fault from relay.sinks"
    with Webhook(lambda *_: Answer(503 if away else 200)) as hook:
        sink = {"type": "http", "url": hook.url, "retry": retry, "circuit_breaker": {"failures": 1}}
        settings = outbox.settings(handlers={"hook": sink}, routes=[{"handlers": ["hook"]}])
        with relaying(settings):
            outbox.publish(host(1), event())
            wait_until(lambda: outbox.column(fault) == ["Undelivered: HTTP 503"], 20)

            def is_told_so_no_longer() -> bool:
                # Again, until none is a trial now, which would be deferred once more.
                outbox.conn.execute("delete from relay.deferred")
                return outbox.column(fault) == [None]

            wait_until(is_told_so_no_longer, 30, 0.2)
            outbox.publish(host(2), event())
            wait_until(lambda: outbox.column(fault) == ["Undelivered: HTTP 503"], 20)
            away = False
            wait_until(lambda: outbox.column(fault) == [None], 20)
            outbox.wait_delivered("hook")
    assert len(hook.ids()) == 1
