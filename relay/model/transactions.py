"""Business transactions as columns: undecoded rows in one buffer, and arrays of facts about transactions. No I/O."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from io import BytesIO
from itertools import chain
from typing import Any, NamedTuple, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from relay.model.events import Commit, Decoder, Events, Lsn, Transaction, Tuples

Int64Array = NDArray[np.int64]
Mask = NDArray[np.bool_]
Buffer = bytes | bytearray | memoryview
"""The octets of a message or a row, as a driver gives them."""
Values = Sequence[bytes | None]
"""The values of a column, undecoded, row by row; None for null."""

COMMIT_FACTS = [("lsn", np.uint64), ("end_lsn", np.uint64), ("ts", np.int64), ("xid", np.int64)]
"""The fields of `Commit`, in its order."""
FACTS = np.dtype(
    [
        *COMMIT_FACTS,
        ("first_offset", np.int64),
        ("last_offset", np.int64),
        ("events", np.int64),
        ("size", np.int64),
        ("hosts", np.int64),
    ]
)
"""The dtype of `Transactions.facts`: the commit, the least and the greatest c_offset (both 0 where there is none), the
number of events, their size in bytes, and the index of the transaction's hosts in `Transactions.hosts`."""


def _sum(numbers: Int64Array) -> int:
    """The sum of an array; of few numbers it takes a tenth of the array's own."""
    return sum(numbers.tolist()) if len(numbers) <= _FEW else int(numbers.sum())


def text(value: bytes) -> str:
    """Decode a value; bytes that are not UTF-8 become surrogates (`surrogateescape`)."""
    return value.decode("utf-8", "surrogateescape")


ROWS_AT_ONCE = 4_000
BYTES_AT_ONCE = 4 * 1024 * 1024
"""How many rows, or bytes of rows, are worked on at once: arrays of more are no cheaper."""
_FEW = 20
_PORTION_BYTES = 1024 * 1024
"""Bytes of a pickled block: a compressing stream buffers as much, and malloc returns blocks of this size at once."""
PADDING = bytes(32)
"""Follows the last row or message in a buffer, so that reads of several octets at once stay within the buffer."""


