"""Runs a batch's tasks on Spark executors, through the DataFrame API only, so that Spark Connect serves as well.

The plan already knows every task, so a batch becomes a DataFrame with one row for each task and no shuffle:
`mapInArrow` applies the rows where they lie. A row carries its task pickled, as Spark carries the function itself, and
compressed: on its way through the JVM a byte is copied again and again, so the fewer of them the better. What Spark's
user interface and event log can show of a task is beside it: the other columns of `TASKS`, and the name of the job.
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

import pyarrow as pa
from pyspark.sql.types import StructType

from relay.config.settings import Settings
from relay.faults import Action, TaskFault
from relay.meter import Meter
from relay.model.batch import JobName, Task, Work
from relay.model.events import Lsn
from relay.pipeline.inline import Result
from relay.spark.executor import CODEC, apply_rows
from relay.spark.faults import safe_description

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

`first_lsn` and `last_lsn` are the ends of the first and the last commit, null for polled rows, which the task reads
itself. `bytes` is the length of `work`, the pickled task.
"""


class SparkEngine:
    """The executors of a Spark session."""

    name = "spark"

    def __init__(self, settings: Settings, session: Session, meter: Meter | None = None) -> None:
        self._meter = meter or Meter()
        self._configuration = pickle.dumps(settings)
        self._session = session
        self._remote = settings.spark.remote is not None
        # As a type, not as text, which the JVM would parse for each job.
        self._schema = StructType().add("task", "integer").add("result", "binary")

    @property
    def workers(self) -> int | None:
        """How many tasks the session runs side by side."""
        return self._session.slots

    def run(self, tasks: Sequence[Work], guarded: bool, name: JobName) -> list[Result]:
        """Apply the tasks on the executors; results are in the order of the tasks.

        If the job fails or the session dies, every task becomes a fault to try again: what was committed all the same
        is recognised by the offsets. Safe in several threads, each for a batch of its own.
        """
        session = self._session.get()
        if session is None:
            return [TaskFault(Action.RETRY, "the Spark session is being built")] * len(tasks)
        try:
            if not guarded:
                return self._run_job(session, tasks, guarded, name)
            # A worker that dies takes the job's other tasks along, which are not to blame.
            return [
                result for task in tasks for result in self._run_job(session, [task], guarded, name)
            ]
        except Exception as error:
            fault = TaskFault(
                Action.RETRY, f"the Spark job failed: {safe_description(error)}", died=True
            )
            self._session.replace_if_dead(session)
            return [fault] * len(tasks)
        finally:
            # What py4j holds of the JVM is in cycles, and with it the JVM holds the whole batch.
            gc.collect(1)

    def abandon(self, name: JobName) -> None:
        """Let a job that is under way fail. Safe in any thread."""
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
        """Let the jobs of this thread have a name."""
        if self._remote:
            # A server has no job groups for its clients; a tag may hold no comma.
            session.addTag(_tag(name))
            try:
                yield
            finally:
                session.removeTag(_tag(name))
            return
        # The thread runs nothing but such jobs, and each of them sets it.
        session.sparkContext.setJobGroup(name.group, name.description)
        yield

    def _run_job(
        self, session: SparkSession, tasks: Sequence[Work], guarded: bool, name: JobName
    ) -> list[Result]:
        started = time.monotonic()
        succeeded = False
        try:
            found = self._collected(session, tasks, guarded, name)
            succeeded = True
            return found
        finally:
            self._meter.spark_job(time.monotonic() - started, succeeded)

    def _collected(
        self, session: SparkSession, tasks: Sequence[Work], guarded: bool, name: JobName
    ) -> list[Result]:
        # As Arrow batches of their own the tasks become partitions of their own.
        table = pa.Table.from_batches([_packed(*numbered) for numbered in enumerate(tasks)])
        frame = session.createDataFrame(table)
        with self._named(session, name):
            rows = frame.mapInArrow(
                partial(apply_rows, self._configuration, guarded), self._schema
            ).collect()
        found: dict[int, Result] = {row.task: pickle.loads(row.result) for row in rows}  # noqa: S301
        return [found[number] for number in range(len(tasks))]


def _packed(number: int, task: Work) -> pa.RecordBatch:
    """A row with a task, around the very bytes that compressing made: a batch is large enough once."""
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
    """The ends of the first and the last commit of a task, and how many transactions it has."""
    if not isinstance(task, Task):
        return None, None, sum(len(share.xids) for share in task.shares)
    commits = task.transactions.facts["end_lsn"]
    return str(Lsn(commits[0])), str(Lsn(commits[-1])), len(task.transactions)


def _tag(name: JobName) -> str:
    return name.group.translate(_SEPARATORS)
