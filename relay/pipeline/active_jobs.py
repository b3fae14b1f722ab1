"""Tracks the threads that apply tasks now: session of the target, handler, and time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import get_ident, get_native_id
from typing import TypeVar

import psycopg

Item = TypeVar("Item")


@dataclass(slots=True, eq=False)
class Job:
    """A task that is being applied. `thread` is the thread's native id, `pid` that of the session's server process.

    `began` and `at` are the times of its begin and of its last progress (monotonic clock, seconds). `seconds` is how
    long each handler has taken. `reads` says that the task is reading from the source.
    """

    thread: int
    began: float
    at: float
    pid: int | None = None
    handler: str | None = None
    reads: bool = False
    seconds: dict[str, float] = field(default_factory=dict)


class ActiveJobs:
    """The jobs of all threads of this process. Safe in several threads."""

    def __init__(self) -> None:
        self._jobs: dict[int, Job] = {}

    @contextmanager
    def job(self) -> Iterator[Job]:
        """Track a task of this thread until the context ends."""
        now = time.monotonic()
        job = self._jobs[get_ident()] = Job(get_native_id(), now, now)
        try:
            yield job
        finally:
            del self._jobs[get_ident()]

    def enters(self, conn: psycopg.Connection[object]) -> None:
        """Note the session of the target that this thread uses."""
        job = self._jobs.get(get_ident())
        if job is not None:
            job.pid, job.at = conn.pgconn.backend_pid, time.monotonic()

    def reading(self, found: Iterable[Item]) -> Iterator[Item]:
        """Yield `found`, and note that this thread reads from the source whenever the next item is requested."""
        job = self._jobs.get(get_ident())
        if job is None:
            yield from found
            return
        job.reads = True
        try:
            for each in found:
                job.reads, job.at = False, time.monotonic()
                yield each
                job.reads = True
        finally:
            job.reads, job.at = False, time.monotonic()

    @contextmanager
    def handler(self, name: str) -> Iterator[Callable[[int], None]]:
        """Note that this thread runs a handler until the context ends, and add up its time.

        Yields what takes the native id of another thread that runs the handler for this one.
        """
        job = self._jobs.get(get_ident())
        if job is None:
            yield lambda thread: None
            return
        own = job.thread

        def runs_in(thread: int) -> None:
            job.thread = thread

        started = job.at = time.monotonic()
        job.handler = name
        try:
            yield runs_in
        finally:
            job.thread = own
            job.handler, job.at = None, time.monotonic()
            job.seconds[name] = job.seconds.get(name, 0.0) + job.at - started

    def jobs(self) -> list[Job]:
        """The current jobs."""
        # A copy in one step: other threads add and remove.
        return list(self._jobs.copy().values())
