"""The executors' side of Delta tables: writes Parquet files, and describes each for the table's log.

Source: Delta Transaction Log Protocol, "Add File and Remove File", "Per-file Statistics", "Partition Value
Serialization".
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import unquote
from uuid import uuid4

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from relay.spark.writers.arrow import gathered

FACTS = "path string, size bigint, partition_values string, stats string"
"""The columns of a task's result, a row for each file; the last two are JSON."""
_FACTS_SCHEMA = pa.schema(
    [
        ("path", pa.string()),
        ("size", pa.int64()),
        ("partition_values", pa.string()),
        ("stats", pa.string()),
    ]
)
REMOVED = "part bigint"
"""The column of the result of a task that removes files."""
_REMOVED_SCHEMA = pa.schema([("part", pa.int64())])
_LONGEST_BOUND = 64
"""The characters of a text in a file's statistics: payloads would make the log as large as the table."""
_GREATEST = "\U0010ffff"
_NOT_IN_NAMES = re.compile(r"[^\w.-]", re.ASCII)
_LONGEST_NAME = 100
"""The most characters of a column in a folder's name, and of a partition value of up to three columns."""
_LONGEST_NAMES = 300
"""The most characters of the values in all folders' names: with the table's address it is one key in a store."""
_NULL = "__HIVE_DEFAULT_PARTITION__"


@dataclass(frozen=True, slots=True)
class BatchFiles:
    """The path and schema of a batch's files. `options` are deltalake's storage options, which are secret."""

    path: str
    options: Mapping[str, str]
    schema: pa.Schema
    partition_by: Sequence[str]
    batch: str

    def __repr__(self) -> str:
        return f"Files({self.path!r})"


def local_path(path: str) -> Path | None:
    """The folder of a table in a local file system; None for an address of an object store."""
    if path.startswith("file://"):
        return Path(unquote(path.removeprefix("file://")))
    return None if "://" in path else Path(path)


def absolute_path(path: str) -> str:
    """The address of a table: that of a local folder from the root, one of an object store as it is."""
    folder = local_path(path)
    return path if folder is None else folder.resolve().as_uri()


def own_data_files(partition_by: Sequence[str]) -> Callable[[str], bool]:
    """A function that says of a path below a table's whether it is where, and named as, a data file of the table is.

    Spark, delta-rs and relay name them alike, but for characters in columns' names. What else lies there belongs to
    others, such as another table's files, or is no data file, such as a deletion vector.
    """
    folders = "".join(
        rf"({re.escape(name)}|{re.escape(_folder(name))})=[^/]*/" for name in partition_by
    )
    named = re.compile(rf"(_change_data/)?{folders}(part|cdc)-[^/]+\.parquet")
    return lambda path: named.fullmatch(path) is not None


def remove_files(
    path: str,
    options: Mapping[str, str],
    parts: Sequence[Sequence[str]],
    numbers: Iterator[pa.RecordBatch],
) -> Iterator[pa.RecordBatch]:
    """Remove the files of a task's parts, by their paths below the table's; yields the number of each part.

    One that is gone is passed over. For as long as an object store takes, deltalake stops all threads of the process.
    """
    store = _store(path, options)
    for batch in numbers:
        for number in batch.column(0).to_pylist():
            for each in parts[number]:
                with suppress(FileNotFoundError):
                    store.delete_file(each)
        yield pa.RecordBatch.from_arrays([batch.column(0)], schema=_REMOVED_SCHEMA)


def write_files(files: BatchFiles, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Write a task's rows to files whose names no other attempt uses; yields a row of `FACTS` for each file."""
    store = _store(files.path, files.options)
    for table in gathered(files.schema, batches):
        written = [
            _write(files, store, values, part)
            for values, part in _partitions(table, files.partition_by)
        ]
        yield pa.RecordBatch.from_pylist(written, schema=_FACTS_SCHEMA)


def _store(path: str, options: Mapping[str, str]) -> Any:
    import pyarrow.fs

    folder = local_path(path)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        return pyarrow.fs.SubTreeFileSystem(str(folder), pyarrow.fs.LocalFileSystem())
    from deltalake.fs import DeltaStorageHandler

    return pyarrow.fs.PyFileSystem(DeltaStorageHandler(path, dict(options)))


def _partitions(
    table: pa.Table, columns: Sequence[str]
) -> Iterator[tuple[dict[str, str | None], pa.Table]]:
    """The partition values of each combination, with its rows without the partition columns."""
    if not columns:
        yield {}, table
        return
    codes = np.zeros(table.num_rows, np.int64)
    for name in columns:
        encoded = table[name].combine_chunks().dictionary_encode(null_encoding="encode")
        codes = codes * len(encoded.dictionary) + encoded.indices.to_numpy(zero_copy_only=False)
        # Renumbered from 0, so that many columns do not overflow.
        codes = np.unique(codes, return_inverse=True)[1]
    order = np.argsort(codes, kind="stable")
    ordered = table.take(pa.array(order))
    starts = np.flatnonzero(np.diff(codes[order], prepend=-1)).tolist()
    for start, end in zip(starts, [*starts[1:], table.num_rows], strict=True):
        part = ordered.slice(start, end - start)
        values = {name: _value(part[name][0].as_py()) for name in columns}
        yield values, part.drop_columns(list(columns))


def _value(value: Any) -> str | None:
    """A partition value in the log's serialization, in which "" means null for every type.

    A time without a zone (`timestamp_ntz`) has no zone in the log either.
    """
    if value is None or value == "":
        return None
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, datetime):
        if value.tzinfo is None:
            return value.isoformat(" ", "microseconds")
        return f"{value.astimezone(UTC).replace(tzinfo=None).isoformat('T', 'microseconds')}Z"
    if isinstance(value, Decimal):
        return format(value, "f")  # str() may write an exponent
    return str(value)


