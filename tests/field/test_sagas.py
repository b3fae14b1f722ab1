"""Public reports of sagas and of durable steps, each tried on relay's.

In memory, where the report is of what the code of a saga meets; on PostgreSQL, where it is of races and of workers.
"""

from __future__ import annotations

import asyncio
import json
import threading
import uuid
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import psycopg
import pytest

from relay import Drop, Fail, RetryLater
from relay.client.saga import Context, Saga, SagaFault, SagaStep, StepFailed, saga
from relay.client.worker import Message, Worker
from relay.testing import SagaRun
from tests.outbox import Outbox, wait_until
from tests.workers import working

HOST = str(uuid.UUID(int=1))


def made(function: Callable[..., Any], **options: Any) -> Saga:
    of: dict[str, Any] = {"starts": "a", "waits": "b*", "key": "host"}
    short = {"backoff": 0.01, "max_backoff": 0.01}
    return saga("orders", **(of | short | options))(function)


def one(step: SagaStep) -> int:
    return 1


def test_all_that_was_done_is_undone_in_reverse_order_and_not_only_the_last() -> None:
    """danielgerlag/workflow-core#206: when the second step failed, it was not clear that the first is undone, too."""

    def run(ctx: Context, event: Message) -> None:
        for name in ("one", "two", "three"):
            ctx.step(name, one, undo=one)

    assert SagaRun(made(run), fails={"three": 9}).event("a").undone == ["two", "one"]


def test_a_wait_without_its_event_undoes() -> None:
    """apache/servicecomb-pack#219: the timeout of a saga had no effect, and nothing was compensated."""

    def run(ctx: Context, event: Message) -> None:
        ctx.step("book", one, undo=one)
        if ctx.wait("b", timeout=60) is None:
            ctx.fail("too late")

    assert SagaRun(made(run)).event("a").pass_time(seconds=60).undone == ["book"]


def test_a_saga_whose_undo_fails_is_not_compensated() -> None:
    """hadamrd/forge-loop#301: a compensation that could not run was passed by, and the saga marked as compensated."""

    def refuse(step: SagaStep) -> None:
        raise Fail("cannot be undone")

    def run(ctx: Context, event: Message) -> None:
        ctx.step("book", one, undo=refuse)
        ctx.fail("no")

    run_of = SagaRun(made(run)).event("a")
    assert (run_of.state, run_of.step) == ("stuck", "book")
    assert run_of.error == "undo of step book: Fail: cannot be undone"


def test_steps_that_are_begun_at_once_are_done_one_after_the_other() -> None:
    """dbos-inc/dbos-transact-py#688: gathered steps were recorded in another order: recovery failed for ever."""
    within: list[int] = []

    async def slow(step: SagaStep) -> int:
        assert not within
        within.append(1)
        for _ in range(3):
            await asyncio.sleep(0)
        return within.pop()

    async def run(ctx: Context, event: Message) -> None:
        names = ("one", "two", "three")
        assert await asyncio.gather(*(ctx.step(name, slow) for name in names)) == [1, 1, 1]

    run_of = SagaRun(made(run), fails={"two": 2}, killed={"one"}).event("a")
    assert (run_of.state, run_of.done) == ("done", ["one", "two", "three"])


def test_an_attempt_that_was_cut_off_goes_on_with_its_count(outbox: Outbox) -> None:
    """dbos-inc/dbos-transact-py#260: a workflow that was interrupted between attempts of a step could not recover."""
    attempts: list[int] = []

    def unreliable(step: SagaStep) -> str:
        attempts.append(step.attempt)
        if step.attempt < 3:
            raise RuntimeError("no luck")
        return "luck"

    def run(ctx: Context, event: Message) -> None:
        ctx.step("try", unreliable)

    of = made(run, backoff=0.2, max_backoff=0.2)
    declare(outbox, of)
    tell(outbox, "a")
    for count in (1, 2, 3):
        with working(Worker(outbox.worker_dsn, of, poll=0.05)):
            wait_until(lambda count=count: len(attempts) >= count)  # type: ignore[misc]
    with working(Worker(outbox.worker_dsn, of, poll=0.05)):
        wait_until(lambda: states(outbox) == ["done"])
    assert attempts == [1, 2, 3]


