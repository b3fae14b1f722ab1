"""Functions of users as sinks: what they get, what ends their calls, and what commits with their deliveries."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from itertools import count
from typing import Any

import pytest
from opentelemetry import trace

from relay import Delivery, Drop, Fail, RetryLater
from relay.admin import sinks
from relay.admin.check import require
from relay.faults import ConfigurationError
from relay.sinks import function_calls, function_transactions
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


@pytest.mark.parametrize("name", ["send", "send_plain"])
def test_any_exception_is_retried_up_to_a_limit(outbox: Outbox, seen: Seen, name: str) -> None:
    def behave(delivery: Delivery, each: Any) -> None:
        amount = each.payload["amount"]
        if amount == 1 and delivery.attempt < 3:
            raise KeyError("not yet")
        if amount == 2:
            raise ValueError("never")
        if amount == 3:
            raise Fail("no such customer")
        if amount == 4:
            raise Drop("not ours")
        if amount == 5 and delivery.attempt == 1:
            raise RetryLater(after=0.3)

    seen.behave = behave
    with relaying(outbox.settings(**calling(name, retry={"attempts": 4}))):
        for number in range(8):
            outbox.publish(host(number % 2), event(number))
        wait_until(lambda: len(seen.done) == 5)
        wait_until(lambda: outbox.value("select count(*) from relay.deferred") == 0)
    assert sorted(seen.amounts) == [0, 1, 5, 6, 7]
    for number in (0, 1):
        amounts = [amount for key, amount in seen.done if key == str(host(number))]
        assert amounts == sorted(amounts)
    tried = [each["amount"] for each in seen.facts]
    assert [tried.count(number) for number in range(8)] == [1, 3, 4, 1, 1, 2, 1, 1]
    attempts = [each["attempt"] for each in seen.facts if each["amount"] == 2]
    assert attempts == [1, 2, 3, 4]
    firsts = [each["first"] for each in seen.facts if each["amount"] == 2]
    assert all(later >= firsts[0] for later in firsts)
    assert (firsts[-1] - firsts[0]).total_seconds() < 1
    dead = outbox.column("select exception from relay.dead_letter_queue order by c_offset")
    assert [text.partition(":")[0] for text in dead] == ["ValueError", "Fail"]
    assert "test_function.py" in dead[0]


class NotCaught(BaseException):
    """An error that `except Exception` does not catch."""


@pytest.mark.parametrize("name", ["send", "send_plain"])
def test_what_would_end_a_thread_ends_the_attempt(outbox: Outbox, seen: Seen, name: str) -> None:
    raised: list[BaseException] = [
        SystemExit(3),
        KeyboardInterrupt(),
        NotCaught(),
        asyncio.CancelledError(),
        GeneratorExit(),
        StopIteration(),
        MemoryError(),
    ]

    def behave(delivery: Delivery, each: Any) -> None:
        if delivery.attempt == 1:
            raise raised[each.payload["amount"]]

    seen.behave = behave
    with relaying(outbox.settings(**calling(name, projected=True))):
        for number in range(len(raised)):
            outbox.publish(host(number), event(number))
        wait_until(lambda: len(seen.done) == len(raised))
        outbox.wait_handled()
    assert sorted(seen.amounts) == list(range(len(raised)))
    outbox.assert_exact()


def test_a_task_of_the_function_does_not_end_its_loop(outbox: Outbox, seen: Seen) -> None:
    async def leave() -> None:
        sys.exit(1)

    async def begin_a_task() -> None:
        task = asyncio.create_task(leave())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        del task

    seen.behave = lambda delivery, each: begin_a_task() if delivery.attempt == 1 else None
    with relaying(outbox.settings(**calling())):
        for number in range(3):
            outbox.publish(host(number), event(number))
        wait_until(lambda: sorted(seen.amounts) == [0, 1, 2])


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """What does not end is waited for briefly."""
    monkeypatch.setattr(function_calls, "END_SECONDS", 0.2)


def test_a_call_is_cancelled_at_its_deadline(outbox: Outbox, seen: Seen) -> None:
    ended: list[int] = []

    async def hang(amount: int) -> None:
        try:
            await asyncio.sleep(600)
        finally:
            ended.append(amount)

    seen.behave = lambda delivery, each: (
        hang(each.payload["amount"])
        if each.payload["amount"] == 1 and delivery.attempt < 3
        else None
    )
    with relaying(outbox.settings(**calling(timeout=0.3, projected=True))):
        for number in (1, 2, 3):
            outbox.publish(host(number % 2), event(number))
        wait_until(lambda: len(seen.done) == 3)
    assert seen.amounts == [2, 1, 3]
    assert ended == [1, 1]
    outbox.assert_exact()


@pytest.mark.usefixtures("soon")
def test_a_call_that_suppresses_its_cancellation_is_not_repeated_beside_itself(
    outbox: Outbox, seen: Seen, caplog: pytest.LogCaptureFixture
) -> None:
    let_go = threading.Event()
    running: list[int] = []
    beside: list[int] = []

    async def ignore() -> None:
        running.append(1)
        beside.append(len(running))
        while not let_go.is_set():
            try:
                await asyncio.sleep(0.05)
            except asyncio.CancelledError:
                continue
        running.pop()

    seen.behave = lambda delivery, each: ignore() if each.payload["amount"] == 1 else None
    with relaying(outbox.settings(**calling(timeout=0.2, circuit_breaker=None))):
        outbox.publish(host(1), event(1))
        outbox.publish(host(1), event(2))
        outbox.publish(host(2), event(3))
        wait_until(
            lambda: outbox.column("select attempts from relay.deferred where attempts >= 3") != []
        )
        assert seen.amounts == [3]
        let_go.set()
        wait_until(lambda: len(set(seen.amounts)) == 3)
    assert set(beside) == {1}
    # The call that was given up has returned late; the transaction was delivered again after it.
    assert [amount for amount in seen.amounts if amount != 3] == [1, 1, 2]
    faults = [getattr(each, "fault", "") for each in caplog.records]
    assert "it suppresses its cancellation" in faults


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize("name", ["send", "send_plain"])
def test_a_function_that_blocks_harms_its_own_sink_only(
    outbox: Outbox, seen: Seen, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    let_go = threading.Event()

    def behave(delivery: Delivery, each: Any) -> None:
        if delivery.attempt == 1 and each.payload["amount"] == 1:
            let_go.wait(60)

    seen.behave = behave
    config = calling(name, timeout=0.3, projected=True)
    config["handlers"]["other"] = {
        "type": "function",
        "callable": f"{__name__}:count_others",
        "retry": QUICK,
    }
    config["routes"] = [{"handlers": ["mail", "other", "projection"]}]
    OTHERS.clear()
    with relaying(outbox.settings(**config)):
        for number in (1, 2, 3, 1):
            outbox.publish(host(number), event(number))
        wait_until(lambda: len(OTHERS) == 4)
        outbox.wait_handled()
        wait_until(lambda: "do not end after their deadline" in caplog.text)
        faults = [str(getattr(each, "fault", "")) for each in caplog.records]
        # It says where the thread stands.
        assert any(f"{threading.__file__}:" in each for each in faults)
        let_go.set()
        wait_until(lambda: set(seen.amounts) == {1, 2, 3})
        wait_until(lambda: outbox.value("select count(*) from relay.deferred") == 0)
    outbox.assert_exact()
    assert not outbox.column("select 1 from relay.dead_letter_queue")


OTHERS: list[int] = []


async def count_others(delivery: Delivery) -> None:
    """Count the events."""
    OTHERS.extend(each.payload["amount"] for each in delivery.events)


def returns_a_coroutine(delivery: Delivery) -> Any:
    """A plain function whose work nobody awaits."""
    return send(delivery)


def lacks_a_right(delivery: Delivery) -> None:
    """Raise what would end relay if it came from relay's own statements."""
    from relay.faults import ConfigurationError

    raise ConfigurationError("a setting of mine")


