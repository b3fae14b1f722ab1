"""Groups the rows of commits by business transaction, in memory or, where they are too many, in a spool file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np

from relay.events import FIELDS, Commit, Undecoded
from relay.faults import ConfigurationError
from relay.source.pgoutput import ProtocolError, decode_tuple, encode_tuple
from relay.source.spool import Spool, SpooledTuples
from relay.source.tuples import FEW_ROWS, Walked, columns

_PLACED_AT_ONCE = 1 << 18
"""How many bytes of a large commit's rows are placed together."""


_NO_OFFSET = np.iinfo(np.int64).max


class Received(NamedTuple):
    """One whole commit: its business transactions in order of first appearance. `size` in bytes held in memory."""

    commit: Commit
    transactions: Sequence[Undecoded]
    events: int
    size: int
    spooled: bool


class Peeked(NamedTuple):
    """The fields that planning needs, row by row. An offset is 0 where there is none.

    Users decide only where there is no transaction_id, so there are none where all rows have one.
    """

    hosts: Sequence[bytes | None]
    transaction_ids: Sequence[bytes | None]
    offsets: Sequence[int]
    users: Sequence[bytes | None]


class Uniform(NamedTuple):
    """What planning needs of a commit that is one business transaction of one host. `size` is that of its rows."""

    host: bytes | None
    transaction_id: bytes
    first_offset: int
    last_offset: int
    size: int


@dataclass(frozen=True, slots=True)
class Layout:
    """The outbox's columns as they are now, and where the peeked fields stand among them."""

    columns: tuple[str, ...]
    places: tuple[int | None, ...]
    offset_column: str

    @classmethod
    def of(cls, columns: Sequence[str], mapping: dict[str, str], table: str) -> Layout:
        """Locate the peeked fields by name; raises ConfigurationError if there is no host column."""
        place = {name: position for position, name in enumerate(columns)}
        names = [
            mapping.get(name, name) for name in ("host_id", "transaction_id", "c_offset", "user_id")
        ]
        if names[0] not in place:
            raise ConfigurationError(
                f"source.table: {table} no longer has the column {names[0]!r}: "
                "restore it, or map host_id in source.columns"
            )
        return cls(tuple(columns), tuple(map(place.get, names)), names[2])

    def peek(self, rows: Sequence[bytes]) -> Peeked:
        """Look at many rows. Raises ProtocolError where one is cut short, ConfigurationError for an odd c_offset."""
        *places, user = self.places
        hosts, ids, offsets = columns(rows, places)
        (users,) = columns(rows, [user if None in ids else None])
        return Peeked(hosts, ids, self._numbers(offsets), users)

    def survey(self, rows: Sequence[bytes], ends: Sequence[int]) -> Iterator[Uniform | None]:
        """Look at many rows, of commits that end at some places; None for a commit that is not uniform.

        Raises as `peek` does.
        """
        if len(rows) < FEW_ROWS or None in self.places[:3]:
            return self._survey(rows, ends)
        return self._survey_together(rows, ends)

    def _survey(self, rows: Sequence[bytes], ends: Sequence[int]) -> Iterator[Uniform | None]:
        peeked = self.peek(rows)
        for start, end in pairwise((0, *ends)):
            host, transaction_id = peeked.hosts[start], peeked.transaction_ids[start]
            offsets = peeked.offsets[start:end]
            if (
                transaction_id is None
                or peeked.transaction_ids[start:end].count(transaction_id) < end - start
                or peeked.hosts[start:end].count(host) < end - start
            ):
                yield None
            else:
                first = min(filter(None, offsets), default=0)
                size = sum(map(len, rows[start:end]))
                yield Uniform(host, transaction_id, first, max(offsets), size)

    def _survey_together(
        self, rows: Sequence[bytes], ends: Sequence[int]
    ) -> Iterator[Uniform | None]:
        host, transaction_id, offset = (place or 0 for place in self.places[:3])
        walked = Walked(rows, (host, transaction_id, offset))
        starts = np.array((0, *ends[:-1]))
        alike = np.ones(len(rows), np.bool_)
        alike[1:] = walked.repeats(host) & walked.repeats(transaction_id)
        alike[starts] = ~walked.absent(transaction_id)[starts]
        offsets = walked.numbers(offset)
        if offsets is None:
            offsets = np.array(self._numbers(walked.values(offset)))
        known = np.where(offsets == 0, _NO_OFFSET, offsets)
        first = np.minimum.reduceat(known, starts)
        found = zip(
            np.logical_and.reduceat(alike, starts).tolist(),
            walked.some(host, starts),
            walked.some(transaction_id, starts),
            np.where(first == _NO_OFFSET, 0, first).tolist(),
            np.maximum.reduceat(offsets, starts).tolist(),
            np.diff(walked.ends[np.array(ends) - 1], prepend=0).tolist(),
            strict=True,
        )
        for uniform, *facts in found:
            yield Uniform(*facts) if uniform else None

    def _numbers(self, offsets: Sequence[bytes | None]) -> list[int]:
        if not all(offset is None or offset.removeprefix(b"-").isdigit() for offset in offsets):
            raise ConfigurationError(
                f"source.columns: the outbox's column {self.offset_column!r} holds something else than offsets, "
                "which are whole numbers: map a column of type bigint to c_offset"
            )
        return [int(offset or 0) for offset in offsets]


