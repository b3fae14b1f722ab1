"""Groups the rows of commits by business transaction, in memory or, where they are too many, in a spool file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np

from relay.events import FIELDS
from relay.faults import ConfigurationError
from relay.source.pgoutput import ProtocolError, decode_tuple, encode_tuple
from relay.source.spool import Spool, SpooledTuples
from relay.source.tuples import FEW_ROWS, Walked, columns
from relay.transactions import FACTS, Places, Rows, Transactions, text

_PLACED_AT_ONCE = 1 << 18
"""How many bytes of a large commit's rows are placed together."""


_NO_OFFSET = np.iinfo(np.int64).max


class End(NamedTuple):
    """Where a commit ends: how many rows there are up to it, and its facts (see `Commit`)."""

    rows: int
    lsn: int
    end_lsn: int
    ts: int
    xid: int


class Peeked(NamedTuple):
    """The fields that planning needs, row by row. An offset is 0 where there is none.

    Users decide only where there is no transaction_id, so there are none where all rows have one.
    """

    hosts: Sequence[bytes | None]
    transaction_ids: Sequence[bytes | None]
    offsets: Sequence[int]
    users: Sequence[bytes | None]


class Survey(NamedTuple):
    """What planning needs of commits, where each is one business transaction of one host (`uniform`)."""

    uniform: Sequence[bool]
    hosts: Sequence[bytes | None]
    ids: Sequence[bytes | None]
    first_offsets: Sequence[int] | Places
    last_offsets: Sequence[int] | Places


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

    def peek(self, rows: Rows) -> Peeked:
        """Look at many rows. Raises ProtocolError where one is cut short, ConfigurationError for an odd c_offset."""
        *places, user = self.places
        hosts, ids, offsets = columns(rows, places)
        (users,) = columns(rows, [user if None in ids else None])
        return Peeked(hosts, ids, self._numbers(offsets), users)

    def survey(self, rows: Rows, ends: Sequence[int]) -> Survey:
        """Look at the rows of commits that end at some places. Raises as `peek` does."""
        if len(rows) < FEW_ROWS or None in self.places[:3]:
            return self._survey(rows, ends)
        return self._survey_together(rows, np.array(ends))

    def _survey(self, rows: Rows, ends: Sequence[int]) -> Survey:
        peeked = self.peek(rows)
        found = []
        for start, end in pairwise((0, *ends)):
            host, transaction_id = peeked.hosts[start], peeked.transaction_ids[start]
            offsets = peeked.offsets[start:end]
            uniform = (
                transaction_id is not None
                and peeked.transaction_ids[start:end].count(transaction_id) == end - start
                and peeked.hosts[start:end].count(host) == end - start
            )
            first = min(filter(None, offsets), default=0)
            found.append((uniform, host, transaction_id, first, max(offsets)))
        return Survey(*zip(*found, strict=True))

    def _survey_together(self, rows: Rows, ends: Places) -> Survey:
        host, transaction_id, offset = (place or 0 for place in self.places[:3])
        walked = Walked(rows, (host, transaction_id, offset))
        starts = np.concatenate(([0], ends[:-1]))
        alike = np.ones(len(rows), np.bool_)
        alike[1:] = walked.repeats(host) & walked.repeats(transaction_id)
        alike[starts] = ~walked.absent(transaction_id)[starts]
        offsets = walked.numbers(offset)
        if offsets is None:
            offsets = np.array(self._numbers(walked.values(offset)))
        known = np.where(offsets == 0, _NO_OFFSET, offsets)
        first = np.minimum.reduceat(known, starts)
        return Survey(
            np.logical_and.reduceat(alike, starts).tolist(),
            walked.some(host, starts),
            walked.some(transaction_id, starts),
            np.where(first == _NO_OFFSET, 0, first),
            np.maximum.reduceat(offsets, starts),
        )

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

    transaction_id: bytes | None
    hosts: dict[bytes, None] = field(default_factory=dict)
    rows: list[bytes] = field(default_factory=list)
    spooled: SpooledTuples | None = None
    events: int = 0
    size: int = 0
    last_offset: int = 0
    first_offset: int = 0


