"""Sagas beside others: forged ids, what arrives in the same moment, and operators while steps are tried again."""

from __future__ import annotations

import json
import uuid
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg

from relay.client.saga import Context, Saga, SagaStep, saga
from relay.client.worker import Message, Worker
from relay.retention.erasure import erase
from tests.outbox import Outbox, wait_until
from tests.workers import working

HOST = str(uuid.UUID(int=1))


def made(function: Any, name: str = "checkout", **options: Any) -> Saga:
    of: dict[str, Any] = {"starts": "order.placed", "key": "payload.order_id", "waits": "order.*"}
    short = {"backoff": 0.01, "max_backoff": 0.01}
    return saga(name, **(of | short | options))(function)


def declare(outbox: Outbox, of: Saga) -> None:
    statement, text = of.queue.declaration()
    outbox.worker.execute(statement.with_parameter("%s").encode(), (text,))


def tell(conn: Any, event_type: str, order: str = "1", queue: str = "checkout") -> None:
    conn.execute(
        "select relay.enqueue(%s, %s::jsonb, %s, %s, %s)",
        (queue, json.dumps({"order_id": order}), event_type, HOST, order),
    )


def states(outbox: Outbox) -> list[str]:
    return [str(each) for each in outbox.column("select state from relay.sagas order by id")]


def one(step: SagaStep) -> int:
    return 1


def test_a_worker_changes_no_saga_of_another_queue_nor_of_another_key(outbox: Outbox) -> None:
    of = made(lambda ctx, event: ctx.wait("order.paid"))
    declare(outbox, of)
    tell(outbox.worker, "order.placed")
    with working(Worker(outbox.worker_dsn, of, poll=0.05)):
        wait_until(lambda: states(outbox) == ["waiting"])
    (victim,) = outbox.column("select id from relay.sagas")
    before = outbox.conn.execute("select * from relay.sagas").fetchall()
    with outbox.member("relay_worker") as dsn, psycopg.connect(dsn, autocommit=True) as other:
        other.execute("select relay.declare_queue('other', null, key => 'payload.order_id')")
        for queue, conn in (("other", other), ("checkout", outbox.worker)):
            tell(conn, "order.placed", "2", queue)
            forged = conn.execute(
                "select relay.advance_saga(%(queue)s, c.id, c.attempt, %(victim)s, 2, '[]', 'given_up', 1)"
                " from relay.claim(%(queue)s) as c",
                {"queue": queue, "victim": victim},
            ).fetchall()
            assert forged == [(False,)]
    assert outbox.conn.execute("select * from relay.sagas").fetchall() == before


def test_an_event_that_was_there_before_the_workers_came_back_counts_and_not_the_timeout(
    outbox: Outbox,
) -> None:
    """Without a worker for longer than the timeout, the timer is due first; others of the key are before the event."""

    def checkout(ctx: Context, event: Message) -> None:
        paid = ctx.wait("order.paid", timeout=0.3)
        ctx.step("late" if paid is None else "paid", one)

    of = made(checkout)
    declare(outbox, of)
    tell(outbox.worker, "order.placed")
    with working(Worker(outbox.worker_dsn, of, poll=0.05, concurrency=1)):
        wait_until(lambda: states(outbox) == ["waiting"])
    tell(outbox.worker, "order.seen")
    tell(outbox.worker, "order.paid")
    wait_until(lambda: outbox.value("select next_at < now() from relay.sagas"))
    with working(Worker(outbox.worker_dsn, of, poll=0.05, concurrency=1)):
        wait_until(lambda: states(outbox) == ["done"])
        wait_until(lambda: outbox.value("select count(*) from relay.queue_messages") == 0)
    assert outbox.column("select step from relay.saga_steps where kind = 'step'") == ["paid"]


def test_an_event_of_cancels_undoes_a_saga_between_two_steps_and_between_two_attempts(
    outbox: Outbox,
) -> None:
    """The saga went on to its end first, or tried its step again, and then dropped what was to cancel it."""

    def tells(step: SagaStep) -> None:
        tell(outbox.worker, "order.cancelled", step.event.payload["order_id"])

    def fails(step: SagaStep) -> None:
        if step.attempt == 1:
            tells(step)
        raise RuntimeError("not yet")

    def checkout(ctx: Context, event: Message) -> None:
        ctx.step("first", one, undo=one)
        if event.payload["order_id"] == "1":
            ctx.step("cancelled meanwhile", tells, undo=one)
        else:
            ctx.step("tried again", fails, attempts=1_000_000)
        ctx.step("last", one)

    of = made(checkout, waits=(), cancels="order.cancelled")
    declare(outbox, of)
    tell(outbox.worker, "order.placed", "1")
    tell(outbox.worker, "order.placed", "2")
    with working(Worker(outbox.worker_dsn, of, poll=0.05)):
        wait_until(lambda: states(outbox) == ["compensated"] * 2)
        wait_until(lambda: outbox.value("select count(*) from relay.queue_messages") == 0)
    assert outbox.column(
        "select e.step from relay.saga_steps as e join relay.sagas as s on s.id = e.saga_id"
        " where e.kind = 'undone' order by s.key, e.number"
    ) == [
        "cancelled meanwhile",
        "first",
        "first",
    ]


def steer(outbox: Outbox, act: str) -> None:
    number = outbox.value("select max(id) from relay.sagas")
    row = outbox.worker.execute(
        "select relay.steer_saga('checkout', %s, %s)", (number, act)
    ).fetchone()
    assert row == (True,)


