"""What of a configuration decides effects, and how a difference is named."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from pydantic import BaseModel

from relay.config.effects import Effects, _omitted, _shown
from relay.config.settings import Settings
from relay.config.types import Mark, Own, Section
from relay.model.events import SQL_TYPES
from tests.process import ROOT
from tests.reference import TYPES

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


def unmarked(model: type[BaseModel], above: str = "") -> Iterator[str]:
    """The keys without a mark, neither of their own nor of the section that they are in."""
    for name, field in model.model_fields.items():
        key = f"{above}{field.alias or name}"
        marks = [each for each in field.metadata if isinstance(each, Mark)]
        if len(marks) > 1:
            yield f"{key} has {len(marks)} marks"
        elif (
            not marks
            and inspect.isclass(field.annotation)
            and issubclass(field.annotation, Section)
        ):
            yield from unmarked(field.annotation, f"{key}.")
        elif not marks:
            yield key


HANDLERS = list(TYPES.values())


def test_every_key_of_a_configuration_has_a_mark() -> None:
    """A new key decides effects or not; one that says what deferred transactions mean belongs into `ORDERING`."""
    keys = [*unmarked(Settings), *(key for each in HANDLERS for key in unmarked(each))]
    assert keys == []


def test_keys_are_without_a_mark_only_where_none_was_written() -> None:
    class Added(Section):
        new: int = 1

    class Above(Section):
        size: Own[int] = 1
        section: Added = Added()

    assert list(unmarked(Above)) == ["section.new"]


LEFT_OUT = {
    *("retry", "timeout", "rate_limit", "concurrency", "circuit_breaker", "tls", "tls_first"),
    *(
        "compress_above",
        "statuses",
        "private_addresses",
        "max_length",
        "max_events",
        "every",
        "bootstrap",
        "start",
    ),
}
"""The keys of handlers that decided no effects when the first rows were stored."""


def as_first_stored(settings: Settings) -> dict[str, Any]:
    """The values that decide effects, by the keys that were listed before each key had a mark."""
    source = settings.source
    values: dict[str, Any] = {
        "partitions": settings.partitions,
        "unrouted": settings.unrouted,
        "source.table": source.table,
        "source.message_prefix": source.message_prefix,
        "handlers": list(settings.handlers),
    }
    values |= {f"source.columns.{field}": column for field, column in source.columns.items()}
    values |= {
        f"source.types.{field}": kind
        for field, kind in source.types.items()
        if kind != SQL_TYPES[field]
    }
    values |= {f"source.headers.{name}": column for name, column in source.headers.items()}
    for name, handler in settings.handlers.items():
        given = handler.model_dump(exclude=LEFT_OUT, exclude_defaults=True)
        values |= {f"handlers.{name}.{key}": value for key, value in given.items()}
    if isinstance(settings.events, str):
        values["events"] = settings.events
    else:
        for name, each in settings.events.items():
            values[f"events.{name}"] = each.model_dump(exclude_defaults=True)
    for index, route in enumerate(settings.routes):
        values[f"routes.{index}"] = route.model_dump(by_alias=True, exclude_defaults=True)
    return values


def samples() -> Iterator[Any]:
    """The configurations of the project, and one with every handler and every key that config/relay.yaml shows."""
    for file in sorted([*(ROOT / "config").rglob("*.yaml"), *(ROOT / "examples").rglob("*.yaml")]):
        for document in yaml.safe_load_all(file.read_text()):
            texts = document.get("data", {}) if isinstance(document, dict) else {}
            contents = [document, *map(yaml.safe_load, texts.values())]
            for content in contents:
                if isinstance(content, dict) and "routes" in content:
                    yield pytest.param(content, id=str(file.relative_to(ROOT)))
    text = (ROOT / "config" / "relay.yaml").read_text().partition("\nhandlers:")[2]
    shown = re.sub(r"^  # ", "  ", text.partition("\n\n")[0], flags=re.MULTILINE)
    all_handlers = yaml.safe_load(f"handlers:{shown}".replace("dsn: …", "dsn: host=lake"))
    yield pytest.param({**all_handlers, "routes": []}, id="every handler")
    for key, value in SOURCES.items():
        yield pytest.param({"source": value, "routes": []}, id=key)


SOURCES: dict[str, dict[str, Any]] = {
    "profile": {"profile": "debezium"},
    "types": {"types": {"id": "uuid", "host_id": "text"}, "columns": {"user_id": None}},
    "headers": {"headers": ["region"], "table": "shop.outbox"},
    "messages": {"message_prefix": "shop", "mode": "wal"},
}


@pytest.mark.parametrize("content", list(samples()))
def test_the_effects_of_configurations_are_those_that_are_stored(
    content: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Instances that run compare them with their own, so that other ones would not start beside these."""
    for name in ("OUTBOX_DSN", "POD_IP", "SPARK_SECRET", "SIGNING_SECRET"):
        monkeypatch.setenv(name, "whsec_aHVudGVyMg==" if name == "SIGNING_SECRET" else "host=here")
    monkeypatch.setenv("AMQP_URL", "amqp://broker.example")
    settings = Settings(**content)
    former = as_first_stored(settings)
    found = Effects.of(settings).values
    kept = {key for key, value in former.items() if not _omitted(value)}
    assert set(found) == kept
    for key in kept - {key for key in kept if key.endswith(".url")}:
        assert found[key] == _shown(former[key])


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