class Rows:
    """Rows of TupleData in one buffer.

    Row i is `data[starts[i]:ends[i]]`. `starts` and `ends` are int64, one element a row, in the order of the events.
    There may be gaps between rows. `data` ends with PADDING, after the last row. Parts share the buffer and the arrays
    of the whole, so these are read-only.
    """

    __slots__ = ("data", "ends", "starts")

    def __init__(self, data: bytes, starts: Int64Array, ends: Int64Array) -> None:
        self.data = data
        self.starts = starts
        self.ends = ends

    @classmethod
    def of(cls, rows: Sequence[Buffer]) -> Self:
        """Copy rows into one buffer."""
        sizes = np.fromiter(map(len, rows), np.int64, len(rows))
        ends = np.cumsum(sizes)
        return cls(b"".join((*rows, PADDING)), ends - sizes, ends)

    @classmethod
    def joined(cls, parts: list[Rows]) -> Rows:
        """Concatenate parts whose rows are in ascending order in their buffers.

        It removes each part from the list when it has copied it, so that only one part is in memory twice.
        """
        if len(parts) == 1:
            return parts.pop()
        data = BytesIO()
        starts, ends = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
        while parts:
            part = parts.pop(0)
            if not len(part):
                continue
            first, last = int(part.starts[0]), int(part.ends[-1])
            moved = data.tell() - first
            starts.append(part.starts + moved)
            ends.append(part.ends + moved)
            data.write(memoryview(part.data)[first:last])
        data.write(PADDING)
        return cls(data.getvalue(), np.concatenate(starts), np.concatenate(ends))

    def __len__(self) -> int:
        return len(self.starts)

    def __iter__(self) -> Iterator[bytes]:
        data = self.data
        spans = zip(self.starts.tolist(), self.ends.tolist(), strict=True)
        return (data[start:end] for start, end in spans)

    def __reduce__(self) -> tuple[Any, ...]:
        # Pickles only these rows, not the whole buffer, in blocks: an object for each row takes more memory.
        portions = self.portions(len(self), _PORTION_BYTES)
        return _rows_of_portions, ([b"".join(each) for each in portions], self.sizes)

    @property
    def sizes(self) -> Int64Array:
        """The length of each row in bytes, int64."""
        sizes: Int64Array = self.ends - self.starts
        return sizes

    @property
    def size(self) -> int:
        """The length of all rows in bytes."""
        return int(self.sizes.sum())

    def part(self, first: int, last: int) -> Rows:
        """The rows from index `first` up to, but not including, `last`; a view."""
        return Rows(self.data, self.starts[first:last], self.ends[first:last])

    def take(self, chosen: Int64Array | Mask) -> Rows:
        """The rows at some indices, in the order of `chosen`, or those of a mask. The result shares the buffer."""
        return Rows(self.data, self.starts[chosen], self.ends[chosen])

    def without_header(self, header: int) -> Rows:
        """The rows without their first `header` bytes. The result shares the buffer."""
        return Rows(self.data, self.starts + header, self.ends)

    def compact(self) -> Rows:
        """The same rows, copied into a new buffer if they fill less than half of this one."""
        return self if self.size * 2 >= len(self.data) - len(PADDING) else Rows.of(list(self))

    def portions(self, count: int, size: int) -> Iterator[Rows]:
        """Yield the rows, in order, in portions of `count` rows, or of fewer rows with at least `size` bytes."""
        if len(self.data) <= size and 0 < len(self) <= count:
            yield self
            return
        cumulative = np.cumsum(self.sizes)
        first = 0
        while first < len(self):
            limit = int(cumulative[first]) + size
            last = min(first + count, int(np.searchsorted(cumulative, limit)) + 1)
            yield self.part(first, last)
            first = last


def _rows_of_portions(portions: Sequence[bytes], sizes: Int64Array) -> Rows:
    ends = np.cumsum(sizes)
    return Rows(b"".join((*portions, PADDING)), ends - sizes, ends)


def portions(rows: Iterable[bytes], count: int, size: int) -> Iterator[Rows]:
    """Yield rows in portions of `count` rows, or of fewer rows with at least `size` bytes."""
    some: list[bytes] = []
    held = 0
    for row in rows:
        some.append(row)
        held += len(row)
        if len(some) >= count or held >= size:
            yield Rows.of(some)
            some, held = [], 0
    if some:
        yield Rows.of(some)


class Undecoded(NamedTuple):
    """A business transaction in one commit, undecoded: the unit of planning.

    `tuples` are pgoutput TupleData with the table's `columns`, in its order. `hosts` are the distinct host_ids as text;
    `first_offset` and `last_offset` are the least and the greatest c_offset, both 0 where there is none; `size` is in
    bytes.
    """

    commit: Commit
    transaction_id: str | None
    hosts: tuple[str, ...]
    columns: tuple[str, ...]
    tuples: Tuples
    size: int
    last_offset: int = 0
    first_offset: int = 0


