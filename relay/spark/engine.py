"""Runs a batch's tasks on Spark executors, through the DataFrame API only, so that Spark Connect serves as well.

The plan already knows every task, so a batch becomes a DataFrame with one row for each task and no shuffle:
`mapInArrow` applies the rows where they lie. A row carries its task pickled, as Spark carries the function itself, and
compressed: on its way through the JVM a byte is copied again and again, so the fewer of them the better.
"""

from __future__ import annotations

import gc
import pickle
import struct
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

import pyarrow as pa

from relay.batch import Work
from relay.config import Settings
from relay.faults import Action, RelayError, TaskFault
from relay.garbage import collect_seldom, return_arrow_blocks, return_large_blocks
from relay.logs import quiet_libraries
from relay.pipeline.apply import Applier
from relay.pipeline.inline import Result, attempt
from relay.spark.session import Session, kind_and_first_line

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_CODEC = "lz4"
_SCHEMA = "task int, result binary"
_ARROW_RESULT = pa.schema([("task", pa.int32()), ("result", pa.binary())])


class SparkEngine:
    """The executors of a Spark session."""

    name = "spark"

    def __init__(self, settings: Settings, session: Session) -> None:
        self._configuration = pickle.dumps(settings)
        self._session = session

    @property
    def lanes(self) -> int | None:
        """How many tasks the session runs side by side."""
        return self._session.slots

    def run(self, tasks: Sequence[Work], guarded: bool) -> list[Result]:
        """Apply the tasks on the executors; results are in the order of the tasks.

        If the job fails or the session dies, every task becomes a fault to try again: what was committed all the same
        is recognised by the offsets.
        """
        session = self._session.get()
        if session is None:
            return [TaskFault(Action.RETRY, "the Spark session is being built")] * len(tasks)
        try:
            if not guarded:
                return self._run_job(session, tasks, guarded)
            # A worker that dies takes the job's other tasks along, which are not to blame.
            return [result for task in tasks for result in self._run_job(session, [task], guarded)]
        except Exception as error:
            fault = TaskFault(
                Action.RETRY, f"the Spark job failed: {kind_and_first_line(error)}", died=True
            )
            self._session.replace_if_dead(session)
            return [fault] * len(tasks)
        finally:
            # What py4j holds of the JVM is in cycles, and with it the JVM holds the whole batch.
            gc.collect(1)

    def _run_job(self, session: SparkSession, tasks: Sequence[Work], guarded: bool) -> list[Result]:
        # As Arrow batches of their own the tasks become partitions of their own.
        table = pa.Table.from_batches([_packed(*numbered) for numbered in enumerate(tasks)])
        frame = session.createDataFrame(table)
        rows = frame.mapInArrow(
            partial(apply_rows, self._configuration, guarded), _SCHEMA
        ).collect()
        found: dict[int, Result] = {row.task: pickle.loads(row.result) for row in rows}  # noqa: S301
        return [found[number] for number in range(len(tasks))]


def _packed(number: int, task: Work) -> pa.RecordBatch:
    """A row with a task, around the very bytes that compressing made: a batch is large enough once."""
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, _CODEC) as stream:
        pickle.dump(task, stream)
    work = sink.getvalue()
    ends = pa.py_buffer(struct.pack("=ii", 0, work.size))
    column = pa.Array.from_buffers(pa.binary(), 1, [None, ends, work])
    return pa.record_batch({"task": pa.array([number], pa.int32()), "work": column})


def _unpacked(batch: pa.RecordBatch) -> Iterator[tuple[int, Work]]:
    for number, work in zip(*batch.columns, strict=True):
        with pa.CompressedInputStream(work.as_buffer(), _CODEC) as stream:
            yield number.as_py(), pickle.load(stream)  # noqa: S301


# On the executors.

_appliers: dict[bytes, Applier] = {}


def _applier(configuration: bytes) -> Applier:
    """This worker's applier, with its connection, kept from task to task."""
    applier = _appliers.get(configuration)
    if applier is None:
        quiet_libraries()
        collect_seldom()
        return_large_blocks()
        return_arrow_blocks()
        settings: Settings = pickle.loads(configuration)  # noqa: S301
        applier = _appliers[configuration] = Applier(settings, connections=1)
    return applier


def prepare(configuration: bytes) -> None:
    """Build this worker's applier and connect; what is wrong shows with the first task."""
    with suppress(Exception):
        _applier(configuration).connect()


def apply_rows(
    configuration: bytes, guarded: bool, batches: Iterator[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """Apply the tasks of a DataFrame partition, one target transaction for each."""
    for batch in batches:
        for number, task in _unpacked(batch):
            try:
                result = attempt(_applier(configuration), task, guarded)
            except RelayError as error:
                result = TaskFault.of(error)
            yield _row(number, result)


def _row(number: int, result: Result) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays(
        [pa.array([number], pa.int32()), pa.array([pickle.dumps(result)], pa.binary())],
        schema=_ARROW_RESULT,
    )
