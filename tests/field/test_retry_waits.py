"""When a retry comes: as it was asked for, in workers, handlers and sinks alike.

riverqueue/river#105 (short waits came seconds late), #1037 (a wait of zero), #730 and oban-bg/oban#137 (what counts as
an attempt).
"""

from __future__ import annotations

import asyncio
import time
from itertools import pairwise
from typing import Any

import psycopg
import pytest

from relay import Delivery, RetryLater
from relay.client.worker import LeasedMessage, Message, Queue, Worker
from relay.config.handlers import FunctionHandler
from relay.delivery import checkpoint, loop
from relay.model.events import Transaction
from relay.outcomes import named_wait
from relay.pipeline import retries
from tests.integration.test_workers import fill, states
from tests.outbox import Outbox, event, host, relaying, wait_until
from tests.workers import working

TRIED: list[float] = []


@pytest.mark.parametrize(
    ("after", "wait"),
    [(None, None), (-5, None), (float("nan"), None), (0, 0.1), (7, 7.0), (10**400, 86_400.0)],
)
def test_a_wait_means_the_same_to_workers_and_handlers(
    after: float | None, wait: float | None
) -> None:
    assert named_wait(RetryLater(after=after)) == wait


def test_a_negative_wait_of_a_worker_is_the_queues_backoff(outbox: Outbox) -> None:
    fill(outbox, 1, queue=Queue(name="mail", match=None, attempts=10, backoff=60))
    worker = Worker(outbox.worker_dsn, "mail", concurrency=1, poll=0.02)
    called: list[int] = []

    @worker.handles()
    def handle(message: Message, conn: Any) -> None:
        called.append(message.attempt)
        raise RetryLater(after=-5)

    with working(worker):
        wait_until(lambda: [each[:2] for each in states(outbox)] == [("retry", 1)])
    waits = "select available_at > now() + interval '20 s' from relay.queue_messages"
    assert called == [1]
    assert outbox.value(waits)


@pytest.mark.parametrize("lease", [None, 30.0])
def test_a_passed_deadline_says_so(outbox: Outbox, lease: float | None) -> None:
    fill(outbox, 1, queue=Queue(name="mail", match=None, backoff=60))
    worker = Worker(outbox.worker_dsn, "mail", concurrency=1, poll=0.02, deadline=0.1, lease=lease)

    @worker.handles()
    async def handle(message: Message | LeasedMessage, *session: Any) -> None:
        await asyncio.sleep(60)

    with working(worker):
        wait_until(lambda: [each[:2] for each in states(outbox)] == [("retry", 1)])
    ((_, _, error),) = states(outbox)
    assert error == "TimeoutError: the call took longer than its deadline of 0.1 s"


def note(delivery: Delivery) -> None:
    TRIED.append(time.monotonic())
    raise ValueError


def test_a_deferred_retry_of_a_sink_comes_in_time(
    outbox: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its time is known when it is stored: nobody has to look for it, and here nobody does."""
    TRIED.clear()
    monkeypatch.setattr(loop, "WATCH_SECONDS", 300.0)
    monkeypatch.setattr(checkpoint, "STORE_SECONDS", 300.0)
    retry = {"on": "any", "attempts": 9, "backoff": [0.6], "jitter": 0, "defer_after": 0}
    handler = {"type": "function", "callable": f"{__name__}:note", "retry": retry}
    settings = outbox.settings(handlers={"mail": handler}, routes=[{"handlers": ["mail"]}])
    with relaying(settings):
        outbox.publish(host(1), event(1))
        wait_until(lambda: len(TRIED) == 9)
    gaps = [after - before for before, after in pairwise(TRIED)]
    assert min(gaps) >= 0.6


def refuse(transaction: Transaction, cursor: psycopg.Cursor[Any]) -> None:
    TRIED.append(time.monotonic())
    raise ValueError


def test_a_deferred_retry_of_the_target_comes_in_time(
    outbox: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Retries at 0.2, 1.2, 1.6 s: the first one was found when somebody looked, every half second."""
    TRIED.clear()
    monkeypatch.setattr(retries, "PAUSE_SECONDS", 300.0)
    retry = {"on": "any", "attempts": 4, "backoff": [0.2], "jitter": 0}
    handler = {"type": "python", "callable": f"{__name__}:refuse", "retry": retry}
    settings = outbox.settings(handlers={"mail": handler}, routes=[{"handlers": ["mail"]}])
    with relaying(settings):
        outbox.publish(host(1), event(1))
        wait_until(lambda: outbox.value("select count(*) from relay.dead_letter_queue") == 1)
        assert len(TRIED) >= 4


def test_a_handler_may_be_retried_until_it_succeeds(outbox: Outbox) -> None:
    retry = {"on": "any", "attempts": None}
    handler = {"type": "function", "callable": f"{__name__}:note", "retry": retry}
    settings = outbox.settings(handlers={"mail": handler}, routes=[{"handlers": ["mail"]}])
    (found,) = settings.sink_handlers.values()
    assert isinstance(found, FunctionHandler)
    assert found.retry.attempts is None
    with pytest.raises(ValueError, match="attempts: null"):
        outbox.settings(
            handlers={
                "mail": {
                    "type": "python",
                    "callable": "tests.callables:record",
                    "retry": {"on": "any"},
                }
            },
            routes=[{"handlers": ["mail"]}],
        )