@dataclass(slots=True, eq=False)
class Transactions:
    """Business transactions in commit order, of one table layout, as columns.

    `facts` has one element of dtype FACTS for each transaction, and `ids` its transaction_id, undecoded. `hosts` has
    the distinct sets of host_ids, as text; `hosts[facts["hosts"][i]]` are those of transaction i. The events are in
    memory: `rows` has `facts["events"][i]` elements for transaction i, one transaction after the other. Or they are in
    a file: then `rows` is empty, and `spooled[i]` has those of transaction i. `attempts[i]` is the number of the
    attempt that handles transaction i; None: it is 1 for all. Parts share arrays, which are read-only.
    """

    columns: tuple[str, ...]
    facts: NDArray[np.void]
    ids: Sequence[bytes | None]
    hosts: Sequence[tuple[str, ...]]
    rows: Rows
    spooled: Sequence[Tuples] | None = None
    attempts: Sequence[int] | None = None

    @classmethod
    def none(cls) -> Self:
        """An empty instance."""
        return cls((), np.zeros(0, FACTS), (), (), Rows.of([]))

    @classmethod
    def joined(cls, parts: list[Transactions]) -> Transactions:
        """Concatenate parts, which have one table layout and are in memory. Empties the list."""
        if len(parts) == 1:
            return parts.pop()
        known: dict[tuple[str, ...], int] = {}
        facts = np.empty(sum(map(len, parts)), FACTS)
        first = 0
        for part in parts:
            some = facts[first : first + len(part)]
            first += len(part)
            some[:] = part.facts
            indices = np.array([known.setdefault(hosts, len(known)) for hosts in part.hosts])
            some["hosts"] = indices[part.facts["hosts"]]
        columns = parts[0].columns
        ids = [transaction_id for part in parts for transaction_id in part.ids]
        rows = [part.rows for part in parts]
        parts.clear()
        return cls(columns, facts, ids, tuple(known), Rows.joined(rows))

    def joins(self, other: Transactions) -> bool:
        """Whether other transactions may follow in the same batch: both have one table layout and are in memory."""
        return self.spooled is other.spooled is None and self.columns == other.columns

    def __len__(self) -> int:
        return len(self.facts)

    def __getitem__(self, index: int) -> Undecoded:
        facts = self.facts[index].item()
        first = int(self.facts["events"][:index].sum())
        return self._one(index, facts, first)

    def __iter__(self) -> Iterator[Undecoded]:
        events = self.facts["events"]
        firsts = (np.cumsum(events) - events).tolist()
        return map(self._one, range(len(self)), self.facts.tolist(), firsts)

    def _one(self, index: int, facts: tuple[int, ...], start: int) -> Undecoded:
        lsn, end, ts, xid, first, last, events, size, hosts = facts
        transaction_id = self.ids[index]
        return Undecoded(
            Commit(Lsn(lsn), Lsn(end), ts, xid),
            None if transaction_id is None else text(transaction_id),
            self.hosts[hosts],
            self.columns,
            self.rows.part(start, start + events) if self.spooled is None else self.spooled[index],
            size,
            last,
            first,
        )

    @property
    def events(self) -> int:
        """The number of events."""
        return _sum(self.facts["events"])

    @property
    def held(self) -> int:
        """The bytes of rows in memory."""
        return 0 if self.spooled is not None else _sum(self.facts["size"])

    @property
    def touching(self) -> list[int]:
        """The indices in `hosts` that these transactions use, each once: a part shares the `hosts` of the whole."""
        return list(dict.fromkeys(self.facts["hosts"].tolist()))

    @property
    def distinct_hosts(self) -> list[str]:
        """Every host_id of these transactions, once."""
        return list(dict.fromkeys(host for index in self.touching for host in self.hosts[index]))

    @property
    def end(self) -> Lsn:
        """The end position of the last commit."""
        return Lsn(self.facts["end_lsn"][-1])

    def part(self, first: int, last: int) -> Transactions:
        """The transactions from index `first` up to, but not including, `last`; a view."""
        events = self.facts["events"]
        start = int(events[:first].sum())
        return Transactions(
            self.columns,
            self.facts[first:last],
            self.ids[first:last],
            self.hosts,
            self.rows.part(start, start + int(events[first:last].sum())),
            self.spooled and self.spooled[first:last],
            self.attempts and self.attempts[first:last],
        )

    def besides(self, indices: Collection[int]) -> Sequence[int]:
        """The indices of all other transactions, in order."""
        every = range(len(self))
        return [index for index in every if index not in indices] if indices else every

    def take(self, chosen: Int64Array | Sequence[int]) -> Transactions:
        """The transactions at some indices, in the order of `chosen`.

        With 2, 3 and 1 events, take([2, 0]) picks the rows 5, 0 and 1: `wanted` is [1, 2]. The transactions' first rows
        are 5 and 0 here, and 0 and 1 in the result, so `shift` is [5, -1]; the rows are [5, -1, -1] + [0, 1, 2].
        """
        indices = np.asarray(chosen, np.int64)
        events = self.facts["events"]
        wanted = events[indices]
        # The difference between a row's index here and in the result is the same for all rows of a transaction.
        shift = (np.cumsum(events) - events)[indices] - (np.cumsum(wanted) - wanted)
        return Transactions(
            self.columns,
            self.facts[indices],
            [self.ids[index] for index in indices.tolist()],
            self.hosts,
            self.rows.take(np.repeat(shift, wanted) + np.arange(wanted.sum()))
            if self.spooled is None
            else self.rows,
            self.spooled and [self.spooled[index] for index in indices.tolist()],
            self.attempts and [self.attempts[index] for index in indices.tolist()],
        )

    def where(self, chosen: Mask) -> Transactions:
        """The transactions with only the rows of a mask (bool, one element a row), without those that have none.

        The rows must be in memory.
        """
        events = self.facts["events"]
        starts = np.cumsum(events) - events
        facts = self.facts.copy()
        facts["events"] = np.add.reduceat(chosen, starts, dtype=np.int64)
        facts["size"] = np.add.reduceat(np.where(chosen, self.rows.sizes, 0), starts)
        left = np.flatnonzero(facts["events"])
        return Transactions(
            self.columns,
            facts[left],
            [self.ids[index] for index in left.tolist()],
            self.hosts,
            self.rows.take(chosen),
            attempts=self.attempts and [self.attempts[index] for index in left.tolist()],
        )

    def portions(self, count: int = ROWS_AT_ONCE, size: int = BYTES_AT_ONCE) -> Iterator[Rows]:
        """Yield all rows, in order, in portions as `Rows.portions` does; a file is read portion by portion."""
        if self.spooled is None:
            return self.rows.portions(count, size)
        return portions(chain.from_iterable(self.spooled), count, size)

    def fitting(self, events: int, size: int) -> int:
        """The number of first transactions that fit within both limits, in whole commits; `size` is in bytes."""
        facts = self.facts
        if self.events <= events and _sum(facts["size"]) <= size:
            return len(facts)
        fits = (np.cumsum(facts["events"]) <= events) & (np.cumsum(facts["size"]) <= size)
        beyond = int(np.argmin(fits))
        return int(np.flatnonzero(facts["end_lsn"] == facts["end_lsn"][beyond])[0])

    def first_commit(self) -> int:
        """The number of transactions of the first commit."""
        ends = self.facts["end_lsn"]
        return int((ends == ends[0]).sum())


