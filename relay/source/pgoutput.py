"""pgoutput, protocol version 1: bytes to messages, and messages to rows. No I/O.

Source: PostgreSQL documentation, "Logical Replication Message Formats".
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from struct import Struct
from typing import NamedTuple

from relay.events import Lsn

_BEGIN = Struct(">QqI")
_COMMIT = Struct(">BQQq")
_U16 = Struct(">H")
_U32 = Struct(">I")
_U64 = Struct(">Q")
_I32 = Struct(">i")
_ATTRIBUTE = Struct(">Ii")

NULL = ord("n")
UNCHANGED = ord("u")
TEXT = ord("t")
BINARY = ord("b")


class ProtocolError(Exception):
    """The stream holds what pgoutput protocol version 1 does not."""


class _Unchanged:
    """The marker for a TOAST value that an update left alone, and that therefore is not in the stream."""

    def __repr__(self) -> str:
        return "UNCHANGED_TOAST"


UNCHANGED_TOAST = _Unchanged()

Value = bytes | None | _Unchanged


class Begin(NamedTuple):
    """Opens a transaction; `final_lsn` is where its commit record stands, `ts` in microseconds since 2000."""

    final_lsn: Lsn
    ts: int
    xid: int


class CommitMessage(NamedTuple):
    """Closes a transaction; after `end_lsn` the stream may be resumed."""

    flags: int
    commit_lsn: Lsn
    end_lsn: Lsn
    ts: int


@dataclass(frozen=True, slots=True)
class Origin:
    """The transaction was replicated to the source from elsewhere."""

    commit_lsn: Lsn
    name: str


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a relation."""

    name: str
    type_oid: int
    type_modifier: int
    is_key: bool


@dataclass(frozen=True, slots=True)
class Relation:
    """Describes a table before its first change and again after each alteration."""

    oid: int
    namespace: str
    name: str
    replica_identity: str
    columns: tuple[Column, ...]


@dataclass(frozen=True, slots=True)
class Type:
    """Names a type that is not built in."""

    oid: int
    namespace: str
    name: str


@dataclass(frozen=True, slots=True)
class Insert:
    """A new row; `tuple` is undecoded TupleData."""

    relation_oid: int
    tuple: bytes


@dataclass(frozen=True, slots=True)
class Update:
    """A changed row; `old` holds the key ('K') or the whole old row ('O') where the identity asks for it."""

    relation_oid: int
    old_kind: str | None
    old: tuple[Value, ...] | None
    new: tuple[Value, ...]


@dataclass(frozen=True, slots=True)
class Delete:
    """A removed row, by key ('K') or whole ('O')."""

    relation_oid: int
    old_kind: str
    old: tuple[Value, ...]


@dataclass(frozen=True, slots=True)
class Truncate:
    """Emptied tables; options are a bit set: 1 cascade, 2 restart identity."""

    options: int
    relation_oids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LogicalMessage:
    """What `pg_logical_emit_message` wrote."""

    transactional: bool
    lsn: Lsn
    prefix: str
    content: bytes


Message = (
    Begin
    | CommitMessage
    | Origin
    | Relation
    | Type
    | Insert
    | Update
    | Delete
    | Truncate
    | LogicalMessage
)


def decode(data: bytes) -> Message:
    """Decode one message. Raises ProtocolError where it is cut short or of an unknown kind."""
    if not data:
        raise ProtocolError("empty pgoutput message")
    decoder = _DECODERS.get(data[0])
    if decoder is None:
        raise ProtocolError(f"unknown pgoutput message {data[:1]!r}")
    try:
        return decoder(data)
    except (IndexError, ValueError, struct.error) as error:
        raise ProtocolError(f"malformed pgoutput message {data[:1]!r}") from error


def _string(data: bytes, start: int) -> tuple[str, int]:
    end = data.index(b"\0", start)
    return data[start:end].decode("utf-8", "surrogateescape"), end + 1


def _begin(data: bytes) -> Begin:
    lsn, ts, xid = _BEGIN.unpack_from(data, 1)
    return Begin(Lsn(lsn), ts, xid)


