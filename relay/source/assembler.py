"""Assembles pgoutput messages into whole commits, grouped by business transaction. No I/O but the spool."""

from __future__ import annotations

from pathlib import Path
from struct import Struct

from relay.events import Commit
from relay.source.grouping import Grouping, Layout, Received
from relay.source.pgoutput import (
    Begin,
    CommitMessage,
    ProtocolError,
    Relation,
    decode,
    timestamp,
)

_INSERT = ord("I")
Buffer = bytes | memoryview

_OID = Struct(">I")
_TUPLE = 6  # an Insert is its kind, the relation's oid and 'N' before the row


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
        self._grouping = Grouping(mapping, max_bytes, spool_directory)
        self._layouts: dict[bytes, Layout | None] = {}
        self._begin: Begin | None = None

    @property
    def open(self) -> bool:
        """Whether a transaction has begun and not yet committed."""
        return self._begin is not None

    @property
    def size(self) -> int:
        """Bytes that the open transaction holds in memory."""
        return self._grouping.size

    def reset(self) -> None:
        """Forget the open transaction and the relations: a new connection sends both again."""
        self._layouts.clear()
        self._begin = None
        self._grouping.clear()

    def feed(self, message: Buffer) -> CommitMessage | None:
        """Take one message; returns the CommitMessage of a commit without rows."""
        if message and message[0] == _INSERT:
            self._insert(message)
            return None
        match decode(bytes(message)):
            case Begin() as begin:
                self._begin = begin
            case CommitMessage() as commit:
                return self._commit(commit)
            case Relation() as relation:
                self._relation(relation)
        return None

    def fetch(self) -> list[Received]:
        """The whole commits with rows since the last time, in order."""
        return self._grouping.fetch()

    def _insert(self, message: Buffer) -> None:
        try:
            layout = self._layouts[bytes(message[1:5])]
        except KeyError as error:
            raise ProtocolError("a row of a table that was not described") from error
        if self._begin is None:
            raise ProtocolError("a row outside a transaction")
        if layout is not None:
            self._grouping.add(layout, bytes(message[_TUPLE:]))

    def _relation(self, relation: Relation) -> None:
        oid = _OID.pack(relation.oid)
        if (relation.namespace, relation.name) == self._table:
            columns = [column.name for column in relation.columns]
            self._layouts[oid] = Layout.of(columns, self._mapping, ".".join(self._table))
        else:
            self._layouts[oid] = None

    def _commit(self, message: CommitMessage) -> CommitMessage | None:
        begin, self._begin = self._begin, None
        if begin is None:
            return message
        commit = Commit(message.commit_lsn, message.end_lsn, timestamp(message.ts), begin.xid)
        return None if self._grouping.finish(commit) else message
