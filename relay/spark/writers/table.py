"""Writes batches to a table of the session's catalog.

Source: Apache Spark documentation, "Generic Load/Save Functions", "INSERT OVERWRITE", "ALTER TABLE".
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from relay.config.handlers import SparkHandler
from relay.faults import ConfigurationError
from relay.spark.writers import BATCH_COLUMN, BatchId, Facts, lost
from relay.spark.writers.arrow import require_partition_columns
from relay.spark.writers.files import StagedFiles, naming_long_partitions, published
from relay.spark.writers.schema_changes import quoted
from relay.store.positions.spark_batches import LastBatch

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_FILES = ("parquet", "orc", "json", "csv", "avro", "text")
"""The formats of tables whose partitions are folders of files."""
_NULL = "__HIVE_DEFAULT_PARTITION__"
_DETAILS = "# Detailed Table Information"


class _Description(NamedTuple):
    """What the catalog says of a table; `lists_partitions`: readers see only partitions that the catalog has."""

    format: str
    location: str
    lists_partitions: bool


class TableWriter:
    """Writes to a table whose last partition column is `relay_batch`, so that each batch has partitions of its own."""

    kind = "table"

    def __init__(self, name: str, settings: SparkHandler, table: str) -> None:
        self._name = name
        self._key = f"handlers.{name}.table"
        self._settings = settings
        self._table = table
        self._options = settings.plain_options

    def check(self, session: SparkSession) -> None:
        """Raise ConfigurationError where the table exists and is not partitioned by `relay_batch`."""
        if session.catalog.tableExists(self._table):
            self._require_partitions(session)

    def write(self, frame: DataFrame, batch: BatchId) -> list[str] | None:
        """Stage the batch's files, or replace the batch's own rows where the table is one of a table format.

        The first batch creates the table. Raises ConfigurationError, and MissingPartition if the table does not exist
        yet.
        """
        session = frame.sparkSession
        if not session.catalog.tableExists(self._table):
            if not batch.is_first:
                last = LastBatch(batch.application, batch.number)
                raise lost(self._name, self._absence(), last)
            key = f"handlers.{self._name}"
            by = [*self._settings.partition_by, BATCH_COLUMN]
            # Spark's column names are case-insensitive.
            known = {name.lower() for name in frame.columns}
            unknown = [name for name in by if name.lower() not in known]
            require_partition_columns(key, unknown, frame.columns)
            empty = frame.limit(0).write
            empty.saveAsTable(self._table, self._settings.format, "ignore", by, **self._options)
        self._require_partitions(session)
        columns = session.table(self._table).columns
        missing = sorted(set(columns) ^ set(frame.columns))
        if missing:
            raise ConfigurationError(
                f"{self._key}: {self._table} and the batch differ in the columns {', '.join(missing)}: name another "
                "table, or change sql or transform"
            )
        ordered = frame.select(*columns)
        described = self._described(session)
        if described.format not in _FILES:
            self._replace(ordered, batch, described)
            return None
        staging = StagedFiles.of(session, described.location)
        by = self._partition_columns(session)
        with naming_long_partitions(f"handlers.{self._name}", ordered, by):
            if staging is not None:
                stored = self._as_stored(session, ordered)
                return staging.write(stored, batch.id, described.format, by, self._options)
            # Set for each batch: where a Connect server has `static`, the insert would replace the whole table.
            session.conf.set("spark.sql.sources.partitionOverwriteMode", "dynamic")
            ordered.write.options(**self._options).insertInto(self._table, overwrite=True)
        return None

    def publish(self, session: SparkSession, batch: BatchId, files: Sequence[str]) -> None:
        """Move the batch's files to their partitions, and add these to the catalog.

        Raises RelayError, errors of the file system, and Spark's errors.
        """
        described = self._described(session)
        staging = StagedFiles.of(session, described.location)
        assert staging is not None  # noqa: S101
        staging.publish(batch.id, files)
        if described.lists_partitions and files:
            specs = dict.fromkeys(_partition(published(name)) for name in files)
            session.sql(f"alter table {self._table} add if not exists {' '.join(specs)}").collect()
        session.catalog.refreshTable(self._table)

    def left(
        self, session: SparkSession | None, batch: LastBatch, files: Sequence[str] | None
    ) -> Facts | None:
        """The batch's id; None for a batch without rows."""
        if session is None or not batch.id:
            return {}
        return {"batch": batch.id} if self._has_rows(session, batch.id) else None

    def lacks(self, session: SparkSession | None, last: LastBatch, facts: Facts) -> str | None:
        """Why the table has no row of the batch any more."""
        if session is None:
            return None
        if not session.catalog.tableExists(self._table):
            return self._absence()
        has = self._has_rows(session, facts["batch"])
        return None if has else f"the table {self._table} has no row of it"

    def _absence(self) -> str:
        return f"there is no table {self._table}"

    def _has_rows(self, session: SparkSession, batch: str) -> bool:
        from pyspark.sql.functions import col

        # What others have done to the table's files and partitions is not seen without it.
        session.catalog.refreshTable(self._table)
        rows = session.table(self._table)
        if BATCH_COLUMN not in rows.columns:
            return False
        return bool(rows.where(col(BATCH_COLUMN) == batch).select(BATCH_COLUMN).head(1))

    def _replace(self, frame: DataFrame, batch: BatchId, described: _Description) -> None:
        """Replace the batch's rows in one commit of the table format, which another writer's replacement repeats."""
        from pyspark.sql.functions import col

        if described.format == "hive":
            raise ConfigurationError(
                f"{self._key}: {self._table} is a table of Hive's own format, in which a batch cannot be replaced at "
                "once: name another table, which relay creates with format: parquet or orc"
            )
        writer = frame.writeTo(self._table).options(**self._options)
        writer.overwrite(col(BATCH_COLUMN) == batch.id)

    def _as_stored(self, session: SparkSession, frame: DataFrame) -> DataFrame:
        """The frame with the table's types."""
        schema = session.table(self._table).schema
        if [field.dataType for field in schema] == [field.dataType for field in frame.schema]:
            return frame
        # Without rows, an insert only checks that Spark may store these types in the table.
        frame.limit(0).write.insertInto(self._table)
        return frame.select(
            *(frame[field.name].cast(field.dataType).alias(field.name) for field in schema)
        )

    def _described(self, session: SparkSession) -> _Description:
        rows = session.sql(f"describe table extended {self._table}").collect()
        names = [row.col_name for row in rows]
        details = {
            row.col_name: row.data_type
            for row in rows[names.index(_DETAILS) if _DETAILS in names else 0 :]
        }
        return _Description(
            str(details.get("Provider", "")).lower(),
            str(details.get("Location", "")),
            "Partition Provider" in details,
        )

    def _partition_columns(self, session: SparkSession) -> list[str]:
        return [each.name for each in session.catalog.listColumns(self._table) if each.isPartition]

    def _require_partitions(self, session: SparkSession) -> None:
        if BATCH_COLUMN not in self._partition_columns(session):
            # An overwrite would replace rows that are not the batch's.
            raise ConfigurationError(
                f"{self._key}: {self._table} is not partitioned by {BATCH_COLUMN}, so relay did not create it, and "
                "writing to it would replace its rows: name another table, which relay creates, or append with a "
                "callable"
            )


def _partition(file: str) -> str:
    """The clause `partition (…)` of the folders of a file."""
    pairs = [folder.partition("=") for folder in file.split("/")[:-1]]
    values = ", ".join(f"{quoted(_plain(name))} = {_literal(value)}" for name, _, value in pairs)
    return f"partition ({values})"


def _plain(text: str) -> str:
    """A folder's text without the escapes of Spark's `ExternalCatalogUtils.escapePathName`."""
    return re.sub(r"%([0-9A-Fa-f]{2})", lambda found: chr(int(found[1], 16)), text)


def _literal(value: str) -> str:
    if value == _NULL:
        return "null"
    escaped = _plain(value).replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"
