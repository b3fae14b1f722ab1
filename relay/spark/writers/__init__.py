"""Writers of `type: spark` sinks: each writes a batch exactly once, however often it is called for it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from relay.config.handlers import SparkHandler
from relay.faults import ConfigurationError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

BATCH_COLUMN = "relay_batch"
"""The column of a frame that holds the batch's id; it is the last partition column of files and tables."""


@dataclass(frozen=True, slots=True)
class BatchId:
    """Identifies a batch at its destination.

    `application` is the UUID of the group, sink and target. `number` counts the batches of the application from 1; a
    batch that was dropped because an operator moved the sink leaves a gap. `id` is the batch's UUID, the value of
    `relay_batch` in its frame. `tried` says that an earlier attempt, perhaps with another query, may have written some
    of its rows.
    """

    application: str
    number: int
    id: str
    tried: bool = field(default=True, compare=False)


class MissingPartition(ConfigurationError):
    """The frame lacks a column of partition_by, and no row of the batch is at its destination."""


class Writer(Protocol):
    """Writes the batches of one sink."""

    def check(self, session: SparkSession) -> None:
        """Raise ConfigurationError where the destination cannot be written exactly once."""

    def write(self, frame: DataFrame, batch: BatchId) -> None:
        """Write the frame.

        After any failure it is called again for the same batch, with the same rows; the destination has them once.
        Raises ConfigurationError as `check` does, MissingPartition, and the destination's errors.
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
        from relay.spark.writers.call import CallableWriter

        return CallableWriter(name, settings.callable)
    if settings.jdbc is not None:
        from relay.spark.writers.jdbc import JdbcWriter

        return JdbcWriter(name, settings.jdbc)
    if kind == "iceberg":
        from relay.spark.writers.iceberg import IcebergWriter

        return IcebergWriter(name, settings)
    if settings.table is not None:
        from relay.spark.writers.table import TableWriter

        return TableWriter(name, settings, settings.table)
    if kind == "delta":
        from relay.spark.writers.delta import DeltaWriter

        return DeltaWriter(name, settings)
    from relay.spark.writers.files import FilesWriter

    return FilesWriter(name, settings)
