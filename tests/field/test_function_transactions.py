"""A function's transaction in the target completes its delivery once, whatever the function does around it."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest

from relay import Delivery, Fail
from relay.admin.sinks import rebuild
from relay.sinks import function_transactions
from relay.testing import deliver
from tests.outbox import Outbox, event, host, relaying, wait_until

RETRY = {"wait": 0.1, "max_wait": 0.2, "jitter": 0.01, "defer_after": 0.05, "attempts": 4}


class Tried:
    """The attempts of this module's functions, and what a test lets them wait for."""

    def __init__(self) -> None:
        self.begun: list[tuple[int, int]] = []
        self.later: list[Callable[[], Any]] = []
        self.may_end = threading.Event()


TRIED = Tried()


@pytest.fixture(autouse=True)
def tried(outbox: Outbox) -> Iterator[Tried]:
    TRIED.__init__()  # type: ignore[misc]
    outbox.conn.execute("create table effects (amount int)")
    yield TRIED
    TRIED.may_end.set()


def begin(delivery: Delivery) -> int:
    (first, *_) = delivery.events
    amount = int(first.payload["amount"])
    TRIED.begun.append((amount, delivery.attempt))
    return amount


def calling(name: str, **more: Any) -> dict[str, Any]:
    handler = {"type": "function", "callable": f"{__name__}:{name}", "retry": RETRY, **more}
    return {"handlers": {"mail": handler}, "routes": [{"handlers": ["mail"]}]}


async def for_each_event(delivery: Delivery) -> None:
    """A block for each event, where a delivery has one."""
    for each in delivery.events:
        async with delivery.transaction() as conn:
            await conn.execute("insert into effects values (%s)", (each.payload["amount"],))


def for_each_event_plain(delivery: Delivery) -> None:
    """The same in a thread."""
    for each in delivery.events:
        with delivery.transaction() as conn:
            conn.execute("insert into effects values (%s)", (each.payload["amount"],))


@pytest.mark.parametrize("name", ["for_each_event", "for_each_event_plain"])
def test_a_second_block_is_no_silent_loss(outbox: Outbox, name: str) -> None:
    """camunda/camunda-8-js-sdk#351: completing what is completed is swallowed, and what belonged to it is gone."""
    with relaying(outbox.settings(**calling(name))):
        outbox.publish(host(1), event(1), event(2))
        outbox.publish(host(2), event(3))
        outbox.wait_delivered("mail")
    assert sorted(outbox.column("select amount from effects")) == [1, 3]
    exceptions = outbox.column("select exception from relay.dead_letter_queue")
    assert len(exceptions) == 2  # the events of the first transaction
    assert all("a delivery has one such block" in each for each in exceptions)


def test_a_test_finds_a_second_block(outbox: Outbox) -> None:
    with psycopg.connect(outbox.relay_dsn) as conn, pytest.raises(Fail, match="one such block"):
        deliver(for_each_event_plain, event(1), event(2), conn=conn)


async def again_after_a_rollback(delivery: Delivery) -> None:
    """A block that failed may be entered again."""
    amount = begin(delivery)
    try:
        async with delivery.transaction() as conn:
            await conn.execute("insert into effects values (%s)", (-amount,))
            raise KeyError
    except KeyError:
        async with delivery.transaction() as conn:
            await conn.execute("insert into effects values (%s)", (amount,))


def test_a_block_that_was_rolled_back_may_be_entered_again(outbox: Outbox, tried: Tried) -> None:
    with relaying(outbox.settings(**calling("again_after_a_rollback"))):
        outbox.publish(host(1), event(1))
        outbox.wait_delivered("mail")
    assert outbox.column("select amount from effects") == [1]
    assert tried.begun == [(1, 1)]


async def in_a_task_group(delivery: Delivery) -> None:
    """A block in a task of a group, which wraps whatever it raises."""
    amount = begin(delivery)

    async def write() -> None:
        async with delivery.transaction() as conn:
            await conn.execute("insert into effects values (%s)", (amount,))

    async with asyncio.TaskGroup() as group:
        group.create_task(write())


