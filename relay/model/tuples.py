"""Decodes TupleData: the values of some columns of many rows, and whole rows as events. No I/O.

Source: PostgreSQL documentation, "Logical Replication Message Formats", TupleData.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Sequence
from functools import partial
from operator import eq
from struct import Struct

import numpy as np

from relay.model import headers
from relay.model.events import FIELDS, NOTE, Event, Row
from relay.model.transactions import Int64Array, Mask, Rows, Values, at_each_octet, text

FEW_ROWS = 40
"""Fewer rows are walked one by one: an array operation costs as much as walking several of them."""
_U16 = Struct(">H")
_U32 = Struct(">I")
_LENGTH = np.dtype(">u4")
_EIGHT = np.dtype(np.uint64)
_WORD = _EIGHT.itemsize
_EVEN_BYTES = 64
"""Values of one length, as ids are, up to this many bytes are copied together; longer ones one by one, only once."""
_DIGITS = 18
"""So many decimal digits fit into 64 bits. PADDING has more octets than that."""
_ZERO = ord("0")
_UTC = b"+00"
NULL = ord("n")
TEXT = ord("t")


class ProtocolError(Exception):
    """The stream is not one of pgoutput, protocol version 1."""


def values(rows: Rows, indices: Collection[int]) -> dict[int, Values]:
    """The values of the columns at some indices, by index. Raises ProtocolError for a row that is cut short."""
    wanted = sorted(set(indices))
    if not len(rows) or not wanted:
        return {index: [] for index in wanted}
    if len(rows) < FEW_ROWS:
        return _walk(rows, wanted)
    walked = Walked(rows, wanted)
    return {index: walked.values(index) for index in wanted}


def columns(rows: Rows, indices: Sequence[int | None]) -> list[Values]:
    """The values of the columns at some indices, in their order; for an index None, a column of nulls."""
    found = values(rows, [index for index in indices if index is not None])
    nothing: Values = [None] * len(rows)
    return [nothing if index is None else found[index] for index in indices]


def _walk(rows: Rows, wanted: Sequence[int]) -> dict[int, Values]:
    found = [_peek(row, wanted) for row in rows]
    return dict(zip(wanted, zip(*found, strict=True), strict=True))


def _peek(data: bytes, wanted: Sequence[int]) -> list[bytes | None]:
    """The values of one row at ascending column indices; the row is not read after the last of them."""
    found: list[bytes | None] = []
    at = 2
    column = 0
    unpack = _U32.unpack_from
    try:
        for index in wanted:
            while column < index:
                at += 1 if data[at] != TEXT else 5 + unpack(data, at + 1)[0]
                column += 1
            if data[at] == TEXT:
                start = at + 5
                end = start + unpack(data, at + 1)[0]
                found.append(data[start:end])
                if end > len(data):
                    raise ProtocolError("column value cut short")
            else:
                found.append(None)
    except (IndexError, struct.error) as error:
        raise ProtocolError("malformed TupleData") from error
    return found


def zoned(rows: Rows, indices: Sequence[int]) -> Rows | None:
    """Append the zone UTC to each time in the columns at some indices, as if these were of the type `timestamptz`.

    Returns None for few rows, and where a value does not end in a digit, as infinity and times BC do not.
    """
    if len(rows) < FEW_ROWS:
        return None
    walked = Walked(rows, indices)
    spans = [walked.span(index) for index in indices]
    starts = np.concatenate([start for start, _ in spans])
    stops = np.sort(np.concatenate([stop for _, stop in spans]))
    octets = np.frombuffer(rows.data, np.uint8).copy()
    if ((octets[stops - 1] < _ZERO) | (octets[stops - 1] > _ZERO + 9)).any():
        return None
    lengths = np.ndarray(len(octets) - _U32.size + 1, _LENGTH, octets, strides=(1,))
    lengths[starts - _U32.size] += len(_UTC)
    zones = np.tile(np.frombuffer(_UTC, np.uint8), len(stops))
    data = np.insert(octets, np.repeat(stops, len(_UTC)), zones).tobytes()
    shift = partial(np.searchsorted, stops, side="right")
    return Rows(
        data,
        rows.starts + len(_UTC) * shift(rows.starts),
        rows.ends + len(_UTC) * shift(rows.ends),
    )


class Walked:
    """Finds the values of some columns in all rows at once: array operations column by column, not a loop over rows.

    For each wanted column it keeps three arrays with one element a row: the start and the end of the value in
    `rows.data` (int64), and whether there is a value (bool; start equals end where there is none). The columns before
    the last wanted one are walked too, since each value's length says where the next begins. Raises ProtocolError where
    a row is cut short.

    Two rows with the columns ("7", null) and ("12", "x") are the octets

        0002 t 00000001 37 n            start of row 0, column 0 at 7, column 1 has no value
        0002 t 00000002 3132 t 00000001 78
    """

    def __init__(self, rows: Rows, wanted: Collection[int]) -> None:
        self._data = data = rows.data
        self._octets = np.frombuffer(data, np.uint8)
        self._spans: dict[int, tuple[Int64Array, Int64Array, Mask]] = {}
        lengths = at_each_octet(data, _LENGTH)
        at = rows.starts + 2
        for index in range(max(wanted, default=-1) + 1):
            if (at >= rows.ends).any():
                raise ProtocolError("malformed TupleData")
            present = self._octets[at] == TEXT
            start = at + np.where(present, 5, 1)
            stop = start + np.where(present, lengths[at + 1], 0)
            if (stop > rows.ends).any():
                raise ProtocolError("column value cut short")
            if index in wanted:
                self._spans[index] = (start, stop, present)
            at = stop

    def values(self, index: int) -> list[bytes | None]:
        """The values of a column, undecoded, row by row."""
        start, stop, present = self._spans[index]
        if not present.any():
            return [None] * len(present)
        data = self._data
        size = self._even_size(index)
        if 0 < size <= _EVEN_BYTES:
            even: list[bytes | None] = at_each_octet(data, np.dtype(f"V{size}"))[start].tolist()
            return even
        spans = zip(start.tolist(), stop.tolist(), strict=True)
        found: list[bytes | None] = [data[first:last] for first, last in spans]
        for row in np.flatnonzero(~present).tolist():
            found[row] = None
        return found

    def some(self, index: int, rows: Int64Array) -> list[bytes | None]:
        """The values of a column in the rows at some indices."""
        data = self._data
        picked = zip(*(each[rows].tolist() for each in self._spans[index]), strict=True)
        return [data[start:stop] if present else None for start, stop, present in picked]

    def span(self, index: int) -> tuple[Int64Array, Int64Array]:
        """The starts and ends of a column's values in the buffer, of the rows that have one."""
        start, stop, present = self._spans[index]
        return start[present], stop[present]

    def absent(self, index: int) -> Mask:
        """A mask of the rows in which a column is null."""
        return ~self._spans[index][2]

    def repeats(self, index: int) -> Mask:
        """For each row but the first, whether the column has the same value as in the row before; nulls are equal."""
        start, _, _ = self._spans[index]
        size = self._even_size(index)
        if size < _WORD:
            values = self.values(index)
            return np.fromiter(map(eq, values[1:], values), np.bool_)
        words = at_each_octet(self._data, _EIGHT)
        same: Mask = np.ones(len(start) - 1, np.bool_)
        for offset in (*range(0, size - _WORD, _WORD), size - _WORD):
            found = words[start + offset]
            same &= found[1:] == found[:-1]
        return same

    def _even_size(self, index: int) -> int:
        """The length of a column's values if it is the same in every row, else 0."""
        start, stop, present = self._spans[index]
        length = stop - start
        size = int(length[0])
        return size if present.all() and (length == size).all() else 0

    def numbers(self, index: int) -> Int64Array | None:
        """The values of a column as int64, 0 for null. None if a value is not made of at most 18 digits."""
        start, stop, present = self._spans[index]
        length = stop - start
        longest = int(length.max())
        if longest > _DIGITS or not length[present].all():
            return None
        numbers = np.zeros(len(start), np.int64)
        for position in range(longest if present.any() else 0):
            within = present & (length > position)
            digits = self._octets[start + position].astype(np.int64) - _ZERO
            if ((digits < 0) | (digits > 9))[within].any():
                return None
            numbers = np.where(within, numbers * 10 + digits, numbers)
        return numbers


