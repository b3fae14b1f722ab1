"""What the code of a saga may do to its context, and must not: within steps, in parallel, and cut off."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from relay.client import Event
from relay.client.saga import Context, Saga, SagaFault, SagaStep, StepFailed, saga
from relay.client.worker import Message
from relay.testing import SagaRun


def made(function: Callable[..., Any], **options: Any) -> Saga:
    return saga("orders", **({"starts": "a", "waits": "b*", "key": "host"} | options))(function)


def one(step: SagaStep) -> int:
    return 1


async def later(step: SagaStep) -> int:
    await asyncio.sleep(0)
    return 1


@pytest.mark.parametrize("what", ["fail", "step", "wait", "patched", "send"])
@pytest.mark.parametrize("where", ["step", "undo", "match"])
def test_a_step_an_undo_and_a_match_do_not_use_the_context(where: str, what: str) -> None:
    """What such a step had changed was committed without it, and such an undo was called for ever."""
    uses: dict[str, Callable[[Context], Any]] = {
        "fail": lambda ctx: ctx.fail("no"),
        "step": lambda ctx: ctx.step("inner", one),
        "wait": lambda ctx: ctx.wait("b"),
        "patched": lambda ctx: ctx.patched("p"),
        "send": lambda ctx: ctx.send(Event("sent", payload={})),
    }

    def run(ctx: Context, event: Message) -> None:
        def wrong(*_: Any) -> Any:
            return uses[what](ctx)

        ctx.step("one", wrong if where == "step" else one, undo=wrong)
        if where == "match":
            ctx.wait("b", match=wrong)
        ctx.fail("that is all")

    run_of = SagaRun(made(run))
    with pytest.raises(SagaFault, match="only the saga"):
        run_of.event("a").event("b")
    assert ("one" in run_of.done) is (where != "step")
    assert run_of.undone == []


def test_a_step_whose_tasks_use_the_context_does_not_wait_for_itself() -> None:
    async def run(ctx: Context, event: Message) -> None:
        async def outer(step: SagaStep) -> None:
            await asyncio.create_task(asyncio.wait_for(ctx.step("inner", later), None))

        await ctx.step("outer", outer)

    with pytest.raises(SagaFault, match="only the saga"):
        SagaRun(made(run)).event("a")


def test_steps_in_a_task_group_are_done_and_fail_the_saga_as_others_do() -> None:
    async def run(ctx: Context, event: Message) -> None:
        async with asyncio.TaskGroup() as group:
            for name in ("one", "two", "three"):
                group.create_task(ctx.step(name, later, undo=later))

    run_of = SagaRun(made(run)).event("a")
    assert (run_of.state, run_of.done) == ("done", ["one", "two", "three"])
    run_of = SagaRun(made(run), fails={"three": 9}).event("a")
    assert (run_of.state, run_of.undone) == ("compensated", ["two", "one"])


def test_a_step_that_is_left_in_the_middle_is_no_part_of_what_commits() -> None:
    """Cut off by a limit that the saga catches, it was forgotten, and what it had changed was not."""

    async def endless(step: SagaStep) -> None:
        await asyncio.sleep(60)

    async def run(ctx: Context, event: Message) -> None:
        try:
            await asyncio.wait_for(ctx.step("slow", endless, attempts=2), 0.01)
        except TimeoutError:
            await ctx.step("other", later)
        except StepFailed:
            await ctx.step("after", later)

    run_of = SagaRun(made(run)).event("a")
    assert (run_of.done, run_of.ran) == (["after"], ["slow", "slow", "after"])


def test_an_attempt_ends_after_the_steps_that_it_has_begun() -> None:
    """The saga's code raised beside a step: its attempt was ended while the step ran, with its session."""
    within: list[str] = []

    async def slow(step: SagaStep) -> None:
        within.append("begins")
        for _ in range(5):
            await asyncio.sleep(0)
        within.append("ends")

    async def run(ctx: Context, event: Message) -> None:
        async def breaks() -> None:
            await asyncio.sleep(0)
            if within != ["begins", "ends"]:
                raise KeyError("a mistake")

        await asyncio.gather(ctx.step("slow", slow), breaks())

    run_of = SagaRun(made(run)).event("a")
    assert (run_of.state, run_of.done, within) == ("done", ["slow"], ["begins", "ends"])


@pytest.mark.parametrize("text", ["a\0b", "a\ud800b"])
def test_why_a_saga_fails_is_a_text_that_the_database_has(text: str) -> None:
    """With another one the end of the attempt failed, for ever."""

    def run(ctx: Context, event: Message) -> None:
        ctx.step("one", one, undo=one)
        ctx.fail(text)

    run_of = SagaRun(made(run)).event("a")
    assert run_of.state == "compensated"
    assert run_of.error is not None
    run_of.error.encode()
    assert "\0" not in run_of.error


@pytest.mark.parametrize("name", ["a\0b", "a\ud800b"])
def test_a_name_that_the_database_has_not_is_a_fault_before_its_step(name: str) -> None:
    def run(ctx: Context, event: Message) -> None:
        ctx.step(name, one)

    run_of = SagaRun(made(run))
    with pytest.raises(SagaFault, match="NUL"):
        run_of.event("a")
    assert run_of.ran == []


def test_a_wait_for_what_never_comes_is_a_fault_at_once() -> None:
    """It waited for ever, and nothing said so: the queue gets only the types that the saga names."""
    for awaited, is_known in (("b1", True), ("b*", True), ("a", True), ("c", False), ("c*", False)):
        run_of = SagaRun(made(lambda ctx, event, awaited=awaited: ctx.wait(awaited)))
        if is_known:
            run_of.event("a")
            continue
        with pytest.raises(SagaFault, match="would never come"):
            run_of.event("a")
