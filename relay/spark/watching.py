"""Watches the jobs of the pipeline on Spark, and gives up those that stand still, so that the group goes on.

A job stands still where other jobs, such as a sink's, have all Spark slots, or where a process with a task in flight is
frozen. A frozen process still has its session of the target, with locks that its partitions need, and Spark takes
minutes to notice, or never does. So the session of a task is marked with the job (`application_name`), the process
sends an empty query in it every few seconds, and the driver ends a session without a sign of life. If the driver has
ended too, the server ends the session (`idle_in_transaction_session_timeout`).

Source: Spark documentation, "Job Scheduling"; PostgreSQL documentation, "The Cumulative Statistics System"
(`pg_stat_activity`), "Client Connection Defaults".
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from threading import Event
from typing import TYPE_CHECKING, Any

import psycopg

from relay.faults import describe
from relay.spark.session import POOL
from relay.store.connections import Dsn, connect
from relay.store.groups import APPLICATION_NAME, INSTANCE

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

log = logging.getLogger(__name__)

NO_SLOT = "no Spark slot free"
"""Why a job is given up: for `starved` seconds other jobs have had all slots."""
TASK_LATE = "a Spark task was late"
"""Why a job is given up: a task gives no sign of life."""

_END_LATE = """
    select pg_terminate_backend(pid) from pg_stat_activity
     where application_name = %(mark)s and datname = current_database() and state like 'idle in transaction%%'
       and state_change < clock_timestamp() - make_interval(secs => %(late)s)
"""
_ALIVE = """
    select count(*) from pg_stat_activity
     where application_name = %(mark)s and datname = current_database() and state <> 'idle'
"""
_numbers = count(1)


@dataclass(frozen=True, slots=True)
class JobLimits:
    """When a job counts as one that stands still, in seconds.

    `look`: between two looks. `starved`: without a running task while other jobs have the slots. `late`: without a sign
    of life from the session of a task. `silent`: with a running task that has no session, since its process starts, or
    is frozen before it connects.
    """

    look: float = 1.0
    starved: float = 5.0
    late: float = 15.0
    silent: float = 60.0


LIMITS = JobLimits()


class JobStalled(Exception):
    """A job was given up; its message is NO_SLOT or TASK_LATE."""


@dataclass(slots=True)
class _Job:
    """A job in flight: its group at Spark, the mark of its sessions, and since when it seems to stand still."""

    group: str
    mark: str
    ended: Event = field(default_factory=Event)
    why: str | None = None
    unfinished: int = 0
    silent_since: float | None = None


class JobWatch:
    """Watches the jobs of one engine. Safe in several threads."""

    def __init__(self, dsn: Dsn) -> None:
        self._dsn = dsn
        self._limits = LIMITS
        self._jobs: list[_Job] = []
        self._starved_since: float | None = None
        self._lock = threading.Lock()

    @contextmanager
    def watched(self, session: SparkSession, group: str) -> Iterator[_Job]:
        """Watch a job until the context ends; `why` of what it yields says why the job was given up, if it was."""
        job = _Job(group, f"relay task {next(_numbers)} of {INSTANCE}"[:63])
        with self._lock:
            self._jobs.append(job)
        thread = threading.Thread(
            target=self._watch, args=(session, job), name="spark-watch", daemon=True
        )
        thread.start()
        try:
            yield job
        finally:
            job.ended.set()
            with self._lock:
                self._jobs.remove(job)

    def _watch(self, session: SparkSession, job: _Job) -> None:
        conn: psycopg.Connection[Any] | None = None
        try:
            while not job.ended.wait(self._limits.look):
                if conn is None or conn.closed:
                    conn = self._connected()
                job.why = self._standstill(session, conn, job)
                if job.why is not None and not job.ended.is_set():
                    session.sparkContext.cancelJobGroup(job.group)
                    return
        except Exception as error:
            # The session has died, and the job with it.
            log.debug("cannot watch a Spark job", extra={"fault": describe(error)})
        finally:
            if conn is not None:
                conn.close()

    def _connected(self) -> psycopg.Connection[Any] | None:
        try:
            return connect(self._dsn, application_name=APPLICATION_NAME)
        except psycopg.Error as error:
            log.debug("cannot watch the sessions of tasks", extra={"fault": describe(error)})
            return None

    def _standstill(
        self, session: SparkSession, conn: psycopg.Connection[Any] | None, job: _Job
    ) -> str | None:
        """Why a job stands still; None if it does not."""
        now = time.monotonic()
        running, unfinished = _tasks(session, job.group)
        if unfinished and _running_by_pool(session).get(POOL) == 0:
            self._starved_since = self._starved_since or now
            return NO_SLOT if now - self._starved_since >= self._limits.starved else None
        self._starved_since = None
        if conn is None:
            return None
        try:
            return self._without_life(conn, job, running, unfinished, now)
        except psycopg.Error as error:
            log.debug("cannot watch the sessions of tasks", extra={"fault": describe(error)})
            conn.close()
            return None

    def _without_life(
        self,
        conn: psycopg.Connection[Any],
        job: _Job,
        running: int,
        unfinished: int,
        now: float,
    ) -> str | None:
        of = {"mark": job.mark, "late": self._limits.late}
        ended = conn.execute(_END_LATE, of).rowcount
        if ended:
            log.warning(
                "ended the sessions of Spark tasks without a sign of life",
                extra={"sessions": ended, "seconds": self._limits.late},
            )
            return TASK_LATE
        alive = conn.execute(_ALIVE, of).fetchone()
        progresses = unfinished != job.unfinished
        job.unfinished = unfinished
        if progresses or (alive is not None and alive[0] >= running):
            job.silent_since = None
            return None
        job.silent_since = job.silent_since or now
        return TASK_LATE if now - job.silent_since >= self._limits.silent else None


def is_busy(session: SparkSession, slots: int) -> bool:
    """Whether jobs have all slots. Raises py4j's errors."""
    return sum(_running_by_pool(session).values()) >= slots


def _running_by_pool(session: SparkSession) -> dict[str, int]:
    """The running tasks of each pool, from the scheduler itself. Raises py4j's errors.

    The numbers of the status tracker may be seconds old: it stores an event only with a later one.
    """
    context: Any = session.sparkContext
    pools = context._jsc.sc().getAllPools()
    found = [pools.apply(number) for number in range(pools.size())]
    return {str(pool.name()): int(pool.runningTasks()) for pool in found}


def _tasks(session: SparkSession, group: str) -> tuple[int, int]:
    """How many tasks of a job group run, and how many have not finished. Raises py4j's errors."""
    tracker = session.sparkContext.statusTracker()
    running = unfinished = 0
    for number in tracker.getJobIdsForGroup(group):
        job = tracker.getJobInfo(number)
        if job is None or job.status != "RUNNING":
            continue
        for stage in filter(None, map(tracker.getStageInfo, job.stageIds)):
            running += stage.numActiveTasks
            unfinished += stage.numTasks - stage.numCompletedTasks
    return running, unfinished
