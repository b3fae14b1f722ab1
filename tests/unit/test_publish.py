"""Business transactions from JSON, and made-up ones."""

from __future__ import annotations

import json
import uuid
from collections import Counter
from itertools import islice
from typing import Any

import pytest

from relay.admin.publish import PublishCall, business_transactions, parse
from relay.faults import ConfigurationError

HOST = "11111111-2222-4333-8444-555555555555"
EVENT: dict[str, Any] = {
    "event_type": "order.placed",
    "aggregate_type": "Order",
    "aggregate_id": "1",
    "payload": {},
}
ONE = {"host_id": HOST, "events": [EVENT]}
TWO = {"host_id": HOST, "user_id": HOST, "transaction_id": HOST, "events": [EVENT, EVENT]}
PARSED = [PublishCall(HOST, None, [EVENT]), PublishCall(HOST, HOST, [EVENT, EVENT], HOST)]


def refusal(text: str) -> str:
    with pytest.raises(ConfigurationError) as raised:
        parse(text, "events.json")
    line = str(raised.value)
    assert "\n" not in line
    return line


# Parsing.


@pytest.mark.parametrize(
    "text",
    [
        json.dumps([ONE, TWO]),
        json.dumps([ONE, TWO], indent=2),
        f"{json.dumps(ONE)}\n{json.dumps(TWO)}\n",
        f"\n{json.dumps(ONE)}\n\n  {json.dumps(TWO)}",
    ],
    ids=["array", "indented array", "lines", "lines with gaps"],
)
def test_an_array_and_lines_say_the_same(text: str) -> None:
    assert parse(text, "events.json") == PARSED


@pytest.mark.parametrize("indent", [None, 2])
def test_a_single_object_is_one_transaction(indent: int | None) -> None:
    assert parse(json.dumps(TWO, indent=indent), "events.json") == PARSED[1:]


@pytest.mark.parametrize("text", ["", "\n \n", "[]"])
def test_nothing_is_no_transaction(text: str) -> None:
    assert parse(text, "events.json") == []


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        (5, "must be an object with host_id and events"),
        ([ONE], "must be an object with host_id and events"),
        ({"events": [EVENT]}, "host_id is missing"),
        ({"host_id": HOST}, "events is missing"),
        ({**ONE, "hots_id": HOST}, "hots_id is not a key; the keys are events, host_id, "),
        ({**ONE, "events": []}, "events must be an array of at least one event"),
        ({**ONE, "events": EVENT}, "events must be an array of at least one event"),
        ({**ONE, "events": [5]}, "event 1: must be an object"),
        (
            {**ONE, "events": [EVENT, {**EVENT, "deliver-at": "2030-01-01"}]},
            "event 2: deliver-at is not a key; the keys are aggregate_id, ",
        ),
        ({**ONE, "events": None}, "events must be an array of at least one event"),
        ({**ONE, "host_id": 5}, "host_id"),
        ({**ONE, "host_id": None}, "host_id"),
        ({**ONE, "host_id": {"id": HOST}}, "host_id"),
        ({**ONE, "user_id": 5}, "user_id"),
        ({**ONE, "transaction_id": [HOST]}, "transaction_id"),
    ],
)
@pytest.mark.parametrize("form", ["array", "lines"])
def test_a_wrong_transaction_is_named_with_its_location(
    wrong: Any, problem: str, form: str
) -> None:
    items = [ONE, wrong, ONE]
    text = json.dumps(items) if form == "array" else "\n".join(map(json.dumps, items))
    assert refusal(text).startswith(f"events.json: transaction 2: {problem}")


def test_a_line_that_is_no_json_is_named_with_its_number() -> None:
    text = f"{json.dumps(ONE)}\n\n{{host_id: 5}}\n{json.dumps(ONE)}"
    assert refusal(text).startswith("events.json:3: is not JSON: ")


def test_a_mistake_in_an_indented_document_is_named_with_its_line() -> None:
    text = json.dumps([ONE, TWO], indent=2).replace('"host_id"', "host_id", 1)
    wrong = 1 + next(n for n, line in enumerate(text.splitlines()) if " host_id" in line)
    assert refusal(text).startswith(f"events.json:{wrong}: is not JSON: ")


# Making up.


def made_up(count: int, hosts: int = 8, seed: int | None = 1) -> list[PublishCall]:
    return list(business_transactions(count, hosts, seed))


def test_the_same_seed_makes_the_same_transactions() -> None:
    assert made_up(20, seed=7) == made_up(20, seed=7)
    assert made_up(20, seed=7) != made_up(20, seed=8)


def test_without_a_seed_every_run_is_another() -> None:
    assert made_up(3, seed=None) != made_up(3, seed=None)


def test_more_of_the_same_seed_begins_alike() -> None:
    assert made_up(50)[:20] == made_up(20)


def test_a_million_are_made_one_by_one() -> None:
    assert len(list(islice(business_transactions(1_000_000, seed=1), 3))) == 3


def test_there_are_as_many_as_asked_over_as_many_hosts_as_asked() -> None:
    found = made_up(500, hosts=5)
    hosts = Counter(business.host_id for business in found)
    assert len(found) == 500
    assert len(hosts) == 5
    assert min(hosts.values()) > 50


def test_a_transaction_is_what_relay_publish_takes() -> None:
    assert parse(json.dumps([{"host_id": b.host_id, "events": b.events} for b in made_up(50)]), "x")
    for business in made_up(50):
        uuid.UUID(business.host_id)
        assert business.user_id is not None
        uuid.UUID(business.user_id)
        for event in business.events:
            assert set(EVENT) < set(event) <= {*EVENT, "aggregate_version", "metadata"}


def test_each_transaction_is_one_order_from_its_placing_on() -> None:
    seen: set[str] = set()
    for business in made_up(300):
        assert 2 <= len(business.events) <= 8
        first, *rest = business.events
        assert first["event_type"] == "order.placed"
        assert {event["aggregate_id"] for event in business.events} == {first["payload"]["order"]}
        versions = [
            e["aggregate_version"] for e in business.events if e["aggregate_type"] == "Order"
        ]
        assert versions == list(range(1, len(versions) + 1))
        lines = [e["payload"]["amount"] for e in rest if e["event_type"] == "order.line_added"]
        assert sum(lines) == pytest.approx(first["payload"]["amount"])
        seen.update(event["event_type"] for event in business.events)
    assert seen == {"order.placed", "order.line_added", "payment.captured", "order.shipped"}
