"""Writes batches to an Iceberg table exactly once, without a jar: executors write files, the driver commits them.

A commit adds a snapshot and sets the table's property `relay.<application>` to the batch's number. The catalog rejects
it if the table has another snapshot than the one that was read. It is then repeated on the new snapshot, but only after
the property has been read again, so that a driver that was suspended does not commit a batch that another driver has
committed.

Source: Iceberg Table Spec, "Table Metadata", "Optimistic Concurrency"; PyIceberg 0.12, `commit_transaction`.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING
from uuid import uuid4

import pyarrow as pa
from pyiceberg.catalog import Catalog, load_catalog
from pyiceberg.exceptions import NamespaceAlreadyExistsError, NoSuchTableError
from pyiceberg.io.pyarrow import _dataframe_to_data_files
from pyiceberg.table import Table
from pyiceberg.transforms import IdentityTransform

from relay.config.handlers import SparkHandler
from relay.spark.writers import BatchId
from relay.spark.writers.arrow import (
    arrow_schema,
    gathered,
    refuse_partition_types,
    require_columns,
    require_partition_columns,
)
from relay.spark.writers.iceberg_commits import AlreadyCommitted, commit, has
from relay.spark.writers.iceberg_upkeep import CREATED_WITH, expire_snapshots, merge_files

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_FILES = "file binary"
_FILES_SCHEMA = pa.schema([("file", pa.binary())])


class IcebergWriter:
    """Appends to `table` of the catalog that `options` describe; the first batch creates it."""

    def __init__(self, name: str, settings: SparkHandler) -> None:
        """Raises ModuleNotFoundError without the extra `iceberg`."""
        self._key = f"handlers.{name}"
        self._name = str(settings.table)
        self._partition_by = list(settings.partition_by)
        self._options = settings.plain_options

    def check(self, session: SparkSession) -> None:
        """Load the table, if it exists. Raises PyIceberg's error for a catalog that cannot be used."""
        self._load(self._catalog())

    def write(self, frame: DataFrame, batch: BatchId) -> None:
        """Append the batch unless the table has it.

        Raises ConfigurationError if the table does not accept the frame's columns, and PyIceberg's errors.
        """
        schema = arrow_schema(frame)
        catalog = self._catalog()
        table = self._load(catalog)
        if table is not None and has(table, batch):
            return
        if table is None:
            table = self._create(catalog, schema)
        self._require_partition_types(_identities(table), schema)
        require_columns(f"{self._key}.table", _table_schema(table), schema)
        target = pickle.dumps((table.metadata, table.io, schema))
        rows = frame.mapInArrow(partial(write_files, target), _FILES).collect()
        files = [pickle.loads(row.file) for row in rows]  # noqa: S301
        with suppress(AlreadyCommitted):
            commit(table, batch, files)

    def upkeep(self, session: SparkSession) -> None:
        """Merge small files on the executors, and remove the snapshots that the table's properties do not keep.

        Raises PyIceberg's and Spark's errors.
        """
        table = self._load(self._catalog())
        if table is not None:
            merge_files(table, session)
            expire_snapshots(table)

    def _catalog(self) -> Catalog:
        return load_catalog("relay", **self._options)

    def _load(self, catalog: Catalog) -> Table | None:
        try:
            return catalog.load_table(self._name)
        except NoSuchTableError:
            return None

    def _require_partition_types(self, columns: list[str], schema: pa.Schema) -> None:
        # PyIceberg selects the rows of a partition by `=`: none for NaN, and those of 0.0 for -0.0 too.
        refuse_partition_types(self._key, columns, schema, pa.types.is_floating)

    def _create(self, catalog: Catalog, schema: pa.Schema) -> Table:
        require_partition_columns(self._key, self._partition_by, schema.names)
        self._require_partition_types(self._partition_by, schema)
        with suppress(NamespaceAlreadyExistsError):
            catalog.create_namespace(catalog.namespace_from(self._name))
        with (
            catalog.create_table_transaction(
                self._name, schema, properties=CREATED_WITH
            ) as creation,
            creation.update_spec() as spec,
        ):
            for column in self._partition_by:
                spec.add_field(column, IdentityTransform(), column)
        return catalog.load_table(self._name)


def _identities(table: Table) -> list[str]:
    """The columns whose values are partition values."""
    return [
        table.schema().find_column_name(field.source_id) or field.name
        for field in table.spec().fields
        if isinstance(field.transform, IdentityTransform)
    ]


def _table_schema(table: Table) -> pa.Schema:
    return table.schema().as_arrow()


# On the executors.


def write_files(target: bytes, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Write a task's rows to files whose names no other attempt uses; yields each as a pickled DataFile.

    `target` is a pickled tuple: the table's metadata, its FileIO and the Arrow schema of the rows.
    """
    metadata, io, schema = pickle.loads(target)  # noqa: S301
    for table in gathered(schema, batches):
        files = _dataframe_to_data_files(metadata, table, io, uuid4())
        pickled = [pickle.dumps(file) for file in files]
        yield pa.RecordBatch.from_arrays([pa.array(pickled, pa.binary())], schema=_FILES_SCHEMA)
