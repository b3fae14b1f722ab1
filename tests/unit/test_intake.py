"""What others send is read exactly, and every fault in it is named."""

from __future__ import annotations

import asyncio
import json
import uuid
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from relay.config.intake import NatsSource
from relay.event_types.event_type import EventType
from relay.event_types.upcasting import Upcasting
from relay.faults import Undelivered
from relay.intake.messages import (
    MOST_EVENTS,
    Invalid,
    MessageReader,
    NotPermitted,
    TooMany,
    derived,
    json_path,
)
from relay.intake.nats import NatsFeed

HOST = "6f1f5a3e-3c1c-4f6e-9f5b-0d8f3f1f2a11"
READER = MessageReader()


def placed(**more: Any) -> dict[str, Any]:
    return {"host_id": HOST, "event_type": "order.placed", "payload": {"amount": 1}, **more}


def body(document: Any) -> bytes:
    return json.dumps(document).encode()


def faults(document: Any, reader: MessageReader = READER) -> dict[str, str]:
    with pytest.raises(Invalid) as raised:
        reader.read(document if isinstance(document, bytes) else body(document))
    return {each.path: each.message for each in raised.value.faults}


TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXTS,
    lambda inner: st.lists(inner) | st.dictionaries(TEXTS, inner),
    max_leaves=10,
)
EVENTS = st.fixed_dictionaries(
    {"host_id": st.just(HOST), "event_type": TEXTS.filter(bool), "payload": VALUES},
    optional={
        "id": st.uuids().map(str),
        "user_id": st.just("00000000-0000-0000-0000-000000000001"),
        "aggregate_type": TEXTS | st.none(),
        "aggregate_id": TEXTS | st.integers(),
        "aggregate_version": st.integers(-(2**63) + 1, 2**63 - 1),
        "metadata": st.dictionaries(TEXTS, VALUES) | st.none(),
        "event_ts": st.just("2026-11-27T09:30:00+01:00"),
        "deliver_at": st.just("2026-11-27T09:30:00Z"),
    },
)


@given(EVENTS)
def test_a_valid_event_is_published_as_it_came(event: dict[str, Any]) -> None:
    submission = READER.read(body(event))
    (published,) = json.loads(submission.events)
    assert submission.host_id == HOST
    assert submission.user_id == event.pop("user_id", None)
    del event["host_id"]
    assert published == {
        "aggregate_type": None,
        "aggregate_id": None,
        **{key: value for key, value in event.items() if value is not None or key == "payload"},
        "id": submission.ids[0],
    }


@given(VALUES)
def test_any_other_json_is_refused_with_paths(document: Any) -> None:
    with pytest.raises(Invalid) as raised:
        READER.read_document(document)
    assert all(each.path.startswith("$") for each in raised.value.faults)


BROKEN: dict[str, list[Any]] = {
    "host_id": ["x", None, 5],
    "user_id": ["x", 5],
    "id": ["x", None],
    "event_type": ["", None, 5, "a\0b", "\ud800"],
    "aggregate_type": [5, "\0"],
    "aggregate_id": [True, [], "\0"],
    "aggregate_version": [2**63, 1.5, "1", True],
    "event_ts": ["yesterday", "2026-11-27T09:30:00", 5, "2026-11-27\ud80009:30:00Z"],
    "deliver_at": ["2026-11-27", "2026-13-01T00:00:00Z", "infinity", "2026-11-27\09:30:00Z"],
    "metadata": [[], "x", {"a": "\0"}, {"\0": 1}, {"a": {"b": ["\ud800"]}}],
    "payload": ["\0", {"a": ["\0"]}],
    "unknown": [1],
}


@given(
    st.lists(
        st.sampled_from(sorted(BROKEN)).flatmap(
            lambda key: st.tuples(st.just(key), st.sampled_from(BROKEN[key]))
        ),
        min_size=1,
        unique_by=lambda each: each[0],
    )
)
def test_every_fault_is_named(broken: list[tuple[str, Any]]) -> None:
    found = faults([placed(), placed(**dict(broken))])
    for key, _ in broken:
        assert any(path.startswith(f"$[1].{key}") for path in found), key
    assert len(found) == len(broken)


def test_faults_of_the_whole() -> None:
    assert faults(b"[1,") == {"$": "is not JSON: Expecting value at line 1, column 4"}
    assert faults(b"\xff") == {"$": "is not UTF-8 text"}
    assert faults(b"NaN") == {"$": "is not JSON: NaN is not JSON"}
    assert faults([]) == {"$": "has no event"}
    assert faults(5) == {"$": "must be an object"}
    assert faults({}) == dict.fromkeys(("$.host_id", "$.event_type", "$.payload"), "is missing")
    with pytest.raises(TooMany):
        READER.read(body([placed()] * (MOST_EVENTS + 1)))


def test_a_list_is_one_business_transaction() -> None:
    other = "00000000-0000-0000-0000-000000000002"
    twice = str(uuid.uuid4())
    found = faults(
        [placed(id=twice), placed(host_id=other), placed(user_id=other), placed(id=twice.upper())]
    )
    assert list(found) == ["$[1].host_id", "$[2].user_id", "$[3].id"]


