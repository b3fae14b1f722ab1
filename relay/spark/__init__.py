"""Spark: the session, the engine of the pipeline, and the outbox as a data source.

from relay.spark import register

register(spark)
events = spark.read.format("outbox").option("dsn.env", "OUTBOX_DSN").load()
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession


def register(spark: SparkSession) -> None:
    """Register `format("outbox")` in a session; the executors need relay too. See docs/reference/data-source.md."""
    from relay.spark.data_source import register as register_source

    register_source(spark)


def java_home() -> Path:
    """Return a JAVA_HOME for a session of yours: the system's Java, or the runtime of the extra `java`.

    Raises ConfigurationError when there is no Java 17 or later.
    """
    from relay.spark.jvm import java_home as found

    return found()


def append_to(
    path: str, storage_options: Mapping[str, str] | None = None
) -> Callable[[DataFrame, int], None]:
    """Return a function for `foreachBatch` that appends each micro-batch once to the Delta table at `path`.

    The first micro-batch of a checkpoint creates the table. `storage_options` are deltalake's. The function collects
    the micro-batch on the driver; it raises ConfigurationError where the table is gone, and deltalake's DeltaError.
    """
    from relay.spark.streams import append_to as found

    return found(path, storage_options)


def position_of(path: str, storage_options: Mapping[str, str] | None = None) -> str:
    """Return the `startingPosition` of a new checkpoint: after the last micro-batch that the Delta table has.

    It is `beginning` where there is no table, or one without rows. One query may write the table. Raises
    ConfigurationError where no commit tells a position.
    """
    from relay.spark.streams import position_of as found

    return found(path, storage_options)


def position(options: Mapping[str, str]) -> str:
    """Return the position of all that is committed in an outbox: `fromSnapshot` or `toSnapshot` of a batch.

    `options` are those of a batch of `format("outbox")`. Raises RelayError, also for a role that may keep no position.
    """
    from relay.spark.jdbc_reads import position as found

    return found(options)


def read(
    spark: SparkSession, options: Mapping[str, str], columns: Sequence[str] | None = None
) -> DataFrame:
    """Return the rows of a batch of `format("outbox")` with the same `options`, in no order, and faster.

    The range is fixed by this call. Where the session has PostgreSQL's JDBC driver, Spark's JDBC source reads it, else
    the data source does; `columns` are those that the frame has, all of them without. Raises RelayError; so does, as an
    error of Spark, an action for which retention has removed rows of the range, or on a server with another history.
    """
    from relay.spark.jdbc_reads import read as found

    return found(spark, options, columns)


__all__ = ["append_to", "java_home", "position", "position_of", "read", "register"]