def _folder(text: str, longest: int = _LONGEST_NAME) -> str:
    """A column or value in a folder's name: characters that addresses escape are another one."""
    return _NOT_IN_NAMES.sub("_", text[:longest])


def _write(
    files: BatchFiles, store: Any, values: Mapping[str, str | None], part: pa.Table
) -> dict[str, Any]:
    longest = min(_LONGEST_NAME, _LONGEST_NAMES // max(1, len(values)))
    folders = [
        f"{_folder(name)}={_NULL if value is None else _folder(value, longest)}"
        for name, value in values.items()
    ]
    # Readers take the columns and values from the log, so two values may share a folder's name.
    path = "/".join([*folders, f"part-{files.batch}-{uuid4().hex}.zstd.parquet"])
    sink = pa.BufferOutputStream()
    pq.write_table(part, sink, compression="zstd")
    data = sink.getvalue()
    _put(files, store, path, data)
    return {
        "path": path,
        "size": data.size,
        "partition_values": json.dumps(values),
        "stats": _json(_stats(part)),
    }


def _put(files: BatchFiles, store: Any, path: str, data: pa.Buffer) -> None:
    """Write a file below the table's path."""
    if local_path(files.path) is None:
        # deltalake's stream for pyarrow does not accept what pyarrow writes to it (delta-rs 1.6, pyarrow 26).
        from deltalake._internal import DeltaFileSystemHandler

        stream: Any = DeltaFileSystemHandler(files.path, dict(files.options)).open_output_stream(
            path
        )
        stream.write(data.to_pybytes())
        stream.close()
        return
    store.create_dir(str(PurePosixPath(path).parent), recursive=True)
    with store.open_output_stream(path) as stream:
        stream.write(data)


@dataclass(frozen=True, slots=True)
class _Values:
    """What a file's statistics say of a column: bounds in JSON's form, and how many nulls it has.

    Those of a struct are objects with what they say of its fields. Bounds are None where there are none.
    """

    least: Any
    greatest: Any
    nulls: Any


def _stats(part: pa.Table) -> dict[str, Any]:
    """The statistics of a file, as deltalake's own: readers take a column without bounds for one without values."""
    values = _of_fields(part.column_names, part.columns)
    return {
        "numRecords": part.num_rows,
        "minValues": values.least or {},
        "maxValues": values.greatest or {},
        "nullCount": values.nulls or {},
    }


def _of_fields(names: Sequence[str], columns: Sequence[pa.ChunkedArray]) -> _Values:
    """What they say of some fields, without those of types that have no bounds: lists, maps and bytes."""
    known = {
        name: values
        for name, column in zip(names, columns, strict=True)
        if (values := _of_column(column)) is not None
    }
    return _Values(
        {name: each.least for name, each in known.items() if each.least is not None} or None,
        {name: each.greatest for name, each in known.items() if each.greatest is not None} or None,
        {name: each.nulls for name, each in known.items()} or None,
    )


def _of_column(column: pa.ChunkedArray) -> _Values | None:
    kind = column.type
    if pa.types.is_struct(kind):
        values = _of_fields([field.name for field in kind], column.flatten())
        return None if values.nulls is None else values
    if not any(is_kind(kind) for is_kind in _BOUNDED):
        return None
    least, greatest = _bounds(column) or (None, None)
    return _Values(least, greatest, column.null_count)


_BOUNDED = (
    *(pa.types.is_integer, pa.types.is_floating, pa.types.is_decimal, pa.types.is_boolean),
    *(pa.types.is_string, pa.types.is_date32, pa.types.is_timestamp),
)
"""The types whose columns have bounds."""


def _bounds(column: pa.ChunkedArray) -> tuple[Any, Any] | None:
    """The least and the greatest value in JSON's form; None where JSON has no form of them.

    NaN and infinity have none, nor have times outside the years 1 to 9999.
    """
    if pa.types.is_floating(column.type) and not pc.all(pc.is_finite(column)).as_py():
        return None
    bounds = pc.min_max(column)
    try:
        least, greatest = bounds["min"].as_py(), bounds["max"].as_py()
    except (ValueError, OverflowError):
        return None
    if least is None:
        return None
    if isinstance(least, str):
        return least[:_LONGEST_BOUND], _not_less(greatest)
    if isinstance(least, date):
        return _time(least), _time(greatest)
    return least, greatest


def _not_less(text: str) -> str:
    """A text of at most `_LONGEST_BOUND` characters and a few, which is not less than another one."""
    rest = text[_LONGEST_BOUND:]
    if not rest:
        return text
    more = len(rest) - len(rest.lstrip(_GREATEST))
    return text[:_LONGEST_BOUND] + _GREATEST * (more + 1)


def _time(moment: date) -> str:
    """A date or a time in the form of the log's statistics."""
    if not isinstance(moment, datetime):
        return moment.isoformat()
    if moment.tzinfo is None:
        return moment.isoformat(" ", "microseconds")
    return f"{moment.replace(tzinfo=None).isoformat('T', 'microseconds')}Z"


def _json(value: Any) -> str:
    """A value as JSON, in which a decimal is a number with all its digits.

    Characters are themselves: delta-rs 1.6 decodes the escapes of some, such as the greatest, to others.
    """
    if isinstance(value, dict):
        pairs = (f"{_json(key)}:{_json(each)}" for key, each in value.items())
        return f"{{{','.join(pairs)}}}"
    if isinstance(value, Decimal):
        return format(value, "f")
    return json.dumps(value, ensure_ascii=False)
