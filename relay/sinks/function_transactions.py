"""Database transactions of the target in which a function completes its delivery: `delivery.transaction()`.

The record of the completion is written first, so that of two attempts that are made at the same time, by two processes
even, the second one waits for the first. Statements of the function follow, and the commit has both.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from enum import Enum, auto
from threading import BoundedSemaphore
from types import TracebackType
from typing import Any, Protocol, TypeVarTuple, Unpack
from weakref import WeakKeyDictionary

import psycopg

from relay.faults import Undelivered
from relay.runtime.shielding import shielded
from relay.runtime.threads import pool
from relay.sinks import Target
from relay.store import session_settings
from relay.store.connections import with_users_adapters
from relay.store.handler_sessions import HandlerPool
from relay.store.positions.completions import Completion, complete, forget
from relay.store.positions.sinks import SinkMoved

_FORGET_SECONDS = 10.0
"""How often records of completions are removed that nothing needs any more."""

Arguments = TypeVarTuple("Arguments")


class BlockState(Enum):
    """What has become of a delivery's transaction."""

    NONE = auto()
    OPEN = auto()
    COMMITTED = auto()
    FOUND = auto()
    """An earlier attempt has committed it."""


class Completing(Protocol):
    """What a transaction needs of the delivery, or of the deliveries, that it completes."""

    _is_over: bool

    def _begin(self) -> None: ...

    def _end(self, state: BlockState, found: Collection[str] = ()) -> None: ...


class AlreadyCompleted(Exception):
    """An earlier attempt has committed: there is nothing left to do. relay counts the deliveries as done.

    `keys` are those of the completions that there are.
    """

    def __init__(self, keys: Collection[str]) -> None:
        super().__init__()
        self.keys = frozenset(keys)


class TargetSessions:
    """Lends sessions of the target to one function's calls, at most `target.connections` at once."""

    def __init__(self, target: Target, sink: str, timeout: float) -> None:
        """After about `timeout` seconds without a statement the server ends a transaction."""
        self.group = target.group
        self.sink = sink
        self.room = BoundedSemaphore(target.connections)
        self._timeout = timeout
        self._size = target.connections
        self._threads: ThreadPoolExecutor | None = None
        self._async_room: asyncio.Semaphore | None = None
        self._pool = HandlerPool(
            target.dsn,
            target.connections,
            _prepare,
            durable=True,
            code_of=[sink],
            idle_limit=f"{int(timeout) + 10}s",
        )
        self._asynchronous: WeakKeyDictionary[
            psycopg.Connection[Any], psycopg.AsyncConnection[Any]
        ] = WeakKeyDictionary()
        self._next_forget = 0.0

    @contextmanager
    def begun(
        self, completions: Sequence[Completion], delivery: Completing
    ) -> Iterator[psycopg.Connection[Any]]:
        """Run a transaction that completes deliveries. Raises AlreadyCompleted, Undelivered and psycopg.Error."""
        self._forget()
        with self._pool.transaction() as conn:
            try:
                found = complete(conn, completions)
            except SinkMoved:
                raise Undelivered("the sink was moved, or is worked by another process") from None
            if found:
                raise AlreadyCompleted(found)
            # After the record: a later attempt waits for it.
            if delivery._is_over:
                raise Undelivered("the attempt was given up")
            conn.execute(session_settings.USERS_PATH_LOCALLY)
            with with_users_adapters(conn):
                yield conn

    def enter_room(self) -> None:
        """Wait until there is a session for another call. Raises Undelivered if there is none in time."""
        if not self.room.acquire(timeout=self._timeout):
            raise Undelivered(f"no session of the target was free in {self._timeout:g} s")

    def _forget(self) -> None:
        if time.monotonic() < self._next_forget:
            return
        self._next_forget = time.monotonic() + _FORGET_SECONDS
        with self._pool.connection() as conn:
            forget(conn, self.group, self.sink)

    # For the event loop of a function

    @property
    def async_room(self) -> asyncio.Semaphore:
        """The same as `room`, for coroutines."""
        if self._async_room is None:
            self._async_room = asyncio.Semaphore(self._size)
        return self._async_room

    async def in_thread(
        self, call: Callable[[Unpack[Arguments]], Any], *arguments: *Arguments
    ) -> Any:
        """Run a blocking call to its end in a thread, also if the task is cancelled meanwhile."""
        if self._threads is None:
            self._threads = pool(self._size, f"function {self.sink} target")
        loop = asyncio.get_running_loop()
        running = loop.run_in_executor(self._threads, call, *arguments)
        try:
            return await shielded(running)
        except asyncio.CancelledError:
            await asyncio.wait([running])
            raise

    def asynchronous(self, conn: psycopg.Connection[Any]) -> psycopg.AsyncConnection[Any]:
        """The same session for coroutines; one object for each session, which knows what it has prepared."""
        found = self._asynchronous.get(conn)
        if found is None or found.closed:
            found = psycopg.AsyncConnection(conn.pgconn)
            self._asynchronous[conn] = found
        return found

    def close(self) -> None:
        """Close the sessions."""
        self._pool.close()
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)


def _prepare(conn: psycopg.Connection[Any]) -> None:
    # What relay would prepare has the names of what coroutines prepare in the same session.
    conn.prepare_threshold = None


class CompletingTransaction:
    """A database transaction of the target that completes deliveries, for `with` and `async with`."""

    def __init__(
        self,
        sessions: TargetSessions,
        completions: Sequence[Completion],
        delivery: Completing,
    ) -> None:
        self._sessions = sessions
        self._transaction: AbstractContextManager[psycopg.Connection[Any]] = sessions.begun(
            completions, delivery
        )
        self._conn: psycopg.Connection[Any] | None = None
        self._delivery = delivery
        self._state = BlockState.NONE
        self._found: Collection[str] = ()

    def __enter__(self) -> psycopg.Connection[Any]:
        self._delivery._begin()
        try:
            self._sessions.enter_room()
            try:
                return self._enter()
            except BaseException:
                self._sessions.room.release()
                raise
        except BaseException:
            self._delivery._end(self._state, self._found)
            raise

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self._exit(kind, error, trace)
        finally:
            self._sessions.room.release()
            self._delivery._end(self._state, self._found)

    async def __aenter__(self) -> psycopg.AsyncConnection[Any]:
        self._delivery._begin()
        try:
            return await self._enter_in_thread()
        except BaseException:
            self._delivery._end(self._state, self._found)
            raise

    async def _enter_in_thread(self) -> psycopg.AsyncConnection[Any]:
        await self._sessions.async_room.acquire()
        try:
            conn = await self._sessions.in_thread(self._enter)
        except BaseException as error:
            try:
                if self._conn is not None:
                    # The task was cancelled while the transaction was begun.
                    await self._sessions.in_thread(
                        self._exit, type(error), error, error.__traceback__
                    )
            finally:
                self._sessions.async_room.release()
            raise
        return self._sessions.asynchronous(conn)

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            await self._sessions.in_thread(self._exit, kind, error, trace)
        finally:
            self._sessions.async_room.release()
            self._delivery._end(self._state, self._found)

    def _enter(self) -> psycopg.Connection[Any]:
        try:
            self._conn = self._transaction.__enter__()
        except AlreadyCompleted as error:
            self._state, self._found = BlockState.FOUND, error.keys
            raise
        return self._conn

    def _exit(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self._transaction.__exit__(kind, error, trace)
        except BaseException as raised:
            # The block raises its own error, which this context manager passes on.
            if raised is not error:
                raise
        else:
            if kind is None:
                self._state = BlockState.COMMITTED