def test_numbers_keep_their_digits() -> None:
    text = '{"a": 0.1000000000000000055, "b": 12345678901234567890123, "c": 1e400}'
    document = f'{{"host_id": "{HOST}", "event_type": "t", "payload": {text}}}'
    assert text in READER.read(document.encode()).events


@pytest.mark.parametrize("number", ["1e131071", "1E-16383", "-2.5e+300", "1e300"])
def test_numbers_whose_digits_would_fill_the_memory_of_a_database_are_refused(number: str) -> None:
    """Few requests with them stopped all who publish: 140,000 bytes were 2 GB of text."""
    digits = abs(int(number.lower().partition("e")[2]))
    for count, is_refused in ((2, False), (16 * 1024 * 1024 // digits + 1, True)):
        numbers = ",".join([number] * count)
        document = f'{{"host_id": "{HOST}", "event_type": "t", "payload": [[{numbers}]]}}'
        if not is_refused:
            READER.read(document.encode())
            continue
        with pytest.raises(TooMany):
            READER.read(document.encode())


def test_depth_is_bounded() -> None:
    deep = f'{{"host_id": "{HOST}", "event_type": "t", "payload": {"[" * 90_000}{"]" * 90_000}}}'
    ((path, message),) = faults(deep.encode()).items()
    assert path.startswith("$.payload[0][0]")
    assert message == "is nested too deeply"


def test_ids_are_derived_from_the_sender_the_key_and_the_ordinal() -> None:
    def ids(*named: str) -> tuple[str, ...]:
        return READER.read(body([placed(), placed()]), id_of=derived(*named)).ids

    assert ids("shop", "1") == ids("shop", "1")
    assert len({*ids("shop", "1"), *ids("shop", "2"), *ids("other", "1")}) == 6
    # What is between the parts is no part of them.
    assert ids("a", "b1") != ids("ab", "1")
    assert derived("shop", "1")(1) == uuid.UUID("c6932e30-2738-50fd-b238-88e6e6b0b535")
    own = str(uuid.uuid4())
    assert READER.read(body(placed(id=own)), id_of=derived("shop", "1")).ids == (own,)


def test_rights_come_before_the_faults_of_a_type() -> None:
    def shop_only(host: str, event_type: str) -> bool:
        return host == HOST and event_type.startswith("order.")

    READER.read(body(placed(host_id=HOST.upper())), shop_only)
    for event in (placed(event_type="user.x"), placed(host_id=str(uuid.uuid4()))):
        with pytest.raises(NotPermitted):
            READER.read(body([placed(), event]), shop_only)


class Line(BaseModel):
    sku: str
    amount: int


class Placed(BaseModel, extra="forbid"):
    lines: list[Line]


TYPED = MessageReader(
    Upcasting(
        [EventType("order.placed", 2, Placed, {1: lambda payload: {"lines": payload["items"]}})]
    )
)


def test_a_payload_is_validated_by_the_declared_type() -> None:
    good = [{"sku": "a", "amount": 1}]
    versioned = placed(payload={"lines": good}, metadata={"version": 2})
    TYPED.read(body(versioned))
    # A publisher may still send an older version.
    TYPED.read(body(placed(payload={"items": good})))
    bad = placed(
        payload={"lines": [{"sku": 5, "amount": "x"}, {"sku": "a"}], "secret name": 1},
        metadata={"version": 2},
    )
    assert faults([versioned, bad], TYPED) == {
        "$[1].payload.lines[0].sku": "Input should be a valid string",
        "$[1].payload.lines[0].amount": "Input should be a valid integer, unable to parse string as an integer",
        "$[1].payload.lines[1].amount": "Field required",
        "$[1].payload.*": "Extra inputs are not permitted",
    }
    assert faults(placed(metadata={"version": 3}), TYPED) == {
        "$.metadata.version": "an unknown version; known are 1 to 2"
    }
    assert list(faults(placed(payload=None), TYPED)) == ["$.payload"]
    # Types that are not declared are passed on.
    TYPED.read(body(placed(event_type="order.paid")))


def test_all_faults_of_a_payload_are_named() -> None:
    lines = [{"sku": 5, "amount": 1}] * 60
    found = faults(placed(payload={"lines": lines}, metadata={"version": 2}), TYPED)
    assert len(found) == 60


def test_json_path() -> None:
    assert json_path(()) == "$"
    assert json_path((1, "payload", "a b", "it's", 0)) == "$[1].payload['a b']['it\\'s'][0]"


def test_a_broker_that_is_away_is_named() -> None:
    """Not by the class of the client's error alone, which says nothing to an operator."""
    settings = NatsSource(type="nats", servers=["nats://127.0.0.1:1"], stream="s", consumer="c")
    with pytest.raises(Undelivered, match="no server accepts a connection"):
        asyncio.run(NatsFeed("orders", settings).__aenter__())
