"""Which handlers an event goes to."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relay.config.settings import Route
from relay.model.events import EVENT_FIELDS, Event
from relay.pipeline.routing import RouteRules


def event(**fields: str | None) -> Event:
    return Event(tuple(fields.get(name) for name in EVENT_FIELDS))


def router(*routes: dict[str, Any]) -> RouteRules:
    return RouteRules([Route.model_validate(route) for route in routes])


def matches(match: dict[str, Any], **fields: str | None) -> bool:
    return router({"match": match, "handlers": ["h"]}).handlers(event(**fields)) == ("h",)


def payload_matches(pattern: Any, payload: Any, path: str = "payload.value") -> bool:
    return matches({path: pattern}, payload=json.dumps(payload))


def test_a_payload_that_is_matched_is_not_kept() -> None:
    routes = router({"match": {"payload": "*gold*"}, "handlers": ["h"]})
    assert routes.handlers(event(payload='{"tier": "gold"}')) == ("h",)
    assert routes.choose.cache_info().currsize == 0


# Order of routes.


def test_the_first_matching_route_wins() -> None:
    routes = router(
        {"match": {"event_type": "order.*"}, "handlers": ["orders"]},
        {"match": {"event_type": "order.placed"}, "handlers": ["never"]},
        {"match": {}, "handlers": ["rest"]},
    )
    assert routes.handlers(event(event_type="order.placed")) == ("orders",)
    assert routes.handlers(event(event_type="payment")) == ("rest",)


def test_continue_goes_on_to_the_next_match_and_no_further() -> None:
    routes = router(
        {"match": {"event_type": "order.*"}, "handlers": ["orders", "audit"], "continue": True},
        {"match": {"event_type": "payment"}, "handlers": ["payments"]},
        {"match": {"aggregate_type": "Order"}, "handlers": ["audit", "totals"]},
        {"match": {}, "handlers": ["rest"]},
    )
    # Each handler once, in the order of the routes.
    found = routes.handlers(event(event_type="order.placed", aggregate_type="Order"))
    assert found == ("orders", "audit", "totals")
    assert routes.handlers(event(event_type="order.placed")) == ("orders", "audit", "rest")


def test_a_last_route_that_continues_still_counts() -> None:
    routes = router({"handlers": ["h"], "continue": True})
    assert routes.handlers(event(event_type="x")) == ("h",)


def test_nothing_matches() -> None:
    assert router().handlers(event(event_type="x")) == ()
    assert router({"match": {"event_type": "y"}, "handlers": ["h"]}).handlers(event()) == ()


def test_every_condition_of_a_route_must_hold() -> None:
    match = {"event_type": "order.*", "payload.tier": "gold"}
    gold, plain = '{"tier": "gold"}', '{"tier": "plain"}'
    assert matches(match, event_type="order.placed", payload=gold)
    assert not matches(match, event_type="order.placed", payload=plain)
    assert not matches(match, event_type="payment", payload=gold)


# Fields.


@pytest.mark.parametrize(
    ("pattern", "matching", "other"),
    [
        ("order.placed", ["order.placed"], ["order.placed.x", "Order.placed", "order_placed", ""]),
        ("order.*", ["order.", "order.placed", "order.line.added"], ["order", "reorder.x"]),
        ("*", ["", "anything", "two\nlines"], []),
        ("v?", ["v1", "v2"], ["v", "v10"]),
        ("v[0-3]", ["v0", "v3"], ["v4", "v[0-3]"]),
        ("[!v]*", ["x1"], ["v1", ""]),
        (["a", "b.*"], ["a", "b.c"], ["c", "b"]),
        ("a|b", ["a|b"], ["a", "b"]),
        ("a.b", ["a.b"], ["axb"]),
    ],
)
def test_a_pattern_is_a_glob_over_the_whole_text(
    pattern: str | list[str], matching: list[str], other: list[str]
) -> None:
    for text in matching:
        assert matches({"event_type": pattern}, event_type=text), text
    for text in other:
        assert not matches({"event_type": pattern}, event_type=text), text


def test_no_pattern_matches_null() -> None:
    assert not matches({"aggregate_type": "*"}, aggregate_type=None)
    assert not matches({"metadata.x": "*"}, metadata=None)
    assert not payload_matches("*", {"value": None})


def test_a_number_matches_a_field_that_holds_it() -> None:
    assert matches({"aggregate_version": 3}, aggregate_version="3")
    assert matches({"aggregate_version": [1, 3]}, aggregate_version="3")
    assert not matches({"aggregate_version": 3}, aggregate_version="33")


def test_a_host_is_named_by_its_id() -> None:
    host = "11111111-2222-4333-8444-555555555555"
    assert matches({"host_id": host}, host_id=host)
    assert not matches({"host_id": host}, host_id=host.replace("1", "2"))


# Paths.


@pytest.mark.parametrize(
    ("pattern", "value", "expected"),
    [
        ("gold", "gold", True),
        ("g*", "gold", True),
        ("gold", "Gold", False),
        (1, 1, True),
        (1, 1.0, True),
        (1, "1", True),
        ("1", 1, True),
        ("1.5", 1.5, True),
        (1.5, 1.5, True),
        (1, 2, False),
        (1, 11, False),
        (True, True, True),
        (True, False, False),
        ("true", True, True),
        ("false", True, False),
        (1, True, False),
        (0, False, False),
        (True, 1, False),
        (False, 0, False),
        ([1, "gold"], "gold", True),
        ([1, "gold"], 2, False),
        ("*", {"any": "object"}, True),
        ("*", [], True),
        ("*", False, True),
        ("", "", True),
    ],
)
def test_a_value_at_a_path(pattern: Any, value: Any, expected: bool) -> None:
    assert payload_matches(pattern, {"value": value}) is expected


@pytest.mark.parametrize(
    ("path", "payload", "found"),
    [
        ("payload.customer.tier", {"customer": {"tier": "x"}}, True),
        ("payload.lines.1.sku", {"lines": [{"sku": "y"}, {"sku": "x"}]}, True),
        ("payload.0", ["x"], True),
        ("payload.1", {"1": "x"}, True),
        ("payload.lines.1.sku", {"lines": [{"sku": "x"}]}, False),
        ("payload.lines.-1", {"lines": ["x"]}, False),
        ("payload.lines.sku", {"lines": [{"sku": "x"}]}, False),
        ("payload.customer.tier", {"customer": "x"}, False),
        ("payload.customer.tier", {"customer": None}, False),
        ("payload.customer.tier", {"customer.tier": "x"}, False),
        ("payload.customer", "x", False),
        ("payload.customer", None, False),
        ("payload.²", ["x", "x", "x"], False),
    ],
)
def test_a_path_leads_through_objects_and_arrays(path: str, payload: Any, found: bool) -> None:
    assert payload_matches("x", payload, path) is found


def test_metadata_has_paths_of_its_own() -> None:
    match = {"metadata.source": "web"}
    assert matches(match, metadata='{"source": "web"}', payload='{"source": "app"}')
    assert not matches(match, metadata='{"source": "app"}', payload='{"source": "web"}')


def test_a_text_that_is_no_json_matches_no_path() -> None:
    assert not matches({"payload.x": "*"}, payload="plain text")


# What jsonb may hold but Python's parser would rather not.


def test_a_long_number_elsewhere_in_the_payload_does_not_hide_the_value() -> None:
    """jsonb holds numbers of up to 131072 digits; Python refuses to read more than 4300 by default."""
    payload = f'{{"number": {"9" * 5000}, "tier": "gold"}}'
    assert matches({"payload.tier": "gold"}, payload=payload)


@pytest.mark.parametrize("levels", [900, 10_000])
def test_a_deep_payload_is_routed(levels: int) -> None:
    """PostgreSQL takes jsonb of 10000 levels with its default max_stack_depth; Python's decoder gives up at 1000."""
    payload = f'{{"deep": {"[" * levels}{"]" * levels}, "tier": "gold"}}'
    assert matches({"payload.tier": "gold"}, payload=payload)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=10,
)


@given(JSON, st.lists(st.text("abc012", min_size=1, max_size=2), min_size=1, max_size=3))
def test_any_payload_is_routed_without_an_error(payload: Any, steps: list[str]) -> None:
    path = ".".join(["payload", *steps])
    found: Any = payload
    for step in steps:
        if isinstance(found, dict):
            found = found.get(step)
        elif isinstance(found, list) and step.isdecimal() and int(step) < len(found):
            found = found[int(step)]
        else:
            found = None
    assert payload_matches("*", payload, path) is (found is not None)
