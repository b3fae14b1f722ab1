"""Writes batches to an Iceberg table exactly once, without a jar: executors write files, the driver commits them.

A commit adds a snapshot and sets the table's property `relay.<application>` to the batch's number. The catalog rejects
it if the table has another snapshot than the one that was read. It is then repeated on the new snapshot, but only after
the property has been read again, so that a driver that was suspended does not commit a batch that another driver has
committed.

Source: Iceberg Table Spec, "Table Metadata", "Optimistic Concurrency"; PyIceberg 0.12, `commit_transaction`.
"""

from __future__ import annotations

import pickle
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
from pyiceberg.catalog import Catalog, load_catalog
from pyiceberg.exceptions import (
    CommitFailedException,
    NamespaceAlreadyExistsError,
    NoSuchTableError,
    NotInstalledError,
    ValidationException,
)
from pyiceberg.expressions import AlwaysTrue
from pyiceberg.io.pyarrow import ArrowScan, _pyarrow_to_schema_without_ids
from pyiceberg.manifest import DataFile
from pyiceberg.table import Table, TableProperties
from pyiceberg.transforms import IdentityTransform

from relay.config.handlers import SparkHandler
from relay.faults import ConfigurationError, first_line
from relay.spark.writers import BatchId, Facts, lost
from relay.spark.writers.arrow import (
    arrow_schema,
    gathered,
    refuse_partition_types,
    require_distinct_columns,
    require_known_types,
    require_partition_columns,
)
from relay.spark.writers.iceberg_commits import (
    AlreadyCommitted,
    commit,
    facts_of,
    has,
    removal,
    upsert,
)
from relay.spark.writers.iceberg_files import data_files
from relay.spark.writers.iceberg_upkeep import CREATED_WITH, expire_snapshots, merge_files
from relay.spark.writers.schema_changes import (
    COMMENT,
    Change,
    accept,
    comment_of,
    plan,
    quoted,
    spark_statement,
    written,
)
from relay.spark.writers.upserts import SNAPSHOTS, Newest, collected, compared, marked, newest
from relay.store.positions.spark_batches import LastBatch

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_NEWEST_VERSION = 2
"""The newest format version of tables to which PyIceberg 0.12 commits."""
_ATTEMPTS = 5
"""How often a batch is merged while others commit to the table."""
_MOST_TASKS = 64
"""The most tasks that read the files of a table for a batch."""
_REST = "stale binary, old binary, new binary"
_REST_SCHEMA = pa.schema([("stale", pa.binary()), ("old", pa.binary()), ("new", pa.binary())])
_DOC = b"doc"
"""The key of a column's comment in the metadata of a field, for PyIceberg."""
_FILES = "file binary"
_FILES_SCHEMA = pa.schema([("file", pa.binary())])


