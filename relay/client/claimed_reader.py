"""A reader at work: it claims the reader's name, reads pages of the log, and moves the position.

A session of the server has the name, by an advisory lock. Each claim moves the position's number, by which whoever had
the name before is told from whoever has it. While the handler works on a page, the server reads the next one.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from relay.client.errors import ReaderError, ReaderMoved, outage_of
from relay.client.log_pages import (
    READ,
    LogCommit,
    LogPage,
    LogTransaction,
    PageMark,
    parts_of,
)
from relay.client.log_session import ReaderSession
from relay.client.outages import OutageLog
from relay.logs import enable
from relay.model.events import Event
from relay.waits import Backoff

if TYPE_CHECKING:
    from concurrent.futures import Executor

logger = logging.getLogger("relay.reader")

_FIRST_PAUSE_SECONDS = 0.005
"""How long a reader waits after it has found nothing; the pause doubles each time, up to `poll`."""
_LONGEST_SKIP_SECONDS = 0.1
"""How long at most a reader waits after it has found only events that do not match."""
_NOTE_SECONDS = 5.0
"""How often the position moves past events that do not match."""
_SIGN_SECONDS = 60.0
"""How often a reader that is not moved says that it is in use: it could expire."""
_QUIET_SECONDS = 0.1
"""From such a pause on, a reader asks first whether anything was published at all, which costs next to nothing."""
_FIRST_OUTAGE_SECONDS, _LONGEST_OUTAGE_SECONDS = 0.2, 30.0
_FIRST_ROWS, _SKIPPED_ROWS = 100, 10_000
_PAGE_BYTES = 8 * 1024 * 1024
"""How many bytes a page should have at most: the next one has fewer rows."""
_BEATS = 3
"""How often within its lease a reader says that it lives."""
_IS_QUIET = """
    select case when s::text = %s or relay.log_is_quiet(%s) then s end
      from pg_catalog.pg_current_snapshot() as s
"""
"""The server's snapshot if nothing is new since another one, else null.