def test_a_worker_that_begins_takes_what_others_left_between_two_steps(outbox: Outbox) -> None:
    """dbos-inc/dbos-transact-py#805: recovered between two steps, a workflow stayed pending, and blocked its queue."""
    gone: list[int] = []

    def last(step: SagaStep) -> None:
        if not gone:
            gone.append(1)
            raise RetryLater("the worker ends here", after=0.1)

    def run(ctx: Context, event: Message) -> None:
        ctx.step("one", one)
        ctx.step("two", one)
        ctx.step("three", last)

    of = made(run)
    declare(outbox, of)
    tell(outbox, "a")
    with working(Worker(outbox.worker_dsn, of, concurrency=1, poll=0.05)):
        wait_until(lambda: bool(gone))
    tell(outbox, "a", host=2)
    with working(Worker(outbox.worker_dsn, of, concurrency=1, poll=0.05)):
        wait_until(lambda: states(outbox) == ["done", "done"])


def test_two_workers_that_recover_a_wait_get_the_same_event(outbox: Outbox) -> None:
    """dbos-inc/dbos-transact-ts#1206: of two processes that recovered a workflow, one got the message, one nothing."""
    got: list[Any] = []

    def run(ctx: Context, event: Message) -> None:
        found = ctx.wait("b", timeout=0.05)
        ctx.step("note", lambda step: got.append(None if found is None else found.payload))

    of = made(run)
    declare(outbox, of)
    for number in range(20):
        tell(outbox, "a", host=number)
    with (
        working(Worker(outbox.worker_dsn, of, poll=0.01)),
        working(Worker(outbox.worker_dsn, of, poll=0.01)),
    ):
        for number in range(20):
            tell(outbox, "b", host=number)
        wait_until(lambda: states(outbox) == ["done"] * 20)
    # Each has either the event or the timeout, once.
    assert len(got) == 20
    recorded = outbox.column(
        "select count(*) from relay.saga_steps where kind = 'wait' and json_typeof(result) = 'number'"
    )
    assert recorded == [sum(each is not None for each in got)]


def test_an_event_in_quick_succession_is_not_missed() -> None:
    """inngest/inngest#1433: an event that came before its wait was registered was never received."""

    def run(ctx: Context, event: Message) -> None:
        ctx.step("long", one)
        found = ctx.wait("b", timeout=60)
        ctx.step("took" if found else "missed", one)

    run_of = SagaRun(made(run)).event("a").event("b")
    assert run_of.done == ["long", "took"]
    assert SagaRun(made(run)).event("b").event("a").done == ["long", "took"]


def test_the_first_of_several_events_goes_on_and_nothing_waits_for_the_others() -> None:
    """inngest/inngest-js#1617: the wait that lost was not cancelled, and the run went on until its timeout."""

    def run(ctx: Context, event: Message) -> None:
        found = ctx.wait("b.*", lambda each: each.event_type in ("b.done", "b.error"), timeout=60)
        ctx.step("lost" if found is None else found.event_type, one)

    run_of = SagaRun(made(run)).event("a").event("b.error")
    assert (run_of.state, run_of.done) == ("done", ["b.error"])


def test_an_answer_that_is_faster_than_its_saga_is_not_skipped(outbox: Outbox) -> None:
    """MassTransit/MassTransit#573: the answer to a command came before the saga was stored, and was skipped."""

    def run(ctx: Context, event: Message) -> None:
        ctx.wait("b")

    of = made(run)
    declare(outbox, of)
    tell(outbox, "b")
    tell(outbox, "a")
    with working(Worker(outbox.worker_dsn, of, poll=0.05)):
        wait_until(lambda: states(outbox) == ["done"])


def test_an_event_that_comes_before_its_saga_is_tried_again_then_a_dead_letter() -> None:
    """MassTransit/MassTransit#1456: messages without an instance should be redelivered, and fail in the end."""
    run_of = SagaRun(made(lambda ctx, event: None, hold=0)).event("b")
    assert run_of.dead == ["no saga of its key has begun within 0 s"]


def test_an_error_of_the_sagas_code_is_not_silent(outbox: Outbox) -> None:
    """MassTransit/MassTransit#702: a saga whose handler raised died silently, and stayed in its store for ever."""

    def run(ctx: Context, event: Message) -> None:
        ctx.step("one", one)
        raise KeyError("a mistake")

    of = made(run)
    declare(outbox, of)
    tell(outbox, "a")
    with working(Worker(outbox.worker_dsn, of, poll=0.05)):
        said = "select error from relay.queue_messages"
        wait_until(lambda: outbox.column(said) == ["KeyError: 'a mistake'"])
    assert states(outbox) == ["running"]


