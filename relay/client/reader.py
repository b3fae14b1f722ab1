"""Reads the log under a name: transaction after transaction, in order, in any process that reaches the database.

A module of its own, so that a service that only publishes does not import it. It needs psycopg.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from datetime import timedelta
from typing import Any, TypeVar

from relay.client import sessions
from relay.client.claimed_reader import ClaimedReader, logger
from relay.client.errors import ReaderError, ReaderMoved, reader_error
from relay.client.lanes import SharedLanes
from relay.client.log_pages import LogCommit, LogTransaction, PagedLog, PageMark
from relay.client.log_session import ReaderSession
from relay.client.outages import OutageLog
from relay.model.events import Event

__all__ = [
    "AsyncReadTransaction",
    "ReadTransaction",
    "ReaderError",
    "ReaderMoved",
    "Subscription",
    "subscribe",
]

_Result = TypeVar("_Result")

_SHORTEST_LIMIT = timedelta(minutes=5)
_MOST_LANES = 256
_ADVANCE = sessions.Statement.selecting("relay.advance(p.a->>'reader', p.a->>'position')")


class ReadCommit(LogCommit):
    """The commit of a transaction. Only its `xid` is known."""

    @contextmanager
    def __call__(self, session: Any) -> Iterator[None]:
        """Move the reader past the transaction, after the block, in the session's open transaction.

        The session is one that `Outbox.publish` takes, of the reader's database. What the block has changed and the
        position commit together, or neither does. Raises ReaderMoved if another session has moved the reader, or reads
        meanwhile: then roll back. Raises ReaderError, NotInTransaction, UnknownSession, and what the driver raises.
        """
        log = self.mark.log
        parameter = log.begin_commit(self.mark)
        yield
        try:
            sessions.execute(session, _ADVANCE, json.dumps(parameter))
        except Exception as error:
            raise _translated(error, log) from error
        log.note_commit(self.mark)


class AsyncReadCommit(LogCommit):
    """The asynchronous form of `ReadCommit`."""

    @asynccontextmanager
    async def __call__(self, session: Any) -> AsyncIterator[None]:
        """Move the reader past the transaction, after the block, in the session's open transaction.

        Raises what `ReadCommit` raises.
        """
        log = self.mark.log
        parameter = await _in_thread(log, log.begin_commit, self.mark)
        yield
        try:
            await sessions.execute_async(session, _ADVANCE, json.dumps(parameter))
        except Exception as error:
            raise _translated(error, log) from error
        log.note_commit(self.mark)


class ReadTransaction(LogTransaction):
    """A transaction of the log, for a handler: its events that match, in order.

    `with transaction.commit(session):` moves the reader past it in the session's open transaction, after the block, so
    that what the block has changed and the position commit together. The session is one that `Outbox.publish` takes,
    of the reader's database. It raises what `done` raises, and what the driver raises: then roll back.

    All events of one database transaction come together. Where they are of several business transactions,
    `transaction_id` is None.
    """

    __slots__ = ()
    commit: ReadCommit

    def done(self) -> None:
        """Move the reader past this transaction and those before it.

        Raises ReaderMoved if another session has moved the reader, or reads meanwhile, and ReaderError.
        """
        self.mark.log.done(self.mark)


class AsyncReadTransaction(LogTransaction):
    """The asynchronous form of `ReadTransaction`."""

    __slots__ = ()
    commit: AsyncReadCommit

    async def done(self) -> None:
        """Move the reader past this transaction and those before it. Raises ReaderMoved and ReaderError."""
        await _in_thread(self.mark.log, self.mark.log.done, self.mark)


async def _in_thread(log: PagedLog, call: Callable[[PageMark], _Result], mark: PageMark) -> _Result:
    """Run a method of the log in its reader's thread; where that has ended, in another, which raises that it has."""
    loop = asyncio.get_running_loop()
    try:
        running = loop.run_in_executor(log.executor, call, mark)
    except RuntimeError:
        running = loop.run_in_executor(None, call, mark)
    return await running


def _translated(error: Exception, log: PagedLog) -> Exception:
    known = reader_error(error, log.name)
    if isinstance(known, ReaderMoved):
        log.forget()
    return known or error