class ColumnDecoder(Decoder, Protocol):
    """Decodes single rows, and some columns of many rows."""

    def columns(self, rows: Rows, fields: Sequence[str]) -> list[Values]:
        """The undecoded values of some of FIELDS in many rows, a sequence for each field."""


@dataclass(frozen=True, slots=True, eq=False)
class Routed:
    """The transactions and events that are routed to one handler, in order."""

    transactions: Transactions
    decoder: ColumnDecoder

    def __iter__(self) -> Iterator[Transaction]:
        return (transaction for _, transaction in self.pairs())

    def pairs(self) -> Iterator[tuple[Undecoded, Transaction]]:
        """Yield each transaction undecoded, and as the handler gets it."""
        decoder, attempts = self.decoder, self.transactions.attempts
        for index, each in enumerate(self.transactions):
            commit = each.commit
            attempt = 1 if attempts is None else attempts[index]
            events = Events(each.tuples, decoder, commit)
            yield each, Transaction(each.transaction_id, commit, events, attempt)

    def values(self, fields: Sequence[str]) -> Iterator[tuple[bytes | None, ...]]:
        """Yield the undecoded values of some of FIELDS of each event, in order. Raises ProtocolError."""
        for rows in self.transactions.portions():
            yield from zip(*self.decoder.columns(rows, fields), strict=True)

    @property
    def events(self) -> int:
        """The number of events."""
        return self.transactions.events