def _commit(data: bytes) -> CommitMessage:
    flags, lsn, end_lsn, ts = _COMMIT.unpack_from(data, 1)
    return CommitMessage(flags, Lsn(lsn), Lsn(end_lsn), ts)


def _origin(data: bytes) -> Origin:
    (lsn,) = _U64.unpack_from(data, 1)
    return Origin(Lsn(lsn), _string(data, 9)[0])


def _relation(data: bytes) -> Relation:
    (oid,) = _U32.unpack_from(data, 1)
    namespace, at = _string(data, 5)
    name, at = _string(data, at)
    identity = chr(data[at])
    (count,) = _U16.unpack_from(data, at + 1)
    at += 3
    columns = []
    for _ in range(count):
        is_key = bool(data[at] & 1)
        column, at = _string(data, at + 1)
        type_oid, modifier = _ATTRIBUTE.unpack_from(data, at)
        at += _ATTRIBUTE.size
        columns.append(Column(column, type_oid, modifier, is_key))
    # An empty namespace stands for pg_catalog.
    return Relation(oid, namespace or "pg_catalog", name, identity, tuple(columns))


def _type(data: bytes) -> Type:
    (oid,) = _U32.unpack_from(data, 1)
    namespace, at = _string(data, 5)
    return Type(oid, namespace or "pg_catalog", _string(data, at)[0])


def _insert(data: bytes) -> Insert:
    (oid,) = _U32.unpack_from(data, 1)
    if data[5] != ord("N"):
        raise ProtocolError("insert without a new row")
    return Insert(oid, data[6:])


def _update(data: bytes) -> Update:
    (oid,) = _U32.unpack_from(data, 1)
    kind, old, at = None, None, 5
    if data[at] in b"KO":
        kind = chr(data[at])
        old, at = _values(data, at + 1)
    if data[at] != ord("N"):
        raise ProtocolError("update without a new row")
    return Update(oid, kind, old, _values(data, at + 1)[0])


def _delete(data: bytes) -> Delete:
    (oid,) = _U32.unpack_from(data, 1)
    if data[5] not in b"KO":
        raise ProtocolError("delete without an old row")
    return Delete(oid, chr(data[5]), _values(data, 6)[0])


def _truncate(data: bytes) -> Truncate:
    (count,) = _U32.unpack_from(data, 1)
    oids = tuple(_U32.unpack_from(data, 6 + 4 * i)[0] for i in range(count))
    return Truncate(data[5], oids)


def _message(data: bytes) -> LogicalMessage:
    (lsn,) = _U64.unpack_from(data, 2)
    prefix, at = _string(data, 10)
    (length,) = _U32.unpack_from(data, at)
    content = data[at + 4 : at + 4 + length]
    if len(content) != length:
        raise ProtocolError("logical message cut short")
    return LogicalMessage(bool(data[1] & 1), Lsn(lsn), prefix, content)


_DECODERS: dict[int, Callable[[bytes], Message]] = {
    ord("B"): _begin,
    ord("C"): _commit,
    ord("O"): _origin,
    ord("R"): _relation,
    ord("Y"): _type,
    ord("I"): _insert,
    ord("U"): _update,
    ord("D"): _delete,
    ord("T"): _truncate,
    ord("M"): _message,
}


def _values(data: bytes, at: int) -> tuple[tuple[Value, ...], int]:
    (count,) = _U16.unpack_from(data, at)
    at += 2
    values: list[Value] = []
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
        elif kind == NULL:
            values.append(None)
        elif kind == UNCHANGED:
            values.append(UNCHANGED_TOAST)
        else:
            raise ProtocolError(f"unknown column kind {chr(kind)!r}")
    return tuple(values), at


def decode_tuple(data: bytes) -> tuple[Value, ...]:
    """All values of one TupleData, as bytes, in the order of the table. Raises ProtocolError."""
    try:
        return _values(data, 0)[0]
    except (IndexError, struct.error) as error:
        raise ProtocolError("malformed TupleData") from error


def encode_tuple(values: Sequence[bytes | None]) -> bytes:
    """The reverse of `decode_tuple`, for rows that did not come through the WAL."""
    parts = [_U16.pack(len(values))]
    for value in values:
        parts.append(b"n" if value is None else b"t" + _I32.pack(len(value)) + value)
    return b"".join(parts)
