"""Event types of the tests: `order.placed` in three versions, as a registry and as a configuration."""

from __future__ import annotations

import os
from decimal import Decimal
from pathlib import Path
from typing import Any

import psycopg
from pydantic import BaseModel

import relay
from relay.faults import RetryLater
from relay.model.events import Transaction

registry = relay.EventTypes()


class Item(BaseModel):
    price: Decimal


@registry.model("order.placed", version=3)
class OrderPlaced(BaseModel):
    amount: Decimal
    currency: str
    items: list[Item]


@registry.upcast("order.placed", from_version=1)
def v1_to_v2(payload: dict[str, Any]) -> dict[str, Any]:
    """Version 2 has a currency."""
    return {**payload, "currency": "EUR"}


@registry.upcast("order.placed", from_version=2)
def v2_to_v3(payload: dict[str, Any]) -> dict[str, Any]:
    """Version 3 has items. The function changes its argument, as upcasters may."""
    payload["items"] = [{"price": payload["amount"]}]
    return payload


EVENTS = {
    "order.placed": {
        "version": 3,
        "model": "tests.event_types:OrderPlaced",
        "upcast": {1: "tests.event_types:v1_to_v2", 2: "tests.event_types:v2_to_v3"},
    }
}
"""The section `events` with the same types."""


def need_file(payload: dict[str, Any]) -> dict[str, Any]:
    """Upcast if the file that the payload names exists; raise a transient fault otherwise."""
    if not Path(payload["file"]).exists():
        raise RetryLater("the file is not there yet")
    return payload


def need_environment(payload: dict[str, Any]) -> dict[str, Any]:
    """Upcast with the factor in the process's environment."""
    return {**payload, "amount": payload["amount"] * int(os.environ["FACTOR"])}


def record(transaction: Transaction, cursor: psycopg.Cursor[Any]) -> None:
    """Append each event, with its model, to the table `seen`."""
    for event in transaction.events:
        model = event.model
        cursor.execute(
            "insert into seen (id, payload, metadata, model) values (%s, %s, %s, %s)",
            (
                event.id,
                event.text("payload"),
                event.text("metadata"),
                None if model is None else f"{type(model).__name__} {model.items[0].price}",
            ),
        )