def test_a_completed_delivery_is_done_however_the_function_ends(
    outbox: Outbox, tried: Tried, caplog: pytest.LogCaptureFixture
) -> None:
    """riverqueue/river#1219: an error after the job's own completion decides what becomes of the job."""
    settings = outbox.settings(**calling("in_a_task_group"))
    with relaying(settings):
        outbox.publish(host(1), event(1))
        outbox.wait_delivered("mail")
    # The position was not stored before a kill: the delivery comes again.
    outbox.set_sinks_back()
    caplog.set_level(logging.WARNING)
    with relaying(settings):
        wait_until(lambda: len(tried.begun) == 2)
        outbox.wait_delivered("mail")
    assert tried.begun == [(1, 1), (1, 1)]
    assert outbox.column("select amount from effects") == [1]
    assert outbox.value("select count(*) from relay.dead_letter_queue") == 0
    assert not caplog.records


async def leaves_a_task(delivery: Delivery) -> None:
    """The first attempt of 1 fails, and leaves a task that writes when the test lets it."""
    amount = begin(delivery)

    async def write() -> None:
        async with delivery.transaction() as conn:
            await conn.execute("insert into effects values (%s)", (amount,))

    if amount == 1 and delivery.attempt == 1:
        loop, ended = asyncio.get_running_loop(), threading.Event()

        def later() -> BaseException | None:
            future = asyncio.run_coroutine_threadsafe(write(), loop)
            ended.set()
            return future.exception(10)

        TRIED.later.append(later)
        raise ValueError
    await write()


def test_what_an_attempt_leaves_behind_commits_nothing_after_another(
    outbox: Outbox, tried: Tried, monkeypatch: pytest.MonkeyPatch
) -> None:
    """celery/celery#4400, Bogdanp/dramatiq#159: an attempt that counts as over still does its work, a second time."""
    monkeypatch.setattr(function_transactions, "_FORGET_SECONDS", 0.0)
    with relaying(outbox.settings(**calling("leaves_a_task"))):
        outbox.publish(host(1), event(1))
        outbox.wait_delivered("mail")
        outbox.publish(host(2), event(2))
        outbox.wait_delivered("mail")
        wait_until(lambda: outbox.value("select count(*) from effects") == 2)
        (later,) = tried.later
        assert "given up" in str(later())
    assert sorted(outbox.column("select amount from effects")) == [1, 2]


async def returns_first(delivery: Delivery) -> None:
    """Leave the writing to a task that nobody waits for."""
    amount = begin(delivery)
    entered = asyncio.Event()

    async def write() -> None:
        async with delivery.transaction() as conn:
            await conn.execute("insert into effects values (%s)", (amount,))
            entered.set()
            await asyncio.sleep(0.2)

    if delivery.attempt > 1:
        await write()
    TRIED.later.append(asyncio.get_running_loop().create_task(write()).result)
    await entered.wait()


def test_a_function_that_returns_before_its_block_has_ended_is_called_again(
    outbox: Outbox, tried: Tried
) -> None:
    with relaying(outbox.settings(**calling("returns_first"))):
        outbox.publish(host(1), event(1))
        outbox.wait_delivered("mail")
    assert [attempt for _, attempt in tried.begun][:2] == [1, 2]
    assert outbox.column("select amount from effects") == [1]


def waits_in_its_block(delivery: Delivery) -> None:
    """Keep the first block open until the test lets it end."""
    with delivery.transaction() as conn:
        conn.execute("insert into effects values (%s)", (begin(delivery),))
        TRIED.may_end.wait(20)


WAITING = "select count(*) from pg_locks where locktype = 'advisory' and not granted"


def test_nothing_is_committed_for_a_position_that_was_left(outbox: Outbox, tried: Tried) -> None:
    """A rebuild empties a table, and what an earlier delivery commits after that would be there twice."""
    settings = outbox.settings(**calling("waits_in_its_block"))
    with relaying(settings):
        wait_until(lambda: outbox.column("select 1 from relay.sinks") == [1])
        outbox.publish(host(1), event(1))
        wait_until(lambda: len(tried.begun) == 1)
        moving = threading.Thread(target=rebuild, args=(settings, "mail", "again"))
        moving.start()
        wait_until(lambda: outbox.value(WAITING) == 1)
        tried.may_end.set()
        moving.join(20)
        wait_until(lambda: len(tried.begun) == 2)
        outbox.wait_delivered("mail")
    # Once for each position: the first is committed before the move.
    assert outbox.column("select amount from effects") == [1, 1]
