"""The connection of a reader: it claims the reader's name, reads pages of the log, and moves the position.

A session of the server has the name, by an advisory lock. The server ends a session that says nothing for as long as
the lease, so that the name of a frozen process is free again. Each claim moves the position's number, by which
whoever had the name before is told from whoever has it.
"""

from __future__ import annotations

import logging
import random
import select
import socket
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from relay.client.errors import ReaderError, ReaderMoved, reader_error
from relay.model.events import FIELDS, Commit, Event, Events, Lsn, Transaction

if TYPE_CHECKING:
    from concurrent.futures import Executor

    import psycopg

logger = logging.getLogger("relay.reader")

_FIRST_PAUSE_SECONDS = 0.005
"""How long a reader waits after it has found nothing; the pause doubles each time, up to `poll`."""
_LONGEST_SKIP_SECONDS = 0.1
"""How long at most a reader waits after it has found only events that do not match."""
_NOTE_SECONDS = 5.0
"""How often the position moves past events that do not match."""
_SIGN_SECONDS = 60.0
"""How often an idle reader says that it is in use: it could expire."""
_LOOK_SECONDS = 0.1
"""From such a pause on, a reader asks whether there were transactions at all, which costs next to nothing."""
_FIRST_OUTAGE_SECONDS, _LONGEST_OUTAGE_SECONDS = 0.2, 30.0
_FIRST_ROWS, _SKIPPED_ROWS = 100, 10_000
_PAGE_BYTES = 8 * 1024 * 1024
"""How many bytes a page should have at most: the next one has fewer rows."""
_BEATS = 3
"""How often within its lease a reader says that it lives."""

_READ = f"select position, c_xid, {', '.join(FIELDS)} from relay.read(%s, %s, %s)"  # noqa: S608
_XID = 1
_FIRST_FIELD = 2
_TRANSACTION_ID = _FIRST_FIELD + FIELDS.index("transaction_id")


@dataclass(frozen=True, slots=True)
class PageMark:
    """Which transaction of which page it is, for what moves the reader past it."""

    log: ClaimedReader
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
        return f"0/{self.mark.snapshot}"


class _PageEvents(Events):
    """The events of a transaction, from consecutive rows of a page."""

    __slots__ = ("_first", "_last", "_page")

    def __init__(self, page: LogPage, first: int, last: int, commit: Commit) -> None:
        self._page, self._first, self._last, self.commit = page, first, last, commit

    def __len__(self) -> int:
        return self._last - self._first

    def __iter__(self) -> Iterator[Event]:
        fields, upcast = self.commit.fields, self._page.upcast
        for number in range(self._first, self._last):
            event = Event(self._page.fields(number) + fields)
            yield event if upcast is None else upcast(event)


