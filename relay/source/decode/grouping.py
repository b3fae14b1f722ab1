"""Groups the rows of commits by business transaction: in memory, or in a spool file if they are too large.

Example, with FEW_ROWS at 0: rows 0 to 5 have the transaction_ids a a b b b c, and `ends["rows"]` is [2, 5]. Rows 0 and
1 are a commit, rows 2 to 4 are another one, and row 5 belongs to a commit that is still open. `Layout.survey` finds
that each of the two commits is one business transaction of one host. They become one `Transactions` whose
`facts["events"]` is [2, 3] and whose rows are a view of the buffer: no row is copied, and no object is made for a row.
If row 3 had another transaction_id, the second commit would be grouped row by row (`_CommitRows`), the first one still
without copies. Row 5 is kept until the end of its commit is received.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from relay.model.events import FIELDS, NOTE, Lsn
from relay.model.snapshots import full_xids
from relay.model.spool import Spool, SpooledTuples
from relay.model.transactions import COMMIT_FACTS, FACTS, Mask, Rows, Transactions, text
from relay.model.tuples import ProtocolError
from relay.source.decode.layout import XID_MASK, Ends, Layout, Survey
from relay.source.decode.pgoutput import decode_tuple, encode_tuple

_GROUPED_AT_ONCE = 1_000
_GROUPED_BYTES = 1 << 18
"""How many rows, and bytes, of a large commit are grouped together."""

_FORGED = (
    b"its c_xid is %d, of a transaction that the server has not begun: whoever inserted it has set c_xid, which is "
    b"to be left to its default"
)
_NOTHING: Mapping[str, bytes] = MappingProxyType({})


@dataclass(slots=True)
class _TransactionRows:
    """The rows of one business transaction of a commit."""

    transaction_id: bytes | None
    hosts: dict[bytes, None] = field(default_factory=dict)
    rows: list[bytes] = field(default_factory=list)
    spooled: SpooledTuples | None = None
    events: int = 0
    size: int = 0
    last_offset: int = 0
    first_offset: int = 0


class _Identities:
    """Recognises rows that a commit of a partitioned table has twice, since it has moved them to another partition.

    A row is known by its c_offset, or 0 where moved rows are renumbered, and by the hash of its id. c_offsets usually
    ascend, and a set is made only if one does not.
    """

    def __init__(self) -> None:
        self._ascending = array("q")
        self._ids = array("q")
        self._distinct: set[int] | None = None

    def add(self, offset: int, event_id: bytes | None) -> bool:
        """Add a row; returns whether it is new."""
        mark = hash(event_id)
        if self._distinct is None:
            if not self._ascending or offset > self._ascending[-1]:
                self._ascending.append(offset)
                self._ids.append(mark)
                return True
            self._distinct = set(map(hash, zip(self._ascending, self._ids, strict=True)))
        identity = hash((offset, mark))
        if identity in self._distinct:
            return False
        self._distinct.add(identity)
        return True


class _CommitRows:
    """A commit whose rows are grouped one by one.

    It has several business transactions, is too large for memory, or its table was altered within it. Copies of rows
    are left out: `xid` is the commit's transaction id, or 0 where it is not known. A row whose c_xid is `next_xid` or
    later is no copy, since no transaction has that xid yet: it gets a NOTE, for which it is dead-lettered.
    """

    def __init__(
        self, mapping: dict[str, str], layout: Layout, xid: int, next_xid: int = 0
    ) -> None:
        self._mapping = mapping
        self._xid = xid
        self._next_xid = next_xid
        self._identities = _Identities() if layout.partitioned else None
        self._columns = layout.columns
        self.foreign = 0
        self._groups: dict[tuple[bytes | None, ...], _TransactionRows] = {}
        self._spool: Spool | None = None
        self._size = 0

    @property
    def size(self) -> int:
        """The bytes of rows in memory."""
        return 0 if self._spool else self._size

    def add_rows(self, layout: Layout, rows: Rows) -> None:
        """Add rows, each to its business transaction."""
        reshape = layout.columns != self._columns
        if reshape:
            self._widen(layout)
        for row, host, transaction_id, offset, user, xid, event_id in zip(
            rows, *layout.peek(rows), strict=True
        ):
            forged = 0 < self._next_xid <= xid
            if not forged and xid and self._xid and xid & XID_MASK != self._xid:
                self.foreign += 1
                continue
            if self._identities is not None and not self._is_new(layout, offset, event_id):
                continue
            key = (transaction_id,) if transaction_id is not None else (host, user)
            group = self._groups.get(key)
            if group is None:
                group = self._new_group(key, transaction_id)
            if forged and NOTE not in self._columns:
                self._gain([NOTE])
                reshape = True
            if reshape or forged:
                notes = {NOTE: _FORGED % xid} if forged else {}
                row = _reshaped(row, layout.columns, self._columns, notes)
            group.hosts[host or b""] = None
            group.events += 1
            group.size += len(row)
            if offset:
                group.first_offset = min(group.first_offset or offset, offset)
                group.last_offset = max(group.last_offset or offset, offset)
            self._size += len(row)
            if self._spool is not None and group.spooled is not None:
                self._spool.append(row, group.spooled)
            else:
                group.rows.append(row)

    def _is_new(self, layout: Layout, offset: int, event_id: bytes | None) -> bool:
        assert self._identities is not None  # noqa: S101
        if layout.renumbered:
            return event_id is None or self._identities.add(0, event_id)
        return not offset or self._identities.add(offset, event_id)

    def spill(self, directory: Path | None) -> None:
        """Move the rows to a file; later rows are appended there."""
        spool = Spool(directory)
        for group in self._groups.values():
            group.spooled = SpooledTuples(spool)
            for row in group.rows:
                spool.append(row, group.spooled)
            group.rows.clear()
        self._spool = spool

    def received(self, end: Ends) -> Transactions:
        """Return the rows as a whole commit, which `end` describes."""
        if self._spool is not None:
            self._spool.seal()
        groups = self._groups.values()
        _, *commit = end.item()
        facts = [
            (*commit, group.first_offset, group.last_offset, group.events, group.size, index)
            for index, group in enumerate(groups)
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

    def _new_group(
        self, key: tuple[bytes | None, ...], transaction_id: bytes | None
    ) -> _TransactionRows:
        group = self._groups[key] = _TransactionRows(transaction_id)
        if self._spool is not None:
            group.spooled = SpooledTuples(self._spool)
        return group

    def _widen(self, layout: Layout) -> None:
        """Add the columns of fields that the table got within the commit: earlier rows get null in them."""
        names = (*FIELDS, *self._mapping)
        fields = {NOTE, *(self._mapping.get(name, name) for name in names)}
        gained = [name for name in layout.columns if name in fields and name not in self._columns]
        if gained:
            self._gain(gained)

    def _gain(self, gained: Sequence[str]) -> None:
        """Add columns, which are null in the rows so far."""
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
    """Groups rows, given in the order of the stream, those of many commits together.

    A commit above `max_bytes` goes to a spool file.
    """

    def __init__(
        self, mapping: dict[str, str], max_bytes: int, spool_directory: Path | None = None
    ) -> None:
        self._mapping = mapping
        self._max_bytes = max_bytes
        self._spool_directory = spool_directory
        self._foreign = 0
        self._next_xid = 0
        self.clear()

    def begin(self, next_xid: int) -> None:
        """Forget all rows; `next_xid` is the first full xid that no transaction of the source has yet, or 0."""
        self._next_xid = next_xid
        self.clear()

    def clear(self) -> None:
        """Forget all rows."""
        self._layout: Layout | None = None
        self._open_groups: _CommitRows | None = None
        self._xid = 0
        self._finished: list[Transactions] = []
        self._forget_kept()

    def _forget_kept(self) -> None:
        # Rows that are not grouped yet, and the ends of commits among them; after the last end, the open commit's.
        self._kept: list[Rows] = []
        self._ends: list[Ends] = []
        self._open_size = 0

    @property
    def size(self) -> int:
        """The bytes that the open commit holds in memory."""
        return self._open_size + (self._open_groups.size if self._open_groups else 0)

    def take(self, layout: Layout | None, rows: Rows, ends: Ends, xid: int = 0) -> Lsn | None:
        """Add undecoded rows, and the ends of commits among them. `layout` may be None if there are no rows.

        `xid` is that of the commit that stays open after the last end, or 0. Returns the end of the last commit that
        has no rows; None without such a commit. Raises ProtocolError for a row that is cut short.
        """
        if len(rows) and layout is not self._layout:
            self._change(layout)
        if self._fits(rows):
            self._xid = xid
            return self._keep(rows, ends)
        passed: Lsn | None = None
        first = 0
        for index, last in enumerate(ends["rows"].tolist()):
            self._xid = int(ends["xid"][index])
            passed = self._take_one(rows.part(first, last), ends[index : index + 1]) or passed
            first = last
        self._xid = xid
        self._take_one(rows.part(first, len(rows)), ends[:0])
        return passed

    def fetch(self) -> list[Transactions]:
        """Return the commits that ended since the last call. Raises ProtocolError for a row that is cut short."""
        self._group_finished()
        finished, self._finished = self._finished, []
        return finished

    def foreign(self) -> int:
        """The number of rows with another transaction's c_xid that were left out since the last call.

        Rows of a partitioned table do not count: there an update can move a row to another partition.
        """
        foreign, self._foreign = self._foreign, 0
        return foreign

    def _fits(self, rows: Rows) -> bool:
        """Whether no commit can be too large to be grouped together with others."""
        return self._open_groups is None and self._open_size + rows.size <= self._max_bytes

    def _take_one(self, rows: Rows, end: Ends) -> Lsn | None:
        """Add rows of one commit, and its end unless it is still open."""
        if self._fits(rows):
            end = end.copy()
            end["rows"] = len(rows)
            return self._keep(rows, end)
        self._group_finished()
        self._group_rows(rows)
        if len(end) and self._open_groups is not None and self._layout is not None:
            self._finish(self._layout, self._open_groups, end[0])
            self._open_groups = None
        return None

    def _keep(self, rows: Rows, ends: Ends) -> Lsn | None:
        """Keep rows and ends until they are fetched."""
        before = sum(map(len, self._kept))
        ended = int(self._ends[-1]["rows"][-1]) if self._ends else 0
        if len(rows):
            self._kept.append(rows)
        if not len(ends):
            self._open_size += rows.size
            return None
        upto = ends["rows"]
        has_rows = upto > np.concatenate(((ended - before,), upto[:-1]))
        self._open_size = rows.part(int(upto[-1]), len(rows)).size
        kept = ends[has_rows]
        if len(kept):
            kept["rows"] += before
            self._ends.append(kept)
        return None if len(kept) == len(ends) else Lsn(ends["end_lsn"][~has_rows][-1])

    def _change(self, layout: Layout | None) -> None:
        """Switch to another layout, after the kept rows are grouped."""
        self._group_finished()
        if self._kept:
            self._group_rows(Rows.of([]))
        self._layout = layout

    def _group_rows(self, rows: Rows) -> None:
        """Group the kept rows of the open commit and `rows` one by one."""
        if self._layout is None:
            return
        if self._open_groups is None:
            self._note_begun(np.array([self._xid]))
            self._open_groups = _CommitRows(self._mapping, self._layout, self._xid, self._next_xid)
        kept = self._kept
        self._forget_kept()
        for part in (*kept, rows):
            for portion in part.portions(_GROUPED_AT_ONCE, _GROUPED_BYTES):
                self._open_groups.add_rows(self._layout, portion)
                if self._open_groups.size > self._max_bytes:
                    self._open_groups.spill(self._spool_directory)

    def _group_finished(self) -> None:
        """Group the rows of finished commits; keep those of the open one."""
        if self._layout is None or not self._ends:
            return
        ends = np.concatenate(self._ends) if len(self._ends) > 1 else self._ends[0]
        self._ends = []
        rows = Rows.joined(self._kept)
        last = int(ends["rows"][-1])
        self._kept = [rows.part(last, len(rows)).compact()] if last < len(rows) else []
        rows = rows.part(0, last)
        self._note_begun(ends["xid"])
        survey = self._layout.survey(rows, ends, self._next_xid)
        if survey is not None and survey.forged:
            self._group_each(self._layout, rows, ends)
            return
        if survey is not None and survey.old is not None:
            self._count(self._layout, int(survey.old.sum()))
            rows, ends = _without(rows, ends, survey.old)
            survey = self._layout.survey(rows, ends) if len(ends) else None
        if survey is None:
            self._group_each(self._layout, rows, ends)
            return
        commits = _as_transactions(self._layout, rows, ends, survey)
        index = 0
        for uniform, run in groupby(survey.uniform):
            first, index = index, index + len(list(run))
            if uniform:
                self._finished.append(commits.part(first, index))
            else:
                start = int(ends["rows"][first - 1]) if first else 0
                self._group_each(self._layout, rows, ends[first:index], start)

    def _note_begun(self, xids: NDArray[np.int64] | NDArray[np.uint32]) -> None:
        """Note the xids of commits, which are modulo 2^32."""
        if self._next_xid:
            newest = int(full_xids(xids, self._next_xid).max())
            self._next_xid = max(self._next_xid, newest + 1)

    def _group_each(self, layout: Layout, rows: Rows, ends: Ends, start: int = 0) -> None:
        """Group the rows of each commit one by one; the first commit begins at the row index `start`."""
        for end in ends:
            stop = int(end["rows"])
            groups = _CommitRows(self._mapping, layout, int(end["xid"]), self._next_xid)
            groups.add_rows(layout, rows.part(start, stop))
            self._finish(layout, groups, end)
            start = stop

    def _count(self, layout: Layout, foreign: int) -> None:
        if not layout.partitioned:
            self._foreign += foreign

    def _finish(self, layout: Layout, groups: _CommitRows, end: Ends) -> None:
        self._count(layout, groups.foreign)
        commit = groups.received(end)
        if len(commit):
            self._finished.append(commit)


def _without(rows: Rows, ends: Ends, old: Mask) -> tuple[Rows, Ends]:
    """Drop the marked rows, and the commits that have no other rows."""
    remaining = np.cumsum(~old)[ends["rows"] - 1]
    has_rows = np.diff(remaining, prepend=0) > 0
    kept = ends[has_rows]
    kept["rows"] = remaining[has_rows]
    return rows.take(~old), kept


def _as_transactions(layout: Layout, rows: Rows, ends: Ends, survey: Survey) -> Transactions:
    """Commits as `Transactions`, each of them one business transaction."""
    known: dict[bytes, int] = {}
    facts = np.empty(len(ends), FACTS)
    for name, _ in COMMIT_FACTS:
        facts[name] = ends[name]
    facts["first_offset"] = survey.first_offsets
    facts["last_offset"] = survey.last_offsets
    facts["events"] = np.diff(ends["rows"], prepend=0)
    facts["size"] = np.add.reduceat(rows.sizes, ends["rows"] - facts["events"])
    facts["hosts"] = [known.setdefault(host or b"", len(known)) for host in survey.hosts]
    hosts = [(text(host),) for host in known]
    return Transactions(layout.columns, facts, survey.ids, hosts, rows)


def _reshaped(
    row: bytes, before: Sequence[str], after: Sequence[str], added: Mapping[str, bytes] = _NOTHING
) -> bytes:
    cells = decode_tuple(row)
    if len(cells) != len(before):
        raise ProtocolError("a row has another number of columns than its table")
    values = {**dict(zip(before, cells, strict=True)), **added}
    return encode_tuple([values.get(name) for name in after])