def test_an_event_does_not_begin_a_saga_that_it_does_not_start() -> None:
    """MassTransit/Automatonymous#64: a saga began with an event that is not its first one."""
    run_of = SagaRun(made(lambda ctx, event: None)).event("b")
    assert run_of.state is None


def test_the_timeout_of_a_saga_that_has_ended_is_nothing(outbox: Outbox) -> None:
    """Particular/NServiceBus#2515, JasperFx/wolverine#1095: the timeout of a completed saga raised an error."""

    def run(ctx: Context, event: Message) -> None:
        ctx.wait("b", timeout=0.3)

    of = made(run)
    declare(outbox, of)
    tell(outbox, "a")
    tell(outbox, "b")
    with working(Worker(outbox.worker_dsn, of, poll=0.05)):
        wait_until(lambda: states(outbox) == ["done"])
        assert outbox.column("select count(*) from relay.queue_messages") == [0]
    assert outbox.column("select count(*) from relay.dead_letters") == [0]


def test_a_late_event_of_a_saga_that_has_ended_is_dropped_and_begins_none() -> None:
    """Particular/docs.particular.net#3144: a late message is discarded, one that comes too early must not be."""

    def run(ctx: Context, event: Message) -> None:
        ctx.step("one", one)

    run_of = SagaRun(made(run)).event("a").event("b")
    assert (run_of.state, run_of.dead) == ("done", [])


def test_a_saga_of_the_same_key_begins_after_the_first_has_ended() -> None:
    """Particular/docs.particular.net#2523: is it safe to end a saga and to begin one with the same key at once?"""

    def run(ctx: Context, event: Message) -> None:
        ctx.step("one", one)

    run_of = SagaRun(made(run)).event("a")
    assert run_of.state == "done"
    assert run_of.event("a").state == "done"


def test_events_of_one_key_are_never_worked_side_by_side(outbox: Outbox) -> None:
    """MassTransit/MassTransit#919, AxonIQ/AxonFramework#1178: simultaneous events gave a wrong end, or two sagas."""
    within: list[int] = [0, 0]

    def alone(step: SagaStep) -> None:
        within[0] += 1
        within[1] = max(within[0], within[1])
        within[0] -= 1

    def run(ctx: Context, event: Message) -> None:
        for number in range(6):
            ctx.wait("b")
            ctx.step(f"step {number}", alone)

    of = made(run)
    declare(outbox, of)
    for each in ("a", "a", *"bbbbbb"):
        tell(outbox, each)
    with (
        working(Worker(outbox.worker_dsn, of, poll=0.01)),
        working(Worker(outbox.worker_dsn, of, poll=0.01)),
    ):
        wait_until(lambda: states(outbox)[:1] == ["done"])
    assert within[1] == 1
    done = "select count(*) from relay.saga_steps where kind = 'step' and saga_id = (select min(id) from relay.sagas)"
    assert outbox.column(done) == [6]


def test_an_event_without_a_key_is_a_dead_letter(outbox: Outbox) -> None:
    """AxonIQ/AxonFramework#1150: a saga that began with a null association could not be found."""
    of = made(lambda ctx, event: None, key="payload.group")
    declare(outbox, of)
    outbox.worker.execute(
        "select relay.enqueue('orders', '{}', event_type => 'a', host_id => %s)", (HOST,)
    )
    with working(Worker(outbox.worker_dsn, of, poll=0.05)):
        wait_until(lambda: outbox.column("select count(*) from relay.dead_letters") == [1])
    assert outbox.column("select exception from relay.dead_letters") == [
        "Fail: the event has no payload.group, the key of the saga (relay.enqueue takes a message's as `key`)"
    ]


def test_a_saga_is_not_suspended_while_a_step_runs() -> None:
    """restatedev/sdk-typescript#122: a suspension was triggered while a side effect was still executing."""
    ran: list[str] = []

    def notify(step: SagaStep) -> str:
        ran.append("notified")
        return "sent"

    def run(ctx: Context, event: Message) -> None:
        ctx.step("notify", notify)
        ctx.wait("b")

    run_of = SagaRun(made(run)).event("a")
    assert (run_of.state, run_of.done, ran) == ("waiting", ["notify"], ["notified"])


def test_a_cancelled_saga_does_not_go_on_after_its_sleep() -> None:
    """hatchet-dev/hatchet#4642: a durable task that was cancelled in its sleep went on after it."""

    def run(ctx: Context, event: Message) -> None:
        ctx.sleep(10)
        ctx.step("after", one)

    run_of = SagaRun(made(run, cancels="stop")).event("a").event("stop")
    assert run_of.pass_time(seconds=60).state == "compensated"
    assert run_of.ran == []


