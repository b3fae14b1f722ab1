"""Functions of users as sinks: what they get, what ends their calls, and what commits with their deliveries."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import psycopg
import pytest

from relay import Delivery, Drop, Fail, RetryLater
from relay.admin import sinks
from relay.sinks import function_calls
from tests.outbox import APPEND, Outbox, event, host, relaying, wait_until

QUICK = {"wait": 0.1, "max_wait": 0.2, "jitter": 0.01, "defer_after": 0.05}


class Seen:
    """What the functions of this module were called with; tests read it."""

    def __init__(self) -> None:
        self.facts: list[dict[str, Any]] = []
        self.done: list[tuple[str, int]] = []
        self.behave: Callable[[Delivery, Any], Any] = lambda delivery, event: None
        self.opened = self.closed = 0

    def note(self, delivery: Delivery) -> None:
        (first, *_) = delivery.events
        self.facts.append(
            {
                "attempt": delivery.attempt,
                "amount": first.payload["amount"],
                "key": delivery.key,
                "host": str(first.host_id),
                "identity": delivery.idempotency_key,
                "id": str(first.id),
                "left": delivery.seconds_left,
                "first": delivery.first_attempt_at,
                "deadline": delivery.deadline,
                "resource": delivery.resource,
                "thread": threading.current_thread().name,
                "transaction_id": delivery.transaction_id,
                "events": len(delivery),
            }
        )

    def finish(self, delivery: Delivery) -> None:
        self.done += [(str(each.host_id), each.payload["amount"]) for each in delivery.events]

    @property
    def amounts(self) -> list[int]:
        return [amount for _, amount in self.done]


SEEN = Seen()


async def send(delivery: Delivery) -> None:
    """Do what the test says, at once or awaited."""
    SEEN.note(delivery)
    for each in delivery.events:
        found = SEEN.behave(delivery, each)
        if asyncio.iscoroutine(found):
            await found
    SEEN.finish(delivery)


def send_plain(delivery: Delivery) -> None:
    """The same, as a plain function."""
    SEEN.note(delivery)
    for each in delivery.events:
        SEEN.behave(delivery, each)
    SEEN.finish(delivery)


@asynccontextmanager
async def clients() -> AsyncIterator[str]:
    """What the functions reach as a resource."""
    SEEN.opened += 1
    yield "clients"
    SEEN.closed += 1


@contextmanager
def plain_clients() -> Iterator[str]:
    """The same for plain functions."""
    SEEN.opened += 1
    yield "clients"
    SEEN.closed += 1


@pytest.fixture(autouse=True)
def seen() -> Seen:
    SEEN.__init__()  # type: ignore[misc]
    return SEEN


def calling(
    name: str = "send", projected: bool = False, sinks: dict[str, Any] | None = None, **more: Any
) -> dict[str, Any]:
    """Every event goes to a function of this module, in the sink `mail`."""
    retry = {**QUICK, **more.pop("retry", {})}
    handlers: dict[str, Any] = {
        "mail": {"type": "function", "callable": f"{__name__}:{name}", "retry": retry, **more}
    }
    if projected:
        handlers["projection"] = {"type": "sql", "statement": APPEND}
    return {"handlers": handlers, "routes": [{"handlers": list(handlers)}], **(sinks or {})}


@pytest.mark.parametrize("name", ["send", "send_plain"])
def test_a_function_gets_each_transaction_in_order(outbox: Outbox, seen: Seen, name: str) -> None:
    opens = "clients" if name == "send" else "plain_clients"
    settings = outbox.settings(**calling(name, open=f"{__name__}:{opens}"))
    with relaying(settings):
        for number in range(40):
            outbox.publish(host(number % 4), event(number), event(number + 1000))
        wait_until(lambda: len(seen.done) == 80)
        wait_until(lambda: outbox.value("select state = 'attached' from relay.sinks"))
        outbox.wait_drained()
    for number in range(4):
        amounts = [amount for key, amount in seen.done if key == str(host(number))]
        assert amounts == [
            amount for each in range(number, 40, 4) for amount in (each, each + 1000)
        ]
    assert (seen.opened, seen.closed) == (1, 1)
    for each in seen.facts:
        assert (each["attempt"], each["events"], each["resource"]) == (1, 2, "clients")
        assert each["key"] == each["host"]
        assert each["identity"] == each["id"]
        assert 0 < each["left"] <= 30
        assert each["first"] < each["deadline"]
        assert each["thread"].startswith("function mail")
    assert not outbox.column("select 1 from relay.dead_letter_queue")