class RowDecoder:
    """Decodes TupleData, finding each field by column name.

    `names` are the table's columns in order, `mapping` the column name of each field, headers too. A field whose column
    the table does not have is None.
    """

    __slots__ = ("_headers", "_indices", "_last", "_order")

    def __init__(self, names: Sequence[str], mapping: dict[str, str]) -> None:
        index = {name: position for position, name in enumerate(names)}
        self._headers = [name for name in mapping if name.startswith(headers.PREFIX)]
        fields = (*FIELDS, NOTE, *self._headers)
        self._indices = {name: index.get(mapping.get(name, name)) for name in fields}
        self._last = len(names) - 1
        found = [self._indices[name] for name in FIELDS]
        self._order = tuple(-1 if position is None else position for position in found)

    def columns(self, rows: Rows, fields: Sequence[str]) -> list[Values]:
        """The values of some fields, or of NOTE, in many rows, field by field.

        Raises ProtocolError for a row that is cut short.
        """
        if headers.FIELD in fields:
            return self._with_headers(rows, fields)
        return columns(rows, [self._indices[field] for field in fields])

    def _with_headers(self, rows: Rows, fields: Sequence[str]) -> list[Values]:
        wanted = [field for field in fields if field != headers.FIELD]
        found = self.columns(rows, (*wanted, *self._headers))
        objects = _objects(self._headers, found[len(wanted) :], len(rows))
        others = dict(zip(wanted, found, strict=False))
        return [others.get(field, objects) for field in fields]

    def present(self, rows: Rows, field: str) -> Int64Array:
        """The indices of the rows in which a time, or NOTE, has a value, int64.

        Raises ProtocolError for a row that is cut short.
        """
        index = self._indices[field]
        if index is None:
            return np.zeros(0, np.int64)
        if index == self._last:
            # Neither a time nor a note ends in the octet that stands for null. Walking all columns would cost as much
            # as everything else.
            return np.flatnonzero(np.frombuffer(rows.data, np.uint8)[rows.ends - 1] != NULL)
        return np.flatnonzero(~Walked(rows, (index,)).absent(index))

    def event(self, data: bytes, commit_fields: Row) -> Event:
        """Decode one row. Bytes that are not UTF-8 become surrogates (`surrogateescape`).

        Raises ProtocolError for a row that is cut short.
        """
        texts: list[str | None] = []
        at = 2
        unpack = _U32.unpack_from
        try:
            for _ in range(_U16.unpack_from(data)[0]):
                if data[at] == TEXT:
                    start = at + 5
                    at = start + unpack(data, at + 1)[0]
                    texts.append(str(data[start:at], "utf-8", "surrogateescape"))
                else:
                    texts.append(None)
                    at += 1
        except (IndexError, struct.error) as error:
            raise ProtocolError("malformed TupleData") from error
        if at != len(data):
            raise ProtocolError("column value cut short")
        texts.append(None)  # at index -1
        row = (*(texts[position] for position in self._order), *commit_fields)
        return Event(row, self._headers_of(texts) if self._headers else None)

    def _headers_of(self, texts: Sequence[str | None]) -> dict[str, str | None]:
        indices = ((name, self._indices[name]) for name in self._headers)
        return {
            name.removeprefix(headers.PREFIX): None if index is None else texts[index]
            for name, index in indices
        }


def _objects(names: Sequence[str], columns: Sequence[Values], count: int) -> Values:
    """Headers as the text of JSON objects, row by row."""
    keys = [name.removeprefix(headers.PREFIX) for name in names]
    texts = ([None if value is None else text(value) for value in column] for column in columns)
    rows = zip(*texts, strict=True) if names else [()] * count
    return [
        headers.as_json(dict(zip(keys, row, strict=True))).encode("utf-8", "surrogateescape")
        for row in rows
    ]
