"""Ordering keys: what a handler orders by, for all handlers of a transaction together and for one delivery."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from pydantic import TypeAdapter

from relay.config.handlers import HandlerSettings
from relay.model.events import FIELDS
from relay.model.transactions import FACTS, Routed, Rows, Transactions
from relay.model.tuples import RowDecoder
from relay.pipeline.deferral import Ordering
from tests.unit.wire import tuple_data

SINK = {"type": "http", "url": "http://shop.example/"}
SQL = {"type": "sql", "statement": "select 1"}


def configured(**handlers: dict[str, Any]) -> dict[str, HandlerSettings]:
    validate = TypeAdapter[HandlerSettings](HandlerSettings).validate_python
    return {name: validate(each) for name, each in handlers.items()}


def routed(*events: dict[str, str]) -> Routed:
    """One transaction."""
    rows = Rows.of(
        [
            tuple_data(
                [None if (value := event.get(name)) is None else value.encode() for name in FIELDS]
            )
            for event in events
        ]
    )
    facts = np.array([(1, 2, 0, 1, 1, 1, len(events), rows.size, 0)], FACTS)
    columns = tuple(FIELDS)
    decoder = RowDecoder(columns, {name: name for name in FIELDS})
    return Routed(Transactions(columns, facts, [None], [("h1", "h2")], rows), decoder)


EVENTS = routed(
    {"host_id": "h1", "user_id": "u", "aggregate_type": "T", "aggregate_id": "a b"},
    {"host_id": "h2", "aggregate_type": "T"},
)


@pytest.mark.parametrize(
    ("order_by", "keys"),
    [
        ("host", {"h1 host", "h2 host"}),
        ("user", {"h1 user u", "h2 user "}),
        ("aggregate", {"h1 aggregate T a b", "h2 aggregate T "}),
        ("none", set()),
    ],
)
def test_a_delivery_has_the_keys_of_its_sink(order_by: str, keys: set[str]) -> None:
    ordering = Ordering(configured(hook={**SINK, "order_by": order_by}))
    assert ordering.delivery_keys("hook", EVENTS) == [keys]


def test_nothing_is_ordered_for_a_handler_that_is_not_reliable() -> None:
    ordering = Ordering(configured(hook={**SINK, "reliable": False}))
    assert ordering.delivery_keys("hook", EVENTS) == [set()]


def test_transactional_handlers_have_keys_together_and_without_the_sinks() -> None:
    handlers = configured(
        a={**SQL, "order_by": "aggregate"},
        b=SQL,
        hook={**SINK, "order_by": "user"},
    )
    ordering = Ordering(handlers)
    parts = dict.fromkeys(handlers, EVENTS)
    transactional = {"h1 host", "h2 host", "h1 aggregate T a b", "h2 aggregate T "}
    assert ordering.transactional_keys(parts) == transactional
    assert ordering.keys(parts) == transactional | {"h1 user u", "h2 user "}
    assert ordering.transactional_keys({"hook": EVENTS}) == set()


def test_a_long_key_fits_into_an_index_and_stays_apart_from_others() -> None:
    ordering = Ordering(configured(hook={**SINK, "order_by": "aggregate"}))
    long = ["é" * 5_000, "é" * 4_999 + "e"]
    keys = {
        key
        for text in long
        for of_one in ordering.delivery_keys("hook", routed({"host_id": "h", "aggregate_id": text}))
        for key in of_one
    }
    assert len(keys) == 2
    assert all(key.startswith("h aggregate ") and len(key) < 100 for key in keys)
