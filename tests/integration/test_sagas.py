"""Sagas of the client: steps that commit with their checkpoint, undo in reverse order, waits, and time."""

from __future__ import annotations

import asyncio
import json
import uuid
from typing import Any

import pytest

from relay import Fail
from relay.client.saga import Context, Saga, SagaStep, StepFailed, saga
from relay.client.worker import Message, Worker
from tests.outbox import Outbox, wait_until
from tests.workers import DATABASES, working

every_database = pytest.mark.parametrize("database", DATABASES)
HOST = str(uuid.UUID(int=1))


def checkout_of(function: Any, **options: Any) -> Saga:
    """A saga of orders, which waits 10 ms between attempts."""
    of: dict[str, Any] = {
        "starts": "order.placed",
        "key": "payload.order_id",
        "backoff": 0.01,
        "max_backoff": 0.01,
    }
    return saga("checkout", **(of | options))(function)


def declare(outbox: Outbox, of: Saga) -> None:
    statement, text = of.queue.declaration()
    outbox.worker.execute(statement.with_parameter("%s").encode(), (text,))
    outbox.conn.execute("create table if not exists done (what text, by text)")


def tell(outbox: Outbox, event_type: str, order: str = "1", **payload: Any) -> None:
    """Put an event into the queue of the saga, as relay does with one of the log."""
    outbox.worker.execute(
        "select relay.enqueue('checkout', %s::jsonb, %s, %s, %s)",
        (json.dumps({"order_id": order, **payload}), event_type, HOST, order),
    )


def done(outbox: Outbox) -> list[str]:
    return [str(each) for each in outbox.column("select what from done order by ctid")]


def states(outbox: Outbox) -> list[str]:
    return [str(each) for each in outbox.column("select state from relay.sagas order by id")]


def entries(outbox: Outbox) -> list[tuple[str, str]]:
    rows = outbox.conn.execute("select kind, step from relay.saga_steps order by saga_id, number")
    return [(kind, step) for kind, step in rows.fetchall()]


def ends(outbox: Outbox, *expected: str) -> None:
    wait_until(lambda: states(outbox) == list(expected))


@every_database
def test_each_step_commits_with_its_effect_and_a_failed_saga_undoes_them(
    outbox: Outbox, database: str
) -> None:
    opened, is_async, execute = DATABASES[database]
    failed: list[int] = []

    def note(step: SagaStep, what: str) -> dict[str, str]:
        execute(step.session, f"insert into done values ('{what}', '{step.name}')")
        return {"noted": what}

    async def note_async(step: SagaStep, what: str) -> dict[str, str]:
        await execute(step.session, f"insert into done values ('{what}', '{step.name}')")
        return {"noted": what}

    def undo(step: SagaStep, what: str) -> None:
        assert step.result == {"noted": what}
        execute(step.session, f"insert into done values ('un{what}', '{step.name}')")

    async def undo_async(step: SagaStep, what: str) -> None:
        assert step.result == {"noted": what}
        await execute(step.session, f"insert into done values ('un{what}', '{step.name}')")

    def refuse(step: SagaStep) -> None:
        failed.append(step.attempt)
        if step.attempt == 3:
            raise Fail("no money")
        raise RuntimeError("not yet")

    async def checkout_async(ctx: Context, event: Message) -> None:
        assert event.payload == {"order_id": "1"}
        await ctx.step("reserve", note_async, "reserved", undo=undo_async)
        await ctx.step("pack", note_async, "packed", undo=undo_async)
        await ctx.step("pay", refuse)

    def checkout(ctx: Context, event: Message) -> None:
        assert event.payload == {"order_id": "1"}
        ctx.step("reserve", note, "reserved", undo=undo)
        ctx.step("pack", note, "packed", undo=undo)
        ctx.step("pay", refuse)

    of = checkout_of(checkout_async if is_async else checkout)
    declare(outbox, of)
    tell(outbox, "order.placed")

    async def serve() -> None:
        async with opened(outbox.worker_dsn) as given:
            worker = Worker(given, of, listen=False, poll=0.05)
            running = asyncio.create_task(worker.run())
            while states(outbox) != ["compensated"] and not running.done():
                await asyncio.sleep(0.02)
            worker.stop()
            await running

    asyncio.run(asyncio.wait_for(serve(), 60))
    assert done(outbox) == ["reserved", "packed", "unpacked", "unreserved"]
    assert failed == [1, 2, 3]
    assert entries(outbox) == [
        ("event", "order.placed"),
        ("step", "reserve"),
        ("step", "pack"),
        ("failed", "pay"),
        ("fail", ""),
        ("undone", "pack"),
        ("undone", "reserve"),
    ]
    assert outbox.column("select count(*) from relay.queue_messages") == [0]


