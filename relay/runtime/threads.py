"""Threads that inherit the context of their creator, so that their log lines have the group, and what wakes them.

Sources: Python documentation, "contextvars — Context Variables": a thread starts with an empty context;
`sys.setswitchinterval`. proc(5), `/proc/PID/task`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import select
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import Context, copy_context
from itertools import takewhile
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)


_SWITCH_SECONDS = 0.0005


def switch_often() -> None:
    """Let a thread that waits for the interpreter have it after half a millisecond, not after Python's five.

    The pipeline waits for it after each of its statements, some twenty times a batch. While the loop of the sinks is
    busy, that doubled the latency of the target, measured.
    """
    sys.setswitchinterval(_SWITCH_SECONDS)


_START_SECONDS = 60.0
"""How long a thread is tried to be started where the system refuses it."""
_PAUSE_SECONDS = 0.2


class Thread(threading.Thread):
    """A daemon thread that runs in the context of its creator.

    `start` waits where the system has no thread for it: it may have one in a moment. Where an event loop runs, it
    raises RuntimeError at once.
    """

    def __init__(
        self, target: Callable[..., object], name: str | None = None, args: Iterable[Any] = ()
    ) -> None:
        super().__init__(target=copy_context().run, name=name, args=(target, *args), daemon=True)

    def start(self) -> None:
        """Start the thread. Raises RuntimeError where it has been started, or the system goes on refusing it."""
        ends = time.monotonic() + _START_SECONDS
        while True:
            try:
                return super().start()
            except RuntimeError as error:
                if self.is_alive() or _in_loop() or time.monotonic() >= ends:
                    raise
                log.warning(
                    "a thread is not started", extra={"part": self.name, "fault": str(error)}
                )
                time.sleep(_PAUSE_SECONDS)


def _in_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


@contextmanager
def beside(work: Callable[[threading.Event], object], name: str) -> Iterator[None]:
    """Run `work` in a thread during the block; its event is set at the end of the block, which waits for it."""
    ended = threading.Event()
    thread = Thread(work, name=name, args=(ended,))
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


class _Threads(ThreadPoolExecutor):
    """A pool whose calls wait for the threads that there are where the system refuses another one."""

    def _adjust_thread_count(self) -> None:
        try:
            super()._adjust_thread_count()
        except RuntimeError:
            if not self._threads:
                # No thread has taken it, and a later one would run it although its caller got the error.
                self._work_queue.get_nowait()
                raise


def pool(workers: int, prefix: str) -> ThreadPoolExecutor:
    """Return a pool whose threads run in the context of its creator.

    Its `submit` raises RuntimeError where the system refuses it the first thread; then it may be called again.
    """
    return _Threads(
        workers, thread_name_prefix=prefix, initializer=_enter, initargs=(copy_context(),)
    )


def position_of(ident: int | None, callers: tuple[str, ...] = ()) -> str:
    """Where a thread is, as ` at FILE:LINE in FUNCTION`, without values; empty if that is not known.

    With `callers`, folders, it is not the innermost frame but the one that code of these folders has called.
    """
    frame = None if ident is None else sys._current_frames().get(ident)
    if frame is None:
        return ""
    frames = traceback.StackSummary.extract(traceback.walk_stack(frame), lookup_lines=False)
    shown = frames[0]
    if callers:
        *_, shown = shown, *takewhile(lambda each: not each.filename.startswith(callers), frames)
    return f" at {shown.filename}:{shown.lineno} in {shown.name}"


_TASKS = Path("/proc/self/task")
_OF_LIBRARIES = ("tokio", "ThreadPoolExecutor-")
"""The beginnings of the names of threads in which libraries work: deltalake's, and pools that got no name."""


def processor_ticks(thread: int) -> int | None:
    """Return the processor time of a thread of this process, in clock ticks; None if there is no /proc."""
    try:
        text = (_TASKS / str(thread) / "stat").read_text()
    except OSError:
        return None
    # Split after the name, which may hold spaces: state is field 3, utime and stime are fields 14 and 15.
    fields = text.rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def processor_seconds(thread: int) -> float:
    """Return the processor time of a thread of this process and of those of libraries, which it may wait for.

    0 if there is no /proc. The threads of a library work for any thread that calls it.
    """
    named = {each.native_id: each.name for each in threading.enumerate()}
    ticks = processor_ticks(thread) or 0
    for task in _TASKS.iterdir() if _TASKS.is_dir() else ():
        number = int(task.name)
        if number != thread and named.get(number, _name(task)).startswith(_OF_LIBRARIES):
            ticks += processor_ticks(number) or 0
    return ticks / os.sysconf("SC_CLK_TCK")


def _name(task: Path) -> str:
    """Return the name of a thread that Python has not started; empty once it has ended."""
    try:
        return (task / "comm").read_text()
    except OSError:
        return ""


def _enter(context: Context) -> None:
    for variable, value in context.items():
        variable.set(value)


class Wakeup:
    """Wakes a thread that waits in a selector or in `wait`: it is readable from `wake` until `clear`. Thread-safe."""

    def __init__(self) -> None:
        self._sender, self._receiver = socket.socketpair()
        self._sender.setblocking(False)
        self._receiver.setblocking(False)
        self._poll = select.poll()
        self._poll.register(self._receiver, select.POLLIN)

    def fileno(self) -> int:
        """The file descriptor that a selector watches."""
        return self._receiver.fileno()

    def wake(self) -> None:
        """End the current wait, or else the next one."""
        try:
            self._sender.send(b"!")
        except BlockingIOError:
            pass  # the thread is being woken already
        except OSError:
            log.debug("a closed wakeup was called")

    def wait(self, timeout: float) -> bool:
        """Wait for `wake`, at most `timeout` seconds; returns whether it was called."""
        return bool(self._poll.poll(timeout * 1000))

    def clear(self) -> None:
        """Forget all calls of `wake`."""
        self._receiver.recv(4096)

    def close(self) -> None:
        """Close the sockets. No thread may wait any more."""
        self._sender.close()
        self._receiver.close()