def test_a_patch_is_not_taken_by_a_saga_that_is_past_it() -> None:
    """temporalio/sdk-java#1430: asking for the version of a change broke the replay of what was before it."""

    def before(ctx: Context, event: Message) -> None:
        ctx.step("one", one)
        ctx.wait("b")
        ctx.step("last", one)

    def after(ctx: Context, event: Message) -> None:
        if ctx.patched("first"):
            ctx.step("zero", one)
        ctx.step("one", one)
        ctx.wait("b")
        ctx.step("last", one)

    run_of = SagaRun(made(before)).event("a")
    run_of.saga = made(after)
    assert run_of.event("b").done == ["one", "last"]
    assert SagaRun(made(after)).event("a").event("b").done == ["zero", "one", "last"]


def test_code_without_a_timer_that_has_begun_is_one_clear_error() -> None:
    """temporalio/sdk-go#2537: after an upgrade a matching timer was expected, and the workflow panicked."""

    def before(ctx: Context, event: Message) -> None:
        ctx.sleep(10)

    run_of = SagaRun(made(before)).event("a")
    run_of.saga = made(lambda ctx, event: ctx.step("other", one))
    with pytest.raises(SagaFault, match="'sleep' was done, and the saga's code comes to 'other'"):
        run_of.pass_time(seconds=10)


def test_an_event_that_is_seen_while_its_saga_begins_is_kept(outbox: Outbox) -> None:
    """Particular/docs.particular.net#5583: a saga was not found, and its store had it: the message was too early."""
    running, goes_on = threading.Event(), threading.Event()

    def slow(step: SagaStep) -> None:
        running.set()
        goes_on.wait(60)

    def run(ctx: Context, event: Message) -> None:
        ctx.step("slow", slow)
        ctx.wait("b")

    of = made(run)
    declare(outbox, of)
    tell(outbox, "b")
    aside = "select xmin::text from relay.queue_messages where event_type = 'b' and key is null"
    with working(Worker(outbox.worker_dsn, of, poll=0.05)):
        wait_until(lambda: bool(outbox.column(aside)))
        tell(outbox, "a")
        wait_until(running.is_set)
        before = outbox.column(aside)
        wait_until(lambda: outbox.column(aside) != before)
        goes_on.set()
        wait_until(lambda: states(outbox) == ["done"])
    assert outbox.column("select count(*) from relay.dead_letters") == [0]


def test_events_that_all_start_a_saga_begin_one_at_once_and_none_fails(outbox: Outbox) -> None:
    """rebus-org/Rebus#937: several batches began one saga in several processes: its insert failed as a duplicate."""

    def run(ctx: Context, event: Message) -> None:
        for _ in range(9):
            ctx.wait("a")

    of = made(run)
    declare(outbox, of)
    with (
        working(Worker(outbox.worker_dsn, of, poll=0.01)),
        working(Worker(outbox.worker_dsn, of, poll=0.01)),
    ):
        for _ in range(10):
            tell(outbox, "a")
        wait_until(lambda: states(outbox) == ["done"])
    assert outbox.column("select count(*) from relay.saga_steps where kind = 'event'") == [10]
    assert outbox.column("select count(*) from relay.dead_letters") == [0]


def test_the_step_of_a_worker_that_is_lost_is_taken_without_a_timeout(outbox: Outbox) -> None:
    """pgflow-dev/pgflow#621: a step of 5 s was taken again after the flow's 90 s, and its message read in vain."""
    taken: list[int] = []
    goes_on = threading.Event()

    def lost(step: SagaStep) -> None:
        taken.append(step.attempt)
        if len(taken) == 1:
            step.session.execute("select set_config('application_name', 'lost', false)")
            goes_on.wait(60)
            step.session.execute("select 1")

    def run(ctx: Context, event: Message) -> None:
        ctx.step("one", lost)

    of = made(run)
    declare(outbox, of)
    tell(outbox, "a")
    kill = "select pg_terminate_backend(pid) from pg_stat_activity where application_name = 'lost'"
    with (
        working(Worker(outbox.worker_dsn, of, poll=0.05)),
        working(Worker(outbox.worker_dsn, of, poll=0.05)),
    ):
        wait_until(lambda: outbox.column(kill) == [True])
        wait_until(lambda: states(outbox) == ["done"])
        goes_on.set()
    assert taken == [1, 2]