@pytest.mark.parametrize(
    ("name", "fault"),
    [("returns_a_coroutine", "returned a coroutine"), ("lacks_a_right", "a setting of mine")],
)
def test_what_would_stop_relay_stops_the_sink(outbox: Outbox, name: str, fault: str) -> None:
    with relaying(outbox.settings(**calling(name, projected=True))):
        outbox.publish(host(1), event(1))
        wait_until(
            lambda: (
                fault in str(outbox.column("select fault from relay.sinks where fault is not null"))
            )
        )
        outbox.publish(host(2), event(2))
        outbox.wait_handled()
    outbox.assert_exact()
    assert outbox.column("select 1 from relay.dead_letter_queue") == []


def test_open_is_tried_again(outbox: Outbox, seen: Seen) -> None:
    OPENINGS.clear()
    with relaying(outbox.settings(**calling(open=f"{__name__}:fails_at_first"))):
        outbox.publish(host(1), event(1))
        wait_until(lambda: seen.amounts == [1])
    assert OPENINGS == ["fails", "fails", "opened", "closed"]
    assert seen.facts[0]["resource"] == 3


OPENINGS: list[str] = []


@asynccontextmanager
async def fails_at_first() -> AsyncIterator[int]:
    """Fail twice."""
    if len(OPENINGS) < 2:
        OPENINGS.append("fails")
        raise OSError("no such host")
    OPENINGS.append("opened")
    async with asyncio.TaskGroup():
        # It is entered and left in one task.
        yield len(OPENINGS)
    OPENINGS.append("closed")