class IcebergWriter:
    """Appends to `table` of the catalog that `options` describe; the first batch creates it."""

    kind = "iceberg"

    def __init__(self, name: str, settings: SparkHandler) -> None:
        """Raises ModuleNotFoundError without the extra `iceberg`."""
        self._sink = name
        self._key = f"handlers.{name}"
        self._name = str(settings.table)
        self._partition_by = list(settings.partition_by)
        self._options = settings.plain_options
        self._evolves = settings.evolves

    def check(self, session: SparkSession) -> None:
        """Raise ConfigurationError for a table or a catalog that cannot be used, and PyIceberg's errors."""
        self._load(self._catalog())

    def write(self, frame: DataFrame, batch: BatchId) -> None:
        """Append the batch unless the table has it.

        Raises ConfigurationError if the table does not accept the frame's columns, and PyIceberg's errors.
        """
        schema = arrow_schema(frame)
        catalog = self._catalog()
        table = self._known(catalog, batch)
        if table is not None and has(table, batch):
            return
        table, types = self._accepting(catalog, table, schema)
        if has(table, batch):
            # Another driver has committed it before the table was changed.
            return
        target = pickle.dumps((table.metadata, table.io, types))
        rows = frame.mapInArrow(partial(write_files, target), _FILES).collect()
        files = [pickle.loads(row.file) for row in rows]  # noqa: S301
        with suppress(AlreadyCommitted):
            commit(table, batch, files)

    def left(
        self, session: SparkSession | None, batch: LastBatch, files: Sequence[str] | None
    ) -> Facts:
        """The table's id and the batch's snapshot."""
        table = self._load(self._catalog())
        if table is None or not has(table, batch):
            raise lost(self._sink, self._absence(table), batch)
        return facts_of(table, batch)

    def lacks(self, session: SparkSession | None, last: LastBatch, facts: Facts) -> str | None:
        """Why the table is another one, or its present snapshot was not made of the batch's."""
        table = self._load(self._catalog())
        if table is None or not has(table, last):
            return self._absence(table)
        return removal(table, facts)

    def _absence(self, table: Table | None) -> str:
        if table is None:
            return f"there is no table {self._name}"
        return f"the table {self._name}, {table.metadata.table_uuid}, does not have it"

    def _known(self, catalog: Catalog, batch: BatchId) -> Table | None:
        """The table; None before the first batch of the sink. Raises LostDestination for one that is gone."""
        table = self._load(catalog)
        if table is None and not batch.is_first:
            raise lost(self._sink, self._absence(None), LastBatch(batch.application, batch.number))
        return table

    def upkeep(self, session: SparkSession) -> None:
        """Merge small files on the executors, and remove the snapshots that the table's properties do not keep.

        Raises ConfigurationError as `write` does, PyIceberg's and Spark's errors.
        """
        table = self._load(self._catalog())
        if table is not None:
            merge_files(table, session)
            expire_snapshots(table)

    def _catalog(self) -> Catalog:
        return catalog_of(self._key, self._options)

    def _load(self, catalog: Catalog) -> Table | None:
        try:
            table = catalog.load_table(self._name)
        except NoSuchTableError:
            return None
        self._require_writable(table)
        return table

    def _require_writable(self, table: Table) -> None:
        """Raise ConfigurationError for a table that PyIceberg refuses late: once files are written, or on executors."""
        unfit = []
        if table.metadata.format_version > _NEWEST_VERSION:
            unfit.append(f"format version {table.metadata.format_version}")
        kind = table.metadata.properties.get(
            TableProperties.WRITE_FILE_FORMAT, TableProperties.WRITE_FILE_FORMAT_DEFAULT
        )
        if kind.lower() != TableProperties.WRITE_FILE_FORMAT_DEFAULT:
            unfit.append(f"{TableProperties.WRITE_FILE_FORMAT} {kind}")
        for field in table.spec().fields:
            try:
                field.transform.pyarrow_transform(table.schema().find_type(field.source_id))
            except NotInstalledError:
                raise ConfigurationError(
                    f"{self._key}.table: the table is partitioned by {field.transform} ({field.name}): install "
                    "pyiceberg-core here and on the executors"
                ) from None
            except NotImplementedError:
                unfit.append(f"the partition field {field.name} with {field.transform}")
        if unfit:
            raise ConfigurationError(
                f"{self._key}.table: the table has {', '.join(unfit)}, which relay does not support: write to a table "
                "without it"
            )

    def _accepting(
        self, catalog: Catalog, table: Table | None, schema: pa.Schema
    ) -> tuple[Table, pa.Schema]:
        """The table, which is created if there is none, and may be changed; and the types to write a batch with.

        Raises ConfigurationError unless it accepts the columns, and PyIceberg's errors.
        """
        if table is None:
            table = self._create(catalog, schema)
        self._require_partition_types(_identities(table), schema)
        changing = _IcebergColumns(f"{self._key}.table", table)
        accept(self._sink, f"{self._key}.table", changing, schema, self._evolves)
        return changing.table, written(changing.schema, schema)

    def _require_partition_types(self, columns: list[str], schema: pa.Schema) -> None:
        # PyIceberg selects the rows of a partition by `=`: none for NaN, and those of 0.0 for -0.0 too.
        refuse_partition_types(self._key, columns, schema, pa.types.is_floating)

    def _create(self, catalog: Catalog, schema: pa.Schema) -> Table:
        require_distinct_columns(f"{self._key}.table", schema.names)
        require_known_types(f"{self._key}.table", schema, "Iceberg", _require_columns_back)
        require_partition_columns(self._key, self._partition_by, schema.names)
        self._require_partition_types(self._partition_by, schema)
        with suppress(NamespaceAlreadyExistsError):
            catalog.create_namespace(catalog.namespace_from(self._name))
        try:
            with (
                catalog.create_table_transaction(
                    self._name, _with_docs(schema), properties=CREATED_WITH
                ) as creation,
                creation.update_spec() as spec,
            ):
                for column in self._partition_by:
                    spec.add_field(column, IdentityTransform(), column)
        except ValueError as error:
            # A catalog without `warehouse`, for example.
            raise ConfigurationError(
                f"{self._key}.options: {self._name} cannot be created: {first_line(error)}"
            ) from None
        return catalog.load_table(self._name)