@dataclass(slots=True)
class _Group:
    """The rows of one business transaction of a commit."""

    layout: Layout
    transaction_id: bytes | None
    hosts: dict[bytes, None] = field(default_factory=dict)
    rows: list[bytes] = field(default_factory=list)
    spooled: SpooledTuples | None = None
    size: int = 0
    last_offset: int = 0
    first_offset: int = 0


class _Groups:
    """A commit whose rows are placed one by one: of several business transactions, too large, or altered midway."""

    def __init__(self, mapping: dict[str, str]) -> None:
        self._mapping = mapping
        self._groups: dict[tuple[bytes | None, ...], _Group] = {}
        self._spool: Spool | None = None
        self._events = 0
        self._size = 0

    @property
    def size(self) -> int:
        """Bytes of rows held in memory."""
        return 0 if self._spool else self._size

    @property
    def spooled(self) -> bool:
        """Whether the rows are in a file."""
        return self._spool is not None

    def place(self, layout: Layout, rows: Sequence[bytes], peeked: Peeked) -> None:
        """Take rows, each to those of its business transaction."""
        for row, host, transaction_id, offset, user in zip(rows, *peeked, strict=True):
            key = (transaction_id,) if transaction_id is not None else (host, user)
            group = self._groups.get(key)
            if group is None:
                group = self._new_group(key, layout, transaction_id)
            elif group.layout is not layout and group.layout != layout:
                row = self._in_one_shape(group, layout, row)
            group.hosts[host or b""] = None
            group.size += len(row)
            if offset:
                group.first_offset = min(group.first_offset or offset, offset)
                group.last_offset = max(group.last_offset, offset)
            self._size += len(row)
            if self._spool is not None and group.spooled is not None:
                self._spool.append(row, group.spooled)
            else:
                group.rows.append(row)
        self._events += len(rows)

    def spill(self, directory: Path | None) -> None:
        """Move the rows to a file, where those that follow go too."""
        spool = Spool(directory)
        for group in self._groups.values():
            group.spooled = SpooledTuples(spool)
            for row in group.rows:
                spool.append(row, group.spooled)
            group.rows.clear()
        self._spool = spool

    def received(self, commit: Commit) -> Received:
        """The rows as a whole commit."""
        if self._spool is not None:
            self._spool.seal()
        transactions = tuple(
            Undecoded(
                commit=commit,
                transaction_id=None
                if group.transaction_id is None
                else _text(group.transaction_id),
                hosts=tuple(map(_text, group.hosts)),
                columns=group.layout.columns,
                tuples=tuple(group.rows) if group.spooled is None else group.spooled,
                size=group.size,
                last_offset=group.last_offset,
                first_offset=group.first_offset,
            )
            for group in self._groups.values()
        )
        return Received(commit, transactions, self._events, self.size, self.spooled)

    def _new_group(
        self, key: tuple[bytes | None, ...], layout: Layout, transaction_id: bytes | None
    ) -> _Group:
        group = self._groups[key] = _Group(layout, transaction_id)
        if self._spool is not None:
            group.spooled = SpooledTuples(self._spool)
        return group

    def _in_one_shape(self, group: _Group, layout: Layout, row: bytes) -> bytes:
        """The row in the shape of its group: the table was altered in the midst of the business transaction.

        Where the table has gained a field's column, the rows before get it too, as null.
        """
        fields = {self._mapping.get(name, name) for name in FIELDS}
        gained = [
            name for name in layout.columns if name in fields and name not in group.layout.columns
        ]
        if gained:
            self._widen(group, (*group.layout.columns, *gained))
        return _reshaped(row, layout.columns, group.layout.columns)

    def _widen(self, group: _Group, columns: tuple[str, ...]) -> None:
        before = group.layout.columns
        group.layout = Layout.of(columns, self._mapping, "the outbox")
        group.rows = [_reshaped(row, before, columns) for row in group.rows]
        if self._spool is None or group.spooled is None:
            return
        self._spool.seal()
        narrow, group.spooled = group.spooled, SpooledTuples(self._spool)
        for row in narrow:
            self._spool.append(_reshaped(row, before, columns), group.spooled)


