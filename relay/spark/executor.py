"""The executors' side of the engine: each Python worker applies tasks with an applier that it keeps.

The driver packs the tasks for it.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256

import pyarrow as pa

import relay
from relay.config import secrets
from relay.config.settings import Settings
from relay.faults import RelayError, TaskFault
from relay.logs import quiet_libraries
from relay.model.batch import Task, Work
from relay.model.events import Lsn
from relay.pipeline.apply import Applier
from relay.pipeline.inline import Result, attempt
from relay.runtime.memory import collect_rarely, return_arrow_blocks, return_large_blocks

_CODEC = "lz4"
"""The codec of a pickled task."""
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
_RESULT = pa.schema([("task", pa.int32()), ("result", pa.binary())])


@dataclass(frozen=True, slots=True)
class PackedSettings:
    """The configuration for executors: pickled with the secrets of this moment, and a digest without these."""

    pickled: bytes
    identity: bytes

    @classmethod
    def of(cls, settings: Settings) -> PackedSettings:
        """Pickle a configuration. Raises SecretUnavailable."""
        return cls(pickle.dumps(settings), sha256(secrets.pickled_without(settings)).digest())


def packed_tasks(tasks: Sequence[Work]) -> pa.Table:
    """The tasks as a table of `TASKS`. Spark makes each Arrow batch a partition, so each task gets one."""
    return pa.Table.from_batches([_packed(*numbered) for numbered in enumerate(tasks)])


def _packed(number: int, task: Work) -> pa.RecordBatch:
    """A row of `TASKS`. Its column `work` shares the compressed bytes, without a copy."""
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, _CODEC) as stream:
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


# On the executors.

_appliers: dict[bytes, Applier] = {}
_newest: dict[bytes, bytes] = {}
"""The last pickle of each applier's configuration."""


def _applier(configuration: PackedSettings) -> Applier:
    """This worker's applier, with its connection; the first call builds it."""
    identity = configuration.identity
    if _newest.get(identity) != configuration.pickled:
        # Replaces the secrets that the applier has, too.
        settings: Settings = pickle.loads(configuration.pickled)  # noqa: S301
        _newest[identity] = configuration.pickled
        if identity not in _appliers:
            quiet_libraries()
            collect_rarely()
            return_large_blocks()
            return_arrow_blocks()
            _appliers[identity] = Applier(settings, connections=1, keeps_alive=True)
    return _appliers[identity]


def prepare(configuration: PackedSettings) -> None:
    """Build this worker's applier and connect. The first task reports what fails here."""
    with suppress(Exception):
        _applier(configuration).connect()


def warm_up(
    configuration: PackedSettings | None, batches: Iterator[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """Import what a task needs, and connect where the batch's row says so."""
    # Python's collector would traverse all imported modules after each task.
    collect_rarely()
    for batch in batches:
        if configuration and batch.column("connects")[0].as_py():
            prepare(configuration)
        yield pa.RecordBatch.from_arrays([pa.array([relay.__version__])], names=["version"])


def apply_rows(
    configuration: PackedSettings, guarded: bool, mark: str, batches: Iterator[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """Apply the tasks of a DataFrame partition, each in one commit of the target.

    `mark` is the application_name of their sessions, by which the driver recognises them.
    """
    for batch in batches:
        for number, task in _unpacked_tasks(batch):
            try:
                applier = _applier(configuration)
                applier.mark(mark)
                result = attempt(applier, task, guarded)
            except RelayError as error:
                result = TaskFault.of(error)
            yield _row(number, result)


def _unpacked_tasks(batch: pa.RecordBatch) -> Iterator[tuple[int, Work]]:
    for number, work in zip(batch.column("task"), batch.column("work"), strict=True):
        with pa.CompressedInputStream(work.as_buffer(), _CODEC) as stream:
            yield number.as_py(), pickle.load(stream)  # noqa: S301


def _row(number: int, result: Result) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays(
        [pa.array([number], pa.int32()), pa.array([pickle.dumps(result)], pa.binary())],
        schema=_RESULT,
    )
