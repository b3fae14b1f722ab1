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
from datetime import UTC, datetime
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
"""The longest string, in characters, in a file's statistics: payloads would make the log as large as the table."""
_NOT_IN_NAMES = re.compile(r"[^\w.-]", re.ASCII)
_LONGEST_NAME = 100
"""The most characters of a column and of a partition value in a folder's name, of at most 255 bytes mostly."""
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


def _folder(text: str) -> str:
    """A column or value in a folder's name: characters that addresses escape are another one."""
    return _NOT_IN_NAMES.sub("_", text[:_LONGEST_NAME])


def _write(
    files: BatchFiles, store: Any, values: Mapping[str, str | None], part: pa.Table
) -> dict[str, Any]:
    folders = [
        f"{_folder(name)}={_NULL if value is None else _folder(value)}"
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
        "stats": json.dumps(_stats(part)),
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


def _stats(part: pa.Table) -> dict[str, Any]:
    lowest: dict[str, Any] = {}
    highest: dict[str, Any] = {}
    for name, column in zip(part.column_names, part.columns, strict=True):
        bounds = _bounds(column)
        if bounds is not None:
            lowest[name], highest[name] = bounds
    nulls = {name: part[name].null_count for name in part.column_names}
    return {
        "numRecords": part.num_rows,
        "minValues": lowest,
        "maxValues": highest,
        "nullCount": nulls,
    }


def _bounds(column: pa.ChunkedArray) -> tuple[Any, Any] | None:
    """The least and the greatest value in JSON's form; None where a column has no bounds that readers can use."""
    kind = column.type
    if not (
        pa.types.is_integer(kind)
        or pa.types.is_string(kind)
        or pa.types.is_date32(kind)
        or (pa.types.is_timestamp(kind) and kind.tz is not None)
    ):
        return None
    bounds = pc.min_max(column)
    try:
        least, greatest = bounds["min"].as_py(), bounds["max"].as_py()
    except (ValueError, OverflowError):
        return None  # a time outside the years 1 to 9999
    if least is None:
        return None
    if isinstance(least, str):
        return (least, greatest) if max(len(least), len(greatest)) <= _LONGEST_BOUND else None
    if isinstance(least, int):
        return least, greatest
    form = "%Y-%m-%dT%H:%M:%S.%fZ" if isinstance(least, datetime) else "%Y-%m-%d"
    if least.year < 1000:
        return None  # strftime writes such a year with fewer than four digits
    return least.strftime(form), greatest.strftime(form)