class Grouping:
    """Takes the rows of one commit after the other, and looks at those of many commits together.

    A commit above `max_bytes` goes to a spool file.
    """

    def __init__(
        self, mapping: dict[str, str], max_bytes: int, spool_directory: Path | None = None
    ) -> None:
        self._mapping = mapping
        self._max_bytes = max_bytes
        self._spool_directory = spool_directory
        self.clear()

    def clear(self) -> None:
        """Forget everything taken so far."""
        self._layout: Layout | None = None
        self._rows: list[bytes] = []
        self._unplaced = 0
        self._limit = self._max_bytes
        self._open: _Groups | None = None
        self._ends: list[tuple[int, Commit]] = []
        self._finished: list[Received] = []

    @property
    def size(self) -> int:
        """Bytes that the open commit holds in memory."""
        return self._unplaced + (self._open.size if self._open else 0)

    @property
    def waiting(self) -> int:
        """How many rows have not been looked at yet."""
        return len(self._rows)

    def add(self, layout: Layout, rows: Sequence[bytes]) -> None:
        """Take rows of the open commit, undecoded. Raises ProtocolError where an earlier one is cut short."""
        if layout is not self._layout:
            self._change(layout)
        self._rows += rows
        self._unplaced += sum(map(len, rows))
        if self._unplaced > self._limit:
            self._place()

    def finish(self, commit: Commit) -> bool:
        """The open commit is whole; returns whether it has rows."""
        if self._open is not None:
            self._place()
            self._finished.append(self._open.received(commit))
            self._open, self._limit = None, self._max_bytes
            return True
        if not self._unplaced:
            return False
        self._ends.append((len(self._rows), commit))
        self._unplaced = 0
        return True

    def fetch(self) -> list[Received]:
        """The commits that were finished since the last time. Raises ProtocolError where a row is cut short."""
        self._look()
        finished, self._finished = self._finished, []
        return finished

    def _change(self, layout: Layout) -> None:
        """The rows that follow are of another shape."""
        self._look()
        if self._rows:
            self._place()
        self._layout = layout

    def _place(self) -> None:
        """Place the rows of the open commit one by one."""
        self._look()
        if self._open is None:
            self._open = _Groups(self._mapping)
        if self._layout is not None and self._rows:
            self._open.place(self._layout, self._rows, self._layout.peek(self._rows))
        self._rows, self._unplaced = [], 0
        if self._open.size > self._max_bytes:
            self._open.spill(self._spool_directory)
        self._limit = min(self._max_bytes - self._open.size, _PLACED_AT_ONCE)

    def _look(self) -> None:
        """Group the rows of the commits that are finished; those of the open one stay."""
        if self._layout is None or not self._ends:
            return
        last, _ = self._ends[-1]
        rows, self._rows = self._rows[:last], self._rows[last:]
        ends, self._ends = self._ends, []
        surveyed = self._layout.survey(rows, [end for end, _ in ends])
        start = 0
        for (end, commit), uniform in zip(ends, surveyed, strict=True):
            self._finished.append(self._received(commit, self._layout, rows[start:end], uniform))
            start = end

    def _received(
        self, commit: Commit, layout: Layout, rows: Sequence[bytes], uniform: Uniform | None
    ) -> Received:
        if uniform is None:
            groups = _Groups(self._mapping)
            groups.place(layout, rows, layout.peek(rows))
            return groups.received(commit)
        transaction = Undecoded(
            commit,
            _text(uniform.transaction_id),
            (_text(uniform.host or b""),),
            layout.columns,
            tuple(rows),
            uniform.size,
            uniform.last_offset,
            uniform.first_offset,
        )
        return Received(commit, (transaction,), len(rows), uniform.size, False)


def _text(value: bytes) -> str:
    return value.decode("utf-8", "surrogateescape")


def _reshaped(row: bytes, before: Sequence[str], after: Sequence[str]) -> bytes:
    cells = decode_tuple(row)
    if len(cells) != len(before):
        raise ProtocolError("a row of another shape than its table")
    values = dict(zip(before, cells, strict=True))
    return encode_tuple(
        [value if isinstance(value := values.get(name), bytes) else None for name in after]
    )
