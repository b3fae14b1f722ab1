"""Assembles pgoutput messages into whole commits, grouped by business transaction. No I/O but the spool."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from struct import Struct

from relay.events import POSTGRES_EPOCH, Lsn
from relay.source.grouping import Grouping, Layout
from relay.source.pgoutput import (
    Begin,
    CommitMessage,
    ProtocolError,
    Relation,
    decode,
)
from relay.transactions import Transactions

_INSERT = b"I"
_PREFIX = Struct(">cIc")
_TUPLE = _PREFIX.size
"""An Insert is its kind, the relation's oid and 'N' before the row."""
_NO_PREFIX = b"\0"

_MICROSECOND = timedelta(microseconds=1)
_EARLIEST = (datetime.min.replace(tzinfo=UTC) - POSTGRES_EPOCH) // _MICROSECOND
_LATEST = (datetime.max.replace(tzinfo=UTC) - POSTGRES_EPOCH) // _MICROSECOND


class Assembler:
    """Feed it messages in the order of the stream, and fetch the commits that hold rows of the outbox.

    A commit whose rows exceed `max_bytes` goes to a spool file. Raises ConfigurationError when the outbox has lost the
    host column, ProtocolError for a malformed message.
    """

    def __init__(
        self,
        table: tuple[str, str],
        mapping: dict[str, str],
        max_bytes: int,
        spool_directory: Path | None = None,
    ) -> None:
        self._table = table
        self._mapping = mapping
        self._grouping = Grouping(mapping, max_bytes, spool_directory, _TUPLE)
        self._layouts: dict[bytes, Layout | None] = {}
        self._xid: int | None = None
        # How the outbox's inserts begin: as far as is known, and inside a transaction.
        self._prefix = self._outbox = _NO_PREFIX

    @property
    def open(self) -> bool:
        """Whether a transaction has begun and not yet committed."""
        return self._xid is not None

    @property
    def size(self) -> int:
        """Bytes that the open transaction holds in memory."""
        return self._grouping.size

    def reset(self) -> None:
        """Forget the open transaction and the relations: a new connection sends both again."""
        self._layouts.clear()
        self._xid = None
        self._outbox = self._prefix = _NO_PREFIX
        self._grouping.clear()

    def feed(self, messages: Sequence[bytes]) -> Lsn | None:
        """Take messages in the order of the stream; returns the end of the last commit without rows, if any."""
        passed: Lsn | None = None
        first = 0
        for place, message in enumerate(messages):
            if message.startswith(self._outbox):
                continue
            self._take_rows(messages[first:place])
            first = place + 1
            passed = self._take(message) or passed
        self._take_rows(messages[first:])
        return passed

    def fetch(self) -> list[Transactions]:
        """The whole commits with rows since the last time, in order."""
        return self._grouping.fetch()

    def _take_rows(self, inserts: Sequence[bytes]) -> None:
        """Inserts into the outbox, one behind the other."""
        layout = self._layouts.get(self._outbox)
        if inserts and layout is not None:
            self._grouping.add(layout, inserts)

    def _take(self, message: bytes) -> Lsn | None:
        if message[:1] == _INSERT:
            self._insert(message)
            return None
        match decode(message):
            case Begin() as begin:
                self._xid = begin.xid
                self._outbox = self._prefix
            case CommitMessage() as commit:
                return self._commit(commit)
            case Relation() as relation:
                self._relation(relation)
        return None

    def _insert(self, message: bytes) -> None:
        """The first row of a table in this transaction: those that follow it are told by how they begin."""
        prefix = message[:_TUPLE]
        if prefix not in self._layouts:
            raise ProtocolError("a row of a table that was not described")
        if self._xid is None:
            raise ProtocolError("a row outside a transaction")
        if self._layouts[prefix] is not None:
            self._outbox = self._prefix = prefix
            self._take_rows([message])

    def _relation(self, relation: Relation) -> None:
        prefix = _PREFIX.pack(_INSERT, relation.oid, b"N")
        if (relation.namespace, relation.name) == self._table:
            columns = [column.name for column in relation.columns]
            self._layouts[prefix] = Layout.of(columns, self._mapping, ".".join(self._table))
        else:
            self._layouts[prefix] = None
        self._outbox = self._prefix = _NO_PREFIX

    def _commit(self, message: CommitMessage) -> Lsn | None:
        xid, self._xid = self._xid, None
        self._outbox = _NO_PREFIX
        if xid is None:
            return message.end_lsn
        if not _EARLIEST <= message.ts <= _LATEST:
            raise ProtocolError("commit time out of range")
        finished = self._grouping.finish(message.commit_lsn, message.end_lsn, message.ts, xid)
        return None if finished else message.end_lsn
