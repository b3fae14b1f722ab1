"""Pages of the log: the rows of a call of `relay.read` as transactions, and the snapshots between them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

from relay.model.events import FIELDS, Commit, Event, Events, Lsn, Row, Transaction
from relay.model.page_snapshots import PageSnapshots

if TYPE_CHECKING:
    from concurrent.futures import Executor

READ = f"select {', '.join(FIELDS)}, c_xid, position from relay.read($1, $2, $3)"  # noqa: S608
"""The statement whose rows are a page; its parameters are those of `relay.read`."""
_ID, _TRANSACTION_ID = FIELDS.index("id"), FIELDS.index("transaction_id")
_XID, _POSITION = len(FIELDS), len(FIELDS) + 1
_ROWS_AT_ONCE = 1000
"""How many rows of a transaction at most become tuples at a time."""


def parts_of(position: str) -> tuple[int, str, str]:
    """Return the number, the snapshot and the origin of a position, as `relay.read` returns it."""
    number, _, rest = position.partition("/")
    snapshot, _, origin = rest.partition("@")
    return int(number), snapshot, origin


class PagedLog(Protocol):
    """Whoever reads pages, and is moved past their transactions: `relay.client.claimed_reader.ClaimedReader`."""

    name: str
    kind: type[LogTransaction]
    commit_kind: type[LogCommit]
    executor: Executor | None

    def done(self, mark: PageMark) -> None:
        """Move past a transaction and those before it."""

    def begin_commit(self, mark: PageMark) -> dict[str, str]:
        """Return what `relay.advance` needs in the transaction that moves past it."""

    def note_commit(self, mark: PageMark) -> None:
        """Note that the transaction is about to commit."""

    def forget(self) -> None:
        """Forget the pages."""


@dataclass(frozen=True, slots=True)
class PageMark:
    """Which transaction of which page it is, for what moves the reader past it."""

    log: PagedLog
    page: LogPage
    index: int

    @property
    def order(self) -> tuple[int, int]:
        """What orders the transactions of a reader."""
        return self.page.number, self.index

    @property
    def snapshot(self) -> str:
        """The snapshot after the transaction."""
        return self.page.snapshot(self.index)


class LogCommit(Commit):
    """The commit of a transaction that was read from the log. Only its `xid` is known."""

    mark: PageMark


@dataclass(frozen=True, slots=True)
class LogTransaction(Transaction):
    """A transaction that was read from the log."""

    commit: LogCommit

    @property
    def mark(self) -> PageMark:
        """What moves the reader past it."""
        return self.commit.mark

    @property
    def position(self) -> str:
        """The position after this transaction, for `subscribe` and `relay.seek`."""
        return f"0/{self.mark.snapshot}@{self.mark.page.origin}"


class _PageEvents(Events):
    """The events of a transaction, from consecutive rows of a page."""

    __slots__ = ("_first", "_last", "_page")

    def __init__(self, page: LogPage, first: int, last: int, commit: Commit) -> None:
        self._page, self._first, self._last, self.commit = page, first, last, commit

    def __len__(self) -> int:
        return self._last - self._first

    def __iter__(self) -> Iterator[Event]:
        fields, upcast = self.commit.fields, self._page.upcast
        for first in range(self._first, self._last, _ROWS_AT_ONCE):
            for row in self._page.rows_of(first, min(first + _ROWS_AT_ONCE, self._last)):
                event = Event(row[:_XID] + fields)
                yield event if upcast is None else upcast(event)


class LogPage:
    """The rows of a call of `relay.read`, of which each database transaction is a transaction.

    `after` is the snapshot from which it was read, `end` the one after all its rows, and `origin` tells this server's
    positions. Pages of another `epoch` than the reader's were read before it was moved; `number` counts pages.
    """

    def __init__(
        self,
        result: Any,
        after: str,
        upcast: Callable[[Event], Event] | None,
        epoch: int,
        number: int,
    ) -> None:
        self._result = result
        self._after = after
        self.upcast = upcast
        self.epoch = epoch
        self.number = number
        self._loaded = _loader_of_texts(result)
        _, self.end, self.origin = parts_of(result.get_value(0, _POSITION).decode())
        self.is_empty = result.get_value(0, _ID) is None
        self.rows = 0 if self.is_empty else result.ntuples
        self._starts: list[int] = []
        self._xids: list[int] = []
        before = None
        for row in range(self.rows):
            xid = result.get_value(row, _XID)
            if xid != before:
                self._starts.append(row)
                self._xids.append(int(xid))
                before = xid

    def __len__(self) -> int:
        return len(self._xids)

    def rows_of(self, first: int, last: int) -> list[Row]:
        """Return the rows from one to before another, as texts: the fields first."""
        rows: list[Row] = self._loaded.load_rows(first, last, tuple)
        return rows

    def average_bytes(self) -> float:
        """Return about how many bytes a row has, from some of them."""
        step = max(1, self.rows // 20)
        sizes = [
            sum(len(text) for text in self.rows_of(row, row + 1)[0] if text is not None)
            for row in range(0, self.rows, step)
        ]
        return sum(sizes) / len(sizes)

    def transaction(self, index: int, log: PagedLog) -> LogTransaction:
        """Return a transaction of the page."""
        first = self._starts[index]
        last = self._starts[index + 1] if index + 1 < len(self._starts) else self.rows
        ids = {self._result.get_value(row, _TRANSACTION_ID) for row in range(first, last)}
        only = ids.pop() if len(ids) == 1 else None
        # As polled rows have it: the 32 bits that the WAL has of an xid.
        commit = log.commit_kind(Lsn(0), Lsn(0), 0, self._xids[index] & 0xFFFFFFFF)
        commit.mark = PageMark(log, self, index)
        events = _PageEvents(self, first, last, commit)
        return log.kind(None if only is None else only.decode(), commit, events)

    def snapshot(self, index: int) -> str:
        """Return the snapshot after a transaction of the page: it sees this one, those before it, and none after it.

        It sees the transactions of the page that do not match, too, as far as it reaches.
        """
        if index + 1 == len(self._xids):
            return self.end
        xmin, xmax, missing = self._snapshots.after(index)
        return f"{xmin}:{xmax}:{','.join(map(str, missing))}"

    @cached_property
    def _snapshots(self) -> PageSnapshots:
        _, xmax, _ = self._after.split(":")
        *_, in_progress = self.end.split(":")
        return PageSnapshots(
            self._xids, int(xmax), [int(each) for each in in_progress.split(",") if each]
        )


def _loader_of_texts(result: Any) -> Any:
    """Return what makes tuples of a result's rows, in which every value is a text as PostgreSQL prints it."""
    from psycopg.adapt import AdaptersMap, Transformer
    from psycopg.types.string import TextLoader

    adapters = AdaptersMap()
    # The loader of types that have none.
    adapters.register_loader(0, TextLoader)
    loader = Transformer(adapters)
    loader.set_pgresult(result)
    return loader
