"""The tests' own encoder of pgoutput messages, protocol version 1, and what hypothesis draws for them.

Written from the PostgreSQL documentation, "Logical Replication Message Formats", and not from relay's decoder.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from hypothesis import strategies as st


class Toast(Enum):
    """A TOASTed value that the update left alone."""

    UNCHANGED = "u"


Cell = bytes | None | Toast
Attribute = tuple[bool, str, int, int]
"""Whether the column is part of the key, its name, its type's oid, its type modifier."""


def integers(low: int, high: int) -> st.SearchStrategy[int]:
    """Integers of a field, with its edges, which hypothesis by itself seldom tries in a wide range."""
    return st.integers(low, high) | st.sampled_from([low, (low + high + 1) // 2, high])


INT32 = integers(-(2**31), 2**31 - 1)
INT64 = integers(-(2**63), 2**63 - 1)
OIDS = integers(0, 2**32 - 1)
LSNS = integers(0, 2**64 - 1)
NAMES = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=20)
CELLS: st.SearchStrategy[Cell] = st.one_of(st.none(), st.binary(max_size=40))
ROWS = st.lists(CELLS, max_size=20)
UPDATED_ROWS = st.lists(CELLS | st.just(Toast.UNCHANGED), max_size=20)
ATTRIBUTES = st.lists(st.tuples(st.booleans(), NAMES, OIDS, INT32), max_size=20)


def int8(value: int) -> bytes:
    return value.to_bytes(1, "big")


def int16(value: int) -> bytes:
    return value.to_bytes(2, "big")


def int32(value: int) -> bytes:
    return value.to_bytes(4, "big", signed=value < 0)


def int64(value: int) -> bytes:
    return value.to_bytes(8, "big", signed=value < 0)


def string(text: str) -> bytes:
    return text.encode() + b"\0"


def tuple_data(cells: Sequence[Cell]) -> bytes:
    return int16(len(cells)) + b"".join(map(_cell, cells))


def _cell(cell: Cell) -> bytes:
    if cell is None:
        return b"n"
    if cell is Toast.UNCHANGED:
        return b"u"
    return b"t" + int32(len(cell)) + cell


def begin(final_lsn: int, ts: int = 0, xid: int = 0) -> bytes:
    return b"B" + int64(final_lsn) + int64(ts) + int32(xid)


def commit(lsn: int, end_lsn: int, ts: int = 0, flags: int = 0) -> bytes:
    return b"C" + int8(flags) + int64(lsn) + int64(end_lsn) + int64(ts)


def origin(lsn: int, name: str) -> bytes:
    return b"O" + int64(lsn) + string(name)


def relation(
    oid: int, namespace: str, name: str, identity: str, attributes: Sequence[Attribute]
) -> bytes:
    described = [
        int8(is_key) + string(column) + int32(type_oid) + int32(modifier)
        for is_key, column, type_oid, modifier in attributes
    ]
    head = b"R" + int32(oid) + string(namespace) + string(name) + identity.encode()
    return head + int16(len(attributes)) + b"".join(described)


def type_message(oid: int, namespace: str, name: str) -> bytes:
    return b"Y" + int32(oid) + string(namespace) + string(name)


def insert(oid: int, new: Sequence[Cell]) -> bytes:
    return b"I" + int32(oid) + b"N" + tuple_data(new)


def update(oid: int, new: Sequence[Cell]) -> bytes:
    return b"U" + int32(oid) + b"N" + tuple_data(new)


def delete(oid: int, old_kind: str, old: Sequence[Cell]) -> bytes:
    return b"D" + int32(oid) + old_kind.encode() + tuple_data(old)


def truncate(oids: Sequence[int], options: int) -> bytes:
    return b"T" + int32(len(oids)) + int8(options) + b"".join(map(int32, oids))


def logical_message(flags: int, lsn: int, prefix: str, content: bytes) -> bytes:
    return b"M" + int8(flags) + int64(lsn) + string(prefix) + int32(len(content)) + content