class IcebergUpserts(IcebergWriter):
    """Keeps the newest event of each key in `table`: executors write the files again in which rows are replaced."""

    def __init__(self, name: str, settings: SparkHandler) -> None:
        """Raises ModuleNotFoundError without the extra `iceberg`."""
        super().__init__(name, settings)
        self._by = list(settings.key)
        self._deletes = settings.deletes

    def write(self, frame: DataFrame, batch: BatchId) -> None:
        """Merge the batch unless the table has it. Raises as `IcebergWriter.write` does."""
        table = self._known(self._catalog(), batch)
        if table is not None and has(table, batch):
            return
        rows = collected(marked(self._key, frame, self._by, self._deletes))
        self.merge(rows, batch, frame.sparkSession)

    def merge(self, rows: pa.Table, batch: BatchId, session: SparkSession) -> None:
        """Merge the rows of a batch unless the table has it. Raises ConfigurationError and PyIceberg's errors."""
        events = newest(rows, self._by, batch)
        schema = events.rows.schema
        for attempt in range(1, _ATTEMPTS + 1):
            catalog = self._catalog()
            table = self._known(catalog, batch)
            if table is not None and has(table, batch):
                return
            try:
                table, types = self._accepting(catalog, table, schema)
                if has(table, batch):
                    return
                self._merge(table, events, types, batch, session)
            except AlreadyCommitted:
                return
            except (CommitFailedException, ValidationException, FileNotFoundError):
                # Another program has committed to the table since it was read.
                if attempt == _ATTEMPTS:
                    raise
            else:
                return

    def _merge(
        self,
        table: Table,
        events: Newest,
        types: pa.Schema,
        batch: BatchId,
        session: SparkSession,
    ) -> None:
        tasks = list(table.scan().plan_files())
        old: list[DataFile] = []
        new: list[DataFile] = []
        stale = [np.empty(0, np.int64)]
        if tasks:
            count = min(len(tasks), _MOST_TASKS)
            parts = tuple(pickle.dumps(tasks[number::count]) for number in range(count))
            described = pickle.dumps(
                (table.metadata, table.io, self._by, replace(events, rows=events.rows.slice(0, 0)))
            )
            numbers = session.range(0, count, 1, count)
            found = numbers.mapInArrow(partial(write_rest, described, parts), _REST).collect()
            for row in found:
                stale.append(np.frombuffer(row.stale, np.int64))
                if row.old is not None:
                    old.append(pickle.loads(row.old))  # noqa: S301
                    new += pickle.loads(row.new)  # noqa: S301
        rows = events.without(np.concatenate(stale)).cast(types)
        if rows.num_rows:
            new += data_files(table.metadata, rows, table.io)
        upsert(table, batch, old, new)


def catalog_of(key: str, options: Mapping[str, str]) -> Catalog:
    """The catalog of a sink's options. Raises ConfigurationError, which names `key`, and PyIceberg's errors."""
    try:
        return load_catalog("relay", **options)
    except NotInstalledError as error:
        raise ConfigurationError(f"{key}.options: {first_line(error)}") from None
    except ValueError:
        # Its text may quote the options, which hold secrets.
        raise ConfigurationError(
            f"{key}.options: PyIceberg cannot load the catalog: give its type and uri, such as "
            '{type: rest, uri: "http://catalog:8181"}'
        ) from None


def _identities(table: Table) -> list[str]:
    """The columns whose values are partition values."""
    return [
        table.schema().find_column_name(field.source_id) or field.name
        for field in table.spec().fields
        if isinstance(field.transform, IdentityTransform)
    ]