def test_a_worker_that_ends_while_another_begins_leaves_its_saga_to_that_one(
    outbox: Outbox,
) -> None:
    """dbos-inc/dbos-transact-py#804: the one that drained took back what was recovered, and stranded it."""

    def run(ctx: Context, event: Message) -> None:
        for number in range(3):
            ctx.step(f"step {number}", one)
            ctx.sleep(0.2)

    of = made(run)
    declare(outbox, of)
    tell(outbox, "a")
    done = "select count(*) from relay.saga_steps where kind = 'step'"
    with ExitStack() as second:
        with working(Worker(outbox.worker_dsn, of, poll=0.01)):
            wait_until(lambda: outbox.column(done) >= [1])
            second.enter_context(working(Worker(outbox.worker_dsn, of, poll=0.01)))
            wait_until(lambda: outbox.column(done) >= [2])
        wait_until(lambda: states(outbox) == ["done"])
    assert outbox.column(done) == [3]


def test_an_event_that_comes_during_a_step_does_not_run_it_a_second_time(outbox: Outbox) -> None:
    """vercel/workflow#2780: an event that came in a step woke the run, and the step ran twice side by side."""
    ran: list[int] = []

    def slow(step: SagaStep) -> None:
        ran.append(step.attempt)
        tell(outbox, "b")
        held = (
            "select count(*) from relay.queue_messages where event_type = 'b' and key is not null"
        )
        wait_until(lambda: outbox.column(held) == [1])

    def run(ctx: Context, event: Message) -> None:
        ctx.step("slow", slow)
        ctx.wait("b")

    of = made(run)
    declare(outbox, of)
    tell(outbox, "a")
    with (
        working(Worker(outbox.worker_dsn, of, poll=0.01)),
        working(Worker(outbox.worker_dsn, of, poll=0.01)),
    ):
        wait_until(lambda: states(outbox) == ["done"])
    assert ran == [1]


def test_a_cancellation_that_comes_during_a_step_is_not_swallowed(outbox: Outbox) -> None:
    """temporalio/sdk-python#620: a cancellation was lost where a short activity ended at the same time."""
    ran: list[str] = []

    def told(step: SagaStep) -> None:
        ran.append(step.name)
        if step.name == "one":
            tell(outbox, "stop")

    def run(ctx: Context, event: Message) -> None:
        for name in ("one", "two", "three"):
            ctx.step(name, told, undo=one)

    of = made(run, cancels="stop")
    declare(outbox, of)
    tell(outbox, "a")
    with working(Worker(outbox.worker_dsn, of, poll=0.01)):
        wait_until(lambda: states(outbox) in (["done"], ["compensated"]))
    assert (states(outbox), ran) == (["compensated"], ["one"])


def test_an_act_that_races_the_last_step_says_what_came_of_it(outbox: Outbox) -> None:
    """dbos-inc/dbos-transact-py#767: a cancellation that raced the end was dropped, and returned as if it held."""
    said: list[bool] = []
    running, goes_on = threading.Event(), threading.Event()

    def last(step: SagaStep) -> None:
        running.set()
        goes_on.wait(60)

    def run(ctx: Context, event: Message) -> None:
        ctx.step("one", one, undo=one)
        ctx.step("last", last)

    of = made(run)
    declare(outbox, of)
    tell(outbox, "a")
    with working(Worker(outbox.worker_dsn, of, poll=0.05)):
        wait_until(running.is_set)
        act = "select relay.steer_saga('orders', %s, 'undo', 'enough')"
        (number,) = outbox.column("select id from relay.sagas")

        def undo() -> None:
            with psycopg.connect(outbox.superuser_dsn) as conn:
                said.extend(row[0] for row in conn.execute(act, (number,)))

        acting = threading.Thread(target=undo)
        acting.start()
        waiting = "select count(*) from pg_stat_activity where wait_event_type = 'Lock'"
        wait_until(lambda: outbox.column(waiting) == [1])
        goes_on.set()
        acting.join()
        wait_until(lambda: states(outbox) in (["done"], ["compensated"]))
    assert said == [states(outbox) == ["compensated"]]


def test_waits_of_a_loop_that_time_out_are_over_once_each() -> None:
    """earendil-works/absurd#96: a timeout was not recorded: a loop of waits slept for the first one again."""

    def run(ctx: Context, event: Message) -> None:
        for number in range(3):
            ctx.step(f"load {number}", one)
            assert ctx.wait("b", timeout=60) is None

    run_of = SagaRun(made(run)).event("a")
    for number in (1, 2):
        assert run_of.pass_time(seconds=60).done == [f"load {each}" for each in range(number + 1)]
    assert run_of.pass_time(seconds=60).state == "done"


