"""Deliveries to a sink: order for each key, others side by side, retries, the circuit breaker and the failure limit."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relay.config.handlers import CircuitBreakerSettings, HttpHandler
from relay.delivery import dispatch
from relay.delivery.dispatch import Dispatcher
from relay.delivery.order import Delivery
from relay.faults import ConfigurationError, DestinationRefused, Rejected, Undelivered
from relay.model.dispositions import (
    APPLIED,
    BLOCKED,
    AttemptHistory,
    Blocked,
    DeadLetter,
    Disposition,
    RetryLater,
)
from relay.model.events import Commit, Lsn, Transaction
from relay.model.transactions import Undecoded
from relay.pipeline.failure_limit import FailureLimit
from relay.sinks.circuit_breaker import CircuitBreaker
from relay.store.deferred.due import DueTransaction

Behave = Callable[[int], Awaitable[None]]


def settings(**more: Any) -> HttpHandler:
    return HttpHandler(type="http", url="http://localhost/", **more)


def delivery(number: int, *keys: str) -> Delivery:
    commit = Commit(Lsn(number), Lsn(number), 0, number)
    rows = Undecoded(commit, str(number), (), (), (), 1)
    events = Transaction(str(number), commit, ())  # type: ignore[arg-type]
    return Delivery(rows, events, frozenset(keys))


class Scripted:
    """A sink that behaves as a test says, and remembers what it was asked to deliver."""

    name = "scripted"

    def __init__(self, behave: Behave) -> None:
        self.begun: list[int] = []
        self.delivered: list[int] = []
        self.attempts: dict[int, int] = {}
        self.most = self._now = 0
        self._behave = behave

    def resume(self, series: str) -> None:
        pass

    async def deliver(self, transaction: Transaction) -> None:
        number = int(transaction.transaction_id or 0)
        self.begun.append(number)
        self.attempts[number] = transaction.attempt
        self._now += 1
        self.most = max(self.most, self._now)
        try:
            await self._behave(number)
        finally:
            self._now -= 1
        self.delivered.append(number)

    async def close(self) -> None:
        """Nothing is open."""


class Run:
    """Submits deliveries to a dispatcher, and keeps what became of each."""

    def __init__(self, behave: Behave, brake: int | None = None, **more: Any) -> None:
        self.sink = Scripted(behave)
        self.dispositions: dict[int, Disposition] = {}
        self.order: list[int] = []
        limits = {} if brake is None else {"scripted": brake}
        self.dispatcher = Dispatcher(self.sink, settings(**more), 1_000, FailureLimit(limits, {}))
        self._taking = asyncio.create_task(self._take())

    async def _take(self) -> None:
        while True:
            await self.dispatcher.has_ended.wait()
            for delivery, disposition in self.dispatcher.take_ended():
                number = delivery.rows.commit.xid
                assert number not in self.dispositions
                self.dispositions[number] = disposition
                self.order.append(number)

    async def idle(self) -> None:
        """Wait until nothing is in flight or queued."""
        while self.dispatcher.count or self.dispatcher.has_ended.is_set():
            await asyncio.sleep(0.001)

    async def all(self, deliveries: Iterable[Delivery]) -> None:
        for each in deliveries:
            await self.dispatcher.wait_for_room()
            self.dispatcher.submit(each)
        await asyncio.wait_for(self.idle(), 10)
        await self.dispatcher.close()


async def at_once(_: int) -> None:
    await asyncio.sleep(0)


AT_ONCE = {"defer_after": 0}
KEYS = st.frozensets(st.sampled_from("abc"), max_size=2)


@given(st.lists(st.tuples(KEYS, st.integers(0, 3), st.booleans()), max_size=40))
def test_order_holds_for_each_key_and_nothing_follows_on_what_has_to_wait(
    plan: list[tuple[frozenset[str], int, bool]],
) -> None:
    async def behave(number: int) -> None:
        _, pauses, fails = plan[number]
        for _ in range(pauses):
            await asyncio.sleep(0)
        if fails:
            raise Undelivered("away")

    async def main() -> Run:
        run = Run(behave, concurrency=5, circuit_breaker=None, retry={"defer_after": 0})
        await run.all(delivery(number, *keys) for number, (keys, _, _) in enumerate(plan))
        return run

    run = asyncio.run(main())
    assert sorted(run.order) == list(range(len(plan)))
    completed: dict[str, list[int]] = defaultdict(list)
    for number in run.order:
        for key in plan[number][0]:
            completed[key].append(number)
    assert all(numbers == sorted(numbers) for numbers in completed.values())
    held: set[str] = set()
    for number, (keys, _, fails) in enumerate(plan):
        disposition = run.dispositions[number]
        if held & keys:
            assert isinstance(disposition, Blocked)
            assert number not in run.sink.begun
        elif fails:
            assert isinstance(disposition, RetryLater)
        else:
            assert disposition == APPLIED
        if disposition != APPLIED:
            held |= keys
    assert run.sink.begun.count(0) <= 1


def test_different_keys_run_side_by_side_up_to_the_limit() -> None:
    async def behave(_: int) -> None:
        await asyncio.sleep(0.01)

    async def main() -> Run:
        run = Run(behave, concurrency=7)
        await run.all(delivery(number, str(number)) for number in range(30))
        return run

    assert asyncio.run(main()).sink.most == 7


def test_short_waits_are_waited_in_place() -> None:
    tries: list[int] = []

    async def behave(number: int) -> None:
        tries.append(number)
        if len(tries) < 3:
            raise Undelivered("away")

    async def main() -> Run:
        retry = {"wait": 0.01, "max_wait": 0.01, "jitter": 0, "defer_after": 1}
        run = Run(behave, retry=retry)
        await run.all([delivery(1, "a"), delivery(2, "a")])
        return run

    run = asyncio.run(main())
    assert run.sink.begun == [1, 1, 1, 2]
    assert run.dispositions == {1: APPLIED, 2: APPLIED}


def test_what_the_destination_refuses_is_dead_and_lets_its_key_flow() -> None:
    async def behave(number: int) -> None:
        if number == 1:
            raise Rejected("HTTP 422")

    async def main() -> Run:
        run = Run(behave)
        await run.all([delivery(1, "a"), delivery(2, "a")])
        return run

    run = asyncio.run(main())
    assert isinstance(run.dispositions[1], DeadLetter)
    assert run.dispositions[2] == APPLIED


def test_attempts_are_counted_through() -> None:
    async def behave(_: int) -> None:
        raise Undelivered("away")

    async def main() -> Run:
        retry = {"wait": 0.001, "max_wait": 0.001, "jitter": 0, "defer_after": 1, "attempts": 4}
        run = Run(behave, retry=retry)
        again = delivery(1, "a")
        again.history = AttemptHistory(2, None)
        await run.all([again])
        return run

    run = asyncio.run(main())
    disposition = run.dispositions[1]
    assert isinstance(disposition, DeadLetter)
    assert (disposition.attempts, run.sink.begun) == (4, [1, 1])


def test_an_outage_keeps_deliveries_in_memory_and_defers_few() -> None:
    away = [True]
    count = 0

    async def behave(_: int) -> None:
        nonlocal count
        count += 1
        await asyncio.sleep(0)
        if count > 30:
            away[0] = False
        if away[0]:
            raise Undelivered("away")

    async def main() -> Run:
        breaker = {"failures": 5, "cool_down": 0.001}
        run = Run(behave, concurrency=3, circuit_breaker=breaker, retry={"defer_after": 0})
        await run.all(delivery(number, str(number)) for number in range(200))
        assert run.dispatcher.destination.fault is None
        return run

    run = asyncio.run(main())
    deferred = [
        number for number, disposition in run.dispositions.items() if disposition != APPLIED
    ]
    # Those before the breaker opened, and none for a trial.
    assert len(deferred) <= 7
    assert len(run.sink.delivered) == 200 - len(deferred)


def test_what_is_blocked_waits_in_memory_while_the_destination_is_down(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """But not for ever: other keys may come after it in the log."""
    away = [True]

    async def behave(_: int) -> None:
        if away[0]:
            raise Undelivered("away")

    async def main() -> Run:
        breaker = {"failures": 2, "cool_down": 0.001}
        run = Run(behave, concurrency=2, circuit_breaker=breaker, retry={"defer_after": 0})
        for number in range(200):
            run.dispatcher.submit(delivery(number, "ab"[number % 2]))
        while len(run.dispositions) < 2:
            await asyncio.sleep(0.001)
        # Both keys are held, and nothing is copied.
        await asyncio.sleep(0.02)
        assert len(run.dispositions) == 2
        monkeypatch.setattr(dispatch, "MOST_DELIVERIES", 100)
        room = asyncio.create_task(run.dispatcher.wait_for_room())
        await asyncio.sleep(0.01)
        assert not room.done()
        monkeypatch.setattr(dispatch, "DEFER_BLOCKED_SECONDS", 0)
        run.dispatcher._changed.set()
        await asyncio.wait_for(room, 5)
        assert all(isinstance(run.dispositions[number], Blocked) for number in range(2, 200))
        away[0] = False
        run.dispatcher.submit(delivery(200, "c"))
        await asyncio.wait_for(run.idle(), 5)
        await run.dispatcher.close()
        return run

    assert asyncio.run(main()).sink.delivered == [200]


def test_keys_that_fail_each_trial_are_deferred_so_that_others_follow() -> None:
    async def behave(number: int) -> None:
        await asyncio.sleep(0)
        if number < 10:
            raise Undelivered("these keys only")

    async def main() -> Run:
        breaker = {"failures": 5, "cool_down": 0.001}
        run = Run(behave, concurrency=3, circuit_breaker=breaker, retry={"defer_after": 0})
        # No more fit in at once, and their size is above the limit.
        for number in range(10):
            run.dispatcher.submit(delivery(number, str(number)))
        await asyncio.wait_for(run.idle(), 10)
        await run.all(delivery(number, str(number)) for number in range(10, 20))
        return run

    run = asyncio.run(main())
    assert sorted(run.sink.delivered) == list(range(10, 20))


def retried(number: int, *keys: str) -> Delivery:
    """A transaction that is in relay.deferred."""
    found = delivery(number, *keys)
    of_row: tuple[Any, ...] = (number, list(keys), True, 1, 0.0, None, None, True, str(number))
    of_commit: tuple[Any, ...] = ([], [], "0/0", "0/0", 0, number, 0, 0, 1, 1, None, False)
    found.due = DueTransaction(*of_row, *of_commit)
    return found


def test_what_was_deferred_goes_before_what_waits_for_its_turn() -> None:
    async def main() -> Run:
        run = Run(at_once, concurrency=1)
        for number in range(10):
            run.dispatcher.submit(delivery(number, str(number)))
        run.dispatcher.submit(retried(10, "held"))
        await run.all(())
        return run

    assert asyncio.run(main()).sink.begun.index(10) <= 1


def test_what_follows_on_a_deferred_transaction_is_deferred_again_while_the_destination_is_down() -> (
    None
):
    async def behave(_: int) -> None:
        raise Undelivered("HTTP 503")

    async def main() -> Run:
        run = Run(behave, circuit_breaker={"failures": 1, "cool_down": 0.001}, retry=AT_ONCE)
        for number in range(3):
            run.dispatcher.submit(retried(number, "a"))
        await asyncio.wait_for(run.idle(), 10)
        await run.dispatcher.close()
        return run

    run = asyncio.run(main())
    assert isinstance(run.dispositions[0], RetryLater)
    assert [run.dispositions[1], run.dispositions[2]] == [BLOCKED, BLOCKED]


def test_what_was_deferred_does_not_wait_for_what_is_kept_after_it() -> None:
    up = False

    async def behave(_: int) -> None:
        if not up:
            raise Undelivered("HTTP 503")

    async def main() -> Run:
        nonlocal up
        run = Run(behave, circuit_breaker={"failures": 1, "cool_down": 0.001}, retry=AT_ONCE)
        run.dispatcher.submit(delivery(0, "b"))
        while not run.dispatcher.breaker.is_open:
            await asyncio.sleep(0)
        run.dispatcher.held.end_query("a", {"a"})
        run.dispatcher.submit(delivery(2, "a"))
        run.dispatcher.submit(retried(1, "a"))
        while 1 not in run.dispositions:
            await asyncio.sleep(0.001)
        assert 2 not in run.dispositions
        up = True
        run.dispatcher.submit(retried(3, "a"))
        await asyncio.wait_for(run.idle(), 10)
        await run.dispatcher.close()
        return run

    run = asyncio.run(main())
    assert isinstance(run.dispositions[1], RetryLater)
    assert run.dispositions[3] == APPLIED
    assert run.order.index(3) < run.order.index(2)


def test_too_many_dead_in_a_row_stop_the_sink() -> None:
    async def behave(_: int) -> None:
        raise Rejected("HTTP 404")

    async def main() -> Run:
        run = Run(behave, brake=10, concurrency=1)
        for number in range(30):
            run.dispatcher.submit(delivery(number, str(number)))
        while len(run.dispositions) < 11:
            await asyncio.sleep(0)
        await asyncio.sleep(0.01)
        await run.dispatcher.close()
        return run

    run = asyncio.run(main())
    assert len(run.dispositions) == 11
    assert (
        sum(isinstance(disposition, DeadLetter) for disposition in run.dispositions.values()) == 10
    )
    assert run.dispatcher.destination.fault == "Rejected: HTTP 404"


def test_a_destination_that_refuses_everything_stops_the_sink_at_once() -> None:
    refuses = True

    async def behave(number: int) -> None:
        await asyncio.sleep(0)
        if refuses:
            raise DestinationRefused("HTTP 410")

    async def check() -> None:
        nonlocal refuses
        run = Run(
            behave,
            concurrency=1,
            circuit_breaker=CircuitBreakerSettings(failures=100, cool_down=0.2),
        )
        for number in range(1, 11):
            run.dispatcher.submit(delivery(number, str(number)))
        while not run.dispatcher.breaker.is_open:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.05)
        assert run.sink.begun == [1]
        assert run.dispatcher.destination.fault == "DestinationRefused: HTTP 410"
        refuses = False
        await asyncio.wait_for(run.idle(), 10)
        assert set(run.dispositions.values()) == {APPLIED}
        await run.dispatcher.close()

    asyncio.run(check())


def test_a_pause_ends_nothing_and_begins_nothing() -> None:
    async def main() -> Run:
        run = Run(at_once, concurrency=2)
        run.dispatcher.submit(delivery(1, "a"))
        run.dispatcher.submit(delivery(2, "b"))
        run.dispatcher.pause()
        run.dispatcher.submit(delivery(3, "c"))
        await run.dispatcher.wait_idle()
        assert run.sink.delivered == [1, 2]
        run.dispatcher.resume()
        await run.idle()
        return run

    assert asyncio.run(main()).sink.delivered == [1, 2, 3]


def test_what_is_held_is_not_tried() -> None:
    async def main() -> Run:
        run = Run(at_once)
        run.dispatcher.held.end_query({"a"}, {"a", "b"})
        await run.all([delivery(1, "a"), delivery(2, "b"), delivery(3, "a", "b"), delivery(4, "b")])
        return run

    run = asyncio.run(main())
    assert [isinstance(run.dispositions[number], Blocked) for number in (1, 2, 3, 4)] == [
        True,
        False,
        True,
        True,
    ]


def test_a_fault_that_would_stop_relay_stops_the_sink_until_it_is_over() -> None:
    """One sink, whose library raises what relay's own code means a stop by, must not end the others."""
    raising = [ConfigurationError("wrong")]

    async def behave(_: int) -> None:
        if raising:
            raise raising.pop()

    async def main() -> Run:
        run = Run(behave, circuit_breaker={"cool_down": 0.02})
        await run.all([delivery(1, "a"), delivery(2, "b")])
        assert not run.dispatcher.failure.done()
        return run

    assert sorted(asyncio.run(main()).sink.delivered) == [1, 2]


