"""Writers of `type: spark` sinks: each writes a batch to its destination exactly once, however often it is called."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from relay.faults import ConfigurationError
from relay.handler_settings import SparkHandler

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


@dataclass(frozen=True, slots=True)
class BatchId:
    """What identifies a batch at its destination.

    `application` is the UUID of the sink's namespace, made once for each group, sink and target. `number` counts the
    batches of the application from 1 without gaps. `id` is the batch's UUID, the value of its frame's `relay_batch`.
    """

    application: str
    number: int
    id: str


class Writer(Protocol):
    """Writes the batches of one sink."""

    def check(self, session: SparkSession) -> None:
        """Raise ConfigurationError where the destination cannot be written exactly once."""

    def write(self, frame: DataFrame, batch: BatchId) -> None:
        """Write the frame.

        Called again for the same batch after any failure, with the same rows; the destination has them once. Raises
        ConfigurationError as `check` does, and whatever the destination raises.
        """


def writer(name: str, settings: SparkHandler) -> Writer:
    """The writer of a sink. Raises ConfigurationError for a format without one, or whose extra is not installed."""
    try:
        return _writer(name, settings)
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            f"handlers.{name}.format: {settings.format} needs {error.name}: install relay-outbox[{settings.format}]"
        ) from None


def _writer(name: str, settings: SparkHandler) -> Writer:
    if settings.jdbc is not None:
        from relay.spark.writers.jdbc import Jdbc

        return Jdbc(name, settings.jdbc)
    match settings.format.lower():
        case "delta" if settings.path is not None:
            from relay.spark.writers.delta import Delta

            return Delta(name, settings)
        case "iceberg" if settings.table is not None:
            from relay.spark.writers.iceberg import Iceberg

            return Iceberg(name, settings)
    raise ConfigurationError(f"handlers.{name}.format: {settings.format} has no writer")
