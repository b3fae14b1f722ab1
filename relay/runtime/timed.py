"""Runs users' code with a time limit, in threads that are given up with a call that exceeds it: none can be ended."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextvars import ContextVar, copy_context
from pathlib import Path
from queue import SimpleQueue
from threading import Event, get_ident, get_native_id

from relay.runtime.threads import Thread, position_of

_RELAY = (str(Path(__file__).parents[1]),)
"""Whose code calls users' code."""
MOST_UNENDED = 10
"""How many calls of one owner may go on beyond their limit before nothing of it is called."""


class Overrun(Exception):
    """A call has exceeded its limit. It goes on in its thread."""


class Occupied(Exception):
    """Nothing was called: `calls` earlier calls of the owner go on beyond their limit, one of them at `position`."""

    def __init__(self, calls: int, position: str) -> None:
        super().__init__(calls, position)
        self.calls, self.position = calls, position


class _Call:
    def __init__(self, work: Callable[[], object], began: Callable[[int], object]) -> None:
        self._work = work
        self._began = began
        self._context = copy_context()
        self.stepped_at = time.monotonic()
        self.done = Event()
        self.thread: int | None = None
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self._context.run(self._run)
        except BaseException as error:
            self.error = error
        finally:
            self.done.set()

    def _run(self) -> None:
        _CURRENT.set(self)
        self.thread = get_ident()
        self._began(get_native_id())
        step()
        self._work()


_CURRENT: ContextVar[_Call | None] = ContextVar("timed_call", default=None)


def step() -> None:
    """Begin the time of the current call again: it has come to the next item of its work."""
    call = _CURRENT.get()
    if call is not None:
        call.stepped_at = time.monotonic()


Calls = SimpleQueue[_Call | None]


def _serve(calls: Calls) -> None:
    while (call := calls.get()) is not None:
        call.run()


class TimedThreads:
    """Threads for calls with a limit, as many as run at once. Safe in several threads.

    Threads are used again, so that a call finds what an earlier one has left in its thread, such as a connection.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._idle: list[Calls] = []
        self._unended: dict[str, list[_Call]] = {}

    def run(
        self,
        owner: str,
        work: Callable[[], object],
        seconds: float,
        began: Callable[[int], object],
    ) -> None:
        """Do the work; raises what it raises, and Overrun when `seconds` have passed since its last `step`.

        `began` is called with the native id of the thread. Raises Occupied while `MOST_UNENDED` calls of the owner that
        have exceeded their limit have not ended: each keeps a thread.
        """
        unended = [each for each in self._unended.get(owner, ()) if not each.done.is_set()]
        if len(unended) >= MOST_UNENDED:
            raise Occupied(len(unended), position_of(unended[0].thread, _RELAY))
        self._unended[owner] = unended
        call = _Call(work, began)
        calls = self._thread()
        calls.put(call)
        while not call.done.wait(max(0.0, call.stepped_at + seconds - time.monotonic())):
            if time.monotonic() >= call.stepped_at + seconds:
                calls.put(None)
                self._unended[owner] = [*self._unended[owner], call]
                raise Overrun
        self._idle.append(calls)
        if call.error is not None:
            raise call.error

    def _thread(self) -> Calls:
        try:
            return self._idle.pop()
        except IndexError:
            calls: Calls = SimpleQueue()
            Thread(_serve, name=self._name, args=(calls,)).start()
            return calls

    def close(self) -> None:
        """Let the threads end."""
        while self._idle:
            self._idle.pop().put(None)
