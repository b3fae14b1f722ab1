"""Assembles pgoutput messages into whole commits, grouped by business transaction. No I/O but the spool."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from struct import Struct

from relay.events import FIELDS, Commit, Lsn, Undecoded
from relay.faults import ConfigurationError
from relay.source.pgoutput import (
    Begin,
    CommitMessage,
    Relation,
    decode,
    decode_tuple,
    encode_tuple,
    peek,
    timestamp,
)
from relay.source.spool import Spool, SpooledTuples

_INSERT = ord("I")
_OID = Struct(">I")
_TUPLE = 6  # an Insert is its kind, the relation's oid and 'N' before the row

PEEKED = ("host_id", "user_id", "transaction_id")
"""The fields that planning needs."""


@dataclass(frozen=True, slots=True)
class Received:
    """One whole commit: its business transactions in order of first appearance. `size` in bytes held in memory."""

    commit: Commit
    transactions: Sequence[Undecoded]
    events: int
    size: int
    spooled: bool


@dataclass(frozen=True, slots=True)
class _Layout:
    """Where the peeked fields stand in the outbox's rows as they are now."""

    columns: tuple[str, ...]
    positions: tuple[int, ...]
    order: tuple[int, ...]


@dataclass(slots=True)
class _Group:
    """The rows of one business transaction while its commit is being received."""

    layout: _Layout
    transaction_id: str | None
    hosts: dict[bytes, None] = field(default_factory=dict)
    rows: list[bytes] = field(default_factory=list)
    spooled: SpooledTuples | None = None
    size: int = 0


Key = tuple[object, ...]


class Assembler:
    """Feed it messages in the order of the stream; it returns each commit that holds rows of the outbox.

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
        self._max_bytes = max_bytes
        self._spool_directory = spool_directory
        self._layouts: dict[int, _Layout] = {}
        self._begin: Begin | None = None
        self._groups: dict[Key, _Group] = {}
        self._events = 0
        self._size = 0
        self._spool: Spool | None = None

    @property
    def open(self) -> bool:
        """Whether a transaction has begun and not yet committed."""
        return self._begin is not None

    @property
    def size(self) -> int:
        """Bytes that the open transaction holds in memory."""
        return 0 if self._spool else self._size

    def reset(self) -> None:
        """Forget the open transaction and the relations: a new connection sends both again."""
        self._layouts.clear()
        self._close()

    def feed(self, message: bytes) -> Received | CommitMessage | None:
        """Take one message; returns the finished commit, the bare CommitMessage of one without rows, or None."""
        if message[0] == _INSERT:
            self._insert(message)
            return None
        match decode(message):
            case Begin() as begin:
                self._begin = begin
            case CommitMessage() as commit:
                return self._commit(commit)
            case Relation() as relation:
                self._relation(relation)
        return None

    def _relation(self, relation: Relation) -> None:
        if (relation.namespace, relation.name) != self._table:
            self._layouts.pop(relation.oid, None)
            return
        columns = tuple(column.name for column in relation.columns)
        place = {name: position for position, name in enumerate(columns)}
        wanted = [place.get(self._mapping.get(name, name), -1) for name in PEEKED]
        if wanted[0] < 0:
            raise ConfigurationError(
                f"the outbox {'.'.join(self._table)} no longer has the column "
                f"{self._mapping.get('host_id', 'host_id')!r}: restore it, or map host_id in source.columns"
            )
        positions = tuple(sorted(position for position in wanted if position >= 0))
        order = tuple(
            positions.index(position) if position >= 0 else len(positions) for position in wanted
        )
        self._layouts[relation.oid] = _Layout(columns, positions, order)

    def _insert(self, message: bytes) -> None:
        layout = self._layouts.get(_OID.unpack_from(message, 1)[0])
        if layout is None:
            return
        row = message[_TUPLE:]
        found = peek(row, layout.positions)
        found.append(None)
        host, user, transaction_id = (found[place] for place in layout.order)
        key: Key = (transaction_id,) if transaction_id is not None else (host, user)
        group = self._groups.get(key)
        if group is None:
            group = self._new_group(key, layout, transaction_id)
        elif group.layout is not layout and group.layout != layout:
            row = self._like(group.layout, layout, row)
        group.hosts[host or b""] = None
        self._events += 1
        self._size += len(row)
        group.size += len(row)
        if self._spool is not None and group.spooled is not None:
            self._spool.append(row, group.spooled)
            return
        group.rows.append(row)
        if self._size > self._max_bytes:
            self._spill()

    def _new_group(self, key: Key, layout: _Layout, transaction_id: bytes | None) -> _Group:
        text = None if transaction_id is None else transaction_id.decode()
        group = _Group(layout, text)
        if self._spool is not None:
            group.spooled = SpooledTuples(self._spool)
        self._groups[key] = group
        return group

    def _like(self, first: _Layout, now: _Layout, row: bytes) -> bytes:
        """A row in the shape that its business transaction began with: the table was altered in the midst of it."""
        known = {self._mapping.get(name, name) for name in FIELDS}
        gained = known & set(now.columns) - set(first.columns)
        if gained:
            raise ConfigurationError(
                f"the outbox {'.'.join(self._table)} gained {', '.join(sorted(gained))} between two events of one "
                "business transaction: leave the column out of source.columns"
            )
        values = dict(zip(now.columns, decode_tuple(row), strict=True))
        return encode_tuple(
            [
                value if isinstance(value := values.get(name), bytes) else None
                for name in first.columns
            ]
        )

    def _spill(self) -> None:
        spool = Spool(self._spool_directory)
        for group in self._groups.values():
            group.spooled = SpooledTuples(spool)
            for row in group.rows:
                spool.append(row, group.spooled)
            group.rows.clear()
        self._spool = spool

    def _commit(self, message: CommitMessage) -> Received | CommitMessage:
        begin, groups = self._begin, self._groups
        if begin is None or not groups:
            self._close()
            return message
        if self._spool is not None:
            self._spool.seal()
        commit = Commit(Lsn(message.commit_lsn), message.end_lsn, timestamp(message.ts), begin.xid)
        transactions = tuple(
            Undecoded(
                commit=commit,
                transaction_id=group.transaction_id,
                hosts=tuple(host.decode("utf-8", "surrogateescape") for host in group.hosts),
                columns=group.layout.columns,
                tuples=tuple(group.rows) if group.spooled is None else group.spooled,
                size=group.size,
            )
            for group in groups.values()
        )
        received = Received(commit, transactions, self._events, self.size, self._spool is not None)
        self._close()
        return received

    def _close(self) -> None:
        self._begin = None
        self._groups = {}
        self._events = 0
        self._size = 0
        self._spool = None
