"""Reads what a Spark sink has written, as a DataFrame, without a jar: executors read the files of Delta and Iceberg.

Source: deltalake, `DeltaTable.to_pyarrow_dataset`; PyIceberg, `DataScan.plan_files` and `ArrowScan`.
"""

from __future__ import annotations

import pickle
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from psycopg import sql

from relay.config.handlers import SparkHandler
from relay.faults import ConfigurationError, RelayError
from relay.spark import frames
from relay.spark.writers import writer
from relay.store.connections import Dsn, connect
from relay.store.session_settings import SessionKind

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

_FILES = ("parquet", "orc")
"""The formats of files that keep the types of what was written."""
_FETCHED = 10_000
"""The rows of a PostgreSQL table that a task fetches at once."""


def stored(
    session: SparkSession, name: str, handler: SparkHandler, columns: pa.Schema, tasks: int
) -> DataFrame:
    """What a sink has written: those of `columns`, of a batch's frame, that the destination has, with these types.

    Raises ConfigurationError as `require_readable` does and where nothing is there, and the errors of its library.
    """
    require_readable(name, handler)
    key = f"handlers.{name}"
    kind = handler.format.lower()
    if handler.jdbc is not None:
        return _postgres(session, f"{key}.jdbc.table", handler, columns, tasks)
    if kind == "delta" and handler.path is not None:
        return _delta(session, f"{key}.path", handler, columns, tasks)
    if kind == "iceberg":
        return _iceberg(session, key, handler, columns, tasks)
    if handler.table is not None:
        if not session.catalog.tableExists(handler.table):
            raise _nothing(f"{key}.table", handler.table)
        frame = session.table(handler.table)
    else:
        frame = _files(session, f"{key}.path", handler)
    kept = _spark_schema(_of(columns, [column.lower() for column in frame.columns]))
    # The values of partitions are texts.
    return frame.select(*(frame[each.name].cast(each.dataType).alias(each.name) for each in kept))


def _spark_schema(columns: pa.Schema) -> StructType:
    from pyspark.sql.pandas.types import from_arrow_schema

    return from_arrow_schema(columns, prefer_timestamp_ntz=True)


def _of(columns: pa.Schema, known: Collection[str]) -> pa.Schema:
    """Those of the columns that a destination has, by their names in lower case where Spark has made it."""
    import pyarrow as pa

    return pa.schema([each for each in columns if each.name in known or each.name.lower() in known])


def require_readable(name: str, handler: SparkHandler) -> None:
    """Raise ConfigurationError for a sink whose destination cannot be read, whatever is there."""
    key = f"handlers.{name}"
    kind = handler.format.lower()
    if handler.callable is not None:
        raise ConfigurationError(
            f"{key}.callable: relay does not know where the function writes, and cannot read it"
        )
    # Raises it where the library of the format is not installed.
    writer(name, handler)
    if handler.path is not None and kind != "delta" and kind not in _FILES:
        raise ConfigurationError(
            f"{key}.format: {kind} does not keep the types of its columns, so they cannot be compared: verify files of "
            f"{' or '.join(_FILES)}, or a table"
        )


def _nothing(key: str, where: str) -> ConfigurationError:
    return ConfigurationError(f"{key}: there is nothing at {where}: the sink has not written yet")


def _files(session: SparkSession, key: str, handler: SparkHandler) -> DataFrame:
    from pyspark.errors import AnalysisException

    assert handler.path is not None  # noqa: S101
    # Else a partition of the text 007 has the number 7.
    session.conf.set("spark.sql.sources.partitionColumnTypeInference.enabled", "false")
    try:
        reader = session.read.format(handler.format).options(**handler.plain_options)
        return reader.load(handler.path)
    except AnalysisException as error:
        if error.getCondition() not in ("PATH_NOT_FOUND", "UNABLE_TO_INFER_SCHEMA"):
            raise
        raise _nothing(key, handler.path) from None


