"""Writers of `type: spark` sinks: each writes a batch to its destination exactly once, however often it is called."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from relay.config.handlers import SparkHandler
from relay.faults import ConfigurationError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

BATCH_COLUMN = "relay_batch"
"""The column of a frame that has the batch's id; files and tables are partitioned by it, last of all."""


@dataclass(frozen=True, slots=True)
class BatchId:
    """What identifies a batch at its destination.

    `application` is the UUID of the sink's namespace, made once for each group, sink and target. `number` counts the
    batches of the application from 1, upwards; one that was given up, since somebody moved the sink, leaves a gap.
    `id` is the batch's UUID, the value of its frame's `relay_batch`. `tried`: an earlier attempt, perhaps with another
    query, may have written something of it.
    """

    application: str
    number: int
    id: str
    tried: bool = field(default=True, compare=False)


class MissingPartition(ConfigurationError):
    """What is written lacks a column of partition_by, and nothing of the batch is at its destination."""


class Writer(Protocol):
    """Writes the batches of one sink."""

    def check(self, session: SparkSession) -> None:
        """Raise ConfigurationError where the destination cannot be written exactly once."""

    def write(self, frame: DataFrame, batch: BatchId) -> None:
        """Write the frame.

        Called again for the same batch after any failure, with the same rows; the destination has them once. Raises
        ConfigurationError as `check` does, MissingPartition, and whatever the destination raises.
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
