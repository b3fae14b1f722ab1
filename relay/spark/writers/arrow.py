"""A frame as Arrow, for all writers: its schema, what no table accepts of it, its rows in executors' tasks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import pyarrow as pa

from relay.faults import ConfigurationError
from relay.spark.writers import MissingPartition

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

MOST_NAME_BYTES = 255
"""The most bytes of the name of a file or a folder, in file systems and in stores that keep objects in one."""
MOST_KEY_BYTES = 1024
"""The most bytes of the key of an object in a store."""


def arrow_schema(frame: DataFrame) -> pa.Schema:
    """The frame's schema, with comments; every column is nullable, and timestamps are UTC microseconds."""
    from pyspark.sql.pandas.types import to_arrow_schema

    fields = to_arrow_schema(frame.schema, timezone="UTC")
    comments = [each.metadata.get("comment") for each in frame.schema]
    return pa.schema(
        [
            pa.field(field.name, field.type, metadata={"comment": str(text)} if text else None)
            for field, text in zip(fields, comments, strict=True)
        ]
    )


def require_distinct_columns(key: str, columns: Sequence[str]) -> None:
    """Raise ConfigurationError, which names `key`, for columns whose names differ by nothing but case.

    Iceberg would make a table of these, which Spark does not read; Delta refuses it once the files are written.
    """
    known: dict[str, str] = {}
    for name in columns:
        before = known.get(name.lower())
        known[name.lower()] = name
        if before is not None:
            raise ConfigurationError(
                f"{key}: the batch has the columns {before} and {name}, which are one for Spark: give one of them "
                "another name with `sql`"
            )


def require_known_types(
    key: str, frame: pa.Schema, kind: str, converted: Callable[[pa.Schema], object]
) -> None:
    """Raise ConfigurationError, which names `key`, for a column of a type that no table of the format `kind` has.

    `converted` makes the format's schema of a frame's, and raises an error for such a type.
    """
    for field in frame:
        try:
            converted(pa.schema([field]))
        except Exception as error:
            raise ConfigurationError(
                f"{key}: the batch's column {field.name} is of type {field.type}, which {kind} does not have: cast it "
                "with `sql`, such as to string"
            ) from error


def require_partition_columns(key: str, columns: Sequence[str], frame: Sequence[str]) -> None:
    """Raise MissingPartition, which names `key`, for a partition column that the frame does not have."""
    for name in columns:
        if name not in frame:
            raise MissingPartition(
                f"{key}.partition_by: the batch has no column {name}: name others, or add it with `sql`; it has "
                f"{', '.join(frame)}"
            )


def long_partition(key: str, name: str) -> ConfigurationError:
    """The error, which names `key`, about a partition column with a value that no folder can be called."""
    return ConfigurationError(
        f"{key}.partition_by: the column {name} has a value that is too long for the name of a folder: shorten it with "
        "`sql`, such as with md5 or left, or partition by another column"
    )


def refuse_partition_types(
    key: str, columns: Sequence[str], frame: pa.Schema, is_refused: Callable[[pa.DataType], bool]
) -> None:
    """Raise ConfigurationError, which names `key`, for a partition column of a type that the table format cannot keep.

    Columns that the frame does not have are left to `require_partition_columns`.
    """
    for name in columns:
        index = frame.get_field_index(name)
        if index >= 0 and (pa.types.is_nested(kind := frame.field(index).type) or is_refused(kind)):
            raise ConfigurationError(
                f"{key}.partition_by: the column {name} is {kind}, whose values cannot name a partition: convert it "
                "with `sql`, such as with hex or a cast to string"
            )


def plain_type(kind: pa.DataType) -> pa.DataType:
    """The type without the differences between Arrow's libraries: the width of offsets, the name of UTC."""
    if pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
        return pa.string()
    if pa.types.is_large_binary(kind) or pa.types.is_binary_view(kind):
        return pa.binary()
    if pa.types.is_timestamp(kind) and kind.tz is not None:
        return pa.timestamp(kind.unit, "UTC")
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return pa.list_(plain_type(kind.value_type))
    if pa.types.is_struct(kind):
        return pa.struct([(field.name, plain_type(field.type)) for field in kind])
    if pa.types.is_map(kind):
        return pa.map_(plain_type(kind.key_type), plain_type(kind.item_type))
    return kind


FILE_BYTES = 64 << 20
"""The bytes of Arrow memory that a task gathers before it writes a file, or a file for each partition value."""


def gathered(schema: pa.Schema, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.Table]:
    """Yield the rows of a task as tables of about `FILE_BYTES`, cast to the schema; none for a task without rows."""
    held: list[pa.RecordBatch] = []
    size = 0
    for batch in batches:
        if batch.num_rows:
            held.append(batch)
            size += batch.nbytes
        if size >= FILE_BYTES:
            yield pa.Table.from_batches(held).cast(schema)
            held, size = [], 0
    if held:
        yield pa.Table.from_batches(held).cast(schema)