def _mapped(session: SparkSession, reading: Any, columns: pa.Schema, tasks: int) -> DataFrame:
    """A DataFrame of `columns`; `reading(number)` yields the record batches of a task, on an executor."""
    numbers = session.range(0, tasks, 1, tasks)
    return numbers.mapInArrow(partial(_read, reading, columns), _spark_schema(columns))


def _read(
    reading: Any, columns: pa.Schema, numbers: Iterator[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    import pyarrow as pa

    for batch in numbers:
        for number in batch.column(0).to_pylist():
            for rows in reading(number):
                table = pa.Table.from_batches([rows]).select(columns.names).cast(columns)
                yield from table.to_batches()


@contextmanager
def _of_file(key: str, path: str) -> Iterator[None]:
    """Turn an error of a table's file into one line with the file's name: the folders may hold partition values."""
    import pyarrow as pa

    try:
        yield
    except (OSError, pa.ArrowException) as error:
        raise RelayError(
            f"{key}: the table has the file {PurePath(path).name}, which cannot be read: {type(error).__name__}: bring "
            "it back, or write the table again (docs/how-to/verify.md)"
        ) from None


# Delta


@dataclass(frozen=True)
class _DeltaFiles:
    """The files of a version of a Delta table, of which each task reads every n-th. `options` may hold secrets."""

    key: str
    path: str
    version: int
    options: Mapping[str, str]
    columns: tuple[str, ...]
    tasks: int

    def __repr__(self) -> str:
        return f"_DeltaFiles({self.path!r}, {self.version})"

    def __call__(self, number: int) -> Iterator[pa.RecordBatch]:
        import deltalake
        from deltalake.exceptions import DeltaProtocolError

        table = deltalake.DeltaTable(
            self.path, version=self.version, storage_options=dict(self.options)
        )
        try:
            dataset = table.to_pyarrow_dataset()
        except DeltaProtocolError as error:
            # It names the table's versions and features.
            raise RelayError(f"{self.key}: deltalake cannot read the table: {error}") from None
        fragments = sorted(dataset.get_fragments(), key=lambda each: each.path)
        for fragment in fragments[number :: self.tasks]:
            with _of_file(self.key, fragment.path):
                yield from fragment.to_batches(schema=dataset.schema, columns=list(self.columns))


def _delta(
    session: SparkSession, key: str, handler: SparkHandler, columns: pa.Schema, tasks: int
) -> DataFrame:
    import deltalake
    from deltalake.exceptions import TableNotFoundError

    from relay.spark.writers.delta_files import absolute_path

    path, options = absolute_path(str(handler.path)), handler.plain_options
    try:
        table = deltalake.DeltaTable(path, storage_options=options)
    except TableNotFoundError:
        raise _nothing(key, str(handler.path)) from None
    kept = _of(columns, {field.name for field in table.schema().fields})
    files = _DeltaFiles(key, path, table.version(), options, tuple(kept.names), tasks)
    return _mapped(session, files, kept, tasks)


# Iceberg


@dataclass(frozen=True)
class _IcebergFiles:
    """The files of a snapshot of an Iceberg table, for each task those that it reads; all is pickled."""

    key: str
    table: bytes
    parts: tuple[bytes, ...]

    def __call__(self, number: int) -> Iterator[pa.RecordBatch]:
        from pyiceberg.expressions import AlwaysTrue
        from pyiceberg.io.pyarrow import ArrowScan

        metadata, io, projected = pickle.loads(self.table)  # noqa: S301
        tasks = pickle.loads(self.parts[number])  # noqa: S301
        scan = ArrowScan(metadata, io, projected, AlwaysTrue())
        for task in tasks:
            with _of_file(self.key, task.file.file_path):
                yield from scan.to_record_batches([task])


def _iceberg(
    session: SparkSession, key: str, handler: SparkHandler, columns: pa.Schema, tasks: int
) -> DataFrame:
    from pyiceberg.exceptions import NoSuchTableError

    from relay.spark.writers.iceberg import catalog_of

    catalog = catalog_of(key, handler.plain_options)
    of_table = f"{key}.table"
    try:
        table = catalog.load_table(str(handler.table))
    except NoSuchTableError:
        raise _nothing(of_table, str(handler.table)) from None
    kept = _of(columns, set(table.schema().column_names))
    scan = table.scan(selected_fields=tuple(kept.names))
    found = list(scan.plan_files())
    parts = tuple(pickle.dumps(found[number::tasks]) for number in range(tasks))
    described = pickle.dumps((table.metadata, table.io, scan.projection()))
    return _mapped(session, _IcebergFiles(of_table, described, parts), kept, tasks)


# PostgreSQL


@dataclass(frozen=True)
class _PostgresRows:
    """The rows of a PostgreSQL table, of which each task reads those of one remainder of the id's hash."""

    dsn: Dsn
    table: str
    columns: tuple[str, ...]
    tasks: int

    def __repr__(self) -> str:
        return f"_PostgresRows({self.table!r})"

    def __call__(self, number: int) -> Iterator[pa.RecordBatch]:
        import pyarrow as pa

        schema = frames.arrow_schema(self.columns)
        with connect(self.dsn, SessionKind.HANDLER) as conn, conn.transaction():
            cursor = conn.cursor("relay_verify")
            cursor.itersize = _FETCHED
            cursor.execute(
                sql.SQL(
                    "select {values} from {table} where mod(abs(hashtext({id}::text)::bigint), {tasks}) = {number}"
                ).format(
                    values=sql.SQL(", ").join(map(_expression, self.columns)),
                    # As to_regclass gave it: quoted, with its schema.
                    table=sql.SQL(self.table),
                    id=sql.Identifier("id"),
                    tasks=sql.Literal(self.tasks),
                    number=sql.Literal(number),
                )
            )
            while rows := cursor.fetchmany(_FETCHED):
                arrays = [
                    pa.array(values, kind)
                    for values, kind in zip(zip(*rows, strict=True), schema.types, strict=True)
                ]
                yield pa.RecordBatch.from_arrays(arrays, schema=schema)


def _expression(column: str) -> sql.Composable:
    """A column of a frame as numbers and texts.

    Times are microseconds since 1970 and dates days since 1970; infinite ones, which relay never writes, are null.
    """
    name = sql.Identifier(column)
    kind = frames.spark_type(column)
    if kind == "timestamp":
        return sql.SQL(
            "case when isfinite({0}) then (extract(epoch from {0}) * 1000000)::bigint end"
        ).format(name)
    if kind == "date":
        return sql.SQL("case when isfinite({0}) then {0} - date '1970-01-01' end").format(
            sql.SQL("{}::date").format(name)
        )
    return sql.SQL("{}::{}").format(name, sql.SQL("text" if kind == "string" else kind))


def _postgres(
    session: SparkSession, key: str, handler: SparkHandler, columns: pa.Schema, tasks: int
) -> DataFrame:
    from relay.store.session_settings import users_path

    assert handler.jdbc is not None  # noqa: S101
    access = handler.jdbc.access
    with connect(access, SessionKind.HANDLER) as conn:
        with conn.transaction(), users_path(conn):
            (found,) = conn.execute(
                "select pg_catalog.to_regclass(%s)::pg_catalog.oid", (handler.jdbc.table,)
            )
        row = conn.execute(
            """
            select format('%%I.%%I', nspname, relname),
                   array(select attname::text from pg_attribute as a
                          where a.attrelid = c.oid and a.attnum > 0 and not a.attisdropped)
              from pg_class as c join pg_namespace as n on n.oid = relnamespace where c.oid = %s
            """,
            found,
        ).fetchone()
    if row is None:
        raise _nothing(key, handler.jdbc.table)
    table, known = row
    kept = _of(columns, known)
    return _mapped(session, _PostgresRows(access, table, tuple(kept.names), tasks), kept, tasks)