def test_a_sleep_that_is_computed_anew_ends_when_it_was_to_end() -> None:
    """cloudflare/workers-sdk#12884: a sleep of another length on replay was another sleep, and began again."""
    lengths = iter((60, 3_600, 7_200))

    def run(ctx: Context, event: Message) -> None:
        ctx.sleep(next(lengths))

    assert SagaRun(made(run)).event("a").pass_time(seconds=60).state == "done"


def test_what_a_step_writes_before_it_fails_is_not_there_twice(outbox: Outbox) -> None:
    """dbos-inc/dbos-transact-py#770: what a step wrote to a stream stayed when it failed, once for each attempt."""

    def write(step: SagaStep) -> None:
        step.session.execute("select relay.enqueue('other', '{}')")
        if step.attempt < 3:
            raise RuntimeError("not yet")

    def run(ctx: Context, event: Message) -> None:
        ctx.step("write", write)

    of = made(run)
    declare(outbox, of)
    outbox.worker.execute("select relay.declare_queue('other')")
    tell(outbox, "a")
    with working(Worker(outbox.worker_dsn, of, poll=0.05)):
        wait_until(lambda: states(outbox) == ["done"])
    left = "select count(*) from relay.queue_messages join relay.queues as q on q.id = queue_id where q.name = 'other'"
    assert outbox.column(left) == [1]


def test_a_conflict_of_transactions_is_no_outcome_of_a_step(outbox: Outbox) -> None:
    """dbos-inc/dbos-transact-py#679: a serialization failure was recorded as what the step had come to."""
    tried: list[int] = []

    def conflicting(step: SagaStep) -> None:
        tried.append(step.attempt)
        if len(tried) < 3:
            step.session.execute("do $$ begin raise serialization_failure; end $$")

    def run(ctx: Context, event: Message) -> None:
        ctx.step("conflicting", conflicting)

    of = made(run)
    declare(outbox, of)
    tell(outbox, "a")
    with working(Worker(outbox.worker_dsn, of, poll=0.05)):
        wait_until(lambda: states(outbox) in (["done"], ["compensated"]))
    assert states(outbox) == ["done"]


def test_what_a_step_has_returned_is_the_same_each_time() -> None:
    """Of a step that returns what JSON writes otherwise: the first time it is what it is afterwards."""
    seen: list[Any] = []

    def run(ctx: Context, event: Message) -> None:
        seen.append(ctx.step("id", lambda step: {"id": uuid.UUID(int=7), "n": 1e22, "t": (1, 2)}))
        ctx.step("again", one)

    SagaRun(made(run)).event("a")
    assert seen[0] == seen[1] == {"id": str(uuid.UUID(int=7)), "n": 1e22, "t": [1, 2]}
    assert isinstance(seen[1]["n"], float)


def test_a_saga_that_swallows_every_error_is_ended_all_the_same() -> None:
    """A saga with `except Exception` or `except BaseException` around its steps does not go on without them."""

    def run(ctx: Context, event: Message) -> None:
        try:
            ctx.step("one", one)
            ctx.wait("b")
        except BaseException:
            pass
        ctx.step("two", one)

    run_of = SagaRun(made(run)).event("a")
    assert (run_of.state, run_of.done) == ("waiting", ["one"])
    assert run_of.event("b").done == ["one", "two"]


def test_drop_in_a_step_is_no_end_of_the_saga() -> None:
    def drop(step: SagaStep) -> None:
        raise Drop("nothing to do")

    def run(ctx: Context, event: Message) -> None:
        try:
            ctx.step("one", drop)
        except StepFailed as error:
            reason = error.reason
            ctx.step("two", lambda step: reason)

    assert SagaRun(made(run)).event("a").entries[-1][1:] == ("two", "Drop: nothing to do")


def declare(outbox: Outbox, of: Saga) -> None:
    statement, text = of.queue.declaration()
    outbox.worker.execute(statement.with_parameter("%s").encode(), (text,))


def tell(outbox: Outbox, event_type: str, host: int = 1) -> None:
    outbox.worker.execute(
        "select relay.enqueue('orders', %s::jsonb, %s, %s)",
        (json.dumps({"of": event_type}), event_type, str(uuid.UUID(int=host))),
    )


def states(outbox: Outbox) -> list[str]:
    return [str(each) for each in outbox.column("select state from relay.sagas order by id")]
