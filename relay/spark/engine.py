"""Runs a batch's tasks on Spark executors, through the DataFrame API only, so that it works with Spark Connect too.

A batch becomes a DataFrame with one row for each task, and `mapInArrow` applies the rows without a shuffle. A row holds
its task pickled and compressed, because the JVM copies each byte several times. Spark's user interface and event log
show the other columns of `relay.spark.executor.TASKS` and the name of the job.

The jobs are watched, and those that stand still are given up, so that the group goes on. A job stands still where other
jobs, such as a sink's, have all Spark slots, or where a process with a task in flight is frozen. A frozen process still
has its session of the target, with locks that its partitions need, and Spark takes minutes to notice, or never does. So
the session of a task is marked with the job (`application_name`), the process sends an empty query in it every few
seconds, and the driver ends a session without a sign of life. If the driver has ended too, the server ends the session
(`idle_in_transaction_session_timeout`).

Source: Spark documentation, "Job Scheduling"; PostgreSQL documentation, "The Cumulative Statistics System"
(`pg_stat_activity`), "Client Connection Defaults".
"""

from __future__ import annotations

import gc
import logging
import pickle
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import count
from threading import Event
from typing import TYPE_CHECKING, Any

import psycopg

from relay.config.settings import Settings
from relay.faults import FaultAction, SecretUnavailable, TaskFault, describe
from relay.model.batch import JobName, Work
from relay.pipeline.inline import Result
from relay.pipeline.listeners import Meter
from relay.spark.descriptions import safe_description
from relay.spark.session import Session
from relay.store.connections import APPLICATION_NAME, INSTANCE, Dsn, connect

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

    from relay.spark.executor import PackedSettings

log = logging.getLogger(__name__)

POOL = "pipeline"
"""The pool of the scheduler for the pipeline's jobs."""
_SEPARATORS = str.maketrans({",": None, " ": "-"})

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