def test_a_pause_keeps_a_retry_in_memory_from_its_attempt() -> None:
    """One that waited for its next attempt made it in spite of the pause."""

    async def away(_: int) -> None:
        raise Undelivered("away")

    async def main() -> Run:
        retry = {"wait": 0.01, "jitter": 0, "defer_after": 60}
        run = Run(away, circuit_breaker={"failures": 100}, retry=retry)
        run.dispatcher.submit(delivery(1, "a"))
        while not run.sink.begun:
            await asyncio.sleep(0)
        run.dispatcher.pause()
        begun = len(run.sink.begun)
        await run.dispatcher.wait_idle()
        assert len(run.sink.begun) == begun
        assert run.dispatcher.count == 1
        assert not run.dispositions
        run.dispatcher.resume()
        while len(run.sink.begun) == begun:
            await asyncio.sleep(0.001)
        await run.dispatcher.close()
        return run

    asyncio.run(main())


def test_what_waits_for_its_turn_is_not_sent_to_a_destination_that_is_down_meanwhile() -> None:
    """All that had begun were sent, counted as trials of the destination, and deferred after the second time."""

    async def away(_: int) -> None:
        raise Undelivered("away")

    async def main() -> Run:
        breaker = {"failures": 1, "cool_down": 60}
        run = Run(away, rate_limit=1, concurrency=4, circuit_breaker=breaker)
        waits: Any = SimpleNamespace(turn=iter([0.0, 0.001, 0.001, 0.001]).__next__)
        run.dispatcher._pace = waits
        for number in range(4):
            run.dispatcher.submit(delivery(number, str(number)))
        await run.dispatcher.wait_idle()
        assert run.sink.begun == [0]
        assert run.dispatcher.count == 4
        await run.dispatcher.close()
        return run

    asyncio.run(main())