class _Groups:
    """A commit whose rows are placed one by one: of several business transactions, too large, or altered midway."""

    def __init__(self, mapping: dict[str, str], layout: Layout) -> None:
        self._mapping = mapping
        self._columns = layout.columns
        self._groups: dict[tuple[bytes | None, ...], _Group] = {}
        self._spool: Spool | None = None
        self._size = 0

    @property
    def size(self) -> int:
        """Bytes of rows held in memory."""
        return 0 if self._spool else self._size

    def place(self, layout: Layout, rows: Rows) -> None:
        """Take rows, each to those of its business transaction."""
        reshape = layout.columns != self._columns
        if reshape:
            self._widen(layout)
        for row, host, transaction_id, offset, user in zip(rows, *layout.peek(rows), strict=True):
            key = (transaction_id,) if transaction_id is not None else (host, user)
            group = self._groups.get(key)
            if group is None:
                group = self._new_group(key, transaction_id)
            if reshape:
                row = _reshaped(row, layout.columns, self._columns)
            group.hosts[host or b""] = None
            group.events += 1
            group.size += len(row)
            if offset:
                group.first_offset = min(group.first_offset or offset, offset)
                group.last_offset = max(group.last_offset, offset)
            self._size += len(row)
            if self._spool is not None and group.spooled is not None:
                self._spool.append(row, group.spooled)
            else:
                group.rows.append(row)

    def spill(self, directory: Path | None) -> None:
        """Move the rows to a file, where those that follow go too."""
        spool = Spool(directory)
        for group in self._groups.values():
            group.spooled = SpooledTuples(spool)
            for row in group.rows:
                spool.append(row, group.spooled)
            group.rows.clear()
        self._spool = spool

    def received(self, end: End) -> Transactions:
        """The rows as a whole commit."""
        if self._spool is not None:
            self._spool.seal()
        groups = self._groups.values()
        facts = [
            (*end[1:], group.first_offset, group.last_offset, group.events, group.size, place)
            for place, group in enumerate(groups)
        ]
        spooled = tuple(group.spooled for group in groups if group.spooled is not None)
        return Transactions(
            self._columns,
            np.array(facts, FACTS),
            [group.transaction_id for group in groups],
            [tuple(map(text, group.hosts)) for group in groups],
            Rows.of([row for group in groups for row in group.rows]),
            spooled or None,
        )

    def _new_group(self, key: tuple[bytes | None, ...], transaction_id: bytes | None) -> _Group:
        group = self._groups[key] = _Group(transaction_id)
        if self._spool is not None:
            group.spooled = SpooledTuples(self._spool)
        return group

    def _widen(self, layout: Layout) -> None:
        """The table was altered in the midst of the commit: where it gained a field's column, rows before get null."""
        fields = {self._mapping.get(name, name) for name in FIELDS}
        gained = [name for name in layout.columns if name in fields and name not in self._columns]
        if not gained:
            return
        before, self._columns = self._columns, (*self._columns, *gained)
        for group in self._groups.values():
            group.rows = [_reshaped(row, before, self._columns) for row in group.rows]
            if self._spool is None or group.spooled is None:
                continue
            self._spool.seal()
            narrow, group.spooled = group.spooled, SpooledTuples(self._spool)
            for row in narrow:
                self._spool.append(_reshaped(row, before, self._columns), group.spooled)