class _IcebergColumns:
    """The columns of a table; `table` is the one that was read last. Those that partition it keep their types."""

    def __init__(self, key: str, table: Table) -> None:
        self._key = key
        self.table = table

    @property
    def schema(self) -> pa.Schema:
        return _with_comments(self.table.schema().as_arrow())

    @property
    def rigid(self) -> Collection[str]:
        schema = self.table.schema()
        ids = [field.source_id for field in self.table.spec().fields]
        return {name for name in map(schema.find_column_name, ids) if name is not None}

    def statement(self, change: Change) -> str:
        return spark_statement(".".join(map(quoted, self.table.name())), change)

    def change(self, changes: Sequence[Change]) -> None:
        """Make all changes in one commit, which the catalog refuses where the table has another schema meanwhile."""
        added = pa.schema([each.column for each in changes if each.kind == "add"])
        require_known_types(self._key, added, "Iceberg", _pyarrow_to_schema_without_ids)
        with self.table.update_schema() as update:
            for each in changes:
                path, text = (each.column.name,), comment_of(each.column)
                if each.kind == "comment":
                    update.update_column(path, doc=text)
                    continue
                (field,) = _pyarrow_to_schema_without_ids(pa.schema([each.column])).fields
                if each.kind == "add":
                    update.add_column(path, field.field_type, doc=text)
                else:
                    update.update_column(path, field.field_type)
        self.table.refresh()


def _with_comments(schema: pa.Schema) -> pa.Schema:
    """The columns with their comments as Arrow and Delta keep them."""
    return pa.schema(
        [
            each.with_metadata({COMMENT: text} if (text := (each.metadata or {}).get(_DOC)) else {})
            for each in schema
        ]
    )


def _with_docs(schema: pa.Schema) -> pa.Schema:
    """The columns with their comments as PyIceberg keeps them."""
    return pa.schema(
        [each.with_metadata({_DOC: text} if (text := comment_of(each)) else {}) for each in schema]
    )


def _require_columns_back(frame: pa.Schema) -> None:
    """Raise an error for a frame that a table made for it would refuse."""
    made = _pyarrow_to_schema_without_ids(_with_docs(frame)).as_arrow()
    if plan("", _with_comments(made), frame):
        raise ValueError


# On the executors.


def write_files(target: bytes, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Write a task's rows to files whose names no other attempt uses; yields each as a pickled DataFile.

    `target` is a pickled tuple: the table's metadata, its FileIO and the Arrow schema of the rows.
    """
    metadata, io, schema = pickle.loads(target)  # noqa: S301
    for table in gathered(schema, batches):
        files = data_files(metadata, table, io)
        pickled = [pickle.dumps(file) for file in files]
        yield pa.RecordBatch.from_arrays([pa.array(pickled, pa.binary())], schema=_FILES_SCHEMA)


def write_rest(
    described: bytes, parts: Sequence[bytes], numbers: Iterator[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """Find the rows of some files that a batch replaces, and write the other rows of such a file to a new one.

    Yields for each file that has a key of the batch: the indices of events that are not newer, as 64-bit integers, and
    pickled the file and the new ones, null where no row is replaced. `described` is a pickled tuple: the table's
    metadata, its FileIO, the columns of the key, and the events.
    """
    metadata, io, key, events = pickle.loads(described)  # noqa: S301
    compares = metadata.schema().select(*key, "c_offset", SNAPSHOTS)
    for batch in numbers:
        for number in batch.column(0).to_pylist():
            for task in pickle.loads(parts[number]):  # noqa: S301
                current = ArrowScan(metadata, io, compares, AlwaysTrue()).to_table([task])
                superseded, stale = compared(current, key, events)
                row: dict[str, bytes | None] = {"stale": stale.tobytes(), "old": None, "new": None}
                if superseded.any():
                    rows = ArrowScan(metadata, io, metadata.schema(), AlwaysTrue()).to_table([task])
                    rest = rows.filter(pa.array(~superseded))
                    files = list(data_files(metadata, rest, io)) if rest.num_rows else []
                    row |= {"old": pickle.dumps(task.file), "new": pickle.dumps(files)}
                if superseded.any() or stale.size:
                    yield pa.RecordBatch.from_pylist([row], schema=_REST_SCHEMA)