def note(step: SagaStep, what: str) -> str:
    step.session.execute("insert into done values (%s, %s)", (what, step.idempotency_key))
    return what


def test_a_saga_catches_a_step_that_has_failed_and_takes_another_way(outbox: Outbox) -> None:
    def broken(step: SagaStep) -> None:
        note(step, "never")
        raise RuntimeError("broken")

    def ship(ctx: Context, event: Message) -> None:
        try:
            ctx.step("by air", broken, attempts=2)
        except StepFailed as error:
            ctx.step("by sea", note, error.step)

    of = checkout_of(ship)
    declare(outbox, of)
    tell(outbox, "order.placed")
    with working(Worker(outbox.worker_dsn, of)):
        ends(outbox, "done")
    assert done(outbox) == ["by air"]


def test_a_saga_waits_for_an_event_that_comes_before_or_after_or_not_at_all(outbox: Outbox) -> None:
    def checkout(ctx: Context, event: Message) -> None:
        paid = ctx.wait("order.paid", lambda each: bool(each.payload["amount"] == 5))
        ctx.step("pay", note, f"paid {paid.payload['amount']}")
        sent = ctx.wait("order.sent", timeout=0.2)
        ctx.step("send", note, "late" if sent is None else "sent")
        ctx.sleep(0.1)
        ctx.step("thank", note, "thanks")

    of = checkout_of(checkout, waits="order.*")
    declare(outbox, of)
    tell(outbox, "order.placed", "1")
    tell(outbox, "order.sent", "1")
    tell(outbox, "order.placed", "2")
    with working(Worker(outbox.worker_dsn, of, poll=0.05)):
        ends(outbox, "waiting", "waiting")
        tell(outbox, "order.paid", "1", amount=4)
        tell(outbox, "order.paid", "1", amount=5)
        ends(outbox, "done", "waiting")
        assert done(outbox) == ["paid 5", "sent", "thanks"]
        tell(outbox, "order.paid", "2", amount=5)
        ends(outbox, "done", "done")
    assert done(outbox)[3:] == ["paid 5", "late", "thanks"]
    assert outbox.column("select count(*) from relay.queue_messages") == [0]


def test_an_event_before_its_saga_is_held_beside_the_order_then_a_dead_letter(
    outbox: Outbox,
) -> None:
    def checkout(ctx: Context, event: Message) -> None:
        paid = ctx.wait("order.paid")
        ctx.step("pay", note, f"paid {paid.payload['amount']}")

    of = checkout_of(checkout, waits="order.paid", hold=600)
    declare(outbox, of)
    tell(outbox, "order.paid", "1", amount=1)
    tell(outbox, "order.paid", "2", amount=2)
    with working(Worker(outbox.worker_dsn, of, poll=0.05)):
        wait_until(
            lambda: (
                outbox.column("select count(*) from relay.queue_messages where key is null") == [2]
            )
        )
        tell(outbox, "order.placed", "1")
        ends(outbox, "done")
    assert done(outbox) == ["paid 1"]
    impatient = checkout_of(checkout, waits="order.paid", hold=0.01)
    with working(Worker(outbox.worker_dsn, impatient, poll=0.05)):
        wait_until(lambda: bool(outbox.column("select exception from relay.dead_letters")))
    assert outbox.column("select exception from relay.dead_letters") == [
        "Fail: no saga of its key has begun within 0.01 s"
    ]
