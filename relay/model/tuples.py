"""Decodes TupleData: the values of some columns in many rows, and whole rows as events. No I/O.

Source: PostgreSQL documentation, "Logical Replication Message Formats", TupleData.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Sequence
from functools import partial
from operator import eq, itemgetter
from struct import Struct
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from relay.model import headers
from relay.model.events import FIELDS, NOTE, Event, Row
from relay.model.transactions import Int64Array, Mask, Rows, Values, text

FEW_ROWS = 40
"""Fewer rows are walked one by one: an array operation costs as much as the walk over several rows."""
_U16 = Struct(">H")
_U32 = Struct(">I")
_LENGTH = np.dtype(">u4")
_EIGHT = np.dtype(np.uint64)
_WORD = _EIGHT.itemsize
_EVEN_BYTES = 64
"""Up to this length in bytes, values of equal length, such as ids, are copied in one array operation."""
_DIGITS = 18
"""The most decimal digits that always fit into 64 bits. PADDING has more octets than that."""
_ZERO = ord("0")
_UTC = b"+00"
NULL = ord("n")
TEXT = ord("t")

Scalar = TypeVar("Scalar", bound=np.generic)


class ProtocolError(Exception):
    """The stream is not valid pgoutput, protocol version 1."""


def at_each_octet(data: bytes, form: np.dtype[Scalar]) -> NDArray[Scalar]:
    """A view of `data` in which element i is the value of dtype `form` at octet i: values in `data` are not aligned.

    Its shape is (len(data) - form.itemsize + 1,). It shares the memory of `data`.
    """
    return np.ndarray(len(data) - form.itemsize + 1, form, data, strides=(1,))


def values(rows: Rows, indices: Collection[int]) -> dict[int, Values]:
    """The values of the columns at some indices, by index. Raises ProtocolError for a truncated row."""
    wanted = sorted(set(indices))
    if not len(rows) or not wanted:
        return {index: [] for index in wanted}
    if len(rows) < FEW_ROWS:
        return _walk(rows, wanted)
    walked = Walked(rows, wanted)
    return {index: walked.values(index) for index in wanted}


def columns(rows: Rows, indices: Sequence[int | None]) -> list[Values]:
    """The values of the columns at some indices, in the order of `indices`; None stands for a column of nulls.

    Raises ProtocolError for a truncated row.
    """
    by_index = values(rows, [index for index in indices if index is not None])
    nulls: Values = [None] * len(rows)
    return [nulls if index is None else by_index[index] for index in indices]


def _walk(rows: Rows, wanted: Sequence[int]) -> dict[int, Values]:
    peeked = [_peek(row, wanted) for row in rows]
    return dict(zip(wanted, zip(*peeked, strict=True), strict=True))


def _peek(data: bytes, wanted: Sequence[int]) -> list[bytes | None]:
    """The values of one row at ascending column indices; the columns after the last are not read."""
    peeked: list[bytes | None] = []
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
                peeked.append(data[start:end])
                if end > len(data):
                    raise ProtocolError("truncated column value")
            else:
                peeked.append(None)
    except (IndexError, struct.error) as error:
        raise ProtocolError("malformed TupleData") from error
    return peeked


def zoned(rows: Rows, indices: Sequence[int]) -> Rows | None:
    """The rows, copied, with the time zone UTC appended to each value of the columns at some indices.

    The columns then have the form of `timestamptz`. Returns None for fewer than FEW_ROWS rows, and if a value does not
    end in a digit, such as infinity and times BC.
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
    """Locates the values of some columns in all rows, with array operations column by column instead of row by row.

    For each wanted column it keeps three arrays with one element a row: the start and the end of the value in
    `rows.data` (int64), and whether there is a value (bool; start equals end where there is none). It also walks the
    columns before, because each value's length determines where the next value begins. Raises ProtocolError for a
    truncated row.

    Two rows with the columns ("7", null) and ("12", "x") are the octets

        0002 t 00000001 37 n                    column 0 starts at octet 7, column 1 has no value
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
                raise ProtocolError("truncated column value")
            if index in wanted:
                self._spans[index] = (start, stop, present)
            at = stop

    def values(self, index: int) -> list[bytes | None]:
        """The undecoded values of a column, one a row; None for null."""
        start, stop, present = self._spans[index]
        if not present.any():
            return [None] * len(present)
        data = self._data
        size = self._even_size(index)
        if 0 < size <= _EVEN_BYTES:
            even: list[bytes | None] = at_each_octet(data, np.dtype(f"V{size}"))[start].tolist()
            return even
        spans = zip(start.tolist(), stop.tolist(), strict=True)
        copies: list[bytes | None] = [data[first:last] for first, last in spans]
        for row in np.flatnonzero(~present).tolist():
            copies[row] = None
        return copies

    def some(self, index: int, rows: Int64Array) -> list[bytes | None]:
        """The values of a column in the rows at some indices."""
        data = self._data
        picked = zip(*(each[rows].tolist() for each in self._spans[index]), strict=True)
        return [data[start:stop] if present else None for start, stop, present in picked]

    def span(self, index: int) -> tuple[Int64Array, Int64Array]:
        """The starts and ends of a column's values in the buffer (int64), for the rows that have one."""
        start, stop, present = self._spans[index]
        return start[present], stop[present]

    def absent(self, index: int) -> Mask:
        """A mask of the rows in which a column is null."""
        return ~self._spans[index][2]

    def repeats(self, index: int) -> Mask:
        """Whether each row but the first has the same value in the column as the previous row; nulls are equal."""
        start, _, _ = self._spans[index]
        size = self._even_size(index)
        if size < _WORD:
            values = self.values(index)
            return np.fromiter(map(eq, values[1:], values), np.bool_)
        words = at_each_octet(self._data, _EIGHT)
        same: Mask = np.ones(len(start) - 1, np.bool_)
        for offset in (*range(0, size - _WORD, _WORD), size - _WORD):
            word = words[start + offset]
            same &= word[1:] == word[:-1]
        return same

    def _even_size(self, index: int) -> int:
        """The length in bytes of a column's values if all rows have the same, else 0."""
        start, stop, present = self._spans[index]
        length = stop - start
        size = int(length[0])
        return size if present.all() and (length == size).all() else 0

    def numbers(self, index: int) -> Int64Array | None:
        """The values of a column as int64, 0 for null; None if a value is not a number of at most 18 digits."""
        start, stop, present = self._spans[index]
        length = stop - start
        longest = int(length.max())
        if longest > _DIGITS or not length[present].all():
            return None
        numbers = np.zeros(len(start), np.int64)
        for offset in range(longest if present.any() else 0):
            within = present & (length > offset)
            digits = self._octets[start + offset].astype(np.int64) - _ZERO
            if ((digits < 0) | (digits > 9))[within].any():
                return None
            numbers = np.where(within, numbers * 10 + digits, numbers)
        return numbers


