"""What runs on executors: each Python worker has an applier of its own, kept from task to task."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import suppress

import pyarrow as pa

import relay
from relay.config.settings import Settings
from relay.faults import RelayError, TaskFault
from relay.logs import quiet_libraries
from relay.memory import collect_rarely, return_arrow_blocks, return_large_blocks
from relay.model.batch import Work
from relay.pipeline.apply import Applier
from relay.pipeline.inline import Result, attempt

CODEC = "lz4"
"""How the bytes of a pickled task are compressed."""
_RESULT = pa.schema([("task", pa.int32()), ("result", pa.binary())])

_appliers: dict[bytes, Applier] = {}


def _applier(configuration: bytes) -> Applier:
    """This worker's applier, with its connection, kept from task to task."""
    applier = _appliers.get(configuration)
    if applier is None:
        quiet_libraries()
        collect_rarely()
        return_large_blocks()
        return_arrow_blocks()
        settings: Settings = pickle.loads(configuration)  # noqa: S301
        applier = _appliers[configuration] = Applier(settings, connections=1)
    return applier


def prepare(configuration: bytes) -> None:
    """Build this worker's applier and connect; what is wrong shows with the first task."""
    with suppress(Exception):
        _applier(configuration).connect()


def warm_up(configuration: bytes, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Load what applying a task needs, and connect."""
    # A worker looks for garbage after each task, in all that it has loaded.
    collect_rarely()
    for batch in batches:
        if configuration and batch.column("connects")[0].as_py():
            prepare(configuration)
        yield pa.RecordBatch.from_arrays([pa.array([relay.__version__])], names=["version"])


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


def _unpacked(batch: pa.RecordBatch) -> Iterator[tuple[int, Work]]:
    for number, work in zip(batch.column("task"), batch.column("work"), strict=True):
        with pa.CompressedInputStream(work.as_buffer(), CODEC) as stream:
            yield number.as_py(), pickle.load(stream)  # noqa: S301


def _row(number: int, result: Result) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays(
        [pa.array([number], pa.int32()), pa.array([pickle.dumps(result)], pa.binary())],
        schema=_RESULT,
    )
