"""Decodes pgoutput, protocol version 1: the messages that relay reads one by one, and rows. No I/O.

A `MessageBuffer` has the messages that were read together, and reads Begin, Commit and Insert, many at once. Origin,
Type, Update, Delete and Truncate have no new rows, so only their kind is checked.

Source: PostgreSQL documentation, "Logical Replication Message Formats".
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from struct import Struct
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from relay.model.events import Lsn
from relay.model.transactions import Buffer, Int64Array, Rows
from relay.model.tuples import NULL, TEXT, ProtocolError, at_each_octet

_BEGIN = Struct(">QqI")
_U16 = Struct(">H")
_U32 = Struct(">I")
_U64 = Struct(">Q")
_I32 = Struct(">i")
_ATTRIBUTE = Struct(">Ii")

_HEADERS = [b"t" + _I32.pack(size) for size in range(1_024)]
"""What precedes a value of so many bytes: to pack it takes as long as to copy the value."""

UNCHANGED = ord("u")
BINARY = ord("b")

KINDS = b"BCORYIUDTM"
"""The first octets of all messages that version 1 has."""


BEGIN = np.dtype([("kind", "u1"), ("lsn", ">u8"), ("ts", ">i8"), ("xid", ">u4")])
COMMIT = np.dtype(
    [("kind", "u1"), ("flags", "u1"), ("lsn", ">u8"), ("end_lsn", ">u8"), ("ts", ">i8")]
)
INSERT = np.dtype([("kind", "u1"), ("oid", ">u4"), ("new", "u1")])
"""The fixed part of messages; an Insert's row follows it."""

_SHORTEST = np.ones(256, np.int64)
_SHORTEST[list(b"BCI")] = BEGIN.itemsize, COMMIT.itemsize, INSERT.itemsize


