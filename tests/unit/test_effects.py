"""What of a configuration decides effects, and how a difference is named."""

from __future__ import annotations

import json
from typing import Any, get_args

import pytest
from pydantic import BaseModel

from relay.config.effects import LEFT_OUT, ORDERING, Effects
from relay.config.handlers import HandlerSettings
from relay.config.settings import Settings

HTTP: dict[str, Any] = {
    "type": "http",
    "url": "https://user:hunter2@shop.example/events?token=hunter2",
    "headers": {"authorization": "hunter2"},
    "signing_secret": "whsec_aHVudGVyMg==",
}


def effects(**changes: Any) -> Effects:
    """Those of a small configuration with some sections replaced."""
    base: dict[str, Any] = {
        "handlers": {"orders": {"type": "sql", "statement": "select 1"}, "shop": HTTP},
        "routes": [{"match": {"event_type": "order.*"}, "handlers": ["orders", "shop"]}],
    }
    return Effects.of(Settings(**{**base, **changes}))


def handlers(**changes: Any) -> dict[str, Any]:
    return {
        "orders": {"type": "sql", "statement": "select 1"},
        "shop": {**HTTP, **changes},
    }


@pytest.mark.parametrize(
    "changes",
    [
        {"source": {"dsn": "host=elsewhere", "mode": "poll"}},
        {"target": {"dsn": "host=elsewhere"}},
        {"batch": {"max_events": 7}},
        {"spark": {"master": "local[3]"}},
        {"handlers": handlers(timeout=3, retry={"wait": 2}, concurrency=9, compress_above=10)},
        {"handlers": handlers(headers={"authorization": "new"}, tls={"verify": False})},
        {"handlers": handlers(reliable=True)},
    ],
)
def test_what_may_differ_between_instances(changes: dict[str, Any]) -> None:
    assert effects(**changes).digest == effects().digest


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"partitions": 16}, "partitions (8, here 16)"),
        ({"unrouted": "ignore"}, "unrouted (dead_letter, here ignore)"),
        ({"events": "shop.events:registry"}, "events (only here)"),
        ({"events": {"order.placed": {"version": 2}}}, "events.order.placed (only here)"),
        ({"source": {"columns": {"payload": "body"}}}, "source.columns.payload (only here)"),
        ({"handlers": handlers(order_by="user")}, "handlers.shop.order_by (only here)"),
        (
            {"handlers": handlers(url="https://shop.example/other")},
            "handlers.shop.url (https://shop.example/events, here https://shop.example/other)",
        ),
        (
            {"routes": [{"handlers": ["orders", "shop"]}]},
            'routes.0 (sha256, here {"handlers": ["orders", "shop"]})',
        ),
    ],
)
def test_what_decides_effects_is_named(changes: dict[str, Any], named: str) -> None:
    other = effects(**changes)
    assert other.digest != effects().digest
    difference = other.difference(effects().values)
    # Long values are kept as digests, and then only the key is named.
    assert difference == (named.split(" ")[0] if "sha256" in named else named)


def test_handlers_that_only_one_has_are_named_whole() -> None:
    shorter = effects(
        handlers={"shop": HTTP},
        routes=[{"match": {"event_type": "order.*"}, "handlers": ["shop"]}],
    )
    difference = shorter.difference(effects().values)
    assert difference.startswith("handlers.orders (not here), handlers (")
    assert "handlers.orders.statement" not in difference
    assert effects().difference(shorter.values).startswith("handlers.orders (only here)")


def test_no_secret_and_no_long_statement_is_kept() -> None:
    long = "select " + ", ".join(map(str, range(100)))
    kept = json.dumps(
        dict(
            effects(
                handlers={**handlers(), "long": {"type": "sql", "statement": long}},
            ).values
        )
    )
    assert "hunter2" not in kept
    assert "authorization" not in kept
    assert "select 1" in kept
    assert long not in kept


def test_the_types_of_ids_decide_effects() -> None:
    plain, text, same = (
        Effects.of(Settings.model_validate({"source": {"types": types}}))
        for types in ({}, {"id": "text"}, {"id": "uuid"})
    )
    assert plain == same
    assert text.difference(plain.values) == "source.types.id (only here)"


DECIDES_EFFECTS = {
    *("type", "statement", "callable", "each", "mode", "payload", "source", "on_exhausted"),
    *("url", "servers", "exchange", "topic", "key", "signing_secret", "headers", "conf"),
    *(
        "path",
        "table",
        "jdbc",
        "sql",
        "transform",
        "format",
        "options",
        "partition_by",
        "host_buckets",
    ),
}
"""The keys that instances must have alike, and that say nothing of what is stored."""


@pytest.mark.parametrize("handler", get_args(get_args(HandlerSettings)[0]))
def test_every_key_of_a_handler_is_classified(handler: type[BaseModel]) -> None:
    """A new key decides effects or not; one that says what deferred transactions mean belongs into `ORDERING`."""
    classified = DECIDES_EFFECTS | LEFT_OUT | set(ORDERING)
    assert set(handler.model_fields) - classified == set()


def test_handlers_that_order_by_another_key_are_named_with_their_store() -> None:
    before = effects()
    assert effects(handlers=handlers(order_by="user")).reordered(before.values) == ["shop"]
    assert effects(handlers=handlers(reliable=False)).reordered(before.values) == ["shop"]
    assert effects(handlers=handlers(order_by="host", timeout=3)).reordered(before.values) == []
    columns = {"source": {"columns": {"host_id": "tenant"}}}
    assert effects(**columns).reordered(before.values) == ["", "shop"]
    unordered = effects(handlers=handlers(order_by="none"))
    assert effects(handlers=handlers(reliable=False)).reordered(unordered.values) == []
    assert effects(handlers=handlers(order_by="user")).reordered_handlers(before.values) == [
        "handlers.shop.order_by"
    ]