class RowDecoder:
    """Decodes the TupleData of one table layout.

    `names` are the table's columns in order, `mapping` the column name of each field and header. A field whose column
    the table does not have is None.
    """

    __slots__ = ("_headers", "_in_order", "_indices", "_last")

    def __init__(self, names: Sequence[str], mapping: dict[str, str]) -> None:
        known = {name: index for index, name in enumerate(names)}
        self._headers = [name for name in mapping if name.startswith(headers.PREFIX)]
        fields = (*FIELDS, NOTE, *self._headers)
        self._indices = {name: known.get(mapping.get(name, name)) for name in fields}
        self._last = len(names) - 1
        indices = [self._indices[name] for name in FIELDS]
        self._in_order = itemgetter(*(-1 if index is None else index for index in indices))

    def columns(self, rows: Rows, fields: Sequence[str]) -> list[Values]:
        """The undecoded values of some fields, or of NOTE, in many rows, a sequence for each field.

        Raises ProtocolError for a truncated row.
        """
        if headers.FIELD in fields:
            return self._with_headers(rows, fields)
        return columns(rows, [self._indices[field] for field in fields])

    def _with_headers(self, rows: Rows, fields: Sequence[str]) -> list[Values]:
        wanted = [field for field in fields if field != headers.FIELD]
        values = self.columns(rows, (*wanted, *self._headers))
        objects = _objects(self._headers, values[len(wanted) :], len(rows))
        others = dict(zip(wanted, values, strict=False))
        return [others.get(field, objects) for field in fields]

    def present(self, rows: Rows, field: str) -> Int64Array:
        """The indices, int64, of the rows in which a time, or NOTE, has a value.

        Raises ProtocolError for a truncated row.
        """
        index = self._indices[field]
        if index is None:
            return np.zeros(0, np.int64)
        if index == self._last:
            # No time or note ends with the octet of a null. The walk over all columns would cost as much as all other
            # work.
            if len(rows) < FEW_ROWS:
                data, ends = rows.data, rows.ends.tolist()
                return np.array(
                    [n for n, end in enumerate(ends) if data[end - 1] != NULL], np.int64
                )
            return np.flatnonzero(np.frombuffer(rows.data, np.uint8)[rows.ends - 1] != NULL)
        return np.flatnonzero(~Walked(rows, (index,)).absent(index))

    def event(self, data: bytes, commit_fields: Row) -> Event:
        """Decode one row. Bytes that are not UTF-8 become surrogates (`surrogateescape`).

        Raises ProtocolError for a truncated row.
        """
        texts: list[str | None] = []
        at = 2
        unpack, add = _U32.unpack_from, texts.append
        try:
            for _ in range(_U16.unpack_from(data)[0]):
                if data[at] == TEXT:
                    start = at + 5
                    at = start + unpack(data, at + 1)[0]
                    add(data[start:at].decode("utf-8", "surrogateescape"))
                else:
                    add(None)
                    at += 1
        except (IndexError, struct.error) as error:
            raise ProtocolError("malformed TupleData") from error
        if at != len(data):
            raise ProtocolError("truncated column value")
        add(None)  # at index -1
        row = (*self._in_order(texts), *commit_fields)
        return Event(row, self._headers_of(texts) if self._headers else None)

    def _headers_of(self, texts: Sequence[str | None]) -> dict[str, str | None]:
        indices = ((name, self._indices[name]) for name in self._headers)
        return {
            name.removeprefix(headers.PREFIX): None if index is None else texts[index]
            for name, index in indices
        }


def _objects(names: Sequence[str], columns: Sequence[Values], count: int) -> Values:
    """The headers of each row as the text of a JSON object."""
    keys = [name.removeprefix(headers.PREFIX) for name in names]
    texts = ([None if value is None else text(value) for value in column] for column in columns)
    rows = zip(*texts, strict=True) if names else [()] * count
    return [
        headers.as_json(dict(zip(keys, row, strict=True))).encode("utf-8", "surrogateescape")
        for row in rows
    ]