class SparkEngine:
    """Applies tasks on the executors of a Spark session."""

    name = "spark"

    def __init__(self, settings: Settings, session: Session, meter: Meter | None = None) -> None:
        self._meter = meter or Meter()
        self._settings = settings
        self._session = session
        self._remote = settings.spark.remote is not None
        self._watch = JobWatch(settings.target_dsn)

    def start(self) -> None:
        """Begin to build the session, unless it exists or is being built; returns at once."""
        self._session.start()

    def is_ready(self, timeout: float = 0.0) -> bool:
        """Whether there is a session, within `timeout` seconds. Raises ConfigurationError if it can never be built."""
        return self._session.get(timeout) is not None

    @property
    def workers(self) -> int | None:
        """How many tasks the session runs at once; None where it does not report it."""
        return self._session.slots

    def run(self, tasks: Sequence[Work], guarded: bool, name: JobName) -> list[Result]:
        """Apply the tasks on the executors and return their results, in the order of the tasks.

        If the job fails, stands still or the session dies, each result is a fault to retry; the offsets then show which
        tasks have committed. Safe in several threads, each with a batch of its own.
        """
        session = self._session.get()
        if session is None:
            return [TaskFault(FaultAction.RETRY, "the Spark session is being built")] * len(tasks)
        # Few batches are large enough for Spark, and its libraries take more memory than the rest of relay.
        from relay.spark.executor import PackedSettings

        try:
            configuration = PackedSettings.of(self._settings)
        except SecretUnavailable as error:
            return [TaskFault.of(error)] * len(tasks)
        try:
            # A worker that dies fails its whole job: with a job for each task, only the task that killed it.
            jobs = [[task] for task in tasks] if guarded else [tasks]
            results = [
                result
                for job in jobs
                for result in self._run_job(session, configuration, job, guarded, name)
            ]
            if any(isinstance(result, TaskFault) and result.refused for result in results):
                self._ask_databases()
            return results
        except JobStalled as stalled:
            why = str(stalled)
            fault = TaskFault(FaultAction.RETRY, f"the Spark job stood still: {why}", stalled=why)
            return [fault] * len(tasks)
        except Exception as error:
            fault = TaskFault(
                FaultAction.RETRY, f"the Spark job failed: {safe_description(error)}", died=True
            )
            self._session.replace_if_dead(session)
            return [fault] * len(tasks)
        finally:
            # What remains of a job in the JVM is small, and py4j's references to it are in cycles.
            gc.collect(1)

    def _ask_databases(self) -> None:
        """Connect to both databases, since one refuses the executors: whether it refuses relay is noted then."""
        for access in (self._settings.source_dsn, self._settings.target_dsn):
            with suppress(psycopg.Error):
                connect(access).close()

    @property
    def is_busy(self) -> bool:
        """Whether other jobs have all Spark slots now."""
        session, slots = self._session.get(), self._session.slots
        with suppress(Exception):
            return session is not None and slots is not None and is_busy(session, slots)
        return False

    def abandon(self, name: JobName) -> None:
        """Cancel a job in flight, so that it fails. Safe in any thread."""
        session = self._session.get()
        with suppress(Exception):
            if session is None:
                return
            if self._remote:
                session.interruptTag(_tag(name))
            else:
                session.sparkContext.cancelJobGroup(name.group)

    @contextmanager
    def _named(self, session: SparkSession, name: JobName) -> Iterator[None]:
        """Name the jobs of this thread."""
        if self._remote:
            # Spark Connect has no job groups; a tag may hold no comma.
            session.addTag(_tag(name))
            try:
                yield
            finally:
                session.removeTag(_tag(name))
            return
        # Not reset: this thread runs only such jobs, and each sets its own.
        session.sparkContext.setLocalProperty("spark.scheduler.pool", POOL)
        session.sparkContext.setJobGroup(name.group, name.description)
        yield

    @contextmanager
    def _watched(self, session: SparkSession, name: JobName) -> Iterator[str]:
        """Watch the job of the context, and yield the mark of its sessions. Raises JobStalled."""
        if self._remote:
            # Spark Connect does not report tasks.
            yield ""
            return
        with self._watch.watched(session, name.group) as job:
            try:
                yield job.mark
            except Exception as error:
                if job.why is None:
                    raise
                raise JobStalled(job.why) from error

    @cached_property
    def _schema(self) -> StructType:
        """The columns of a result. Not as text: the JVM would parse it for each job."""
        from pyspark.sql.types import StructType

        return StructType().add("task", "integer").add("result", "binary")

    def _run_job(
        self,
        session: SparkSession,
        configuration: PackedSettings,
        tasks: Sequence[Work],
        guarded: bool,
        name: JobName,
    ) -> list[Result]:
        from relay.spark.executor import apply_rows, packed_tasks

        with self._metered():
            frame = session.createDataFrame(packed_tasks(tasks))
            with self._named(session, name), self._watched(session, name) as mark:
                applied = frame.mapInArrow(
                    partial(apply_rows, configuration, guarded, mark), self._schema
                )
                try:
                    rows = applied.collect()
                finally:
                    self._release(session, frame, applied)
            results: dict[int, Result] = {row.task: pickle.loads(row.result) for row in rows}  # noqa: S301
            return [results[number] for number in range(len(tasks))]

    @contextmanager
    def _metered(self) -> Iterator[None]:
        started = time.monotonic()
        succeeded = False
        try:
            yield
            succeeded = True
        finally:
            self._meter.spark_job(time.monotonic() - started, succeeded)

    def _release(self, session: SparkSession, *frames: DataFrame) -> None:
        """Let the JVM drop the batch now: py4j's references to it are in cycles, which the collector visits late."""
        if self._remote:
            return
        gateway: Any = session.sparkContext._gateway
        for frame in frames:
            with suppress(Exception):  # the JVM may be gone
                gateway.detach(frame._jdf)


def _tag(name: JobName) -> str:
    return name.group.translate(_SEPARATORS)


@dataclass(frozen=True, slots=True)
class JobLimits:
    """When a job counts as one that stands still, in seconds.

    `poll`: between two polls. `starved`: without a running task while other jobs have the slots. `late`: without a sign
    of life from the session of a task. `silent`: with a running task that has no session, since its process starts, or
    is frozen before it connects.
    """

    poll: float = 1.0
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
            while not job.ended.wait(self._limits.poll):
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
        running, unfinished = tasks_of(session, job.group)
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


def tasks_of(session: SparkSession, group: str) -> tuple[int, int]:
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
