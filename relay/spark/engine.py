"""Runs a batch's tasks on Spark executors, through the DataFrame API only, so that it works with Spark Connect too.

A batch becomes a DataFrame with one row for each task, and `mapInArrow` applies the rows without a shuffle. A row holds
its task pickled and compressed, because the JVM copies each byte several times. Spark's user interface and event log
show the other columns of `TASKS` and the name of the job.
"""

from __future__ import annotations

import gc
import pickle
import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING

import psycopg
import pyarrow as pa
from pyspark.sql.types import StructType

from relay.config.settings import Settings
from relay.faults import FaultAction, SecretUnavailable, TaskFault
from relay.model.batch import JobName, Task, Work
from relay.model.events import Lsn
from relay.pipeline.inline import Result
from relay.pipeline.listeners import Meter
from relay.spark.executor import CODEC, PackedSettings, apply_rows
from relay.spark.faults import safe_description
from relay.spark.session import POOL
from relay.spark.watching import JobStalled, JobWatch, is_busy
from relay.store.connections import connect

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from relay.spark.session import Session

_SEPARATORS = str.maketrans({",": None, " ": "-"})

TASKS = pa.schema(
    [
        ("task", pa.int32()),
        ("partitions", pa.list_(pa.int32())),
        ("first_lsn", pa.string()),
        ("last_lsn", pa.string()),
        ("transactions", pa.int64()),
        ("events", pa.int64()),
        ("bytes", pa.int64()),
        ("work", pa.binary()),
    ]
)
"""The columns of the driver's DataFrame, a row for each task.

`first_lsn` and `last_lsn` are the end positions of the first and the last commit, null for polled rows, which the task
reads itself. `bytes` is the length of `work`, the pickled and compressed task.
"""


class SparkEngine:
    """Applies tasks on the executors of a Spark session."""

    name = "spark"

    def __init__(self, settings: Settings, session: Session, meter: Meter | None = None) -> None:
        self._meter = meter or Meter()
        self._settings = settings
        self._session = session
        self._remote = settings.spark.remote is not None
        self._watch = JobWatch(settings.target_dsn)
        # Not as text: the JVM would parse it for each job.
        self._schema = StructType().add("task", "integer").add("result", "binary")

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
            # py4j's references are in cycles, and until they are collected the JVM keeps the whole batch.
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

    def _run_job(
        self,
        session: SparkSession,
        configuration: PackedSettings,
        tasks: Sequence[Work],
        guarded: bool,
        name: JobName,
    ) -> list[Result]:
        started = time.monotonic()
        succeeded = False
        try:
            results = self._collected(session, configuration, tasks, guarded, name)
            succeeded = True
            return results
        finally:
            self._meter.spark_job(time.monotonic() - started, succeeded)

    def _collected(
        self,
        session: SparkSession,
        configuration: PackedSettings,
        tasks: Sequence[Work],
        guarded: bool,
        name: JobName,
    ) -> list[Result]:
        # Spark makes each Arrow batch a partition, so each task gets one.
        table = pa.Table.from_batches([_packed(*numbered) for numbered in enumerate(tasks)])
        frame = session.createDataFrame(table)
        with self._named(session, name), self._watched(session, name) as mark:
            rows = frame.mapInArrow(
                partial(apply_rows, configuration, guarded, mark), self._schema
            ).collect()
        results: dict[int, Result] = {row.task: pickle.loads(row.result) for row in rows}  # noqa: S301
        return [results[number] for number in range(len(tasks))]


def _packed(number: int, task: Work) -> pa.RecordBatch:
    """A row of `TASKS`. Its column `work` shares the compressed bytes, without a copy."""
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, CODEC) as stream:
        pickle.dump(task, stream)
    work = sink.getvalue()
    ends = pa.py_buffer(struct.pack("=ii", 0, work.size))
    column = pa.Array.from_buffers(pa.binary(), 1, [None, ends, work])
    metadata = [number, list(task.partitions), *_span(task), task.events, work.size]
    columns = [pa.array([value], field.type) for value, field in zip(metadata, TASKS, strict=False)]
    return pa.RecordBatch.from_arrays([*columns, column], schema=TASKS)


def _span(task: Work) -> tuple[str | None, str | None, int]:
    """The end positions of the first and the last commit of a task, and how many transactions it has."""
    if not isinstance(task, Task):
        return None, None, sum(len(share.xids) for share in task.shares)
    commits = task.transactions.facts["end_lsn"]
    return str(Lsn(commits[0])), str(Lsn(commits[-1])), len(task.transactions)


def _tag(name: JobName) -> str:
    return name.group.translate(_SEPARATORS)
