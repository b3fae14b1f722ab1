"""Runs calls of a user's function apart from relay's own loop: in an event loop of its own, or in threads.

What a function does to its thread or loop (blocks it, ends it, never returns) concerns the calls of its own sink only.
Results come back to the loop of the sinks, many of them in one call.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, AbstractContextManager, suppress
from contextvars import Context
from queue import SimpleQueue
from threading import Event, Lock, get_ident
from typing import Any, Protocol

from relay.config.imports import as_exception
from relay.faults import describe
from relay.renewal import renew_sessions, renew_sessions_async
from relay.runtime.shielding import shielded
from relay.runtime.threads import Thread, position_of

log = logging.getLogger(__name__)

END_SECONDS = 5.0
"""How long a call that is cancelled is waited for."""


class Call:
    """One call of a function, for the loop of the sinks.

    `ended` gets what it has raised, None if it has returned; or, once nobody waits for it any more (`is_over`), what
    stands for that. `returned` is its result. `is_late`: its time is over. `knows_end`: its loop has
    been there to cancel it.
    """

    __slots__ = (
        "argument", "context", "ended", "is_done", "is_late", "is_over", "knows_end", "returned", "task"
    )  # fmt: skip

    def __init__(
        self, argument: Any, context: Context, ended: asyncio.Future[BaseException | None]
    ) -> None:
        self.argument = argument
        self.context = context
        self.ended = ended
        self.returned: Any = None
        self.task: asyncio.Task[None] | None = None
        self.is_done = self.is_late = self.is_over = self.knows_end = False


class Calls(Protocol):
    """Runs calls, and holds what `open` of the configuration has opened."""

    def start(self, call: Call) -> None:
        """Begin a call."""

    def cancel(self, call: Call) -> None:
        """Ask a call to end, if that is possible."""

    def where(self, call: Call) -> str:
        """What a call does that has not ended, for a log line."""

    async def enter(self, opens: Callable[[], Any]) -> Held:
        """Enter the context manager that a function returns. Raises its errors."""

    async def close(self, seconds: float) -> None:
        """End calls, and leave the context manager; what has not ended after `seconds` goes on."""


class Held:
    """What a context manager has returned, until `leave`."""

    def __init__(self) -> None:
        self.opened: Future[Any] = Future()
        self.left: Future[None] = Future()
        self.is_leaving = False

    async def wait(self) -> None:
        """Wait until it is opened; whoever is cancelled leaves it opening. Raises the errors of opening it."""
        await shielded(asyncio.wrap_future(self.opened))

    @property
    def is_open(self) -> bool:
        """Whether the value can be used."""
        return self.opened.done() and not self.left.done()

    @property
    def value(self) -> Any:
        """The value."""
        return self.opened.result()

    def failed(self, error: BaseException) -> None:
        """Note what the context manager has raised."""
        if not self.opened.done():
            self.opened.set_exception(contained(error))
        elif not (self.is_leaving and isinstance(error, asyncio.CancelledError)):
            log.warning("what open has opened has ended", extra={"fault": describe(error)})


def contained(error: BaseException) -> Exception:
    """An Exception in place of what would end a thread or a loop."""
    return error if isinstance(error, Exception) else as_exception(error)


class _Results:
    """Hands the results of calls to the loop of the sinks: one call into it for all that have come meanwhile.

    Waking a thread lets it have the interpreter at once. So a loop collects what its callbacks hand over in one turn.
    """

    def __init__(
        self, ended: Callable[[Call], None], calls: asyncio.AbstractEventLoop | None = None
    ) -> None:
        """`calls` is the loop in whose thread results are added; None: they are added in several threads."""
        self._loop = asyncio.get_running_loop()
        self._calls = calls
        self._ended = ended
        self._results: deque[tuple[Call, Any, BaseException | None]] = deque()
        self._is_due = False

    def add(self, call: Call, returned: Any, error: BaseException | None) -> None:
        """Add a result. Safe in any thread."""
        self._results.append((call, returned, error))
        if not self._is_due:
            self._is_due = True
            if self._calls is None:
                self._hand_over()
            else:
                self._calls.call_soon(self._hand_over)

    def _hand_over(self) -> None:
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._end_calls)

    def _end_calls(self) -> None:
        self._is_due = False
        while self._results:
            call, returned, error = self._results.popleft()
            call.is_done, call.returned = True, returned
            self._ended(call)
            if not call.ended.done():
                call.ended.set_result(error)


class LoopCalls:
    """Runs an `async def` in an event loop that only this sink uses."""

    def __init__(
        self, name: str, function: Callable[[Any], Awaitable[Any]], ended: Callable[[Call], None]
    ) -> None:
        """`ended` is called in the loop of the sinks with each call that has ended."""
        self._name = f"function {name}"
        self._function = function
        self._loop = asyncio.new_event_loop()
        self._results = _Results(ended, self._loop)
        self._sinks = asyncio.get_running_loop()
        self._to_start: deque[Call] = deque()
        self._is_starting = False
        self._running: dict[asyncio.Task[None], Call] = {}
        self._held: list[tuple[asyncio.Task[None], Held, asyncio.Event]] = []
        self._opening: Held | None = None
        self._is_closing = False
        self._thread = Thread(self._run, name=self._name)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        while not self._loop.is_closed():
            try:
                self._loop.run_forever()
            except BaseException as error:
                # Of a task that the function has made: asyncio lets SystemExit and KeyboardInterrupt end the loop.
                log.error(
                    "a task of a function would have ended its event loop",
                    extra={"fault": describe(error)},
                )
            else:
                if not self._is_closing:
                    log.error("a function has stopped its event loop, which goes on")
                    continue
                with suppress(Exception):
                    self._loop.run_until_complete(self._loop.shutdown_asyncgens())
                self._loop.close()

    def start(self, call: Call) -> None:
        """Begin a call."""
        self._to_start.append(call)
        if not self._is_starting:
            self._is_starting = True
            self._sinks.call_soon(self._wake)

    def _wake(self) -> None:
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._start_all)

    def _start_all(self) -> None:
        self._is_starting = False
        while self._to_start:
            call = self._to_start.popleft()
            if call.is_over:
                self._results.add(call, None, None)
                continue
            call.task = task = self._loop.create_task(
                self._call(call), name=self._name, context=call.context
            )
            self._running[task] = call
            task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        call = self._running.pop(task)
        if task.cancelled():
            # Before its first step, so that `_call` has not begun.
            self._results.add(call, None, asyncio.CancelledError())

    async def _call(self, call: Call) -> None:
        returned, error = None, None
        try:
            await renew_sessions_async()
            returned = await self._function(call.argument)
        except BaseException as raised:
            error = raised
        self._results.add(call, returned, error)

    def cancel(self, call: Call) -> None:
        """Cancel the task of a call."""
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._cancel, call)

    def _cancel(self, call: Call) -> None:
        call.knows_end = True
        if call.task is None:
            call.is_over = True
        else:
            call.task.cancel()

    def where(self, call: Call) -> str:
        """What a call does that has not ended: its loop is blocked, or it suppresses its cancellation."""
        if not call.knows_end:
            return f"its event loop is blocked{position_of(self._thread.ident)}"
        return "it suppresses its cancellation"

    async def enter(self, opens: Callable[[], Any]) -> Held:
        """Enter the context manager in a task that leaves it too, as task groups need. Raises its errors."""
        held = self._opening
        if held is None or held.left.done():
            held = self._opening = Held()
            self._loop.call_soon_threadsafe(self._hold, opens, held)
        try:
            await held.wait()
        except asyncio.CancelledError:
            self._loop.call_soon_threadsafe(self._cancel_opening, held)
            raise
        self._opening = None
        return held

    def _hold(self, opens: Callable[[], Any], held: Held) -> None:
        leaving = asyncio.Event()
        task = self._loop.create_task(self._holding(opens, held, leaving))
        self._held = [each for each in self._held if not each[1].left.done()]
        self._held.append((task, held, leaving))

    def _cancel_opening(self, held: Held) -> None:
        for task, each, _ in self._held:
            if each is held and not held.opened.done():
                task.cancel()

    async def _holding(self, opens: Callable[[], Any], held: Held, leaving: asyncio.Event) -> None:
        try:
            manager = opens()
            if isinstance(manager, AbstractAsyncContextManager):
                async with manager as value:
                    held.opened.set_result(value)
                    await leaving.wait()
            else:
                with manager as value:
                    held.opened.set_result(value)
                    await leaving.wait()
        except BaseException as error:
            held.failed(error)
        finally:
            held.left.set_result(None)

    async def close(self, seconds: float) -> None:
        """End the calls, leave the context managers and end the thread, within `seconds`."""
        ending = asyncio.run_coroutine_threadsafe(self._end(seconds / 3), self._loop)
        try:
            async with asyncio.timeout(seconds):
                await asyncio.wrap_future(ending)
        except TimeoutError:
            log.warning(
                "a function does not end, and goes on while relay ends",
                extra={"fault": f"its event loop is blocked{position_of(self._thread.ident)}"},
            )

    async def _end(self, seconds: float) -> None:
        for task in self._running:
            task.cancel()
        if self._running:
            await asyncio.wait(self._running, timeout=seconds)
        for _, held, leaving in self._held:
            held.is_leaving = True
            leaving.set()
        holding = [task for task, _, _ in self._held]
        if holding:
            _, late = await asyncio.wait(holding, timeout=seconds)
            for task in late:
                task.cancel()
        self._is_closing = True
        self._loop.call_soon(self._loop.stop)


class ThreadCalls:
    """Runs a plain function in daemon threads, at most `most` at once; more calls wait for their turn."""

    def __init__(
        self, name: str, function: Callable[[Any], Any], most: int, ended: Callable[[Call], None]
    ) -> None:
        """`ended` is called in the loop of the sinks with each call that has ended."""
        self._name = f"function {name}"
        self._function = function
        self._most = most
        self._results = _Results(ended)
        self._calls: SimpleQueue[Call | None] = SimpleQueue()
        self._lock = Lock()
        self._idle = self._threads = 0
        self._idents: dict[Call, int] = {}
        self._held: list[tuple[Held, Event]] = []
        self._opening: Held | None = None

    def start(self, call: Call) -> None:
        """Begin a call."""
        with self._lock:
            if self._idle:
                self._idle -= 1
            elif self._threads < self._most:
                self._threads += 1
                Thread(self._run, name=self._name).start()
        self._calls.put(call)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            self._call(call)
            with self._lock:
                self._idle += 1

    def _call(self, call: Call) -> None:
        returned, error = None, None
        if not call.is_over:
            self._idents[call] = get_ident()
            try:
                renew_sessions()
                returned = call.context.run(self._function, call.argument)
            except BaseException as raised:
                error = raised
            del self._idents[call]
        self._results.add(call, returned, error)

    def cancel(self, call: Call) -> None:
        """Do nothing: a thread cannot be ended."""

    def where(self, call: Call) -> str:
        """What a call does that has not ended."""
        ident = self._idents.get(call)
        return "it waits for a thread" if ident is None else f"its thread{position_of(ident)}"

    async def enter(self, opens: Callable[[], Any]) -> Held:
        """Enter the context manager in a thread that leaves it too. Raises its errors.

        While an earlier call of `opens` has not ended, it waits for that one: a thread cannot be ended.
        """
        held = self._opening
        if held is None or held.left.done():
            held, leaving = Held(), Event()
            self._opening = held
            self._held = [each for each in self._held if not each[0].left.done()]
            self._held.append((held, leaving))
            Thread(_hold, name=self._name, args=(opens, held, leaving)).start()
        await held.wait()
        self._opening = None
        return held

    async def close(self, seconds: float) -> None:
        """Let the threads end after their calls, and leave the context managers; waits for these only."""
        for _ in range(self._threads):
            self._calls.put(None)
        for held, leaving in self._held:
            held.is_leaving = True
            leaving.set()
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                for held, _ in self._held:
                    await asyncio.shield(asyncio.wrap_future(held.left))


def _hold(opens: Callable[[], Any], held: Held, leaving: Event) -> None:
    try:
        manager: AbstractContextManager[Any] = opens()
        with manager as value:
            held.opened.set_result(value)
            leaving.wait()
    except BaseException as error:
        held.failed(error)
    finally:
        held.left.set_result(None)
