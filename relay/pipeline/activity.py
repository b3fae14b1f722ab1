"""Which threads apply tasks now: in which sessions of the target, with which handler, and for how long."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import get_ident, get_native_id
from typing import TypeVar

import psycopg

Item = TypeVar("Item")


@dataclass(slots=True, eq=False)
class Job:
    """A task that is applied. `thread` is the native id of the thread, `pid` that of the session's server process.

    `at` is when it went on last (monotonic clock, seconds); `seconds` is how long each handler has taken. `reads` says
    that it waits for the source.
    """

    thread: int
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
        """This thread applies a task until the end."""
        job = self._jobs[get_ident()] = Job(get_native_id(), time.monotonic())
        try:
            yield job
        finally:
            del self._jobs[get_ident()]

    def enters(self, conn: psycopg.Connection[object]) -> None:
        """This thread works in a session now."""
        job = self._jobs.get(get_ident())
        if job is not None:
            job.pid, job.at = conn.pgconn.backend_pid, time.monotonic()

    def reading(self, found: Iterable[Item]) -> Iterator[Item]:
        """What the source brings; this thread waits for the source whenever the next one is asked for."""
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
    def handler(self, name: str) -> Iterator[None]:
        """This thread runs a handler until the end."""
        job = self._jobs.get(get_ident())
        if job is None:
            yield
            return
        started = job.at = time.monotonic()
        job.handler = name
        try:
            yield
        finally:
            job.handler, job.at = None, time.monotonic()
            job.seconds[name] = job.seconds.get(name, 0.0) + job.at - started

    def jobs(self) -> list[Job]:
        """What runs now."""
        # A copy in one step: other threads add and remove.
        return list(self._jobs.copy().values())
