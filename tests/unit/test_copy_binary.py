"""Values as text in COPY's binary format; what the server makes of them is tested in test_relation.py."""

from __future__ import annotations

import struct
import uuid

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relay.handlers import copy_binary

TYPES = {"a": "uuid", "b": "text", "c": "jsonb", "d": "bigint", "e": "int"}


def read(data: bytes, columns: int) -> list[list[bytes | None]]:
    """The rows of COPY's binary format without its start and end."""
    rows: list[list[bytes | None]] = []
    at = 0
    while at < len(data):
        assert struct.unpack_from(">h", data, at) == (columns,)
        at += 2
        row: list[bytes | None] = []
        for _ in range(columns):
            (size,) = struct.unpack_from(">i", data, at)
            at += 4
            row.append(None if size < 0 else data[at : at + size])
            at += max(size, 0)
        rows.append(row)
    return rows


def maybe(values: st.SearchStrategy[bytes]) -> st.SearchStrategy[bytes | None]:
    return st.none() | values


ROW = st.tuples(
    maybe(st.uuids().map(lambda value: str(value).encode())),
    maybe(st.text(max_size=5).map(str.encode)),
    maybe(st.just(b'{"a": 1}')),
    maybe(st.integers(-(2**63), 2**63 - 1).map(b"%d".__mod__)),
    maybe(st.integers(-(2**31), 2**31 - 1).map(b"%d".__mod__)),
)


def expected(kind: str, value: bytes | None) -> bytes | None:
    if value is None:
        return None
    if kind == "uuid":
        return uuid.UUID(value.decode()).bytes
    if kind == "jsonb":
        return b"\1" + value
    if kind == "text":
        return value
    return struct.pack(">q" if kind == "bigint" else ">i", int(value))


@given(st.lists(ROW, min_size=1, max_size=8), st.integers(0, 2**40))
def test_what_is_written_is_read(table: list[tuple[bytes | None, ...]], first: int) -> None:
    columns = dict(zip(TYPES, zip(*table, strict=True), strict=True))
    found = copy_binary.rows(np.arange(first, first + len(table)), columns, TYPES)
    assert found is not None
    order, data = found
    assert sorted(order) == sorted(TYPES)
    for number, (row, got) in enumerate(zip(table, read(data, 6), strict=True), start=first):
        values = dict(zip(TYPES, row, strict=True))
        assert got == [
            struct.pack(">q", number),
            *(expected(TYPES[name], values[name]) for name in order),
        ]


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("uuid", b"{a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11}"),
        ("uuid", b"a0eebc999c0b4ef8bb6d6bb9bd380a11"),
        ("uuid", b"a0eebc999c0b4ef8bb6d6bb9bd380a11----"),
        ("uuid", b"g0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11"),
        ("uuid", b""),
        ("int", b"2147483648"),
        ("bigint", b"9223372036854775808"),
        ("bigint", b"1.0"),
        ("timestamptz", b"infinity"),
        ("timestamptz", b"2026-11-22 10:00:00"),
        ("timestamptz", b"0044-03-15 12:00:00+00 BC"),
        ("pg_lsn", b"nonsense"),
    ],
)
def test_what_only_the_server_can_tell(kind: str, value: bytes) -> None:
    assert copy_binary.rows(np.arange(1), {"x": [value]}, {"x": kind}) is None


def test_uuids_whose_lengths_are_even_only_together() -> None:
    long, short = b"a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a111", b"a0eebc9-9c0b-4ef8-bb6d-6bb9bd380a11"
    assert copy_binary.rows(np.arange(2), {"x": [long, short]}, {"x": "uuid"}) is None


def test_rows_without_columns_are_their_numbers() -> None:
    assert copy_binary.rows(np.arange(5, 7), {}, {}) == (
        [],
        struct.pack(">hiqhiq", 1, 8, 5, 1, 8, 6),
    )