class Subscription:
    """What `subscribe` returns: iterate it with `for` or with `async for`, in one task or thread."""

    def __init__(
        self,
        open_log: Callable[[type[LogTransaction], type[LogCommit]], ClaimedReader | SharedLanes],
    ) -> None:
        self._open_log = open_log
        self._logs: list[ClaimedReader | SharedLanes] = []
        self._is_stopped = False

    def stop(self) -> None:
        """End the iteration after the transaction in flight. Safe in any thread and in a signal handler."""
        self._is_stopped = True
        for each in self._logs:
            each.stop()

    def _opened(
        self, kind: type[LogTransaction], commit_kind: type[LogCommit]
    ) -> ClaimedReader | SharedLanes:
        log = self._open_log(kind, commit_kind)
        self._logs.append(log)
        if self._is_stopped:
            log.stop()
        return log

    def __iter__(self) -> Iterator[ReadTransaction]:
        """Yield transactions as they come. Raises ReaderError."""
        log = self._opened(ReadTransaction, ReadCommit)
        try:
            while (page := log.next_page()) is not None:
                yield from log.transactions(page)  # type: ignore[misc]
        finally:
            self._logs.remove(log)
            log.close()

    async def __aiter__(self) -> AsyncIterator[AsyncReadTransaction]:
        """Yield transactions as they come. Raises ReaderError."""
        loop = asyncio.get_running_loop()
        log = self._opened(AsyncReadTransaction, AsyncReadCommit)
        executor = log.executor = ThreadPoolExecutor(1, f"reader {log.name}")
        try:
            while (page := await loop.run_in_executor(executor, log.next_page)) is not None:
                for each in log.transactions(page):
                    yield each  # type: ignore[misc]
        finally:
            self._logs.remove(log)
            # A cancelled task does not wait for its thread.
            log.stop()
            executor.submit(log.close)
            executor.shutdown(wait=False)


def subscribe(
    dsn: str,
    name: str,
    *,
    match: Mapping[str, Any] | None = None,
    start: str | None = "now",
    upcast: Callable[[Event], Event] | None = None,
    expires: timedelta | None = None,
    max_lag: timedelta | None = None,
    where: str | None = None,
    params: Mapping[str, Any] | None = None,
    lanes: int | None = None,
    lane_key: str = "host",
    page: int = 5000,
    poll: float = 2.0,
    lease: float = 15.0,
) -> Subscription:
    """Return an iterable of the transactions of the log from a reader's position on, which ends with `stop` only.

    async for transaction in subscribe(dsn, "billing", match={"event_type": "order.*"}):
        for event in transaction.events:
            ...
        await transaction.done()

    A reader that does not exist is declared, see `relay.declare_reader`, and begins at `start`: `now`, `beginning`, or
    the `position` of a transaction. One that exists gets the `match`, `where`, `params`, `expires` and `max_lag`, and
    is not moved; with None as `start`, it has to exist and keeps them. `where` is a path of SQL/JSON into an event,
    such as `$.payload.amount >= $least`, with its variables in `params`. Retention keeps events for a reader until
    nobody has subscribed to it for as long as it `expires`, or an unread event is older than its `max_lag`. `upcast`
    returns each event in its current version, such as `EventTypes.current`.

    Transactions are read ahead in pages of about `page` events. Those that are not `done` when the process ends come
    again. An idle reader asks every `poll` seconds. Of several processes with one name, one reads, and the others stand
    by: until its connection ends, or it has been frozen for `lease` seconds. With `lanes`, each process reads some of
    them; all events of a host, or of an aggregate with `lane_key="aggregate"`, are in one lane, and each lane is a
    position of its own, so that a transaction is `done` with those before it in its lane. A lost connection is opened
    again. Raises ValueError for a number that makes no sense.
    """
    for what, number, least in (("page", page, 1), ("poll", poll, 0.005), ("lease", lease, 1)):
        if number < least:
            raise ValueError(f"{what}: must be {least} or more")
    if poll > lease / 2:
        raise ValueError("poll: must be at most half of lease")
    for what, limit in (("expires", expires), ("max_lag", max_lag)):
        if limit is not None and limit < _SHORTEST_LIMIT:
            raise ValueError(f"{what}: must be at least five minutes")
    if lanes is not None and not 1 <= lanes <= _MOST_LANES:
        raise ValueError(f"lanes: must be 1 to {_MOST_LANES}")
    if lane_key not in ("host", "aggregate"):
        raise ValueError("lane_key: must be host or aggregate")
    declaration = None
    if start is not None:
        declaration = (
            name,
            _json("match", match or {}),
            start,
            expires,
            max_lag,
            where,
            None if params is None else _json("params", params),
            lanes,
            lane_key,
        )

    def open_log(
        kind: type[LogTransaction], commit_kind: type[LogCommit]
    ) -> ClaimedReader | SharedLanes:
        outage = OutageLog(logger, {"reader": name})

        def open_lane(lane: str, session: ReaderSession) -> ClaimedReader:
            return ClaimedReader(
                dsn, lane, None, upcast, page, poll, lease, kind, commit_kind, outage, session
            )

        reader = ClaimedReader(
            dsn, name, declaration, upcast, page, poll, lease, kind, commit_kind, outage
        )
        return reader if lanes is None else SharedLanes(dsn, reader, open_lane, poll, lease)

    return Subscription(open_log)


def _json(what: str, value: Mapping[str, Any]) -> str:
    try:
        return json.dumps(dict(value))
    except TypeError as error:
        raise ValueError(f"{what}: must have values that JSON has: {error}") from error
