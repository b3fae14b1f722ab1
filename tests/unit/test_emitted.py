"""Messages of pg_logical_emit_message as rows: each event as it was written, or what is wrong with it."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from relay.config.effects import Effects
from relay.config.settings import Settings
from relay.config.source import SourceSettings
from relay.model.events import FIELDS, NOTE, Event
from relay.model.transactions import Rows, Transactions, Undecoded
from relay.model.tuples import ProtocolError, RowDecoder
from relay.source.decode.assembler import Assembler
from relay.source.decode.emitted import Emitted
from relay.source.decode.translation import Encoding
from tests.unit import wire

PREFIX = "shop.outbox"
HOST = "00000000-0000-4000-8000-000000000001"
MAPPING = {name: name for name in FIELDS}
TIME = 800_000_000_000_000
EVENT = {"host_id": HOST, "event_type": "order.placed", "payload": {"amount": 1}}

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=10)
NUMBERS = st.integers() | st.floats(allow_nan=False, allow_infinity=False)
JSON = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)


def message(content: bytes, lsn: int = 500, flags: int = 1, prefix: str = PREFIX) -> bytes:
    return wire.logical_message(flags, lsn, prefix, content)


def received(
    *messages: bytes, types: dict[str, Any] | None = None, encoding: Encoding | None = None
) -> Transactions:
    """One commit of messages, as the source takes it."""
    source = SourceSettings.model_validate(
        {"message_prefix": PREFIX, "mode": "wal", "types": types or {}}
    )
    emitted = Emitted(PREFIX, source.sql_types)
    assembler = Assembler(("public", "t"), source.mapping, 1 << 20, emitted=emitted)
    assembler.reset(encoding)
    assembler.feed([wire.begin(900, TIME, 7), *messages, wire.commit(900, 1000, TIME)])
    found = assembler.fetch()
    return Transactions.joined(found) if found else Transactions.none()


def events(transactions: Transactions) -> list[Event]:
    decoder = RowDecoder(transactions.columns, MAPPING)
    return [decoder.event(row, each.commit.fields) for each in transactions for row in each.tuples]


def notes(transactions: Transactions) -> list[str | None]:
    decoder = RowDecoder(transactions.columns, MAPPING)
    rows = Rows.of([row for each in transactions for row in each.tuples])
    (found,) = decoder.columns(rows, [NOTE])
    return [None if each is None else each.decode() for each in found]


def one(content: Any, **more: Any) -> tuple[Event, str | None]:
    found = received(message(json.dumps(content).encode()), **more)
    (event,) = events(found)
    (note,) = notes(found)
    return event, note


def test_an_event_has_what_it_says() -> None:
    said = {
        **{"id": HOST.upper(), "host_id": HOST, "user_id": HOST, "transaction_id": HOST},
        **{"aggregate_id": 42, "aggregate_type": "Order", "aggregate_version": 7},
        **{"event_type": "order.placed", "event_ts": "2026-11-21T11:00:00.5+01:00"},
        **{"payload": {"a": 0.1}, "metadata": {"k": None}, "deliver_at": "2026-11-22T00:00:00Z"},
    }
    event, note = one(said)
    assert note is None
    assert event.row[: len(FIELDS)] == (
        *(HOST, HOST, HOST, "42", "7", "Order", "order.placed", "2026-11-21 10:00:00.5+00"),
        *('{"a": 0.1}', '{"k": null}', None, HOST, "1", "1", "2026-11-22 00:00:00+00"),
    )
    assert event.commit_lsn == 900


def test_what_an_event_does_not_say_is_the_same_whenever_it_comes() -> None:
    content = json.dumps([EVENT, EVENT]).encode()
    first, second = events(received(message(content)))
    assert [first, second] == events(received(message(content)))
    assert isinstance(first.id, UUID)
    assert first.id != second.id
    assert first.transaction_id == second.transaction_id
    assert first.event_ts == first.commit_ts == datetime(2025, 5, 8, 6, 13, 20, tzinfo=UTC)
    assert [(each.transaction_ordinal, each.transaction_count) for each in (first, second)] == [
        (1, 2),
        (2, 2),
    ]
    (elsewhere,) = events(received(message(json.dumps(EVENT).encode(), lsn=501)))
    assert {elsewhere.id, elsewhere.transaction_id}.isdisjoint(
        {first.id, second.id, first.transaction_id}
    )


def test_messages_of_a_commit_are_business_transactions_of_their_own_unless_they_name_one() -> None:
    apart = [message(json.dumps(EVENT).encode(), lsn) for lsn in (1, 2)]
    assert len(received(*apart)) == 2
    named = json.dumps({**EVENT, "transaction_id": HOST}).encode()
    assert len(received(message(named, 1), message(named, 2))) == 1


@given(st.lists(st.fixed_dictionaries({"payload": JSON, "metadata": JSON}), min_size=1, max_size=3))
def test_payloads_come_as_they_were_written(said: list[dict[str, Any]]) -> None:
    content = json.dumps([{**EVENT, **each} for each in said]).encode()
    found = received(message(content))
    assert notes(found) == [None] * len(said)
    assert [{"payload": each.payload, "metadata": each.metadata} for each in events(found)] == said


def test_numbers_keep_every_digit() -> None:
    digits = b"12345678901234567890.0000000000000000000010"
    head = json.dumps({"host_id": HOST, "event_type": "e"}).encode()[:-1]
    (event,) = events(received(message(head + b', "payload": ' + digits + b"}")))
    assert event.text("payload") == digits.decode()


@given(
    JSON
    | st.fixed_dictionaries(
        dict.fromkeys(EVENT, JSON), optional=dict.fromkeys(set(FIELDS) - set(EVENT), JSON)
    )
)
def test_any_json_is_an_event_or_says_why_not(content: Any) -> None:
    found = received(message(json.dumps(content).encode()))
    output = notes(found)
    assert len(output) == max(1, len(content) if isinstance(content, list) else 1)
    for event, note in zip(events(found), output, strict=True):
        if note is None:
            assert event.host_id is not None
            assert event.event_type is not None
            assert event.id is not None
        else:
            assert note.endswith("(message at 0/1F4)")


@given(st.binary(max_size=40))
def test_any_bytes_are_events_or_a_dead_letter(content: bytes) -> None:
    assert received(message(content)).events >= 1


@pytest.mark.parametrize(
    ("said", "says"),
    [
        ({"host_id": None}, "host_id is missing"),
        ({"host_id": "nobody"}, "host_id is not of type uuid"),
        ({"event_type": None}, "event_type is missing"),
        ({"event_type": {"a": 1}}, "event_type is not text"),
        ({"aggregate_version": 1.5}, "aggregate_version is not a whole number"),
        ({"aggregate_version": "s3cret"}, "aggregate_version is not of type bigint"),
        ({"aggregate_version": 2**63}, "aggregate_version is out of range"),
        ({"event_ts": "2026-11-21T11:00:00"}, "event_ts has no time zone"),
        ({"event_ts": "s3cret", "id": 7}, "id is not of type uuid; event_ts is not a time such as"),
    ],
)
def test_a_field_that_is_wrong_is_named_without_its_value(said: dict[str, Any], says: str) -> None:
    event, note = one({**EVENT, **said})
    assert note is not None
    assert note.startswith(says)
    assert "s3cret" not in note
    # The dead letter has what the event says otherwise.
    assert event.payload == EVENT["payload"]


@pytest.mark.parametrize(
    ("content", "says", "payload"),
    [
        (b"{", "it is not JSON", "{"),
        (b"", "it is not JSON", ""),
        (b"\xff", "it is not text", "\\xff"),
        (b"[]", "it has no events", "[]"),
        (b"7", "it is not a JSON object", "7"),
        (
            b'{"host_id": "x"}',
            "host_id is not of type uuid; event_type is missing; payload is missing",
            '{"host_id": "x"}',
        ),
        (b"[" * 100_000, "it is not JSON", "[" * 100_000),
        (
            json.dumps({**EVENT, "payload": "HALF"}).replace("HALF", "\\ud800").encode(),
            "payload is not of type jsonb",
            json.dumps({**EVENT, "payload": "HALF"}).replace("HALF", "\\ud800"),
        ),
    ],
)
def test_a_message_that_is_no_event_keeps_its_content(
    content: bytes, says: str, payload: Any
) -> None:
    found = received(message(content))
    (note,), (event,) = notes(found), events(found)
    assert note == f"{says} (message at 0/1F4)"
    assert event.payload == payload


def test_ids_of_other_types() -> None:
    types = {"id": "bigint", "host_id": "text", "transaction_id": "bigint"}
    event, note = one({**EVENT, "id": 2**60, "host_id": 7, "transaction_id": "5"}, types=types)
    assert (note, event.text("id"), event.host_id) == (None, str(2**60), "7")
    # No number stands for a position.
    _, note = one(EVENT, types=types)
    assert note == "id is missing; transaction_id is missing (message at 0/1F4)"


def test_messages_in_another_encoding_are_read() -> None:
    content = json.dumps({**EVENT, "payload": "é"}, ensure_ascii=False).encode("latin-1")
    found = received(message(content), encoding=Encoding("LATIN1", "iso8859-1"))
    assert (notes(found), events(found)[0].payload) == ([None], "é")


def test_other_messages_and_tables_are_left_out() -> None:
    emitted = Emitted(PREFIX, SourceSettings().sql_types)
    assembler = Assembler(("public", "t"), MAPPING, 1 << 20, emitted=emitted)
    content = json.dumps(EVENT).encode()
    columns = [(False, "id", 25, -1)]
    assembler.feed(
        [
            message(content, flags=0),
            wire.begin(900, TIME, 7),
            message(content, prefix="other"),
            wire.relation(16_384, "public", "t", "d", columns),
            wire.insert(16_384, [b"1"]),
            wire.commit(900, 1000, TIME),
        ]
    )
    assert assembler.fetch() == []
    assert (assembler.ignored(), assembler.ignored()) == (1, 0)
    with pytest.raises(ProtocolError):
        Emitted(PREFIX, SourceSettings().sql_types).inserts([message(content)])


def test_a_large_commit_of_messages_goes_through_a_file() -> None:
    emitted = Emitted(PREFIX, SourceSettings().sql_types)
    assembler = Assembler(("public", "t"), MAPPING, 2_000, emitted=emitted)
    content = json.dumps({**EVENT, "transaction_id": HOST}).encode()
    some = [message(content, lsn) for lsn in range(50)]
    assembler.feed([wire.begin(900, TIME, 7), *some[:25]])
    assembler.feed([*some[25:], wire.commit(900, 1000, TIME)])
    (found,) = assembler.fetch()
    assert found.spooled is not None
    one_of_all: Undecoded = found[0]
    assert len(one_of_all.tuples) == 50


@pytest.mark.parametrize(
    ("section", "says"),
    [
        ({}, "messages are in the WAL only, and mode is auto"),
        ({"mode": "poll"}, "messages are in the WAL only, and mode is poll"),
        ({"mode": "wal", "table": "a.b"}, "so table has no meaning"),
        ({"mode": "wal", "profile": "debezium"}, "so table has no meaning"),
        ({"mode": "wal", "columns": {"payload": "body"}}, "so columns has no meaning"),
        ({"mode": "wal", "headers": ["region"]}, "so headers has no meaning"),
        ({"mode": "wal", "offsets": "gapless"}, "so offsets has no meaning"),
    ],
)
def test_messages_come_by_the_wal_and_from_no_table(section: dict[str, Any], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        Settings(source={"message_prefix": PREFIX, **section})


def test_the_prefix_decides_effects() -> None:
    settings = Settings(source={"message_prefix": PREFIX, "mode": "wal"})
    assert Effects.of(settings).values["source.message_prefix"] == PREFIX
    assert not settings.source.owns_table


@pytest.mark.parametrize("field", ["id", "host_id", "event_type", "aggregate_id"])
def test_no_text_has_a_zero_character(field: str) -> None:
    event, note = one({**EVENT, field: "a\0b"}, types={"id": "text", "host_id": "text"})
    assert event.text(field) is None
    assert note is not None
    assert f"{field} has a zero character" in note


@pytest.mark.parametrize("unit", ["0", "{}", '{"payload":1}'])
def test_an_array_of_next_to_nothing_is_one_event(unit: str) -> None:
    found = received(message(f"[{','.join([unit] * 1_000)}]".encode()))
    assert len(events(found)) == 1
    assert "most of its 1000 events are empty" in str(notes(found))


def test_an_empty_id_is_none() -> None:
    first, second = events(
        received(message(json.dumps([{**EVENT, "id": ""}] * 2).encode()), types={"id": "text"})
    )
    assert first.id
    assert second.id
    assert first.id != second.id
