"""Handlers that are DataFrame writers.

In the target transaction the events are only put aside, so that they commit with all other effects or not at all. From
there `relay.pipeline.spark_writer` takes them in batches, and writes a batch until that has worked.

Source: Apache Spark documentation, "Structured Streaming", foreachBatch; "Parquet Files", dynamic partition overwrite.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from relay.faults import ConfigurationError
from relay.handler_settings import SparkHandler
from relay.handlers.imports import load
from relay.handlers.sql import SqlBatch
from relay.store.spark_batches import staging

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

BATCH_COLUMN = "relay_batch"
"""A batch's id is a partition of files and tables: a batch that is written again replaces that and nothing else."""

Write = Callable[["DataFrame", int], object]


class Spark(SqlBatch):
    """Puts events aside for a DataFrame writer."""

    def __init__(self, name: str, settings: SparkHandler, group: str) -> None:
        """Raises ConfigurationError for a callable that cannot be imported."""
        super().__init__(name, staging(group, name))
        writer(name, settings)


def writer(name: str, settings: SparkHandler) -> Write:
    """What writes a batch, given as a frame and a number. Raises ConfigurationError as above."""
    if settings.callable is not None:
        return load(name, settings.callable)
    if settings.jdbc is not None or settings.format.lower() == "iceberg":
        raise ConfigurationError(
            f"handlers.{name}: jdbc and format: iceberg are not written yet: use path, table or callable"
        )

    def write(frame: DataFrame, _: int) -> None:
        if settings.table is None:
            _to_path(frame, settings)
        else:
            _to_table(frame, name, settings, settings.table)

    return write


def _to_path(frame: DataFrame, settings: SparkHandler) -> None:
    frame.write.save(
        settings.path,
        settings.format,
        "overwrite",
        [*settings.partition_by, BATCH_COLUMN],
        partitionOverwriteMode="dynamic",
        **_options(settings),
    )


def _to_table(frame: DataFrame, name: str, settings: SparkHandler, table: str) -> None:
    session = frame.sparkSession
    if not session.catalog.tableExists(table):
        by = [*settings.partition_by, BATCH_COLUMN]
        frame.limit(0).write.saveAsTable(table, settings.format, "ignore", by, **_options(settings))
    partitions = {each.name for each in session.catalog.listColumns(table) if each.isPartition}
    if BATCH_COLUMN not in partitions:
        # What is overwritten in it would be more than a batch of relay's.
        raise ConfigurationError(
            f"handlers.{name}.table: {table} is not partitioned by {BATCH_COLUMN}, so relay did not create it, and "
            "writing to it would replace its rows: name another table, which relay creates, or append with a callable"
        )
    # Here, not where the session is made: on a Connect server, or with a `conf` of the user, the whole table would go.
    session.conf.set("spark.sql.sources.partitionOverwriteMode", "dynamic")
    columns = session.table(table).columns
    frame.select(*columns).write.options(**_options(settings)).insertInto(table, overwrite=True)


def _options(settings: SparkHandler) -> dict[str, str]:
    return {name: value.get_secret_value() for name, value in settings.options.items()}
