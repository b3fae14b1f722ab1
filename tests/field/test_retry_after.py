"""Retry-After: in all forms of a date, in UTC, and kept while the circuit breaker is open."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable
from email.utils import formatdate
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relay.config.handlers import CircuitBreakerSettings, HttpHandler
from relay.config.settings import Settings
from relay.delivery.dispatch import Dispatcher
from relay.delivery.order import Delivery
from relay.faults import Undelivered
from relay.model.dispositions import APPLIED, Disposition, RetryLater
from relay.model.events import Commit, Lsn, Transaction
from relay.model.transactions import Undecoded
from relay.pipeline.failure_limit import FailureLimit
from relay.sinks import circuit_breaker
from relay.sinks.circuit_breaker import CircuitBreaker
from relay.sinks.http import retry_after
from tests.outbox import Outbox, event, host, relaying, wait_until
from tests.webhook import Answer, Webhook


@pytest.mark.parametrize("zone", ["UTC", "America/New_York", "Asia/Tokyo"])
def test_each_form_of_a_date_is_utc(zone: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """RFC 9110, 5.6.7: IMF-fixdate, RFC 850, asctime."""
    monkeypatch.setenv("TZ", zone)
    time.tzset()
    try:
        then = time.time() + 60
        moment = time.gmtime(then)
        forms = [
            formatdate(then, usegmt=True),
            time.strftime("%A, %d-%b-%y %H:%M:%S GMT", moment),
            time.asctime(moment),
        ]
        for text in forms:
            waited = retry_after(text)
            assert waited is not None, text
            assert 55 < waited <= 60, text
    finally:
        monkeypatch.undo()
        time.tzset()


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("7", 7),
        ("0", 0),
        ("99999999999999", 86_400),
        ("9" * 5_000, 86_400),
        ("Sun, 06 Nov 1994 08:49:37 GMT", 0),
        ("Sunday, 06-Nov-94 08:49:37 GMT", 0),
        ("Sun Nov  6 08:49:37 1994", 0),
        ("Fri, 31 Dec 9999 23:59:59 GMT", 86_400),
        *(
            (text, None)
            for text in (
                *("", "soon", "-1", "-5", "1.5", "nan", "inf", "1e9", "٣", "12 Mar"),
                *("Sun, 99 Foo 2026 00:00:00 GMT", "Fri, 00 Jan 0000 00:00:00 GMT"),
                *("Fri, 31 Dec 99999 23:59:59 GMT", "2026-03-01T12:00:00Z", None),
            )
        ),
    ],
)
def test_a_delay_is_capped_and_what_is_none_asks_for_nothing(
    text: str | None, seconds: float | None
) -> None:
    assert retry_after(text) == seconds


@given(st.text() | st.from_regex(r"\w{3}, \d+ \w{3} -?\d+ \d+:\d+:\d+ ([+-]\d+|\w+)"))
def test_whatever_it_says_is_no_exception(text: str) -> None:
    found = retry_after(text)
    assert found is None or 0 <= found <= 86_400


class Limited:
    """An endpoint that answers the first request for each event with 429, and notes the times of all."""

    def __init__(self, asked: float) -> None:
        self.asked = asked
        self.sent: defaultdict[str, list[float]] = defaultdict(list)

    def __call__(self, headers: dict[str, str], body: bytes) -> Answer:
        times = self.sent[headers["idempotency-key"]]
        times.append(time.monotonic())
        return Answer(429, (("retry-after", str(self.asked)),)) if len(times) == 1 else Answer()

    def assert_kept(self) -> None:
        """No event was sent again before its time."""
        for times in self.sent.values():
            first, second = times
            assert second - first >= self.asked - 0.05


def posting(outbox: Outbox, webhook: Webhook, failures: int) -> Settings:
    hook: dict[str, Any] = {
        "type": "http",
        "url": webhook.url,
        "retry": {"wait": 0.1, "jitter": 0.01},
        "circuit_breaker": {"failures": failures, "cool_down": 0.2},
    }
    return outbox.settings(handlers={"hook": hook}, routes=[{"handlers": ["hook"]}])


def test_no_event_is_sent_again_before_its_time_while_the_breaker_is_open(outbox: Outbox) -> None:
    """hargata/lubelog#1279, rianvdm/discogs-mcp#47: a probe within the time asked for extends the limit."""
    limited = Limited(2)
    with Webhook(limited) as webhook, relaying(posting(outbox, webhook, failures=4)):
        for number in range(8):
            outbox.publish(host(number), event(number))
        wait_until(lambda: len(webhook.accepted) == 8)
    assert len(limited.sent) == 8
    limited.assert_kept()


