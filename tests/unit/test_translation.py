"""Rows of databases in another encoding than UTF-8, and times without a zone."""

from __future__ import annotations

import pytest

from relay.model.events import FIELDS, NOTE
from relay.model.transactions import Rows
from relay.source.decode.pgoutput import decode_tuple
from relay.source.decode.translation import TIMESTAMPTZ, Encoding, Translation
from tests.unit import wire

MAPPING = {name: name for name in FIELDS}
TEXT, TIMESTAMP = 25, 1114


def translated(
    encoding: str, *cells: wire.Cell, names: tuple[str, ...] = ("event_type", "payload")
) -> tuple[object, ...]:
    found = Translation.needed([(name, TEXT) for name in names], MAPPING, Encoding.of(encoding))
    assert found is not None
    assert found.columns == [*names, NOTE]
    return decode_tuple(found.row(wire.tuple_data(cells)))


def test_a_database_in_utf8_needs_no_translation() -> None:
    columns = [("event_type", TEXT), ("event_ts", TIMESTAMPTZ), ("created", TIMESTAMP)]
    assert Encoding.of("UTF8") is None
    assert Translation.needed(columns, MAPPING, None) is None


@pytest.mark.parametrize(
    ("encoding", "stored", "text"),
    [
        ("WIN1252", b"caf\xe9 \x80", "café €"),
        ("LATIN1", b"\xa4\x81", "¤\x81"),
        ("SQL_ASCII", "café €".encode(), "café €"),
        ("EUC_CN", b"\xd6\xd0", "中"),
        ("WIN1252", b"plain", "plain"),
    ],
)
def test_values_become_utf8(encoding: str, stored: bytes, text: str) -> None:
    assert translated(encoding, stored, None) == (text.encode(), None, None)


def test_a_byte_that_cannot_be_decoded_is_escaped_and_noted() -> None:
    assert translated("WIN1252", b"\xe9\x81\x8d.", b'{"k": "\xe9\x81"}') == (
        "é\\x81\\x8d.".encode(),
        '{"k": "é\\\\x81"}'.encode(),
        b"event_type is not WIN1252: 0x81 at byte 1, 0x8d at byte 2; "
        b"payload is not WIN1252: 0x81 at byte 8",
    )
    assert translated("SQL_ASCII", "é".encode() + b"\xff", None) == (
        "é\\xff".encode(),
        None,
        b"event_type is not UTF-8: 0xff at byte 2",
    )


def test_a_note_stays_short() -> None:
    _, _, note = translated("WIN1252", b"\x81" * 100_000, None)
    assert isinstance(note, bytes)
    assert note.endswith(b"0x81 at byte 19 and 99980 more")


def test_what_nobody_reads_is_left_as_it_is() -> None:
    names = ("event_type", "remark")
    assert translated("WIN1252", b"e", b"\x81", names=names) == (b"e", b"\x81", None)


@pytest.mark.parametrize(
    ("printed", "read"),
    [
        (b"2025-11-12 01:02:03.5", b"2025-11-12 01:02:03.5+00"),
        (b"0044-03-15 00:00:00 BC", b"0044-03-15 00:00:00+00 BC"),
        (b"infinity", b"infinity"),
        (b"-infinity", b"-infinity"),
        (b"2025-11-12 01:02:03+00", b"2025-11-12 01:02:03+00"),
        (None, None),
    ],
)
def test_a_time_without_a_zone_is_utc(printed: bytes | None, read: bytes | None) -> None:
    columns = [("deliver_at", TIMESTAMP), ("event_type", TEXT)]
    found = Translation.needed(columns, MAPPING, None)
    assert found is not None
    assert found.columns == ["deliver_at", "event_type"]
    assert decode_tuple(found.row(wire.tuple_data([printed, b"\xff"]))) == (read, b"\xff")


@pytest.mark.parametrize("last", [b"2025-11-12 01:02:03.5", b"infinity", b"0044-03-15 00:00:00 BC"])
def test_many_rows_are_translated_as_each_is(last: bytes) -> None:
    columns = [("event_ts", TIMESTAMP), ("payload", TEXT), ("deliver_at", TIMESTAMP)]
    found = Translation.needed(columns, MAPPING, None)
    assert found is not None
    time = b"2025-11-12 01:02:03"
    cells: list[list[bytes | None]] = [
        [time, b"{}", time],
        [None, b"+" * 300, time],
        [time, None, None],
        [time, b"", last],
    ]
    rows = [wire.tuple_data(each) for each in cells * 20]
    # Rows of a stream lie between other messages.
    apart = Rows.of([b"header" + row for row in rows]).without_header(6)
    assert list(found.rows(apart)) == [found.row(row) for row in rows]
    assert list(found.rows(Rows.of(rows[:3]))) == [found.row(row) for row in rows[:3]]


def test_names_are_decoded() -> None:
    encoding = Encoding.of("LATIN1")
    assert encoding is not None
    assert encoding.name_of(b"caf\xe9".decode("utf-8", "surrogateescape")) == "café"