EFFECTS = """
    create table effects (id uuid, amount int, attempt int);
    create sequence tried
"""


async def insert(delivery: Delivery) -> None:
    """Write an effect that completes the delivery, and fail after or before it as the amount says."""
    SEEN.note(delivery)
    amount = SEEN.facts[-1]["amount"]
    async with delivery.transaction() as conn:
        for each in delivery.events:
            await conn.execute(
                "insert into effects (id, amount, attempt) values (%s, %s, %s)",
                (each.id, each.payload["amount"], delivery.attempt),
            )
        if amount == 1 and delivery.attempt == 1:
            raise ValueError("inside")
        if amount == 3:
            await conn.commit()
    if amount == 2:
        raise ValueError("after the commit")


def insert_plain(delivery: Delivery) -> None:
    """The same, as a plain function."""
    SEEN.note(delivery)
    amount = SEEN.facts[-1]["amount"]
    with delivery.transaction() as conn:
        for each in delivery.events:
            conn.execute(
                "insert into effects (id, amount, attempt) values (%s, %s, %s)",
                (each.id, each.payload["amount"], delivery.attempt),
            )
        if amount == 1 and delivery.attempt == 1:
            raise ValueError("inside")
        if amount == 3:
            conn.commit()
    if amount == 2:
        raise ValueError("after the commit")