def test_the_time_between_trials_doubles(monkeypatch: Any) -> None:
    now = [0.0]
    monkeypatch.setattr("relay.sinks.circuit_breaker.time.monotonic", lambda: now[0])
    breaker = CircuitBreaker(CircuitBreakerSettings(failures=2, cool_down=3))
    assert breaker.seconds_to_trial() == 0
    assert [breaker.failed("a"), breaker.failed("b")] == [False, True]
    waits = []
    for _ in range(4):
        wait = breaker.seconds_to_trial()
        assert wait
        waits.append(wait)
        now[0] += wait
        assert breaker.seconds_to_trial() == 0
        breaker.begin()
        assert breaker.seconds_to_trial() is None
        breaker.failed("a")
    assert waits == [1, 2, 3, 3]
    assert breaker.succeeded("a")
    assert not breaker.succeeded("a")
    assert breaker.seconds_to_trial() == 0


def test_one_key_that_fails_among_others_does_not_open_the_breaker() -> None:
    breaker = CircuitBreaker(CircuitBreakerSettings(failures=3))
    for key in "abc":
        breaker.succeeded(key)
    assert not any(breaker.failed("a") for _ in range(20))
    assert not breaker.failed("b")
    assert breaker.failed("c")
    alone = CircuitBreaker(CircuitBreakerSettings(failures=3))
    assert [alone.failed("a") for _ in range(3)] == [False, False, True]
