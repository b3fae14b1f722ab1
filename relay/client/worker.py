"""Works the messages of a queue, any number at once, in as many processes as you like.

A module of its own, so that a service that only publishes does not import it.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import signal
import threading
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from fnmatch import fnmatchcase
from functools import partial
from threading import Thread
from typing import Any, TypeVar

from relay.client.attempts import Around, AsyncSlot, Handling, Slot
from relay.client.databases import Database
from relay.client.errors import LeaseLost, NoHandler, WorkerError, outage_of, worker_error
from relay.client.idle import Idle, Left, Query, either
from relay.client.messages import LeasedMessage, Message, Queue, application_name
from relay.client.outages import OutageLog
from relay.client.outbox import Outbox
from relay.client.saga import Saga
from relay.client.wakeups import listen
from relay.logs import enable
from relay.waits import Backoff

__all__ = ["LeaseLost", "LeasedMessage", "Message", "Queue", "Worker", "WorkerError"]

log = logging.getLogger("relay.worker")

_Handler = TypeVar("_Handler", bound=Callable[..., Any])
_Result = TypeVar("_Result")

_FIRST_OUTAGE_SECONDS, _LONGEST_OUTAGE_SECONDS = 0.2, 30.0
_CANCEL_SECONDS = 5.0
"""How long a cancelled handler may take to end."""
_EXTENSIONS = 3
"""How often a lease is prolonged before it would end."""


class Worker:
    """Takes the messages of a queue, and calls for each the handler of its event type.

    worker = Worker("postgresql://…", "mail")

    @worker.handles("order.placed")
    async def send(message, conn):
        await conn.execute("insert into mails …")

    worker.run_forever()

    `conn` is a session in the transaction that has taken the message: what the handler changes through it and the
    completion of the message commit together. If the handler raises, both are undone, and the message is tried again as
    the queue's `attempts` and `backoff` say. RetryLater, Drop and Fail of `relay` say it otherwise. A worker that
    crashes gives its messages back at once.

    With a `lease`, in seconds, a message is leased instead: for work that takes longer than a transaction should. Its
    handler is called with the message alone, a LeasedMessage, and the lease is prolonged while it runs.
    """

    def __init__(
        self,
        database: Any,
        queue: str | Queue | Saga,
        *,
        concurrency: int = 16,
        lease: float | None = None,
        deadline: float | None = None,
        around: Sequence[Around] = (),
        outbox: Outbox | None = None,
        poll: float = 2.0,
        listen: str | bool = True,
        grace: float = 10.0,
    ) -> None:
        """Set up a worker, which connects when it runs.

        `database` is a connection string of psycopg, a pool of psycopg or asyncpg, an engine or sessionmaker of
        SQLAlchemy, asynchronous or not, or `django.db.connection`. A `Queue`, or that of a `Saga`, is declared when the
        worker starts; a name is that of a queue which exists. At most `concurrency` handlers run at once, each with a
        connection. A coroutine is cancelled after `deadline` seconds, which is a failed attempt. `around` are context
        managers that its call runs in, see `relay.client.middleware`. `outbox` is where replies are published. An idle
        worker looks for messages every `poll` seconds, and is woken when there are some: it listens on one more
        connection, where `database` is a connection string, or on that of another connection string `listen`, which
        needs psycopg; False: it polls only. Idle workers of a queue that listen share the polls: together they look
        about every `poll` seconds. When it is stopped, it lets its handlers run for up to `grace` seconds.

        Raises TypeError for a database of an unknown kind, and ValueError for a number that makes no sense.
        """
        saga = queue if isinstance(queue, Saga) else None
        if isinstance(queue, Saga):
            queue = queue.queue
            if lease is not None:
                raise ValueError("lease: the transaction of a saga's worker is its lease")
        self._declared = queue if isinstance(queue, Queue) else None
        name = queue.name if isinstance(queue, Queue) else queue
        if concurrency < 1:
            raise ValueError("concurrency: must be 1 or more")
        for what, seconds in (("lease", lease), ("deadline", deadline), ("poll", poll)):
            if seconds is not None and seconds <= 0:
                raise ValueError(f"{what}: must be more than 0 seconds")
        self.queue = name
        self._database = Database(database, application_name(name))
        self._handling = Handling(
            name, self._handler_of, around, outbox or Outbox(), lease, deadline
        )
        self._concurrency = concurrency
        self._grace = grace
        self._idle = Idle(poll)
        self._listens_at = database if listen is True else listen
        self._handlers: list[tuple[str, Callable[..., Any]]] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping = asyncio.Event()
        self._threads: ThreadPoolExecutor | None = None
        self._calls: set[object] = set()
        self._outage = OutageLog(log, {"queue": name})
        self._gave_up = False
        if saga is not None:
            self.handles()(saga.handler(self._handling.outbox))

    def handles(self, *event_types: str) -> Callable[[_Handler], _Handler]:
        """Return a decorator for the handler of event types, or of patterns such as `order.*`; without any, of all.

        The first handler whose type or pattern fits is called. A message without one is given back, for workers of
        another version; after ten minutes, that is a failed attempt. All handlers of a worker are coroutine functions,
        or none is. Raises ValueError otherwise.
        """

        def register(handler: _Handler) -> _Handler:
            is_async = inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(
                getattr(handler, "__call__", None)  # noqa: B004
            )
            if self._database.is_async is None:
                self._database.is_async = is_async
            if self._database.is_async is not is_async:
                kind = "a coroutine function" if is_async else "no coroutine function"
                raise ValueError(
                    f"queue {self.queue}: the handler is {kind}, unlike the worker's database or its other handlers"
                )
            if self._handling.deadline is not None and not is_async:
                raise ValueError(
                    f"queue {self.queue}: deadline: only coroutine functions can be cancelled"
                )
            self._handlers += [(each, handler) for each in event_types or ("*",)]
            return handler

        return register

    def _handler_of(self, message: Message) -> Callable[..., Any]:
        for pattern, handler in self._handlers:
            if fnmatchcase(message.event_type, pattern):
                return handler
        raise NoHandler(f"the worker has no handler for {message.event_type}")

    async def run(self) -> None:
        """Work until `stop`, or until the task is cancelled.

        Outages of the database are waited for. Raises WorkerError if the queue does not exist or the role may not take
        from it, without a handler, for a `Queue` that JSON cannot represent, and for a connection string that libpq
        does not understand.
        """
        if not self._handlers:
            raise WorkerError(f"queue {self.queue}: the worker has no handlers")
        self._database.check()
        enable()
        self._loop = self._handling.loop = asyncio.get_running_loop()
        if not self._database.is_async:
            # One more prolongs the leases.
            self._threads = ThreadPoolExecutor(self._concurrency + 1, f"worker {self.queue}")
        await self._declare()
        slots = [asyncio.create_task(self._work()) for _ in range(self._concurrency)]
        others: list[asyncio.Task[Any]] = [asyncio.create_task(self._stopping.wait())]
        ended = threading.Event()
        lease = self._handling.lease
        if lease is not None and self._database.is_opened_here:
            Thread(target=self._prolong_in_thread, args=(lease, ended), daemon=True).start()
        elif lease is not None:
            others.append(asyncio.create_task(self._prolong(lease)))
        listening: list[asyncio.Task[None]] = []
        if isinstance(self._listens_at, str):
            listening = [asyncio.create_task(listen(self._listens_at, self.queue, self._idle))]
        log.info("the worker is running", extra={"queue": self.queue})
        try:
            await asyncio.wait([*slots, *others], return_when=asyncio.FIRST_COMPLETED)
            is_stopped = self._stopping.is_set()
        finally:
            self._stopping.set()
            self._idle.wake_all()
            await self._end(slots)
            ended.set()
            for each in (*others, *listening):
                each.cancel()
            await asyncio.wait([*others, *listening], timeout=_CANCEL_SECONDS)
            if self._threads is not None:
                self._threads.shutdown(wait=False)
        tasks = [
            each for each in (*slots, *others, *listening) if each.done() and not each.cancelled()
        ]
        for error in [each.exception() for each in tasks]:
            if error is not None:
                raise error
        if not is_stopped:
            raise WorkerError(
                f"queue {self.queue}: a handler has cancelled the task that called it"
            )
        log.info("the worker has stopped", extra={"queue": self.queue})

    async def _end(self, slots: Sequence[asyncio.Task[None]]) -> None:
        """Wait until the handlers have returned, and cancel those that take too long: their messages are given back."""
        _, running = await asyncio.wait(slots, timeout=self._grace)
        if not running:
            return
        log.warning(
            "handlers take too long, and are given up",
            extra={"queue": self.queue, "handlers": len(running)},
        )
        for each in running:
            each.cancel()
        _, running = await asyncio.wait(running, timeout=_CANCEL_SECONDS)
        self._gave_up = bool(running) or bool(self._calls)

    def stop(self) -> None:
        """Make `run` return: no message is taken any more. Safe in any thread and in a signal handler."""
        if self._loop is None or self._loop.is_closed():
            self._stopping.set()
        else:
            self._loop.call_soon_threadsafe(self._stopping.set)

    def run_forever(self) -> None:
        """Run in the main thread until SIGTERM or SIGINT. Raises what `run` raises.

        A handler that does not end in time ends with the process, which gives its message back; the exit status is then
        1.
        """
        asyncio.run(self._run_until_signal())

    async def _run_until_signal(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self.stop)
        await self.run()
        if self._gave_up:
            # Python would wait for a thread, and asyncio for a coroutine, that does not end.
            logging.shutdown()
            os._exit(1)

    async def _declare(self) -> None:
        """Declare the worker's queue, unless it is only named."""
        if self._declared is None:
            return
        statement, text = self._declared.declaration()
        run, close = self._opened()
        try:
            await self._persist(partial(run, "execute", statement, text), close)
        finally:
            await close()

    async def _work(self) -> None:
        """Handle one message after another; wait while there is none."""
        run, close = self._opened()
        loop = asyncio.get_running_loop()
        following: list[Query] = []

        def follows(left: Left) -> bool:
            if self._stopping.is_set() or not self._idle.ended(query, left):
                return False
            if not following:
                following.append(self._idle.begin())
            return True

        try:
            while not self._stopping.is_set():
                query = following.pop() if following else self._idle.begin()
                found = partial(self._idle.found, query)
                if self._database.is_async:
                    # At once: `follows` is asked before the loop goes on, where a handler awaits nothing.
                    attempt = partial(run, "attempt", found, follows)
                else:
                    attempt = partial(run, "attempt", partial(loop.call_soon_threadsafe, found))
                left = await self._persist(attempt, close)
                if not following and not self._idle.ended(query, left):
                    await self._idle.wait(self._stopping)
        finally:
            await close()

    async def _prolong(self, lease: float) -> None:
        """Prolong the leases of the messages whose handlers run."""
        run, close = self._opened()
        try:
            while True:
                await asyncio.sleep(lease / _EXTENSIONS)
                if self._handling.leased:
                    await self._persist(partial(run, "extend"), close)
        finally:
            await close()

    def _prolong_in_thread(self, lease: float, ended: threading.Event) -> None:
        """Prolong the leases also while a handler blocks the event loop, up to its deadline."""
        link = self._database.link()
        slot = Slot(self._handling, link)
        while not ended.wait(lease / _EXTENSIONS):
            try:
                slot.extend()
            except Exception as error:
                log.warning(
                    "the leases could not be prolonged",
                    extra={"queue": self.queue, "error": type(error).__name__},
                )
                link.close()
        link.close()

    async def _persist(
        self, call: Callable[[], Awaitable[_Result]], close: Callable[[], Awaitable[None]]
    ) -> _Result | None:
        """Repeat a call while the database is down, until the worker is stopped. Raises WorkerError.

        Each time on a new connection, if it is the slot's own: the former may be to a server that is a standby now.
        """
        pauses = Backoff(_FIRST_OUTAGE_SECONDS, _LONGEST_OUTAGE_SECONDS, random_part=0.5)
        while not self._stopping.is_set():
            try:
                result = await call()
            except Exception as error:
                unusable = worker_error(error, self.queue)
                if unusable is not None:
                    raise unusable from error
                self._outage.fails(call, outage_of(error))
            else:
                self._outage.ends(call)
                return result
            with suppress(Exception):
                await close()
            # Another slot looks for messages meanwhile.
            self._idle.wake()
            await either(self._stopping, pauses.take())
        return None

    def _opened(self) -> tuple[Callable[..., Awaitable[Any]], Callable[[], Awaitable[None]]]:
        """Return what calls a method of a new slot by its name, and what closes the slot's link."""
        if self._database.is_async:
            link = self._database.async_link()
            slot = AsyncSlot(self._handling, link)
            return (lambda method, *given: getattr(slot, method)(*given)), link.close
        plain = self._database.link()
        synchronous = Slot(self._handling, plain)

        async def run(method: str, *given: Any) -> Any:
            return await self._in_thread(partial(getattr(synchronous, method), *given))

        return run, partial(self._in_thread, plain.close)

    async def _in_thread(self, call: Callable[[], _Result]) -> _Result:
        token = object()

        def noted() -> _Result:
            try:
                return call()
            finally:
                self._calls.discard(token)

        self._calls.add(token)
        return await asyncio.get_running_loop().run_in_executor(self._threads, noted)
