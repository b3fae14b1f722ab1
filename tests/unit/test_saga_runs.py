"""`relay.testing.SagaRun`: a saga in memory, whose steps fail at each point and whose clock is moved."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relay.client import Event
from relay.client.saga import Context, SagaFault, SagaStep, saga
from relay.client.worker import Message
from relay.testing import SagaRun


class Shop:
    """What the saga's steps do, by idempotency key."""

    def __init__(self) -> None:
        self.effects: dict[str, str] = {}

    def do(self, step: SagaStep, what: str) -> str:
        return self.effects.setdefault(step.idempotency_key, what)

    def undo(self, step: SagaStep, what: str) -> None:
        assert step.result == what
        self.effects.setdefault(step.idempotency_key, f"un{what}")


@saga(
    "checkout",
    starts="order.placed",
    waits=["order.paid"],
    cancels="order.cancelled",
    key="payload.order",
)
def checkout(ctx: Context, event: Message) -> None:
    shop = SHOP[0]
    ctx.step("reserve", shop.do, "reserved", undo=shop.undo)
    ctx.send(Event("payment.wanted", payload={"order": event.payload["order"]}))
    paid = ctx.wait("order.paid", timeout=86_400)
    if paid is None:
        ctx.fail("nobody has paid")
    ctx.step("ship", shop.do, "shipped", undo=shop.undo)
    ctx.sleep(3_600)
    ctx.step("thank", shop.do, "thanked")


SHOP = [Shop()]
PLACED = ("order.placed", {"order": 1})
NAMES = ("reserve", "send payment.wanted", "ship", "thank", "undo reserve", "undo ship")


def run_of(**options: Any) -> SagaRun:
    SHOP[0] = Shop()
    return SagaRun(checkout, **options)


def test_a_saga_waits_sleeps_and_ends() -> None:
    run = run_of().event(*PLACED)
    assert (run.state, run.step) == ("waiting", "order.paid")
    assert [each.event_type for each in run.sent] == ["payment.wanted"]
    run.event("order.paid")
    assert (run.state, run.step) == ("waiting", "sleep")
    assert run.pass_time(minutes=59).state == "waiting"
    assert run.pass_time(minutes=1).state == "done"
    assert run.done == ["reserve", "send payment.wanted", "ship", "thank"]
    assert not run.event("order.paid").dead


def test_a_wait_that_is_over_without_its_event_undoes_what_was_done() -> None:
    run = run_of().event(*PLACED).pass_time(days=1)
    assert (run.state, run.error) == ("compensated", "nobody has paid")
    assert run.undone == ["reserve"]


def test_an_event_before_its_saga_is_kept_and_one_of_its_cancels_undoes() -> None:
    run = run_of().event("order.paid").event(*PLACED)
    assert run.step == "sleep"
    run.event("order.cancelled")
    assert (run.state, run.undone) == ("compensated", ["ship", "reserve"])
    assert run.error == "cancelled by order.cancelled"


@given(
    st.dictionaries(st.sampled_from(NAMES), st.integers(1, 6), max_size=4),
    st.sets(st.sampled_from(NAMES)),
    st.booleans(),
)
def test_each_effect_is_there_once_or_undone_once(
    fails: dict[str, int], killed: set[str], is_cancelled: bool
) -> None:
    """Every step may fail, for good or not, and its worker may be killed after it."""
    run = run_of(fails=fails, killed=killed)
    run.event(*PLACED).event("order.paid")
    if is_cancelled:
        run.event("order.cancelled")
    run.pass_time(days=2)
    effects = sorted(SHOP[0].effects.values())
    assert run.state in ("done", "compensated")
    assert len(set(effects)) == len(effects)
    if run.state == "done":
        assert effects == ["reserved", "shipped", "thanked"]
    else:
        assert [each for each in effects if not each.startswith("un")] == [
            each.removeprefix("un") for each in effects if each.startswith("un")
        ]
    assert len(run.sent) == (1 if "send payment.wanted" in run.done else 0)


@pytest.mark.parametrize(("name", "fails"), list(product(("reserve", "ship"), (4, 5))))
def test_the_last_attempt_of_a_step_fails_the_saga(name: str, fails: int) -> None:
    run = run_of(fails={name: fails}).event(*PLACED).event("order.paid").pass_time(days=2)
    assert run.state == ("done" if fails == 4 else "compensated")
    assert run.ran.count(name) == 5


def test_code_that_does_not_fit_is_one_clear_error() -> None:
    @saga("twice", starts="a", key="host")
    def twice(ctx: Context, event: Message) -> None:
        ctx.step("same", lambda step: 1)
        ctx.step("same", lambda step: 2)

    @saga("nested", starts="a", key="host")
    def nested(ctx: Context, event: Message) -> None:
        ctx.step("outer", lambda step: ctx.step("inner", lambda step: 2))

    for of, said in ((twice, "'same' comes twice"), (nested, "uses the context")):
        with pytest.raises(SagaFault, match=said):
            SagaRun(of).event("a")