class LogPage:
    """The rows of a call of `relay.read`, of which each database transaction is a transaction.

    `after` is the snapshot from which it was read, `end` the one after all its rows. Pages of another `epoch` than the
    reader's were read before it was moved; `number` counts pages.
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
        self.end: str = result.get_value(0, 0).decode().partition("/")[2]
        self.is_empty = result.get_value(0, _FIRST_FIELD) is None
        self.rows = 0 if self.is_empty else result.ntuples
        self._starts: list[int] = []
        self._xids: list[int] = []
        before = None
        for number in range(self.rows):
            xid = result.get_value(number, _XID)
            if xid != before:
                self._starts.append(number)
                self._xids.append(int(xid))
                before = xid

    def __len__(self) -> int:
        return len(self._xids)

    def fields(self, number: int) -> tuple[str | None, ...]:
        """Return the fields of a row."""
        get = self._result.get_value
        return tuple(
            None if (value := get(number, column)) is None else value.decode()
            for column in range(_FIRST_FIELD, _FIRST_FIELD + len(FIELDS))
        )

    def average_bytes(self) -> float:
        """Return about how many bytes a row has, from some of them."""
        step = max(1, self.rows // 20)
        sizes = [
            sum(len(text) for text in self.fields(number) if text is not None)
            for number in range(0, self.rows, step)
        ]
        return sum(sizes) / len(sizes)

    def transaction(self, index: int, log: ClaimedReader) -> LogTransaction:
        """Return a transaction of the page."""
        first = self._starts[index]
        last = self._starts[index + 1] if index + 1 < len(self._starts) else self.rows
        ids = {self._result.get_value(number, _TRANSACTION_ID) for number in range(first, last)}
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
        *_, open_at_end = _parsed(self.end)
        ends = max(_parsed(self._after)[1], max(self._xids[: index + 1]) + 1)
        later = {each for each in self._xids[index + 1 :] if each < ends}
        missing = sorted(later.union(open_at_end[: bisect_left(open_at_end, ends)]))
        return f"{missing[0] if missing else ends}:{ends}:{','.join(map(str, missing))}"


def _parsed(snapshot: str) -> tuple[int, int, list[int]]:
    xmin, xmax, rest = snapshot.split(":")
    return int(xmin), int(xmax), [int(each) for each in rest.split(",") if each]


class ClaimedReader:
    """A reader at work. Its methods are called by one thread at a time, except `stop`.

    `kind` and `commit_kind` are the classes of the transactions and their commits, `executor` the thread of an
    asynchronous reader.
    """

    def __init__(
        self,
        dsn: str,
        name: str,
        declaration: tuple[Any, ...] | None,
        upcast: Callable[[Event], Event] | None,
        page: int,
        poll: float,
        lease: float,
        kind: type[LogTransaction],
        commit_kind: type[LogCommit],
    ) -> None:
        self.name = name
        self.kind, self.commit_kind = kind, commit_kind
        self.executor: Executor | None = None
        self._dsn = dsn
        self._declaration = declaration
        self._upcast = upcast
        self._most = page
        self._rows = min(page, _FIRST_ROWS)
        self._poll = poll
        self._lease = lease
        self._pause = min(_FIRST_PAUSE_SECONDS, poll)
        self._outage = _FIRST_OUTAGE_SECONDS
        self._conn: psycopg.Connection[Any] | None = None
        self._number = 0
        self._stored = ""
        """The snapshot of the reader's position; empty before the first claim."""
        self._after = ""
        """The snapshot from which the next page is read."""
        self._epoch = 0
        self._pages = 0
        self._done = self._delivered = (0, -1)
        """The order of the last transaction that is done, and of the last one that was returned."""
        self._number_before = 0
        """The number of the position before the last commit."""
        self._seen = ""
        """The server's snapshot before a page without rows."""
        self._noted = time.monotonic()
        self._stands_by = False
        self._stopping = threading.Event()
        self._waker, self._wakeup = socket.socketpair()
        self._waker.setblocking(False)
        self._using = threading.Lock()
        self._ended = threading.Event()
        self._keeper: threading.Thread | None = None

    # What iterates

    def transactions(self, page: LogPage) -> Iterator[LogTransaction]:
        """Yield the transactions of a page, as long as it is the reader's next and the reader is not stopped."""
        for index in range(len(page)):
            if self._stopping.is_set() or page.epoch != self._epoch:
                return
            transaction = page.transaction(index, self)
            self._delivered = transaction.mark.order
            yield transaction

    def next_page(self) -> LogPage | None:
        """Wait for the next page with events; returns None once the reader is stopped. Raises ReaderError."""
        import psycopg

        with self._using:
            while not self._stopping.is_set():
                try:
                    page = self._read() if self._holds() else None
                    self._outage = _FIRST_OUTAGE_SECONDS
                    if page is not None:
                        return page
                except ReaderMoved:
                    logger.warning(
                        "the reader was moved, and goes on from there", extra=self._extra
                    )
                    self._number = 0
                except (psycopg.Error, OSError) as error:
                    self._lose(error)
                    self._pause_in_outage()
        return None

    def stop(self) -> None:
        """End `next_page`, and yield no further transaction. Safe in any thread and in a signal handler."""
        self._stopping.set()
        with suppress(OSError):
            self._waker.send(b"!")

    def close(self) -> None:
        """End the session, so that another process reads."""
        self._stopping.set()
        self._ended.set()
        with self._using:
            self._disconnect()
            self._waker.close()
            self._wakeup.close()

    def _read(self) -> LogPage | None:
        """Return the next page if it has events; wait if there is none. Raises ReaderError, psycopg.Error."""
        if self._pause >= _LOOK_SECONDS and self._is_quiet():
            self._idle()
            return None
        result = self._execute(_READ, (self.name, self._rows, f"{self._number}/{self._after}"))
        if not result.ntuples:
            self._idle()
            return None
        self._pages += 1
        page = LogPage(result, self._after, self._upcast, self._epoch, self._pages)
        self._after, self._seen = page.end, ""
        if page.is_empty:
            self._pass(page)
            return None
        self._pause = min(_FIRST_PAUSE_SECONDS, self._poll)
        self._rows = max(1, min(self._most, int(_PAGE_BYTES / page.average_bytes())))
        return page

    def _idle(self) -> None:
        """Wait for something new, and say from time to time that the reader is in use."""
        if time.monotonic() > self._noted + _SIGN_SECONDS:
            self._advance(self._stored)
        if self._wait(self._pause, notified=True):
            # What relay has seen in the WAL may become visible a moment later.
            self._pause = min(_FIRST_PAUSE_SECONDS, self._poll)
        else:
            self._pause = min(self._pause * 2, self._poll)

    def _pass(self, page: LogPage) -> None:
        """Go on past events that do not match."""
        if self._delivered <= self._done and time.monotonic() > self._noted + _NOTE_SECONDS:
            self._advance(page.end)
        self._rows = max(self._rows, min(self._most * 10, _SKIPPED_ROWS))
        self._wait(min(self._pause, _LONGEST_SKIP_SECONDS), notified=False)
        self._pause = min(self._pause * 2, _LONGEST_SKIP_SECONDS)

    def _is_quiet(self) -> bool:
        """Return whether no transaction has come to an end since a page without rows. Raises psycopg.Error."""
        seen = self._execute("select pg_catalog.pg_current_snapshot()").get_value(0, 0).decode()
        before, self._seen = self._seen, seen
        return bool(seen == before)

    # What moves the position

    def done(self, mark: PageMark) -> None:
        """Move the reader past a transaction. Raises ReaderMoved, ReaderError."""
        if self._is_past(mark):
            return
        self._hold(mark, mark.snapshot)
        self._done = mark.order

    def begin_commit(self, mark: PageMark) -> dict[str, str]:
        """Return the arguments of `relay.advance` for a transaction. Raises ReaderMoved, ReaderError.

        They are the same at a second attempt, whose transaction fails if the first one has committed.
        """
        if self._is_past(mark):
            if mark.order != self._done:
                raise ReaderError(f"reader {self.name}: is past this transaction already")
        else:
            self._hold(mark)
            self._number_before = self._number
        return {"reader": self.name, "position": f"{self._number_before}/{mark.snapshot}"}

    def note_commit(self, mark: PageMark) -> None:
        """Note that a caller's transaction has moved the reader, and presume that it commits."""
        self._number = self._number_before + 1
        self._stored = mark.snapshot
        self._done = mark.order
        self._noted = time.monotonic()

    def forget(self) -> None:
        """Read again from the reader's position: somebody else has moved it."""
        self._number, self._stored = 0, ""
        self._epoch += 1

    def _is_past(self, mark: PageMark) -> bool:
        """Return whether the reader is past a transaction. Raises ReaderMoved for one from before it was moved."""
        if mark.page.epoch != self._epoch:
            raise self._moved()
        return mark.order <= self._done

    def _hold(self, mark: PageMark, snapshot: str | None = None) -> None:
        """Make sure that this process reads, and move the position if there is one. Raises ReaderMoved, ReaderError."""
        import psycopg

        with self._using:
            if self._ended.is_set():
                raise ReaderError(f"reader {self.name}: its iteration has ended")
            while True:
                try:
                    # Nobody has moved the reader meanwhile, or a move whose answer was lost has been made.
                    if self._number == 0 and not self._holds(snapshot):
                        raise self._moved()
                    if mark.page.epoch != self._epoch:
                        raise self._moved()
                    if snapshot is not None and self._stored != snapshot:
                        self._advance(snapshot)
                    return
                except psycopg.errors.LockNotAvailable as error:
                    # The caller may have a transaction open that has moved it.
                    raise self._moved() from error
                except (psycopg.Error, OSError) as error:
                    self._lose(error)
                    if self._stopping.is_set():
                        raise ReaderError(
                            f"reader {self.name}: the database does not answer"
                        ) from error
                    self._pause_in_outage()

    def _pause_in_outage(self) -> None:
        self._stopping.wait(self._outage * random.uniform(0.5, 1))  # noqa: S311
        self._outage = min(self._outage * 2, _LONGEST_OUTAGE_SECONDS)

    def _moved(self) -> ReaderMoved:
        return ReaderMoved(f"reader {self.name}: another session has moved it, or reads now")

    def _advance(self, snapshot: str) -> None:
        """Move the position on the reader's own connection. Raises ReaderMoved, ReaderError, psycopg.Error."""
        try:
            self._execute("select relay.advance(%s, %s)", (self.name, f"{self._number}/{snapshot}"))
        except ReaderMoved:
            self.forget()
            raise
        self._number += 1
        self._stored = snapshot
        self._noted = time.monotonic()

    # The session

    def _holds(self, moved_to: str | None = None) -> bool:
        """Return whether this process reads; otherwise wait a while. Raises ReaderError, psycopg.Error.

        `moved_to` is the snapshot to which the reader may have moved the position without knowing it.
        """
        if self._conn is None:
            self._connect()
        if self._number:
            return True
        claimed = self._execute("select relay.claim_reader(%s)", (self.name,)).get_value(0, 0)
        if claimed is None:
            if not self._stands_by:
                logger.info("another process reads: this one stands by", extra=self._extra)
                self._stands_by = True
            self._wait(self._poll * random.uniform(0.75, 1.25), notified=False)  # noqa: S311
            return False
        number, _, snapshot = claimed.decode().partition("/")
        self._number = int(number)
        if snapshot not in (self._stored, moved_to):
            # What was read comes again, or is no longer next.
            self._epoch += 1
            self._done = self._delivered = (self._pages, 0)
            self._after = snapshot
        self._stored = snapshot
        self._stands_by, self._seen = False, ""
        channel = self._execute("select relay.watch_log()").get_value(0, 0).decode()
        self._execute(f'listen "{channel}"')
        if self._keeper is None:
            self._keeper = threading.Thread(
                target=self._keep, name=f"reader {self.name}", daemon=True
            )
            self._keeper.start()
        logger.info("reading", extra=self._extra)
        return True

    def _connect(self) -> None:
        import psycopg
        from psycopg.conninfo import conninfo_to_dict

        given = conninfo_to_dict(self._dsn)
        options: dict[str, Any] = {
            "application_name": f"relay reader {self.name}"[:63],
            "connect_timeout": 10,
            "keepalives_idle": 10,
            "keepalives_interval": 5,
            "keepalives_count": 3,
        }
        conn = psycopg.connect(
            self._dsn,
            autocommit=True,
            client_encoding="UTF8",
            **{each: value for each, value in options.items() if each not in given},
        )
        self._conn = conn
        milliseconds = str(round(self._lease * 1000))
        settings = {
            "DateStyle": "ISO",
            "TimeZone": "UTC",
            "IntervalStyle": "postgres",
            "bytea_output": "hex",
            "default_transaction_isolation": "read committed",
            "idle_session_timeout": milliseconds,
            "lock_timeout": milliseconds,
            "statement_timeout": "0",
            "tcp_user_timeout": milliseconds,
        }
        conn.execute(
            "select pg_catalog.set_config(s.name, s.value, false) "
            "from unnest(%s::text[], %s::text[]) as s (name, value)",
            (list(settings), list(settings.values())),
        )
        found = self._execute("select pg_catalog.pg_backend_pid()").get_value(0, 0)
        if int(found) != conn.info.backend_pid:
            raise ReaderError(
                f"reader {self.name}: a pooler is between this process and the server, and a reader needs a session: "
                "give the address of the server"
            )
        if self._declaration is not None:
            self._execute(
                "select relay.declare_reader(%s, %s::jsonb, %s, %s::interval, %s::interval)",
                self._declaration,
            )
            # Once: a reader that is dropped meanwhile is not to begin again.
            self._declaration = None

    def _execute(self, statement: str, parameters: tuple[Any, ...] = ()) -> Any:
        """Run a statement, and return its result as libpq has it. Raises ReaderError, psycopg.Error."""
        import psycopg

        assert self._conn is not None  # noqa: S101
        try:
            cursor = self._conn.execute(statement.encode(), parameters)
        except psycopg.Error as error:
            known = reader_error(error, self.name)
            if known is not None:
                raise known from error
            raise
        return cursor.pgresult

    def _lose(self, error: Exception) -> None:
        logger.warning(
            "the database does not answer", extra=self._extra | {"error": type(error).__name__}
        )
        self._disconnect()

    def _disconnect(self) -> None:
        conn, self._conn = self._conn, None
        self._number = 0
        if conn is not None:
            with suppress(Exception):
                conn.close()

    def _keep(self) -> None:
        """Say that the process lives while its handler works."""
        while not self._ended.wait(self._lease / _BEATS):
            if not self._using.acquire(blocking=False):
                continue
            try:
                if self._conn is not None:
                    self._conn.execute(b"select")
            except Exception as error:
                self._lose(error)
            finally:
                self._using.release()

    def _wait(self, seconds: float, notified: bool) -> bool:
        """Wait until the reader is stopped or, if asked for, notified; returns whether it was. Raises psycopg.Error."""
        assert self._conn is not None  # noqa: S101
        # A wait of psycopg would wake the process ten times a second.
        pgconn = self._conn.pgconn
        poll = select.poll()
        poll.register(pgconn.socket, select.POLLIN)
        poll.register(self._wakeup, select.POLLIN)
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            readable = [number for number, _ in poll.poll(left * 1000)]
            if self._wakeup.fileno() in readable:
                return False
            if readable:
                pgconn.consume_input()
                found = False
                while pgconn.notifies() is not None:
                    found = True
                if found and notified:
                    return True
        return False

    @property
    def _extra(self) -> dict[str, Any]:
        return {"reader": self.name}