class Grouping:
    """Takes the rows of one commit after the other, and looks at those of many commits together.

    Each row comes behind a header of so many bytes. A commit above `max_bytes` goes to a spool file.
    """

    def __init__(
        self,
        mapping: dict[str, str],
        max_bytes: int,
        spool_directory: Path | None = None,
        header: int = 0,
    ) -> None:
        self._mapping = mapping
        self._max_bytes = max_bytes
        self._spool_directory = spool_directory
        self._header = header
        self.clear()

    def clear(self) -> None:
        """Forget everything taken so far."""
        self._layout: Layout | None = None
        self._rows: list[bytes] = []
        self._unplaced = 0
        self._limit = self._max_bytes
        self._open: _Groups | None = None
        self._ends: list[End] = []
        self._finished: list[Transactions] = []

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
        self._unplaced += sum(map(len, rows)) - self._header * len(rows)
        if self._unplaced > self._limit:
            self._place(layout)

    def finish(self, lsn: int, end_lsn: int, ts: int, xid: int) -> bool:
        """The open commit is whole; returns whether it has rows."""
        if self._open is None and not self._unplaced:
            return False
        if self._open is not None:
            if self._layout is not None and self._rows:
                self._place(self._layout)
            self._finished.append(self._open.received(End(0, lsn, end_lsn, ts, xid)))
            self._open, self._limit = None, self._max_bytes
            return True
        self._ends.append(End(len(self._rows), lsn, end_lsn, ts, xid))
        self._unplaced = 0
        return True

    def fetch(self) -> list[Transactions]:
        """The commits that were finished since the last time. Raises ProtocolError where a row is cut short."""
        self._look()
        finished, self._finished = self._finished, []
        return finished

    def _change(self, layout: Layout) -> None:
        """The rows that follow are of another shape."""
        self._look()
        if self._layout is not None and self._rows:
            self._place(self._layout)
        self._layout = layout

    def _place(self, layout: Layout) -> None:
        """Place the rows of the open commit one by one."""
        self._look()
        if self._open is None:
            self._open = _Groups(self._mapping, layout)
        self._open.place(layout, Rows.of(self._rows, self._header))
        self._rows, self._unplaced = [], 0
        if self._open.size > self._max_bytes:
            self._open.spill(self._spool_directory)
        self._limit = min(self._max_bytes - self._open.size, _PLACED_AT_ONCE)

    def _look(self) -> None:
        """Group the rows of the commits that are finished; those of the open one stay."""
        if self._layout is None or not self._ends:
            return
        ends, self._ends = self._ends, []
        last = ends[-1].rows
        rows = Rows.of(self._rows[:last], self._header)
        self._rows = self._rows[last:]
        survey = self._layout.survey(rows, [end.rows for end in ends])
        commits = _as_transactions(self._layout, rows, ends, survey)
        place = 0
        for uniform, run in groupby(survey.uniform):
            first, place = place, place + len(list(run))
            if uniform:
                self._finished.append(commits.part(first, place))
                continue
            for odd in range(first, place):
                groups = _Groups(self._mapping, self._layout)
                groups.place(self._layout, commits.part(odd, odd + 1).rows)
                self._finished.append(groups.received(ends[odd]))


def _as_transactions(
    layout: Layout, rows: Rows, ends: Sequence[End], survey: Survey
) -> Transactions:
    """Commits as if each were a business transaction of its own."""
    known: dict[bytes, int] = {}
    facts = np.empty(len(ends), FACTS)
    counts, facts["lsn"], facts["end_lsn"], facts["ts"], facts["xid"] = zip(*ends, strict=True)
    facts["first_offset"] = survey.first_offsets
    facts["last_offset"] = survey.last_offsets
    facts["events"] = np.diff(counts, prepend=0)
    facts["size"] = np.add.reduceat(rows.sizes, np.array((0, *counts[:-1])))
    facts["hosts"] = [known.setdefault(host or b"", len(known)) for host in survey.hosts]
    hosts = [(text(host),) for host in known]
    return Transactions(layout.columns, facts, survey.ids, hosts, rows)


def _reshaped(row: bytes, before: Sequence[str], after: Sequence[str]) -> bytes:
    cells = decode_tuple(row)
    if len(cells) != len(before):
        raise ProtocolError("a row of another shape than its table")
    values = dict(zip(before, cells, strict=True))
    return encode_tuple(
        [value if isinstance(value := values.get(name), bytes) else None for name in after]
    )
