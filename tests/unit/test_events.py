"""Positions and events as values."""

from __future__ import annotations

import json
import pickle
from datetime import UTC, datetime
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relay.model.batch import DeadLetterReport, Outcome, TaskOutcome
from relay.model.events import COMMIT_FIELDS, EVENT_FIELDS, FIELDS, SQL_TYPES, Commit, Event, Lsn

ORDER = "11111111-2222-4333-8444-555555555555"


def event(**fields: str | None) -> Event:
    return Event(tuple(fields.get(name) for name in EVENT_FIELDS))


# Lsn.


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0/0", 0),
        ("16/B374D848", 0x16B374D848),
        ("16/b374d848", 0x16B374D848),
        ("0/A", 10),
        ("FFFFFFFF/FFFFFFFF", 2**64 - 1),
    ],
)
def test_a_position_is_read_as_postgresql_reads_it(text: str, value: int) -> None:
    assert Lsn.parse(text) == value


@given(st.integers(0, 2**64 - 1))
def test_a_position_is_printed_as_two_halves_in_hexadecimal(value: int) -> None:
    high, low = str(Lsn(value)).split("/")
    assert int(high, 16) * 2**32 + int(low, 16) == value
    # PostgreSQL pads neither half.
    assert (high, low) == (f"{int(high, 16):X}", f"{int(low, 16):X}")
    assert Lsn.parse(str(Lsn(value))) == value


@pytest.mark.parametrize(
    "text",
    [
        "",
        "/",
        "0",
        "0/",
        "/0",
        "0/0/0",
        "0/G",
        "0x1/0",
        "-1/0",
        "0/-1",
        "+1/0",
        "1_0/0",
        " 0/0",
        "0/0 ",
        "0 / 0",
        "0/100000000",
        "100000000/0",
        "٣/٣",
    ],
)
def test_what_postgresql_refuses_is_no_position(text: str) -> None:
    with pytest.raises(ValueError, match=r".*"):
        Lsn.parse(text)


def test_positions_compare_as_numbers_and_survive_pickling() -> None:
    assert Lsn.parse("9/0") < Lsn.parse("10/0")
    again = pickle.loads(pickle.dumps(Lsn.parse("16/B374D848")))
    assert (type(again), str(again)) == (Lsn, "16/B374D848")


# Event.


def test_every_field_has_a_type_and_each_property_is_named_after_its_field() -> None:
    assert set(SQL_TYPES) == set(EVENT_FIELDS) == set(FIELDS) | set(COMMIT_FIELDS)
    empty = event()
    assert [getattr(empty, name) for name in EVENT_FIELDS] == [None] * len(EVENT_FIELDS)


def test_properties_are_python_s_own_types() -> None:
    full = event(
        id=ORDER,
        host_id=ORDER.replace("1", "2"),
        user_id=ORDER.replace("1", "3"),
        aggregate_id="a-1",
        aggregate_version="9223372036854775807",
        aggregate_type="Order",
        event_type="order.placed",
        event_ts="2026-02-28 23:59:59.12+00",
        payload='{"amount": 12.50, "lines": [1, 2]}',
        metadata="[]",
        c_offset="7",
        transaction_id=ORDER.replace("1", "4"),
        transaction_ordinal="1",
        transaction_count="2",
        deliver_at="2026-03-02 08:00:00+00",
        commit_lsn="16/B374D848",
        commit_ts="2026-03-01 00:00:00+00",
        xid="4294967295",
    )
    assert {name: getattr(full, name) for name in EVENT_FIELDS} == {
        "id": UUID(ORDER),
        "host_id": UUID(ORDER.replace("1", "2")),
        "user_id": UUID(ORDER.replace("1", "3")),
        "aggregate_id": "a-1",
        "aggregate_version": 2**63 - 1,
        "aggregate_type": "Order",
        "event_type": "order.placed",
        "event_ts": datetime(2026, 2, 28, 23, 59, 59, 120_000, UTC),
        "payload": {"amount": 12.5, "lines": [1, 2]},
        "metadata": [],
        "c_offset": 7,
        "transaction_id": UUID(ORDER.replace("1", "4")),
        "transaction_ordinal": 1,
        "transaction_count": 2,
        "deliver_at": datetime(2026, 3, 2, 8, tzinfo=UTC),
        "commit_lsn": Lsn.parse("16/B374D848"),
        "commit_ts": datetime(2026, 3, 1, tzinfo=UTC),
        "xid": 4_294_967_295,
    }


@pytest.mark.parametrize("printed", ["infinity", "-infinity", "0044-03-15 12:00:00+00 BC"])
def test_a_time_that_python_does_not_have_is_an_error_and_its_text_is_not(printed: str) -> None:
    outside = event(event_ts=printed)
    assert outside.text("event_ts") == printed
    with pytest.raises(ValueError, match=r"isoformat|Invalid"):
        _ = outside.event_ts


def test_a_payload_that_a_handler_changes_stays_as_it_came_for_the_next() -> None:
    shared = event(payload='{"lines": []}')
    shared.payload["lines"].append(1)
    assert shared.payload == {"lines": []}


def test_json_null_and_sql_null_both_read_as_none_but_differ_as_text() -> None:
    assert event(payload="null").payload is None
    assert (event(payload="null").text("payload"), event().text("payload")) == ("null", None)


def test_an_unknown_field_is_a_key_error() -> None:
    with pytest.raises(KeyError):
        event().text("paylaod")


def test_text_gives_each_field_and_events_compare_and_pickle_by_value() -> None:
    fields = {name: f"the {name}" for name in EVENT_FIELDS}
    one = event(**fields)
    assert {name: one.text(name) for name in EVENT_FIELDS} == fields
    again = pickle.loads(pickle.dumps(one))
    assert again == one
    assert hash(again) == hash(one)


def test_events_that_differ_in_one_field_are_not_equal() -> None:
    assert event(id=ORDER) != event(id=ORDER, payload="{}")
    assert event(id=ORDER) != ORDER


def test_the_repr_says_which_event_but_never_what_is_in_it() -> None:
    secret = json.dumps({"card": "4111"})
    output = repr(
        event(
            id=ORDER,
            event_type="order.placed",
            c_offset="7",
            payload=secret,
            metadata=secret,
            aggregate_id="4111",
            user_id="4111",
        )
    )
    assert ORDER in output
    assert "order.placed" in output
    assert "7" in output
    assert "4111" not in output


# Commit and outcome.


def test_a_commit_gives_its_fields_in_the_order_of_their_names() -> None:
    commit = Commit(Lsn.parse("0/A"), Lsn.parse("0/B"), 825_638_400_000_000, 7)
    assert dict(zip(COMMIT_FIELDS, commit.fields, strict=True)) == {
        "commit_lsn": "0/A",
        "commit_ts": "2026-03-01 00:00:00+00",
        "xid": "7",
    }


def test_an_outcome_adds_up_its_tasks() -> None:
    dead = DeadLetterReport("t", Lsn(1), 3, "orders", "ValueError")
    outcome = Outcome(
        "inline",
        [
            TaskOutcome((0,), applied=5, skipped=1),
            TaskOutcome((1, 2), applied=2, skipped=4, dead=(dead,)),
        ],
    )
    assert (outcome.applied, outcome.skipped, outcome.dead) == (7, 5, [dead])
    assert pickle.loads(pickle.dumps(outcome.tasks)) == outcome.tasks
