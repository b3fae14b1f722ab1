"""Writers of `type: spark` sinks: each writes a batch exactly once, however often it is called for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from relay.config.handlers import SparkHandler
from relay.config.imports import load
from relay.faults import ConfigurationError
from relay.spark.descriptions import of_function

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

BATCH_COLUMN = "relay_batch"
"""The column of a frame that holds the batch's id; it is the last partition column of files and tables."""


@dataclass(frozen=True, slots=True)
class BatchId:
    """Identifies a batch at its destination.

    `application` is the UUID of the group, sink and target. `number` counts the batches of the application from 1; a
    batch that was dropped because an operator moved the sink leaves a gap. `id` is the batch's UUID, the value of
    `relay_batch` in its frame. A destination that has the batch has everything that the source's `snapshot` sees, which
    is every event committed before `complete_before`; None where no such time is known. What the snapshot `before`
    does not see is new in the batch; the rest of it is replayed.
    """

    application: str
    number: int
    id: str
    snapshot: str = ""
    complete_before: datetime | None = None
    before: str = ""

    @property
    def completeness(self) -> dict[str, str]:
        """What a table stores with the batch's commit: `snapshot` and, where known, `complete_before` in ISO 8601."""
        stored = {"relay.snapshot": self.snapshot} if self.snapshot else {}
        if self.complete_before is not None:
            stored["relay.complete_before"] = self.complete_before.astimezone(UTC).isoformat()
        return stored


class MissingPartition(ConfigurationError):
    """The frame lacks a column of partition_by, and no row of the batch is at its destination."""


class Writer(Protocol):
    """Writes the batches of one sink.

    A writer that is suspended, loses its claim and goes on later is a danger to what its successor has written. So no
    step of `write` removes or replaces other rows than the batch's, in one commit that the destination rejects or that
    gives the same rows again.
    """

    def check(self, session: SparkSession) -> None:
        """Raise ConfigurationError where the destination cannot be written exactly once."""

    def write(self, frame: DataFrame, batch: BatchId) -> list[str] | None:
        """Write the frame; returns None where the destination has the batch then.

        A StagingWriter may return the names of files that are staged for `publish` instead. After any failure `write`
        is called again for the same batch, with the same rows; the destination has them once. Raises
        ConfigurationError as `check` does, MissingPartition, and the destination's errors.
        """


@runtime_checkable
class StagingWriter(Writer, Protocol):
    """A writer of files, which become visible when one attempt's files have been stored as those of the batch."""

    def publish(self, session: SparkSession, batch: BatchId, files: Sequence[str]) -> None:
        """Make the staged files of the batch visible, once, however often and by however many it is called."""


@runtime_checkable
class UpkeepWriter(Writer, Protocol):
    """A writer of a table that costs more with every commit unless it is kept small."""

    def upkeep(self, session: SparkSession) -> None:
        """Merge small files, and remove what the table's properties do not keep; the rows stay the same.

        Other writers and readers may use the table meanwhile. Raises ConfigurationError and the destination's errors,
        after which the table holds what it held.
        """


def writer(name: str, settings: SparkHandler) -> Writer:
    """The writer of a sink.

    Raises ConfigurationError for a callable that cannot be imported, or a format whose extra is not installed.
    """
    try:
        return _writer(name, settings)
    except ModuleNotFoundError as error:
        kind = settings.format.lower()
        raise ConfigurationError(
            f"handlers.{name}.format: {kind} needs {error.name}: install relay-outbox[{kind}]"
        ) from None


def _writer(name: str, settings: SparkHandler) -> Writer:
    kind = settings.format.lower()
    if settings.callable is not None:
        return CallableWriter(name, settings.callable)
    if settings.jdbc is not None:
        from relay.spark.writers.jdbc import JdbcWriter

        return JdbcWriter(name, settings.jdbc)
    if kind == "iceberg":
        from relay.spark.writers.iceberg import IcebergUpserts, IcebergWriter

        return (IcebergUpserts if settings.mode == "upsert" else IcebergWriter)(name, settings)
    if settings.table is not None:
        from relay.spark.writers.table import TableWriter

        return TableWriter(name, settings, settings.table)
    if kind == "delta":
        from relay.spark.writers.delta import DeltaUpserts, DeltaWriter

        return (DeltaUpserts if settings.mode == "upsert" else DeltaWriter)(name, settings)
    from relay.spark.writers.files import FilesWriter

    return FilesWriter(name, settings)


class CallableWriter:
    """Calls `function(frame, batch)` until it returns. The function must tolerate repeated calls for a batch."""

    def __init__(self, name: str, path: str) -> None:
        """Raises ConfigurationError for a callable that cannot be imported."""
        self._key = f"handlers.{name}.callable"
        self._function = load(self._key, path, "frame", "batch")

    def check(self, session: SparkSession) -> None:
        """Check nothing: the function does."""

    def write(self, frame: DataFrame, batch: BatchId) -> None:
        """Call the function. Raises RelayError with the kind, file and line of the function's error."""
        with of_function(self._key):
            self._function(frame, batch)
