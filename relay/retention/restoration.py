"""Restores archived events into the outbox, as a partition of their own.

The archive, the files that a Spark sink has written, is read without Spark.

Their c_xid is null, as in rows older than relay: a reader that begins at the beginning reads them with the rest of the
table, in order; every other reader counts them as read.

Source: PostgreSQL documentation, "Table Partitioning".
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

import psycopg
from psycopg import sql

from relay.config.handlers import SparkHandler
from relay.config.settings import Settings
from relay.faults import ConfigurationError, first_line
from relay.model import headers
from relay.model.events import FIELDS, INSERTED_BY, SQL_TYPES
from relay.retention.partitions import RESTORED, Partition, partitions, retained, with_short_lock
from relay.runtime.reporting import ProgressReport, silent
from relay.source.outbox.columns import columns as table_columns
from relay.store.connections import Connection

if TYPE_CHECKING:
    import pyarrow as pa

_FORMATS = ("parquet", "orc", "delta")
"""The formats that can be read without Spark."""
_HADOOPS_S3 = re.compile("^s3[an]://")
_WORD = re.compile(r"\w+")
_TIME = "c_ts"
_COPYING = "copying archived events"
_REPORT_EVERY = 500
"""The number of rows between two reports of progress."""


@dataclass(frozen=True, slots=True)
class Restored:
    """The partition of the restored events, and how many there are."""

    partition: str
    events: int


def restore(
    settings: Settings,
    source: Connection,
    lower: datetime,
    upper: datetime,
    report: ProgressReport = silent,
) -> Restored:
    """Restore the events with lower <= event_ts < upper that the table no longer has.

    The remains of a killed run are removed first. Raises ConfigurationError, OSError, psycopg.Error.
    """
    table = settings.source.table
    _archive(settings)
    given = retained(source, table)
    if given is None or given.every is None:
        raise ConfigurationError(
            f"source.table: {table} has no partitions that relay manages: run `relay partition` first"
        )
    _require_free(partitions(source, table), lower, upper)
    schema, parent = settings.source.table_name
    root = sql.Identifier(schema, parent)
    row = source.execute(
        "select relay.partition_name(%s::regclass, %s, %s)",
        (root.as_string(source), lower, given.every),
    ).fetchone()
    assert row is not None  # noqa: S101
    name = sql.Identifier(schema, row[0])
    # Unlogged while it is filled, so that no publication publishes its rows.
    source.execute(sql.SQL("drop table if exists {}").format(name))
    source.execute(
        sql.SQL(
            "create unlogged table {} (like {} including defaults including generated including constraints "
            "including storage including compression including comments)"
        ).format(name, root)
    )
    events = _fill(settings, source, name, root, lower, upper, report)
    report("attaching the partition")
    source.execute(sql.SQL("alter table {} set logged").format(name))
    bounds = sql.SQL("({time} >= {lower} and {time} < {upper})").format(
        time=sql.Identifier(_TIME), lower=sql.Literal(lower), upper=sql.Literal(upper)
    )
    # With this constraint, ATTACH PARTITION scans no row.
    source.execute(
        sql.SQL("alter table {} add constraint relay_range check {}").format(name, bounds)
    )
    _copy_owner(source, name, root)
    try:
        with_short_lock(source, lambda: _attach(source, name, root, lower, upper))
    except psycopg.errors.CheckViolation:
        source.execute(sql.SQL("drop table {}").format(name))
        raise ConfigurationError(
            f"--from: the default partition of {table} has events of this range: restore a range before or after them"
        ) from None
    return Restored(f"{schema}.{row[0]}", events)


def unfit(settings: Settings, columns: Collection[str] | None = None) -> str | None:
    """Return why `restore` could not use what the archive's sink writes; None if nothing speaks against it.

    `columns` are those that the sink writes. Without them, only a column counts that its query does not name.
    """
    name = settings.retention.archive
    if name is None:
        return None
    try:
        _, sink = _archive(settings)
    except ConfigurationError as error:
        return str(error)
    if columns is None:
        query = (sink.sql or "*").lower()
        columns = _WORD.findall(query) if "*" not in query else (*FIELDS, headers.FIELD)
    missing = [each for each in (*FIELDS, *_extra(settings)) if each not in columns]
    if not missing:
        return None
    return (
        f"handlers.{name}: its sql or transform leaves out {', '.join(missing)}, and relay could not restore events "
        "from such files: keep these columns, or name another sink"
    )


def _extra(settings: Settings) -> list[str]:
    """Return the column of an archive for extra columns of the outbox, where it has any."""
    return [headers.FIELD] if settings.source.headers else []


def _require_free(existing: Iterable[Partition], lower: datetime, upper: datetime) -> None:
    """Raise ConfigurationError if a partition overlaps the range."""
    for each in existing:
        if each.upper is None:
            continue
        if (each.lower is None or each.lower < upper) and each.upper > lower:
            raise ConfigurationError(
                f"--from: {each.name} has the range from {each.lower or 'the beginning'} to {each.upper}: restore a "
                "range before or after it"
            )


def _attach(
    source: Connection, name: sql.Identifier, root: sql.Identifier, lower: datetime, upper: datetime
) -> None:
    source.execute(
        sql.SQL("alter table {} attach partition {} for values from ({}) to ({})").format(
            root, name, sql.Literal(lower), sql.Literal(upper)
        )
    )
    source.execute(sql.SQL("alter table {} drop constraint relay_range").format(name))
    row = source.execute("select now()").fetchone()
    assert row is not None  # noqa: S101
    source.execute(
        sql.SQL("comment on table {} is {}").format(
            name, sql.Literal(RESTORED + row[0].isoformat())
        )
    )


def _copy_owner(source: Connection, name: sql.Identifier, root: sql.Identifier) -> None:
    """Give the partition the owner of the outbox."""
    row = source.execute(
        "select pg_get_userbyid(relowner) from pg_class where oid = %s::regclass",
        (root.as_string(source),),
    ).fetchone()
    assert row is not None  # noqa: S101
    source.execute(sql.SQL("alter table {} owner to {}").format(name, sql.Identifier(row[0])))


def _fill(
    settings: Settings,
    source: Connection,
    name: sql.Identifier,
    root: sql.Identifier,
    lower: datetime,
    upper: datetime,
    report: ProgressReport,
) -> int:
    """Copy the archived events that the outbox lacks, each once; returns how many."""
    columns: dict[str, str] = {}
    # PostgreSQL computes the values of generated columns, and accepts none.
    generated = {
        name
        for name, each in table_columns(source, settings.source.table_name).items()
        if each.generated
    }
    for field, column in settings.source.mapping.items():
        # Several fields may be mapped to one column.
        if column not in ("", INSERTED_BY, _TIME, *generated):
            columns.setdefault(column, field)
    into = sql.SQL(", ").join(sql.Identifier(column) for column in (*columns, INSERTED_BY, _TIME))
    total = None if report is silent else _count(settings, lower, upper)
    report(_COPYING, 0, total)
    with (
        source.transaction(),
        source.cursor() as cursor,
        cursor.copy(sql.SQL("copy {} ({}) from stdin").format(name, into)) as copy,
    ):
        for number, values in enumerate(
            _rows(settings, list(columns.values()), lower, upper), start=1
        ):
            copy.write_row(values)
            if number % _REPORT_EVERY == 0:
                report(_COPYING, number, total)
    report("removing events that the outbox has")
    key = sql.Identifier(settings.source.mapping["id"])
    source.execute(
        sql.SQL(
            "delete from {name} where exists (select from {root} as o where o.{key} = {name}.{key})"
        ).format(name=name, root=root, key=key)
    )
    # After a restore of the target, or a rebuild, a sink writes events again that the archive has.
    source.execute(
        sql.SQL(
            "delete from {name} as each using {name} as other where each.{key} = other.{key} and each.ctid > other.ctid"
        ).format(name=name, key=key)
    )
    row = source.execute(sql.SQL("select count(*) from {}").format(name)).fetchone()
    assert row is not None  # noqa: S101
    return int(row[0])


def _rows(
    settings: Settings, fields: list[str], lower: datetime, upper: datetime
) -> Iterator[list[Any]]:
    moment = FIELDS.index("event_ts")
    stored = [field for field in fields if field in FIELDS]
    numbers = [FIELDS.index(field) for field in stored]
    names = [field.removeprefix(headers.PREFIX) for field in fields[len(stored) :]]
    for batch in _archived(settings, lower, upper):
        for values in zip(*(column.to_pylist() for column in batch.columns), strict=True):
            # pyarrow returns a map as a list of pairs.
            extra = dict(values[len(FIELDS)] or ()) if names else {}
            yield [
                *(values[number] for number in numbers),
                *(extra.get(name) for name in names),
                *(None, values[moment]),
            ]


def _archive(settings: Settings) -> tuple[str, SparkHandler]:
    """Return the sink that `retention.archive` names. Raises ConfigurationError unless its files can be read here."""
    name = settings.retention.archive
    if name is None:
        raise ConfigurationError(
            "retention.archive: names no sink: name the sink of the type spark that writes the archive"
        )
    sink = settings.spark_handlers[name]
    if sink.path is None or sink.format.lower() not in _FORMATS:
        raise ConfigurationError(
            f"handlers.{name}: relay restores only from a path in the format {', '.join(_FORMATS)}: read it with Spark"
        )
    return name, sink


def _archived(settings: Settings, lower: datetime, upper: datetime) -> Iterator[pa.RecordBatch]:
    """Yield the archived events with lower <= event_ts < upper: columns `FIELDS` in their order, then `headers` if any.

    Raises ConfigurationError, and OSError where the archive cannot be read.
    """
    import pyarrow as pa

    name, sink = _archive(settings)
    dataset = _dataset(name, sink)
    missing = [field for field in FIELDS if field not in dataset.schema.names]
    if missing:
        raise ConfigurationError(
            f"handlers.{name}: its files lack {', '.join(missing)}: a sink whose sql or transform changes the columns "
            "cannot be the archive"
        )
    extra = _extra(settings)
    if not set(extra).issubset(dataset.schema.names):
        if sink.sql is not None or sink.transform is not None:
            raise ConfigurationError(
                f"handlers.{name}: its files lack {headers.FIELD}: restore them without source.headers; the columns of "
                "headers are null then"
            )
        # The schema is that of the first file, which may be older than source.headers: its headers are null.
        dataset = dataset.replace_schema(
            dataset.schema.append(pa.field(headers.FIELD, pa.map_(pa.string(), pa.string())))
        )
    with _arrows_errors():
        yield from dataset.to_batches(
            columns=[*FIELDS, *extra], filter=_between(dataset, lower, upper)
        )


def _count(settings: Settings, lower: datetime, upper: datetime) -> int | None:
    """Count the events that `_archived` yields; None where the archive has no event_ts."""
    dataset = _dataset(*_archive(settings))
    if "event_ts" not in dataset.schema.names:
        return None
    with _arrows_errors():
        return int(dataset.count_rows(filter=_between(dataset, lower, upper)))


def _between(dataset: Any, lower: datetime, upper: datetime) -> Any:
    """Return the filter lower <= event_ts < upper for a dataset."""
    import pyarrow as pa
    import pyarrow.dataset

    moment = pyarrow.dataset.field("event_ts")
    kind = dataset.schema.field("event_ts").type
    bounds = [pa.scalar(each, pa.timestamp("us", "UTC")).cast(kind) for each in (lower, upper)]
    return (moment >= bounds[0]) & (moment < bounds[1])


def _dataset(name: str, sink: SparkHandler) -> Any:
    """Open the files of a sink. Raises OSError where they cannot be read, ConfigurationError without their library."""
    import pyarrow.dataset

    assert sink.path is not None  # noqa: S101
    kind = sink.format.lower()
    if kind == "delta":
        try:
            import deltalake
        except ModuleNotFoundError as error:
            raise ConfigurationError(
                f"handlers.{name}.format: {kind} needs {error.name}: install relay-outbox[{kind}]"
            ) from None
        try:
            table = deltalake.DeltaTable(sink.path, storage_options=sink.plain_options)
            return table.to_pyarrow_dataset()
        except deltalake.exceptions.DeltaError as error:
            raise OSError(first_line(error)) from None
    # Hadoop's names for S3, which Arrow's library does not know.
    path = _HADOOPS_S3.sub("s3://", sink.path)
    with _arrows_errors():
        files = pyarrow.dataset.dataset(path, format=kind).files
        partitioning = pyarrow.dataset.partitioning(_folders(files), flavor="hive")
        return pyarrow.dataset.dataset(path, format=kind, partitioning=partitioning)


_FOLDER = re.compile("([^/=]+)=[^/]*/")


def _folders(files: Iterable[str]) -> pa.Schema:
    """The columns that are folders of some files. Arrow would take the text 007 for a number, and nulls for no type."""
    import pyarrow as pa

    kinds = {"bigint": pa.int64(), "int": pa.int32()}
    names = dict.fromkeys(name for file in files for name in _FOLDER.findall(file))
    return pa.schema([(name, kinds.get(SQL_TYPES.get(name, ""), pa.string())) for name in names])


@contextmanager
def _arrows_errors() -> Iterator[None]:
    """Turn errors of Arrow, such as that of a damaged file, into OSError."""
    import pyarrow as pa

    try:
        yield
    except pa.ArrowException as error:
        raise OSError(first_line(error)) from None
