"""A checkout: reserve, pay, wait for the warehouse, ship. What fails later undoes what was done before."""

from __future__ import annotations

import os
from decimal import Decimal
from typing import Any

import psycopg

from relay import Fail
from relay.client import Event
from relay.client.saga import Context, SagaStep, saga
from relay.client.worker import Message, Worker


def reserve(step: SagaStep, item: str) -> None:
    """Take a piece from the stock; this commits together with the step."""
    order = step.event.payload["order_id"]
    taken = step.session.execute(
        "update stock set pieces = pieces - 1 where item = %s and pieces > 0", (item,)
    )
    if taken.rowcount == 0:
        raise Fail(f"{item} is sold out")
    step.session.execute("insert into reservations values (%s, %s)", (order, item))


def put_back(step: SagaStep, item: str) -> None:
    """Undo `reserve`."""
    order = step.event.payload["order_id"]
    step.session.execute("delete from reservations where order_id = %s", (order,))
    step.session.execute("update stock set pieces = pieces + 1 where item = %s", (item,))


def pay(step: SagaStep, amount: str) -> dict[str, str]:
    """Call the payment service, which does nothing for an idempotency key that it knows."""
    if Decimal(amount) > 1_000:
        raise Fail("the card is declined")
    _call_bank(step, Decimal(amount))
    return {"payment": step.idempotency_key}


def refund(step: SagaStep, amount: str) -> None:
    """Undo `pay`."""
    _call_bank(step, -Decimal(amount))


def _call_bank(step: SagaStep, amount: Decimal) -> None:
    # Another service, so a transaction of its own.
    with psycopg.connect(os.environ["BANK_URL"]) as bank:
        bank.execute(
            "insert into payments values (%s, %s, %s) on conflict do nothing",
            (step.idempotency_key, step.event.payload["order_id"], amount),
        )


def ship(step: SagaStep) -> None:
    """Hand the parcel over."""
    step.session.execute("insert into parcels values (%s)", (step.event.payload["order_id"],))


@saga(
    "checkout",
    starts="order.placed",
    waits="parcel.packed",
    cancels="order.cancelled",
    key="payload.order_id",
)
def checkout(ctx: Context, event: Message) -> None:
    """Runs again from the top after each step: steps that are done return what they returned."""
    order: dict[str, Any] = event.payload
    ctx.step("reserve", reserve, order["item"], undo=put_back)
    ctx.step("pay", pay, order["amount"], undo=refund)
    ctx.send(
        Event(
            "parcel.wanted", ("Order", order["order_id"]), payload={"order_id": order["order_id"]}
        )
    )
    packed = ctx.wait("parcel.packed", timeout=3 * 86_400)
    if packed is None:
        ctx.fail("the warehouse has not packed it within three days")
    ctx.step("ship", ship)


worker = Worker(os.environ["DATABASE_URL"], checkout, concurrency=4)