def test_what_follows_an_operators_act_has_all_its_attempts_and_nothing_old_stays(
    outbox: Outbox,
) -> None:
    """The message of the step that was tried ten times went on with what came next: it failed without an attempt."""
    attempts: dict[str, list[int]] = {"next": [], "undo": []}

    def fails(step: SagaStep) -> None:
        raise RuntimeError("not yet")

    def third(kind: str) -> Any:
        def run(step: SagaStep) -> None:
            attempts[kind].append(step.attempt)
            if step.attempt < 3:
                raise RuntimeError("not yet")

        return run

    def checkout(ctx: Context, event: Message) -> None:
        ctx.step("fails", fails, attempts=1_000_000)
        ctx.step("next", third("next"), undo=third("undo"))
        ctx.step("fails again", fails, attempts=1_000_000)

    of = made(checkout, undo_attempts=3, attempts=3)
    declare(outbox, of)
    tell(outbox.worker, "order.placed")
    tried = "select coalesce(max(attempts), 0) from relay.queue_messages"
    with working(Worker(outbox.worker_dsn, of, poll=0.05)):
        wait_until(lambda: outbox.value(tried) >= 10)
        steer(outbox, "skip")
        wait_until(lambda: outbox.column("select step from relay.sagas") == ["fails again"])
        wait_until(lambda: outbox.value(tried) >= 10)
        wait_until(lambda: outbox.value("select count(*) from relay.queue_messages") == 1)
        steer(outbox, "undo")
        wait_until(lambda: states(outbox) == ["compensated"])
        wait_until(lambda: outbox.value("select count(*) from relay.queue_messages") == 0)
    # A worker that had the former message may try once more, from the first.
    for numbers in attempts.values():
        assert (numbers[0], numbers[-1]) == (1, 3), attempts


def test_a_saga_that_is_given_up_leaves_nothing_that_would_wake_it(outbox: Outbox) -> None:
    of = made(lambda ctx, event: ctx.sleep(3_600))
    declare(outbox, of)
    tell(outbox.worker, "order.placed")
    with working(Worker(outbox.worker_dsn, of, poll=0.05)):
        wait_until(lambda: states(outbox) == ["waiting"])
    steer(outbox, "give up")
    assert outbox.value("select count(*) from relay.queue_messages") == 0


def test_an_erased_host_has_no_message_of_a_saga_that_a_worker_had(outbox: Outbox) -> None:
    """Of a saga that began to wait meanwhile, the message that wakes it had the host, and its key, until then."""
    of = made(lambda ctx, event: ctx.sleep(3_600))
    declare(outbox, of)
    tell(outbox.worker, "order.placed")
    settings = outbox.settings()
    with (
        psycopg.connect(outbox.worker_dsn) as worker,
        ThreadPoolExecutor() as threads,
    ):
        worker.execute(
            "select relay.advance_saga('checkout', c.id, c.attempt, null, 0, '[]', 'waiting', 1, 'sleep',"
            " now() + interval '1 hour') from relay.claim('checkout') as c"
        )
        erased = threads.submit(erase, settings, outbox.conn, outbox.conn, HOST)
        waits = "select count(*) from pg_locks where not granted"
        wait_until(lambda: erased.done() or outbox.worker.execute(waits).fetchone() != (0,))
        worker.commit()
        assert erased.result(60).removed["sagas"] == 1
    assert outbox.value("select count(*) from relay.queue_messages") == 0
    assert outbox.value("select count(*) from relay.queue_done") == 0


def test_entries_that_are_others_after_a_failover_are_read_again(outbox: Outbox) -> None:
    """A worker keeps what it has read of a saga; a standby that lacked the last commit has other entries."""

    def lost(step: SagaStep) -> None:
        outbox.conn.execute(
            "update relay.saga_steps set result = '7', at = clock_timestamp() where step = 'first'"
        )

    seen = []

    def buy(ctx: Context, event: Message) -> None:
        first = ctx.step("first", one)
        ctx.step("second", lost)
        ctx.step("third", one)
        seen.append(first)

    of = made(buy)
    declare(outbox, of)
    tell(outbox.worker, "order.placed")
    with working(Worker(outbox.worker_dsn, of, poll=0.05)):
        wait_until(lambda: states(outbox) == ["done"])
    assert seen[-1] == 7


def test_a_child_that_ends_while_its_parent_is_undone_changes_nothing_of_that(
    outbox: Outbox,
) -> None:
    """What it tells its parent comes between two attempts of an undo."""

    def until_the_child_has_ended(step: SagaStep) -> None:
        if outbox.value("select count(*) from relay.sagas where state = 'done'") != 1:
            raise RuntimeError("not yet")

    def parent(ctx: Context, event: Message) -> None:
        ctx.step("pay", one, undo=until_the_child_has_ended)
        ctx.step("begin", lambda step: tell(step.session, "parcel.wanted", "1", "parcel"), undo=one)
        ctx.fail("the customer has gone")

    def child(ctx: Context, event: Message) -> None:
        ctx.step("send", lambda step: tell(step.session, "parcel.sent"))

    both = made(parent, waits="parcel.sent"), made(child, "parcel", starts="parcel.wanted")
    for each in both:
        declare(outbox, each)
    tell(outbox.worker, "order.placed")
    with working(Worker(outbox.worker_dsn, both[0], poll=0.05)):
        wait_until(lambda: "undoing" in states(outbox))
        with working(Worker(outbox.worker_dsn, both[1], poll=0.05)):
            wait_until(lambda: sorted(states(outbox)) == ["compensated", "done"])
        wait_until(lambda: outbox.value("select count(*) from relay.queue_messages") == 0)
    undone = "select step from relay.saga_steps where kind = 'undone' order by number"
    assert outbox.column(undone) == ["begin", "pay"]
