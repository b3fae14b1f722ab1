"""The decoders against an encoder of the tests' own: what PostgreSQL sends is what comes out, or ProtocolError."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relay.model.events import Lsn, timestamp
from relay.model.tuples import ProtocolError
from relay.source.decode.pgoutput import (
    Begin,
    Column,
    LogicalMessage,
    Relation,
    decode_tuple,
    encode_tuple,
)
from tests.unit import wire

Message = Begin | Relation | LogicalMessage
Sent = tuple[bytes, Message]
"""A message as bytes, and as it must come out."""

DECODERS: Mapping[int, Callable[[bytes], Message]] = {
    ord("B"): Begin.of,
    ord("R"): Relation.of,
    ord("M"): LogicalMessage.of,
}


def decode(data: bytes) -> Message:
    return DECODERS[data[0]](data)


def as_values(cells: Sequence[wire.Cell]) -> tuple[bytes | None, ...]:
    return tuple(None if cell is wire.Toast.UNCHANGED else cell for cell in cells)


@st.composite
def begins(draw: st.DrawFn) -> Sent:
    lsn, ts, xid = draw(wire.LSNS), draw(wire.INT64), draw(wire.OIDS)
    return wire.begin(lsn, ts, xid), Begin(Lsn(lsn), ts, xid)


@st.composite
def relations(draw: st.DrawFn) -> Sent:
    oid, namespace, name = draw(wire.OIDS), draw(wire.NAMES), draw(wire.NAMES)
    identity = draw(st.sampled_from("dnfi"))
    attributes = draw(wire.ATTRIBUTES)
    columns = tuple(Column(column, type_oid) for _, column, type_oid, _ in attributes)
    return (
        wire.relation(oid, namespace, name, identity, attributes),
        Relation(oid, namespace or "pg_catalog", name, columns),
    )


@st.composite
def logical_messages(draw: st.DrawFn) -> Sent:
    transactional, lsn = draw(st.booleans()), draw(wire.LSNS)
    prefix, content = draw(wire.NAMES), draw(st.binary(max_size=40))
    return (
        wire.logical_message(transactional, lsn, prefix, content),
        LogicalMessage(transactional, Lsn(lsn), prefix, content),
    )


MESSAGES: dict[str, Callable[[], st.SearchStrategy[Sent]]] = {
    "begin": begins,
    "relation": relations,
    "message": logical_messages,
}
ANY_MESSAGE = st.one_of([strategy() for strategy in MESSAGES.values()])


# Messages.


@pytest.mark.parametrize("kind", MESSAGES)
@given(data=st.data())
def test_a_message_comes_out_as_it_was_sent(kind: str, data: st.DataObject) -> None:
    sent, expected = data.draw(MESSAGES[kind]())
    assert decode(sent) == expected


# What PostgreSQL 16.14 sent for the table `t (id int primary key, v text)` in UTF8, which later gained `m mood` and
# `amount numeric(10,2)`; `mood` is an enumeration.
CAPTURED = [
    (
        "4200000000014a7ec8000303bea8ca1c82000002dc",
        Begin(Lsn.parse("0/14A7EC8"), 848_542_340_619_394, 732),
    ),
    (
        "52000040007075626c69630074006400020169640000000017ffffffff00760000000019ffffffff",
        Relation(16384, "public", "t", (Column("id", 23), Column("v", 25))),
    ),
    (
        "52000040007075626c69630074006600040169640000000017ffffffff01760000000019ffffffff"
        "016d000000400effffffff01616d6f756e7400000006a4000a0006",
        Relation(
            16384,
            "public",
            "t",
            (Column("id", 23), Column("v", 25), Column("m", 16398), Column("amount", 1700)),
        ),
    ),
    (
        "4d0100000000014b11987072650000000003636f6e",
        LogicalMessage(True, Lsn.parse("0/14B1198"), "pre", b"con"),
    ),
]


@pytest.mark.parametrize(
    ("sent", "expected"), CAPTURED, ids=[type(message).__name__ for _, message in CAPTURED]
)
def test_a_message_comes_out_as_postgresql_meant_it(sent: str, expected: Message) -> None:
    assert decode(bytes.fromhex(sent)) == expected


@pytest.mark.parametrize("kind", MESSAGES)
@given(data=st.data())
def test_a_message_cut_anywhere_is_a_protocol_error(kind: str, data: st.DataObject) -> None:
    sent, _ = data.draw(MESSAGES[kind]())
    cut = data.draw(st.integers(1, len(sent) - 1))
    with pytest.raises(ProtocolError):
        decode(sent[:cut])


@given(data=st.data())
def test_a_garbled_message_decodes_or_is_a_protocol_error(data: st.DataObject) -> None:
    sent, _ = data.draw(ANY_MESSAGE)
    garbled = bytearray(sent)
    for index in data.draw(st.lists(st.integers(1, len(sent) - 1), min_size=1, max_size=4)):
        garbled[index] = data.draw(st.integers(0, 255))
    with suppress(ProtocolError):
        decode(bytes(garbled))


@given(kind=st.sampled_from(sorted(DECODERS)), rest=st.binary(max_size=60))
def test_noise_decodes_or_is_a_protocol_error(kind: int, rest: bytes) -> None:
    with suppress(ProtocolError):
        decode(bytes([kind]) + rest)


# Rows.


@given(wire.UPDATED_ROWS)
def test_a_row_decodes_to_its_bytes_whatever_they_are(row: list[wire.Cell]) -> None:
    assert decode_tuple(wire.tuple_data(row)) == as_values(row)


@given(st.lists(st.none() | st.binary(max_size=40), max_size=20))
def test_encoding_a_row_is_what_postgresql_sends_and_decodes_back(row: list[bytes | None]) -> None:
    encoded = encode_tuple(row)
    assert encoded == wire.tuple_data(row)
    assert decode_tuple(encoded) == tuple(row)


@pytest.mark.parametrize("length", [-1, -5, -(2**31), 2**31 - 1])
def test_an_impossible_length_is_a_protocol_error(length: int) -> None:
    with pytest.raises(ProtocolError):
        decode_tuple(wire.int16(1) + b"t" + wire.int32(length) + b"abc")


def test_an_unknown_kind_of_value_is_a_protocol_error() -> None:
    with pytest.raises(ProtocolError):
        decode_tuple(wire.int16(1) + b"x")


@pytest.mark.parametrize(
    ("microseconds", "printed"),
    [
        (0, "2000-01-01 00:00:00+00"),
        (-1, "1999-12-31 23:59:59.999999+00"),
        (500_000, "2000-01-01 00:00:00.5+00"),
        (120, "2000-01-01 00:00:00.00012+00"),
        (820_454_400_123_450, "2025-12-31 00:00:00.12345+00"),
    ],
)
def test_a_commit_time_is_printed_as_postgresql_prints_it(microseconds: int, printed: str) -> None:
    """PostgreSQL 16 and 18 print so: `timestamptz '2000-01-01 00:00:00+00' + interval '… us'`, in UTC."""
    assert timestamp(microseconds) == printed
