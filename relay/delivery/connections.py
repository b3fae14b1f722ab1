"""The connections to the databases that all sinks of an instance share, and the threads that use them.

One session of the target has all claims. Beside it there are `sinks.connections` connections to each database, with as
many threads: a call uses one connection at a time, so that none waits for one while it has another. A sink has one call
in each database at a time. A call that waits for a lock of the target ends after TURN, and begins again in threads that
are for such calls: sinks that are blocked wait for each other, and leave connections to the others.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from contextlib import suppress
from functools import partial
from threading import Lock
from typing import Any, Concatenate, ParamSpec, TypeVar, TypeVarTuple, Unpack

import psycopg

from relay.config.settings import Settings
from relay.delivery.outbox_end import OutboxEnd
from relay.runtime.threads import pool
from relay.source.outbox.rows import prepare_reading
from relay.store import session_settings
from relay.store.connections import Configure, Connection, Dsn, Pool, new_pool
from relay.store.positions.sinks import Claims
from relay.store.session_settings import LOCK_TIMEOUT, SessionKind

Given = ParamSpec("Given")
Result = TypeVar("Result")
Arguments = TypeVarTuple("Arguments")

TURN = "500ms"
"""How long a statement of a sink waits for a lock in the target before its transaction begins again."""
IDLE_SECONDS = 10.0
"""How long a connection stays open that is not needed."""


class InTurn(Executor):
    """Runs its calls one after the other in the threads of another executor, which it shares with others.

    While an error `is_blocked`, its call is run again in the threads of `again`, each time after the calls of others.
    """

    def __init__(
        self,
        threads: Executor,
        again: Executor | None = None,
        is_blocked: Callable[[BaseException], bool] = lambda error: False,
    ) -> None:
        self._threads = threads
        self._again = again
        self._is_blocked = is_blocked
        self._lock = Lock()
        self._calls: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._runs = False

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Queue a call. Raises RuntimeError after the threads have been shut down, and where there can be none."""
        future: Future[Any] = Future()
        with self._lock:
            self._calls.append((future, partial(fn, *args, **kwargs)))
            if self._runs:
                return future
            try:
                self._threads.submit(self._run_next)
            except BaseException:
                self._calls.pop()
                raise
            self._runs = True
        return future

    def _run_next(self) -> None:
        future, call = self._calls[0]
        if future.running() or future.set_running_or_notify_cancel():
            try:
                result = call()
            except BaseException as error:
                if self._again and self._is_blocked(error) and self._submit_next(self._again):
                    return
                future.set_exception(error)
            else:
                future.set_result(result)
        with self._lock:
            self._calls.popleft()
            self._runs = bool(self._calls) and self._submit_next(self._threads)

    def _submit_next(self, threads: Executor) -> bool:
        try:
            threads.submit(self._run_next)
        except RuntimeError:
            # The threads have been shut down: nobody waits for the calls that are left.
            return False
        return True


class Connections:
    """The connections of all sinks of an instance, from the first use until `close`."""

    def __init__(self, settings: Settings) -> None:
        size = settings.sinks.connections
        self.claims = Claims(settings.target_dsn, settings.group)
        self._claiming = pool(1, "sinks claims")
        self._target = _pool(settings, settings.target_dsn, TURN)
        self._source = _pool(settings, settings.source_dsn, LOCK_TIMEOUT, prepare_reading)
        blocked = max(1, size // 3)
        self._in_target = pool(size - blocked, "sinks target")
        self._blocked = pool(blocked, "sinks target blocked")
        self._in_source = pool(size, "sinks source")
        self.outbox_end = OutboxEnd(settings, self._source, self._target, InTurn(self._in_source))
        self._is_closing = False

    async def in_claims(
        self, call: Callable[[Unpack[Arguments]], Result], *arguments: *Arguments
    ) -> Result:
        """Run a blocking call on the claims; returns its result, and raises its errors."""
        return await asyncio.get_running_loop().run_in_executor(self._claiming, call, *arguments)

    def of_sink(self) -> SinkConnections:
        """What one sink uses of them."""
        return SinkConnections(
            self._target,
            self._source,
            InTurn(self._in_target, self._blocked, self._is_blocked),
            InTurn(self._in_source),
        )

    def _is_blocked(self, error: BaseException) -> bool:
        # The transaction was rolled back.
        return isinstance(error, psycopg.errors.LockNotAvailable) and not self._is_closing

    def close(self) -> None:
        """End the sessions; a statement in flight keeps its own until it ends."""
        self._is_closing = True
        for threads in (self._claiming, self._in_target, self._blocked, self._in_source):
            threads.shutdown(wait=False, cancel_futures=True)
        self.claims.close()
        for each in (self._target, self._source):
            each.close()


class SinkConnections:
    """The connections that one sink uses, one call in each database at a time. Calls raise psycopg.Error."""

    def __init__(
        self, target: Pool, source: Pool, in_target: Executor, in_source: Executor
    ) -> None:
        self.source = source
        self._target = target
        self._in_target = in_target
        self._in_source = in_source
        self.target_failed = False
        """Whether a statement has failed on the target: nothing more can be stored."""

    async def in_target(
        self,
        call: Callable[Concatenate[Connection, Given], Result],
        *arguments: Given.args,
        **named: Given.kwargs,
    ) -> Result:
        """Run a blocking call with a connection to the target; returns its result, and raises its errors.

        It is run again, in another transaction, as long as it waits for a lock.
        """
        try:
            return await asyncio.get_running_loop().run_in_executor(
                self._in_target, self._run, lambda conn: call(conn, *arguments, **named)
            )
        except psycopg.Error:
            self.target_failed = True
            raise

    def _run(self, call: Callable[[Connection], Result]) -> Result:
        with self._target.connection() as conn:
            return call(conn)

    async def in_source(self, call: Callable[..., Result], *arguments: object) -> Result:
        """Run a blocking call that takes connections of `source`, one at a time; returns its result."""
        return await asyncio.get_running_loop().run_in_executor(self._in_source, call, *arguments)

    def submit_to_source(self, call: Callable[[], object]) -> None:
        """Run a call after those of this sink that read the source, without waiting for it."""
        with suppress(RuntimeError):  # all connections are closed
            self._in_source.submit(call)


def _pool(
    settings: Settings, dsn: Dsn, lock_timeout: str, configure: Configure | None = None
) -> Pool:
    session = session_settings.statements(SessionKind.OWN, {"lock_timeout": lock_timeout})
    size = settings.sinks.connections
    return new_pool(dsn, size, session, configure, max_idle=IDLE_SECONDS)