@pytest.mark.parametrize("name", ["insert", "insert_plain"])
def test_effects_commit_with_the_delivery(
    outbox: Outbox, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(function_transactions, "_FORGET_SECONDS", 0.2)
    outbox.conn.execute(EFFECTS)
    with relaying(outbox.settings(**calling(name, retry={"attempts": 2}))):
        for number in range(20):
            outbox.publish(host(number % 4), event(number), event(100 + number))
        wait_until(lambda: outbox.value("select count(*) from effects") == 38)
        wait_until(lambda: outbox.value("select count(*) from relay.deferred") == 0)
        # Records are removed once nothing brings their deliveries again.
        numbers = count(20)

        def are_removed() -> bool:
            outbox.publish(host(1), event(next(numbers)))
            return bool(outbox.value("select count(*) from relay.sink_completions") <= 5)

        # The position is a new snapshot every few seconds.
        wait_until(are_removed, 60, every=0.3)
    assert outbox.value("select count(*) from effects where amount in (1, 2, 101, 102)") == 4
    assert outbox.column("select attempt from effects where amount = 1") == [2]
    assert outbox.value("select count(*) from effects where amount in (3, 103)") == 0
    dead = outbox.column("select exception from relay.dead_letter_queue")
    assert len(dead) == 2
    assert "a handler may not commit" in dead[0]


@pytest.mark.parametrize("name", ["insert", "insert_plain"])
def test_a_delivery_that_has_committed_is_not_repeated(outbox: Outbox, name: str) -> None:
    outbox.conn.execute(EFFECTS)
    settings = outbox.settings(**calling(name))
    with relaying(settings):
        outbox.publish(host(1), event(10))
        wait_until(lambda: outbox.value("select count(*) from effects") == 1)
    # As after a crash before progress was stored.
    outbox.set_sinks_back()
    with relaying(settings):
        outbox.publish(host(1), event(11))
        wait_until(lambda: outbox.value("select count(*) from effects") == 2)
    assert outbox.column("select amount from effects order by 1") == [10, 11]
    # An operator who moves the sink wants its effects again.
    sinks.seek(settings, "mail", to="beginning")
    with relaying(settings):
        wait_until(lambda: outbox.value("select count(*) from effects") == 4)
    assert outbox.column("select amount from effects order by 1") == [10, 10, 11, 11]


@pytest.mark.parametrize("name", ["send", "send_plain"])
def test_the_publishers_trace_is_current(outbox: Outbox, seen: Seen, name: str) -> None:
    """Without spans of relay's own, as a client library that is instrumented finds it."""
    current: list[str] = []
    carried: list[dict[str, str]] = []

    def behave(delivery: Delivery, each: Any) -> None:
        context = trace.get_current_span().get_span_context()
        current.append(trace.format_trace_id(context.trace_id))
        carried.append(dict(delivery.trace))
        delivery.log.warning("called", extra={"more": 1})

    seen.behave = behave
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    with relaying(outbox.settings(**calling(name))):
        outbox.publish(host(1), event(1, metadata={"traceparent": parent}))
        outbox.publish(host(1), event(2))
        wait_until(lambda: len(seen.done) == 2)
    assert current == ["0af7651916cd43dd8448eb211c80319c", "0" * 32]
    assert carried == [{"traceparent": parent}, {}]


def test_log_lines_name_the_delivery(
    outbox: Outbox, seen: Seen, caplog: pytest.LogCaptureFixture
) -> None:
    seen.behave = lambda delivery, each: delivery.log.warning("called", extra={"more": 1})
    with relaying(outbox.settings(**calling())):
        outbox.publish(host(1), event(1))
        wait_until(lambda: seen.amounts == [1])
    (line,) = [each for each in caplog.records if each.getMessage() == "called"]
    found = {name: getattr(line, name) for name in ("handler", "attempt", "more", "name")}
    assert found == {"handler": "mail", "attempt": 1, "more": 1, "name": "relay.function.mail"}
    assert getattr(line, "transaction_id") == seen.facts[0]["transaction_id"]  # noqa: B009


def test_operators_pause_seek_and_count_it_like_every_sink(outbox: Outbox, seen: Seen) -> None:
    settings = outbox.settings(**calling(rate_limit=50.0, concurrency=2))
    with relaying(settings):
        outbox.publish(host(1), event(1))
        wait_until(lambda: seen.amounts == [1])
        assert sinks.pause(settings, "mail", "maintenance").changed
        time.sleep(1.2)
        outbox.publish(host(1), event(2))
        outbox.wait_drained()
        (listed,) = sinks.listed(settings)
        assert (listed.state, listed.destination) == ("paused", "function")
        assert seen.amounts == [1]
        sinks.resume(settings, "mail")
        wait_until(lambda: seen.amounts == [1, 2])
        sinks.rebuild(settings, "mail")
        wait_until(lambda: seen.amounts == [1, 2, 1, 2])
    assert [each["attempt"] for each in seen.facts] == [1] * 4


def not_called_so(delivery: Delivery, cursor: Any) -> None:
    """Take one argument too many."""


async def yields(delivery: Delivery) -> AsyncIterator[None]:
    """Do nothing until it is iterated."""
    yield


NOT_CALLABLE: list[tuple[dict[str, Any], str]] = [
    ({"name": "not_called_so"}, "relay calls it with (delivery)"),
    ({"name": "yields"}, "is a generator"),
    ({"name": "nothing"}, "has no 'nothing'"),
    ({"open": "tests.integration.test_function:yields"}, "contextlib.asynccontextmanager"),
    ({"open": "tests.integration.test_function:send"}, "is async"),
]


def test_a_callable_that_relay_cannot_call_is_refused(
    outbox: Outbox, subtests: pytest.Subtests
) -> None:
    for keys, fault in NOT_CALLABLE:
        with subtests.test(str(keys)):
            with pytest.raises(ConfigurationError) as refused:
                require(outbox.settings(**calling(**keys)))
            assert fault in str(refused.value)
