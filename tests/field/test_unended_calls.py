"""A call of a batch that does not end keeps its members from being called beside it, which is no attempt of theirs.

taskforcesh/bullmq#631: a job that takes too long fails, since it was found stalled too often.
AppScale/gts#2838, celery/celery#4789: a task that hangs takes a worker for good, and what it had.
"""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

import pytest

from relay import Deliveries, Delivery
from relay.sinks import function_calls
from tests.outbox import Outbox, event, host, relaying, wait_until

QUICK = {"wait": 0.1, "max_wait": 0.1, "jitter": 0.01, "defer_after": 0.05, "attempts": 3}


class Hanging:
    """What this module's functions have handled, and what the first call waits for."""

    def __init__(self) -> None:
        self.handled: list[int] = []
        self.attempts: list[int] = []
        self.begun = 0
        self.released = threading.Event()


HERE = Hanging()


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> Any:
    HERE.__init__()  # type: ignore[misc]
    monkeypatch.setattr(function_calls, "END_SECONDS", 0.2)
    yield HERE
    HERE.released.set()


def handle(deliveries: Deliveries) -> None:
    """Hang the first time."""
    HERE.begun += 1
    if HERE.begun == 1:
        HERE.released.wait(60)
        return
    for each in deliveries:
        one(each)


def one(delivery: Delivery) -> None:
    HERE.handled.append(int(next(iter(delivery.events)).payload["amount"]))
    HERE.attempts.append(delivery.attempt)


def test_a_batch_whose_call_does_not_end_costs_its_members_no_attempts(
    outbox: Outbox, here: Hanging
) -> None:
    count = 8
    handler = {
        "type": "function",
        "callable": f"{__name__}:handle",
        "each": "batch",
        "max_wait": 0.2,
        "timeout": 0.2,
        "retry": QUICK,
    }
    config: dict[str, Any] = {"handlers": {"mail": handler}, "routes": [{"handlers": ["mail"]}]}
    with relaying(outbox.settings(**config)):
        with outbox.conn.transaction():
            for number in range(count):
                outbox.publish(host(number), event(number))
        wait_until(lambda: here.begun == 1)
        wait_until(lambda: outbox.value("select count(*) from relay.deferred") == count)
        with outbox.conn.transaction():
            outbox.publish(host(100), event(100))
        # Others are called meanwhile.
        wait_until(lambda: 100 in here.handled)
        threading.Event().wait(2)
        assert here.begun == 2
        here.released.set()
        wait_until(lambda: len(here.handled) == count + 1)
        wait_until(lambda: outbox.value("select count(*) from relay.deferred") == 0)
    assert Counter(here.handled) == Counter([*range(count), 100])
    assert outbox.value("select count(*) from relay.dead_letter_queue") == 0
    assert max(here.attempts) <= 2