@pytest.mark.rare
def test_a_restart_keeps_to_what_was_asked_for(outbox: Outbox) -> None:
    limited = Limited(4)
    with Webhook(limited) as webhook:
        settings = posting(outbox, webhook, failures=1)
        for number in range(4):
            outbox.publish(host(number), event(number))
        with relaying(settings):
            wait_until(lambda: len(limited.sent) == 4)
        with relaying(settings):
            wait_until(lambda: len(webhook.accepted) == 4)
    limited.assert_kept()


def test_an_event_keeps_its_own_time_when_others_close_the_breaker() -> None:
    """A delivery under way may succeed after the breaker has opened: what was asked for one key holds for that."""
    found: dict[str, Disposition] = {}
    opened = asyncio.Event()
    behave: dict[str, Callable[[], Awaitable[None]]] = {}

    async def refuse() -> None:
        raise Undelivered("HTTP 429", after=50.0)

    async def succeed_late() -> None:
        await opened.wait()

    behave = {"1": succeed_late, "2": refuse, "3": refuse}

    async def check() -> None:
        async def deliver(transaction: Transaction) -> None:
            await behave[str(transaction.transaction_id)]()

        sink: Any = SimpleNamespace(name="h", deliver=deliver)
        settings = HttpHandler(
            type="http", url="http://h", circuit_breaker=CircuitBreakerSettings(failures=1)
        )
        dispatcher = Dispatcher(sink, settings, 1_000_000, FailureLimit({}, {}))
        for number in behave:
            commit = Commit(Lsn(1), Lsn(1), 0, int(number))
            events: Any = Transaction(number, commit, ())  # type: ignore[arg-type]
            rows = Undecoded(commit, number, (), (), (), 1)
            dispatcher.submit(Delivery(rows, events, frozenset(number)))
        while not dispatcher.breaker.is_open:
            await asyncio.sleep(0.001)
        assert not dispatcher.has_ended.is_set()
        opened.set()
        while dispatcher.count:
            await asyncio.sleep(0.001)
        for each, disposition in dispatcher.take_ended():
            found[str(each.rows.transaction_id)] = disposition
        await dispatcher.close()

    asyncio.run(asyncio.wait_for(check(), 10))
    assert found.pop("1") == APPLIED
    for disposition in found.values():
        assert isinstance(disposition, RetryLater)
        assert 49 < disposition.after <= 50
    assert len(found) == 2


def test_trials_keep_what_the_destination_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    one = CircuitBreaker(CircuitBreakerSettings(failures=2, cool_down=30))
    # The limit of a single key does not hold up a sink whose destination is away.
    one.failed("a", 3_000.0)
    assert not one.is_open
    assert one.failed("b")
    assert one.seconds_to_trial() == 1
    one.failed("d", 120.0)
    assert one.seconds_to_trial() == 120
    now += 50
    # An attempt that was under way asks for more.
    one.failed("c", 100.0)
    assert one.seconds_to_trial() == 100
    now += 100
    assert one.seconds_to_trial() == 0
    one.begin()
    one.failed("a")
    assert one.seconds_to_trial() == 2
    now += 2
    one.begin()
    one.failed("a", 86_400.0)
    assert one.seconds_to_trial() == circuit_breaker.LONGEST_ASKED_SECONDS == 3_600
    one.succeeded("a")
    assert one.seconds_to_trial() == 0
