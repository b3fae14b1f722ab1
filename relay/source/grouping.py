"""Groups the rows of one commit by business transaction, in memory or, where they are too many, in a spool file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from relay.events import FIELDS, Commit, Undecoded
from relay.faults import ConfigurationError
from relay.source.pgoutput import ProtocolError, decode_tuple, encode_tuple, peek
from relay.source.spool import Spool, SpooledTuples

PEEKED = ("host_id", "user_id", "transaction_id", "c_offset")
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
class Layout:
    """The outbox's columns as they are now, and where the peeked fields stand among them."""

    columns: tuple[str, ...]
    positions: tuple[int, ...]
    order: tuple[int, ...]

    @classmethod
    def of(cls, columns: Sequence[str], mapping: dict[str, str], table: str) -> Layout:
        """Locate the peeked fields by name; raises ConfigurationError if there is no host column."""
        place = {name: position for position, name in enumerate(columns)}
        wanted = [place.get(mapping.get(name, name), -1) for name in PEEKED]
        if wanted[0] < 0:
            raise ConfigurationError(
                f"source.table: {table} no longer has the column {mapping.get('host_id', 'host_id')!r}: "
                "restore it, or map host_id in source.columns"
            )
        positions = tuple(sorted(position for position in wanted if position >= 0))
        order = tuple(
            positions.index(position) if position >= 0 else len(positions) for position in wanted
        )
        return cls(tuple(columns), positions, order)


@dataclass(slots=True)
class _Group:
    """The rows of one business transaction while its commit is being received."""

    layout: Layout
    transaction_id: str | None
    hosts: dict[bytes, None] = field(default_factory=dict)
    rows: list[bytes] = field(default_factory=list)
    spooled: SpooledTuples | None = None
    size: int = 0
    last_offset: int = 0
    first_offset: int = 0


Key = tuple[object, ...]


class Grouping:
    """Takes the rows of one commit after the other. Above `max_bytes` a commit's rows go to a spool file."""

    def __init__(
        self, mapping: dict[str, str], max_bytes: int, spool_directory: Path | None = None
    ) -> None:
        self._mapping = mapping
        self._max_bytes = max_bytes
        self._spool_directory = spool_directory
        self.clear()

    def clear(self) -> None:
        """Forget the rows taken so far."""
        self._groups: dict[Key, _Group] = {}
        self._events = 0
        self._size = 0
        self._spool: Spool | None = None

    @property
    def size(self) -> int:
        """Bytes of rows held in memory."""
        return 0 if self._spool else self._size

    def add(self, layout: Layout, row: bytes) -> None:
        """Take one row, undecoded. Raises ProtocolError if it is cut short."""
        found = peek(row, layout.positions)
        found.append(None)
        host, user, transaction_id, offset = (found[place] for place in layout.order)
        key: Key = (transaction_id,) if transaction_id is not None else (host, user)
        group = self._groups.get(key)
        if group is None:
            group = self._new_group(key, layout, transaction_id)
        elif group.layout is not layout and group.layout != layout:
            row = self._in_one_shape(group, layout, row)
        group.hosts[host or b""] = None
        group.size += len(row)
        if offset is not None:
            number = self._whole(offset)
            group.first_offset = min(group.first_offset or number, number)
            group.last_offset = max(group.last_offset, number)
        self._events += 1
        self._size += len(row)
        if self._spool is not None and group.spooled is not None:
            self._spool.append(row, group.spooled)
            return
        group.rows.append(row)
        if self._size > self._max_bytes:
            self._spill()

    def _whole(self, offset: bytes) -> int:
        if not offset.removeprefix(b"-").isdigit():
            column = self._mapping.get("c_offset", "c_offset")
            raise ConfigurationError(
                f"source.columns: the outbox's column {column!r} holds something else than offsets, "
                "which are whole numbers: map a column of type bigint to c_offset"
            )
        return int(offset)

    def finish(self, commit: Commit) -> Received | None:
        """The commit with the rows taken since the last one; None if there were none."""
        if not self._groups:
            return None
        if self._spool is not None:
            self._spool.seal()
        transactions = tuple(
            Undecoded(
                commit=commit,
                transaction_id=group.transaction_id,
                hosts=tuple(host.decode("utf-8", "surrogateescape") for host in group.hosts),
                columns=group.layout.columns,
                tuples=tuple(group.rows) if group.spooled is None else group.spooled,
                size=group.size,
                last_offset=group.last_offset,
                first_offset=group.first_offset,
            )
            for group in self._groups.values()
        )
        received = Received(commit, transactions, self._events, self.size, self._spool is not None)
        self.clear()
        return received

    def _new_group(self, key: Key, layout: Layout, transaction_id: bytes | None) -> _Group:
        text = None if transaction_id is None else transaction_id.decode("utf-8", "surrogateescape")
        group = _Group(layout, text)
        if self._spool is not None:
            group.spooled = SpooledTuples(self._spool)
        self._groups[key] = group
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

    def _spill(self) -> None:
        spool = Spool(self._spool_directory)
        for group in self._groups.values():
            group.spooled = SpooledTuples(spool)
            for row in group.rows:
                spool.append(row, group.spooled)
            group.rows.clear()
        self._spool = spool


def _reshaped(row: bytes, before: Sequence[str], after: Sequence[str]) -> bytes:
    cells = decode_tuple(row)
    if len(cells) != len(before):
        raise ProtocolError("a row of another shape than its table")
    values = dict(zip(before, cells, strict=True))
    return encode_tuple(
        [value if isinstance(value := values.get(name), bytes) else None for name in after]
    )