class Begin(NamedTuple):
    """A Begin: the position of the commit record, the commit time in microseconds since 2000, and the xid."""

    final_lsn: Lsn
    ts: int
    xid: int

    @classmethod
    def of(cls, data: bytes) -> Begin:
        """Decode a Begin. Raises ProtocolError if it is cut short."""
        try:
            lsn, ts, xid = _BEGIN.unpack_from(data, 1)
        except struct.error as error:
            raise _malformed(data) from error
        return cls(Lsn(lsn), ts, xid)


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a relation."""

    name: str
    type_oid: int


@dataclass(frozen=True, slots=True)
class Relation:
    """The description of a table, sent before its first change and after each alteration."""

    oid: int
    namespace: str
    name: str
    columns: tuple[Column, ...]

    @classmethod
    def of(cls, data: bytes) -> Relation:
        """Decode a Relation. Raises ProtocolError if it is cut short."""
        try:
            return _relation(data)
        except (IndexError, ValueError, struct.error) as error:
            raise _malformed(data) from error


@dataclass(frozen=True, slots=True)
class LogicalMessage:
    """A message that `pg_logical_emit_message` wrote."""

    transactional: bool
    lsn: Lsn
    prefix: str
    content: bytes

    @classmethod
    def of(cls, data: bytes) -> LogicalMessage:
        """Decode a Message. Raises ProtocolError if it is cut short."""
        try:
            return _message(data)
        except (IndexError, ValueError, struct.error) as error:
            raise _malformed(data) from error


def _malformed(data: bytes) -> ProtocolError:
    return ProtocolError(f"malformed pgoutput message {data[:1]!r}")


def _string(data: bytes, start: int) -> tuple[str, int]:
    end = data.index(b"\0", start)
    return data[start:end].decode("utf-8", "surrogateescape"), end + 1


def _relation(data: bytes) -> Relation:
    (oid,) = _U32.unpack_from(data, 1)
    namespace, at = _string(data, 5)
    name, at = _string(data, at)
    # The replica identity is before the count, and flags are before the name of each column.
    (count,) = _U16.unpack_from(data, at + 1)
    at += 3
    columns = []
    for _ in range(count):
        column, at = _string(data, at + 1)
        type_oid, _modifier = _ATTRIBUTE.unpack_from(data, at)
        at += _ATTRIBUTE.size
        columns.append(Column(column, type_oid))
    # An empty namespace stands for pg_catalog.
    return Relation(oid, namespace or "pg_catalog", name, tuple(columns))


def _message(data: bytes) -> LogicalMessage:
    (lsn,) = _U64.unpack_from(data, 2)
    prefix, at = _string(data, 10)
    (length,) = _U32.unpack_from(data, at)
    content = data[at + 4 : at + 4 + length]
    if len(content) != length:
        raise ProtocolError("logical message cut short")
    return LogicalMessage(bool(data[1] & 1), Lsn(lsn), prefix, content)


def decode_tuple(data: bytes) -> tuple[bytes | None, ...]:
    """Decode all values of one TupleData, in the order of the table.

    Null is None, and so is an unchanged TOASTed value, which the stream does not have. Raises ProtocolError.
    """
    try:
        return _values(data)
    except (IndexError, struct.error) as error:
        raise ProtocolError("malformed TupleData") from error


def _values(data: bytes) -> tuple[bytes | None, ...]:
    (count,) = _U16.unpack_from(data, 0)
    at = _U16.size
    values: list[bytes | None] = []
    for _ in range(count):
        kind = data[at]
        at += 1
        if kind in (TEXT, BINARY):
            (length,) = _I32.unpack_from(data, at)
            at += 4
            value = data[at : at + length]
            if length < 0 or len(value) != length:
                raise ProtocolError("column value cut short")
            values.append(value)
            at += length
        elif kind in (NULL, UNCHANGED):
            values.append(None)
        else:
            raise ProtocolError(f"unknown column kind {chr(kind)!r}")
    return tuple(values)


def encode_tuple(values: Sequence[bytes | None]) -> bytes:
    """Encode values as TupleData, for rows that did not come through the WAL: the reverse of `decode_tuple`."""
    most = len(_HEADERS)
    cells = [
        b"n"
        if value is None
        else (_HEADERS[len(value)] if len(value) < most else b"t" + _I32.pack(len(value))) + value
        for value in values
    ]
    return _U16.pack(len(values)) + b"".join(cells)


class MessageBuffer:
    """Messages in the order of the stream. `kinds` has the first octet of each.

    Raises ProtocolError for a message that is cut short.
    """

    __slots__ = ("_messages", "kinds")

    def __init__(self, messages: Rows) -> None:
        self._messages = messages
        kinds = np.frombuffer(messages.data, np.uint8)[messages.starts]
        if (messages.sizes < _SHORTEST[kinds]).any():
            raise ProtocolError("malformed pgoutput message")
        self.kinds: bytes = kinds.tobytes()

    @classmethod
    def of(cls, messages: Sequence[Buffer], header: int = 0) -> Self:
        """Copy messages into one buffer, without the `header` bytes before each."""
        return cls(Rows.of(messages).without_header(header))

    def __getitem__(self, index: int) -> bytes:
        messages = self._messages
        return messages.data[messages.starts[index] : messages.ends[index]]

    def part(self, first: int, last: int) -> MessageBuffer:
        """The messages from index `first` up to, and without, `last`, as a view."""
        return MessageBuffer(self._messages.part(first, last))

    def indices(self, kind: int) -> Int64Array:
        """The indices of the messages of a kind, int64, ascending."""
        indices: Int64Array = (np.frombuffer(self.kinds, np.uint8) == kind).nonzero()[0]
        return indices

    def read(self, indices: Int64Array, form: np.dtype[np.void]) -> NDArray[np.void]:
        """The fixed parts of the messages at some indices, as a structured array of dtype `form`."""
        return at_each_octet(self._messages.data, form)[self._messages.starts[indices]]

    def rows(self, indices: Int64Array) -> Rows:
        """The rows of the Inserts at some indices, as a view; copied if they are a small part of the buffer."""
        return self._messages.take(indices).without_header(INSERT.itemsize).compact()