Where both are the same, no transaction has published anything or moved the reader, and the log is not looked at.
"""


class ClaimedReader:
    """A reader at work. Its methods are called by one thread at a time, except `stop`.

    `kind` and `commit_kind` are the classes of the transactions and their commits, `executor` the thread of an
    asynchronous reader. Readers that share an `outage` log it once.
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
        outage: OutageLog,
        session: ReaderSession | None = None,
    ) -> None:
        enable()
        self.name = name
        self.kind, self.commit_kind = kind, commit_kind
        self.executor: Executor | None = None
        self._session = session or ReaderSession(dsn, name, lease)
        self._declaration = declaration
        self._upcast = upcast
        self._most = page
        self._rows = min(page, _FIRST_ROWS)
        self._poll = poll
        self._lease = lease
        self._pauses = Backoff(_FIRST_PAUSE_SECONDS, poll)
        self._outage = outage
        self._retries = Backoff(_FIRST_OUTAGE_SECONDS, _LONGEST_OUTAGE_SECONDS, random_part=0.5)
        self._number = 0
        self._stored = ""
        """The snapshot of the reader's position; empty before the first claim."""
        self._after = ""
        """The snapshot from which the next page is read."""
        self._origin = ""
        """That of the server's positions, at the last claim: its history and timeline."""
        self._epoch = 0
        self._pages = 0
        self._asked: int | None = None
        """The epoch in which the server was asked for the next page; None if its answer was taken."""
        self._ahead: LogPage | None = None
        """The next page, read while the handler works on the one before."""
        self._done = self._delivered = (0, -1)
        """The order of the last transaction that is done, and of the last one that was returned."""
        self._number_before = 0
        """The number of the position before the last commit."""
        self._seen = ""
        """A snapshot of the server up to which everything is read; empty if there is none newer than the position."""
        self._noted = time.monotonic()
        self._stands_by = False
        self._stopping = threading.Event()
        self._using = threading.Lock()
        self._ended = False
        self._called = threading.Event()
        """Wakes the keeper."""
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
        while not self._stopping.is_set():
            page = self.step()
            if page is not None:
                return page
        return None

    def step(self) -> LogPage | None:
        """Claim the reader, or read the next page if it has events; wait if there is none. Raises ReaderError."""
        import psycopg

        with self._using:
            try:
                page = self._read() if self._holds() else None
                self._answers()
                return page
            except ReaderMoved:
                logger.warning("the reader was moved, and goes on from there", extra=self._extra)
                self._number = 0
            except (psycopg.Error, OSError) as error:
                if isinstance(error, psycopg.errors.QueryCanceled):
                    self._rows = max(1, self._rows // 4)
                self._lose(error)
                self._session.wait(self._retries.take(), notified=False)
        return None

    @property
    def is_claimed(self) -> bool:
        """Whether this process reads, as far as it knows."""
        return self._number != 0

    @property
    def is_idle(self) -> bool:
        """Whether all transactions that were returned are done."""
        return self._delivered <= self._done

    def ask(
        self, statement: str, parameters: tuple[Any, ...]
    ) -> list[tuple[str | None, ...]] | None:
        """Return the rows of a statement as text; None if the database does not answer. Raises ReaderError."""
        import psycopg

        with self._using:
            try:
                self._open()
                result = self._session.execute(statement, parameters)
            except (psycopg.Error, OSError) as error:
                self._lose(error)
                return None
            self._answers()
            return [
                tuple(
                    None if (value := result.get_value(row, column)) is None else value.decode()
                    for column in range(result.nfields)
                )
                for row in range(result.ntuples)
            ]

    def using(self) -> AbstractContextManager[object]:
        """Keep other threads from the session."""
        return self._using

    def stop(self) -> None:
        """End `next_page`, and yield no further transaction. Safe in any thread and in a signal handler."""
        self._stopping.set()
        self._session.wake()

    def close(self) -> None:
        """End the session, so that another process reads."""
        self._stopping.set()
        with self._using:
            self._ended = True
            self._outage.leaves(self)
            self._disconnect()
            self._session.dispose()
        self._called.set()

    def _read(self) -> LogPage | None:
        """Return the next page if it has events; wait if there is none. Raises ReaderError, psycopg.Error."""
        self._take_ahead()
        page, self._ahead = self._ahead, None
        if page is None or page.epoch != self._epoch:
            if self._pauses.next >= _QUIET_SECONDS and self._is_quiet():
                self._idle()
                return None
            self._ask()
            page = self._answer()
        if page is None:
            self._idle()
            return None
        if page.is_empty:
            self._pass()
            return None
        self._pauses.reset()
        asked = self._rows
        self._rows = max(1, min(self._most, int(_PAGE_BYTES / page.average_bytes())))
        if page.rows * 8 >= asked:
            # There is probably more: the server counts rows that do not match, or are in other lanes, as well.
            self._ask()
            self._called.set()
        return page

    def _ask(self) -> None:
        """Send the question for the next page. Raises psycopg.Error."""
        given = (self.name, str(self._rows), self._position(self._number, self._after))
        self._session.send(READ, given)
        self._asked = self._epoch

    def _answer(self) -> LogPage | None:
        """Return the page that was asked for; None if nothing is new. Raises ReaderError, psycopg.Error."""
        epoch, self._asked = self._asked or 0, None
        result = self._session.received()
        if not result.ntuples:
            return None
        self._pages += 1
        page = LogPage(result, self._after, self._upcast, epoch, self._pages)
        self._after, self._seen = page.end, ""
        return page

    def _take_ahead(self) -> None:
        """Take the page that was asked for while the handler works, so that the connection is free."""
        import psycopg

        if self._asked is not None:
            try:
                self._ahead = self._answer()
            except (ReaderError, psycopg.Error, OSError):
                # A commit may have moved the reader meanwhile. Any other error comes again with the next statement.
                self._ahead = None

    def _idle(self) -> None:
        """Wait for something new, and say from time to time that the reader is in use.

        Raises ReaderMoved, ReaderError, psycopg.Error.
        """
        self._note()
        self._sign()
        if self._wait(self._pauses.take(), notified=True):
            # What relay has seen in the WAL may become visible a moment later.
            self._pauses.reset()

    def _sign(self) -> None:
        """Say that the reader is in use, if it was neither moved nor said so for a while."""
        if time.monotonic() > self._noted + _SIGN_SECONDS:
            self._execute("select relay.keep_reader(%s)", (self.name,))
            self._noted = time.monotonic()

    def _note(self) -> None:
        """Move the position past events that do not match, from time to time.

        Raises ReaderMoved, ReaderError, psycopg.Error.
        """
        if (
            self.is_idle
            and self._after != self._stored
            and time.monotonic() > self._noted + _NOTE_SECONDS
        ):
            self._advance(self._after)

    def _pass(self) -> None:
        """Go on past events that do not match. Raises ReaderMoved, ReaderError, psycopg.Error."""
        self._note()
        self._rows = max(self._rows, min(self._most * 10, _SKIPPED_ROWS))
        self._wait(self._pauses.take(_LONGEST_SKIP_SECONDS))

    def _is_quiet(self) -> bool:
        """Return whether nothing is new since a page without rows. Raises psycopg.Error."""
        given = (self._seen, self._position(self._number, self._seen))
        present = self._value(_IS_QUIET, given) if self._seen else None
        # If not, from before the page that is read now.
        self._seen = present or str(self._value("select pg_catalog.pg_current_snapshot()"))
        return present is not None

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
        return {
            "reader": self.name,
            "position": self._position(self._number_before, mark.snapshot),
        }

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
            if self._ended:
                raise ReaderError(f"reader {self.name}: its iteration has ended")
            while True:
                try:
                    # Nobody has moved the reader meanwhile, or a move whose answer was lost has been made.
                    if self._number == 0 and not self._holds(snapshot):
                        raise self._refused()
                    if mark.page.epoch != self._epoch:
                        raise self._moved()
                    if snapshot is not None and self._stored != snapshot:
                        self._advance(snapshot)
                    self._answers()
                    return
                except psycopg.errors.LockNotAvailable as error:
                    # The caller may have a transaction open that has moved it.
                    raise self._refused() from error
                except (psycopg.Error, OSError) as error:
                    self._lose(error)
                    if self._stopping.is_set():
                        raise ReaderError(
                            f"reader {self.name}: the database does not answer"
                        ) from error
                    self._stopping.wait(self._retries.take())

    def _refused(self) -> ReaderMoved:
        """Forget the page: one of its later transactions would take the reader past the one that is refused."""
        self.forget()
        return self._moved()

    def _moved(self) -> ReaderMoved:
        return ReaderMoved(f"reader {self.name}: another session has moved it, or reads now")

    def _advance(self, snapshot: str) -> None:
        """Move the position on the reader's own connection. Raises ReaderMoved, ReaderError, psycopg.Error."""
        try:
            position = self._position(self._number, snapshot)
            self._execute("select relay.advance(%s, %s)", (self.name, position))
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
        self._open()
        if self._number:
            return True
        claimed = self._value("select relay.claim_reader(%s)", (self.name,))
        if claimed is None:
            if not self._stands_by:
                logger.info("another process reads: this one stands by", extra=self._extra)
                self._stands_by = True
            self._wait(self._poll * random.uniform(0.75, 1.25))  # noqa: S311
            return False
        number, snapshot, origin = parts_of(claimed)
        self._number = number
        former, self._origin = self._origin, origin
        if snapshot not in (self._stored, moved_to) or origin != former:
            # What was read comes again, is no longer next, or was lost in a failover, after which others have its xids.
            self._epoch += 1
            self._done = self._delivered = (self._pages, 0)
            self._after = snapshot
        self._stored = snapshot
        self._stands_by, self._seen = False, ""
        channel = self._value("select relay.watch_log()")
        self._execute(f'listen "{channel}"')
        logger.info("reading", extra=self._extra)
        return True

    def _position(self, number: int, snapshot: str) -> str:
        return f"{number}/{snapshot}@{self._origin}"

    def _open(self) -> None:
        """Connect, unless there is a connection, and let the keeper keep it. Raises ReaderError, psycopg.Error."""
        if not self._session.is_open:
            self._session.open()
            self._declare()
        if self._keeper is None:
            self._keeper = threading.Thread(
                target=self._keep, name=f"reader {self.name}", daemon=True
            )
            self._keeper.start()

    def _declare(self) -> None:
        if self._declaration is not None:
            self._execute(
                "select relay.declare_reader(%s, %s::jsonb, %s, %s::interval, %s::interval, %s, %s::jsonb, %s, %s)",
                self._declaration,
            )
            # Once: a reader that is dropped meanwhile is not to begin again.
            self._declaration = None

    def _execute(self, statement: str, parameters: tuple[Any, ...] = ()) -> None:
        """Run a statement. Raises ReaderError, psycopg.Error."""
        self._take_ahead()
        self._session.execute(statement, parameters)

    def _value(self, statement: str, parameters: tuple[Any, ...] = ()) -> str | None:
        """Return the only value of a statement. Raises ReaderError, psycopg.Error."""
        self._take_ahead()
        return self._session.value(statement, parameters)

    def _wait(self, seconds: float, notified: bool = False) -> bool:
        """Wait after an answer of the server; return whether the session was notified. Raises psycopg.Error."""
        self._answers()
        return self._session.wait(seconds, notified)

    def _answers(self) -> None:
        self._retries.reset()
        self._outage.ends(self)

    def _lose(self, error: Exception) -> None:
        self._outage.fails(self, outage_of(error))
        self._disconnect()

    def _disconnect(self) -> None:
        self._session.close()
        self._number = 0
        self._asked = None

    def _keep(self) -> None:
        """While the handler works, take the page that was asked for, and say that the process lives."""
        import psycopg

        while True:
            was_called = self._called.wait(self._lease / _BEATS)
            self._called.clear()
            with self._using:
                if self._ended:
                    return
                self._take_ahead()
                if not self._session.is_open:
                    continue
                try:
                    # A question of a moment ago has kept the session alive, too.
                    used = time.monotonic() - self._session.used_at
                    if not was_called and used > self._lease / _BEATS / 2:
                        self._execute("select")
                    if self._number:
                        self._sign()
                except ReaderError:
                    # It comes again, for who reads.
                    continue
                except (psycopg.Error, OSError) as error:
                    self._lose(error)

    @property
    def _extra(self) -> dict[str, Any]:
        return {"reader": self.name}
