"""Assembles pgoutput messages into whole commits, grouped by business transaction. No I/O but the spool."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import numpy as np

from relay.model.events import Lsn, microseconds
from relay.model.transactions import Buffer, Int64Array, Transactions
from relay.model.tuples import ProtocolError
from relay.source.decode.emitted import Emitted
from relay.source.decode.grouping import Grouping
from relay.source.decode.layout import ENDS, Ends, Layout
from relay.source.decode.pgoutput import BEGIN, COMMIT, INSERT, KINDS, MessageBuffer, Relation
from relay.source.decode.translation import Encoding, Translation

_BEGIN, _COMMIT, _INSERT, _RELATION = b"BCIR"
_OTHER_KINDS = bytes(set(range(256)) - {_BEGIN, _COMMIT, _INSERT})

_EARLIEST = microseconds(datetime.min.replace(tzinfo=UTC))
_LATEST = microseconds(datetime.max.replace(tzinfo=UTC))


class OpenCommit(NamedTuple):
    """A commit whose end the stream has not brought yet; `lsn` is the position of its commit record."""

    lsn: Lsn
    xid: int


class Assembler:
    """Assembles the messages given to `feed`, in the order of the stream; `fetch` returns whole commits.

    A commit whose rows exceed `max_bytes` goes to a spool file. Raises ConfigurationError if the outbox has lost the
    host column, ProtocolError for a malformed message.
    """

    def __init__(
        self,
        table: tuple[str, str],
        mapping: dict[str, str],
        max_bytes: int,
        spool_directory: Path | None = None,
        header: int = 0,
        emitted: Emitted | None = None,
        gapless: bool = False,
        learned: Callable[[Sequence[str]], None] = lambda columns: None,
    ) -> None:
        """`header` is the size in bytes before each message. With `emitted`, logical messages give the rows.

        `gapless`: a row that is moved to another partition gets another c_offset. `learned` is called with the outbox's
        columns, and may raise RelayError.
        """
        self._gapless = gapless
        self._learned = learned
        self._emitted = emitted
        self._table = table
        self._mapping = mapping
        self._header = header
        self._grouping = Grouping(mapping, max_bytes, spool_directory)
        # What this connection has described: the oids, the oid of the outbox, and its columns.
        self._described: set[int] = set()
        self._outbox: int | None = None
        self._layout: Layout | None = None
        self._encoding: Encoding | None = None
        self._translation: Translation | None = None
        self._partitioned = False
        self._xid: int | None = None
        self._begun_lsn = Lsn(0)
        self._learn_emitted()

    @property
    def open(self) -> bool:
        """Whether a Begin has come without its Commit."""
        return self._xid is not None

    @property
    def begun(self) -> OpenCommit | None:
        """The open commit; None between commits."""
        return None if self._xid is None else OpenCommit(self._begun_lsn, self._xid)

    @property
    def size(self) -> int:
        """The bytes that the open commit holds in memory."""
        return self._grouping.size

    def reset(
        self, encoding: Encoding | None = None, partitioned: bool = False, next_xid: int = 0
    ) -> None:
        """Forget the open commit and the relations: a new connection sends both again.

        `encoding` is that of names and values where it is not UTF-8. `partitioned`: the outbox is a partitioned table,
        where an update that moves a row to another partition is streamed as an insert. `next_xid` is the source's next
        full xid, 0 where it is not known.
        """
        self._encoding = encoding
        self._partitioned = partitioned
        self._translation = None
        self._described.clear()
        self._outbox = self._layout = self._xid = None
        self._grouping.begin(next_xid)
        self._learn_emitted()

    def feed(self, messages: list[Buffer]) -> Lsn | None:
        """Take messages, in the order of the stream, and empty the list.

        Returns the end of the last commit that has no rows; None without such a commit.
        """
        if self._emitted is not None:
            messages[:] = self._emitted.inserts(messages)
        if not messages:
            return None
        count = len(messages)
        buffer = MessageBuffer.of(messages, self._header)
        # The buffer has copies: a large message must not be in memory twice.
        messages.clear()
        passed: Lsn | None = None
        first = 0
        for index in buffer.indices(_RELATION).tolist():
            passed = self._take(buffer.part(first, index)) or passed
            self._learn(Relation.of(buffer[index]))
            first = index + 1
        rest = buffer.part(first, count) if first else buffer
        return self._take(rest) or passed

    def fetch(self) -> list[Transactions]:
        """Return the whole commits with rows since the last call, in order."""
        return self._grouping.fetch()

    def foreign(self) -> int:
        """The number of rows with another transaction's c_xid that were left out since the last call."""
        return self._grouping.foreign()

    def ignored(self) -> int:
        """The number of non-transactional messages that were left out since the last call."""
        return 0 if self._emitted is None else self._emitted.ignored()

    def _learn_emitted(self) -> None:
        """Learn the relation of rows that come from logical messages, which the stream does not describe."""
        if self._emitted is None:
            return
        self._emitted.reset(self._encoding)
        relation = self._emitted.relation
        names = [column.name for column in relation.columns]
        self._described.add(relation.oid)
        self._layout = Layout.of(names, self._mapping, relation.name)
        self._outbox = relation.oid

    def _learn(self, relation: Relation) -> None:
        self._described.add(relation.oid)
        if self._emitted is not None:
            return
        if (self._name(relation.namespace), self._name(relation.name)) == self._table:
            columns = [(self._name(column.name), column.type_oid) for column in relation.columns]
            translation = Translation.needed(columns, self._mapping, self._encoding)
            names = translation.columns if translation else [name for name, _ in columns]
            self._learned(names)
            self._layout = Layout.of(
                names, self._mapping, ".".join(self._table), self._partitioned, self._gapless
            )
            self._translation = translation
            self._outbox = relation.oid
        elif relation.oid == self._outbox:
            self._outbox = None

    def _name(self, text: str) -> str:
        return text if self._encoding is None else self._encoding.name_of(text)

    def _take(self, buffer: MessageBuffer) -> Lsn | None:
        """Take messages without a Relation among them."""
        self._check_kinds(buffer.kinds)
        self._check_order(buffer.kinds)
        commits = buffer.indices(_COMMIT)
        inserts = self._inserts(buffer)
        ends = self._ends(buffer, commits)
        ends["rows"] = inserts.searchsorted(commits)
        rows = buffer.rows(inserts)
        if self._translation is not None:
            rows = self._translation.rows(rows)
        return self._grouping.take(self._layout, rows, ends, self._xid or 0)

    def _check_kinds(self, kinds: bytes) -> None:
        """Raise ProtocolError for a kind that protocol version 1 does not have: other kinds are not decoded."""
        if unknown := kinds.translate(None, KINDS):
            raise ProtocolError(f"unknown pgoutput message {unknown[:1]!r}")

    def _check_order(self, kinds: bytes) -> None:
        """Raise ProtocolError unless Begins and Commits alternate, with rows only between them.

        The kinds are compared as a string. Of `BIIC O BIC`, `turns` keeps BCBC, which is how a repetition of BC begins;
        `marks` is BIICBIC, which neither begins with I nor contains CI.
        """
        marks = (b"B" * self.open + kinds).translate(None, _OTHER_KINDS)
        turns = marks.translate(None, b"I")
        if not (b"BC" * len(turns)).startswith(turns):
            raise ProtocolError("Begin and Commit do not alternate")
        if marks.startswith(b"I") or b"CI" in marks:
            raise ProtocolError("a row outside a transaction")

    def _inserts(self, buffer: MessageBuffer) -> Int64Array:
        """The indices of the inserts into the outbox, int64, ascending."""
        indices = buffer.indices(_INSERT)
        inserts = buffer.read(indices, INSERT)
        if inserts["new"].tobytes().translate(None, b"N"):
            raise ProtocolError("insert without a new row")
        tables = set(inserts["oid"].tolist())
        if not tables <= self._described:
            raise ProtocolError("a row of a table that was not described")
        return indices if tables == {self._outbox} else indices[inserts["oid"] == self._outbox]

    def _ends(self, buffer: MessageBuffer, commits: Int64Array) -> Ends:
        """The ends of the commits, each with the xid of its Begin; the caller sets `rows`."""
        begins = buffer.read(buffer.indices(_BEGIN), BEGIN)
        xids = begins["xid"].tolist()
        if len(begins):
            self._begun_lsn = Lsn(begins["lsn"][-1])
        if self._xid is not None:
            xids.insert(0, self._xid)
        messages = buffer.read(commits, COMMIT)
        ends = np.empty(len(messages), ENDS)
        for name in ("lsn", "end_lsn", "ts"):
            ends[name] = messages[name]
        ends["xid"] = xids[: len(messages)]
        self._xid = xids[-1] if len(xids) > len(messages) else None
        times = messages["ts"]
        if times.min(initial=0) < _EARLIEST or times.max(initial=0) > _LATEST:
            raise ProtocolError("commit time out of range")
        return ends
