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
    """Writes to a table whose last partition column is `relay_batch`, so that a batch replaces only its partitions."""

    def __init__(self, name: str, settings: SparkHandler, table: str) -> None:
        self._name = name
        self._key = f"handlers.{name}.table"
        self._settings = settings
        self._table = table
        self._options = {name: value.get_secret_value() for name, value in settings.options.items()}

    def check(self, session: SparkSession) -> None:
        """Raise ConfigurationError where the table exists and is not partitioned by `relay_batch`."""
        if session.catalog.tableExists(self._table):
            self._require_partitions(session)

    def write(self, frame: DataFrame, batch: BatchId) -> None:
        """Replace the batch's own partitions, in a table that the first batch creates.

        Raises ConfigurationError, and MissingPartition if the table does not exist yet.
        """
        session = frame.sparkSession
        if not session.catalog.tableExists(self._table):
            key = f"handlers.{self._name}"
            by = [*self._settings.partition_by, BATCH_COLUMN]
            # Spark's column names are case-insensitive.
            known = {name.lower() for name in frame.columns}
            unknown = [name for name in by if name.lower() not in known]
            require_partition_columns(key, unknown, frame.columns)
            empty = frame.limit(0).write
            empty.saveAsTable(self._table, self._settings.format, "ignore", by, **self._options)
        self._require_partitions(session)
        # Set for each batch: where a Connect server or the user's `conf` has `static`, the insert would replace the
        # whole table.
        session.conf.set("spark.sql.sources.partitionOverwriteMode", "dynamic")
        columns = session.table(self._table).columns
        missing = sorted(set(columns) ^ set(frame.columns))
        if missing:
            raise ConfigurationError(
                f"{self._key}: {self._table} and the batch differ in the columns {', '.join(missing)}: name another "
                "table, or change sql or transform"
            )
        if batch.tried:
            # If the query, or a table in it, has changed since, the earlier rows may be in other partitions.
            self._empty(session, batch)
        ordered = frame.select(*columns).write.options(**self._options)
        ordered.insertInto(self._table, overwrite=True)

    def _empty(self, session: SparkSession, batch: BatchId) -> None:
        """Empty the batch's partitions. An overwrite also works where the catalog does not remove a table's files."""
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
            # An overwrite would replace rows that are not the batch's.
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
