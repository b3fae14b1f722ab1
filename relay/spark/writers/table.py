"""Writes batches to a table of the session's catalog.

Source: Apache Spark documentation, "Generic Load/Save Functions", "INSERT OVERWRITE".
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from relay.config.handlers import SparkHandler
from relay.faults import ConfigurationError
from relay.spark.writers import BATCH_COLUMN, BatchId
from relay.spark.writers.columns import require_partition_columns

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


class TableWriter:
    """A table that is partitioned by the batch, last of all: a batch replaces partitions that only it has."""

    def __init__(self, name: str, settings: SparkHandler, table: str) -> None:
        self._name = name
        self._key = f"handlers.{name}.table"
        self._settings = settings
        self._table = table
        self._options = {name: value.get_secret_value() for name, value in settings.options.items()}

    def check(self, session: SparkSession) -> None:
        """Raise ConfigurationError where the table exists and is not partitioned by the batch."""
        if session.catalog.tableExists(self._table):
            self._require_partitions(session)

    def write(self, frame: DataFrame, batch: BatchId) -> None:
        """Replace the batch's own partitions. Raises ConfigurationError; MissingPartition if there is no table yet."""
        session = frame.sparkSession
        if not session.catalog.tableExists(self._table):
            key = f"handlers.{self._name}"
            by = [*self._settings.partition_by, BATCH_COLUMN]
            # Spark takes a name in any case.
            known = {name.lower() for name in frame.columns}
            unknown = [name for name in by if name.lower() not in known]
            require_partition_columns(key, unknown, frame.columns)
            empty = frame.limit(0).write
            empty.saveAsTable(self._table, self._settings.format, "ignore", by, **self._options)
        self._require_partitions(session)
        # Here, not where the session is made: on a Connect server, or with a `conf` of the user, the whole table would
        # go.
        session.conf.set("spark.sql.sources.partitionOverwriteMode", "dynamic")
        columns = session.table(self._table).columns
        missing = sorted(set(columns) ^ set(frame.columns))
        if missing:
            raise ConfigurationError(
                f"{self._key}: {self._table} and what is written differ in the columns {', '.join(missing)}: name "
                "another table, or change sql or transform"
            )
        if batch.tried:
            # The query, or another table of it, may have changed since: rows would be in other partitions now.
            self._empty(session, batch)
        ordered = frame.select(*columns).write.options(**self._options)
        ordered.insertInto(self._table, overwrite=True)

    def _empty(self, session: SparkSession, batch: BatchId) -> None:
        """Empty the batch's partitions, also of a table whose files the catalog does not remove."""
        by = [each.name for each in session.catalog.listColumns(self._table) if each.isPartition]
        table = session.table(self._table)
        texts = [table[name].cast("string").alias(name) for name in by]
        of_batch = table.where(table[BATCH_COLUMN] == batch.id)
        rest = ", ".join(
            f"cast(null as {field.dataType.simpleString()}) as {_quoted(field.name)}"
            for field in table.schema
            if field.name not in by
        )
        for row in of_batch.select(*texts).distinct().collect():
            spec = ", ".join(f"{_quoted(name)} = {_literal(row[name])}" for name in by)
            session.sql(
                f"insert overwrite table {self._table} partition ({spec}) select {rest} from range(0)"  # noqa: S608
            ).collect()

    def _require_partitions(self, session: SparkSession) -> None:
        columns = session.catalog.listColumns(self._table)
        if BATCH_COLUMN not in {each.name for each in columns if each.isPartition}:
            # What is overwritten in it would be more than a batch of relay's.
            raise ConfigurationError(
                f"{self._key}: {self._table} is not partitioned by {BATCH_COLUMN}, so relay did not create it, and "
                "writing to it would replace its rows: name another table, which relay creates, or append with a "
                "callable"
            )


def _quoted(name: str) -> str:
    return f"`{name.replace('`', '``')}`"


def _literal(text: str | None) -> str:
    if text is None:
        return "null"
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"
