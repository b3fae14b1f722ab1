"""How a table gets the columns of a batch: a plan of changes, which each kind of table carries out.

Columns are added, and get a wider type or a comment; none is dropped or narrowed. A plan is made of what the table has
now: where a change was made and the batch was not written, the next attempt plans what is left. So it does no harm
that an attempt is killed between two changes, or that two drivers make the same ones.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import pyarrow as pa

from relay.faults import ConfigurationError
from relay.spark.writers import BATCH_COLUMN
from relay.spark.writers.arrow import plain_type

log = logging.getLogger(__name__)

COMMENT = b"comment"
"""The key of a column's comment in the metadata of a field, in Arrow and in Delta."""
_OWN = "relay_"
"""The beginning of the names of columns that no query can leave out, and that all but one are of `mode: upsert`."""


@dataclass(frozen=True, slots=True)
class Change:
    """A change of one column, which is `column` afterwards; a column that is added is nullable."""

    kind: Literal["add", "widen", "comment"]
    column: pa.Field


class ChangingTable(Protocol):
    """A table whose columns can be changed, as it was when it was read.

    Its `schema` has a comment as `comment` in the metadata of a field, and the null type for a column that takes values
    of any type. `rigid` are the columns whose types cannot be changed.
    """

    @property
    def schema(self) -> pa.Schema:
        """The columns."""

    @property
    def rigid(self) -> Collection[str]:
        """The names of the columns whose types stay."""

    def statement(self, change: Change) -> str:
        """The statement with which somebody else makes a change."""

    def change(self, changes: Sequence[Change]) -> None:
        """Make the changes, and read the table again.

        Raises an error where somebody else has changed the columns since they were read, ConfigurationError where the
        change is not possible, and the destination's errors.
        """


def accept(sink: str, key: str, table: ChangingTable, batch: pa.Schema, evolves: bool) -> bool:
    """Make a table accept the columns of a batch; returns whether it was changed. `key` names the destination.

    Raises ConfigurationError for a batch that does not fit, which names the statement where the table is not to be
    changed, and the errors of the table.
    """
    changes = plan(key, table.schema, batch, table.rigid)
    if not evolves:
        missing = next((each for each in changes if each.kind != "comment"), None)
        if missing is not None:
            raise _refusal(key, table, missing)
        return False
    if not changes:
        return False
    table.change(changes)
    for each in changes:
        log.info(
            "changed a table's columns",
            extra={"handler": sink, "change": each.kind, "column": each.column.name},
        )
    return True


def plan(key: str, table: pa.Schema, batch: pa.Schema, rigid: Collection[str] = ()) -> list[Change]:
    """The changes after which the rows of a batch can be written to a table. `rigid` are as in ChangingTable.

    Columns of the table that the batch lacks are null in its rows. Raises ConfigurationError, which names `key`, where
    no change makes them fit.
    """
    changes = []
    for field in batch:
        index = table.get_field_index(field.name)
        if index < 0:
            _require_new(key, table, field)
            changes.append(Change("add", field))
            continue
        known = table.field(index)
        is_wide = is_wider(field.type, known.type)
        if is_wide and field.name not in rigid:
            changes.append(Change("widen", field))
        elif not (pa.types.is_null(known.type) or _fits(field.type, known.type)):
            raise ConfigurationError(
                f"{key}: the table's column {field.name} is {plain_type(known.type)} and the batch's is "
                f"{plain_type(field.type)}{', and relay cannot widen it there' if is_wide else ''}: cast it with `sql`"
            )
        text = comment_of(field)
        if text is not None and text != comment_of(known):
            changes.append(Change("comment", field))
    for field in table:
        if not field.nullable:
            raise ConfigurationError(
                f"{key}: the table's column {field.name} is NOT NULL, but every column of a batch is nullable: "
                "drop the constraint"
            )
    return changes


def written(table: pa.Schema, batch: pa.Schema) -> pa.Schema:
    """The types with which the columns of a batch are written to a table that accepts them: the table's."""
    types = {each.name: plain_type(each.type) for each in table}
    return pa.schema(
        [
            each.with_type(types[each.name]) if is_wider(types[each.name], each.type) else each
            for each in batch
        ]
    )


def comment_of(field: pa.Field) -> str | None:
    """The comment of a column."""
    text = (field.metadata or {}).get(COMMENT)
    return None if text is None else text.decode()


def sql_type(kind: pa.DataType) -> str:
    """The name of a type in Spark's SQL."""
    from pyspark.sql.pandas.types import from_arrow_type

    return from_arrow_type(kind).simpleString()


def quoted(name: str) -> str:
    """A name in the SQL of Spark and of deltalake."""
    return f"`{name.replace('`', '``')}`"


def spark_statement(table: str, change: Change) -> str:
    """A change as a statement of Spark's SQL; `table` is its quoted name."""
    name = quoted(change.column.name)
    if change.kind == "add":
        return f"alter table {table} add columns ({name} {sql_type(change.column.type)})"
    return f"alter table {table} alter column {name} type {sql_type(change.column.type)}"


def is_wider(kind: pa.DataType, other: pa.DataType) -> bool:
    """Whether a type has all values of another one of the same sort, and more."""
    for is_sort in (pa.types.is_signed_integer, pa.types.is_floating):
        if is_sort(kind) and is_sort(other):
            return bool(kind.bit_width > other.bit_width)
    if pa.types.is_decimal(kind) and pa.types.is_decimal(other):
        return bool(kind.scale == other.scale and kind.precision > other.precision)
    return False


def _fits(kind: pa.DataType, into: pa.DataType) -> bool:
    return plain_type(kind) == plain_type(into) or is_wider(into, kind)


def _require_new(key: str, table: pa.Schema, field: pa.Field) -> None:
    """Raise ConfigurationError for a column that cannot be added."""
    if field.name.startswith(_OWN) and field.name != BATCH_COLUMN:
        raise ConfigurationError(
            f"{key}: the table has no column {field.name}: relay writes it into each row: add it, or name another table"
        )
    twin = next((name for name in table.names if name.lower() == field.name.lower()), None)
    if twin is not None:
        raise ConfigurationError(
            f"{key}: the batch's column {field.name} is the table's {twin} but for case, and they are one for Spark: "
            "give it that name with `sql`"
        )
    if pa.types.is_null(field.type):
        raise ConfigurationError(
            f"{key}: the batch's new column {field.name} has no type: cast it with `sql`, such as to string"
        )


def _refusal(key: str, table: ChangingTable, change: Change) -> ConfigurationError:
    name = change.column.name
    if change.kind == "add":
        what, cure = f"the table has no column {name}", "leave it out with `sql`"
        if name == BATCH_COLUMN:
            cure = "name another table: relay writes it into each row"
    else:
        known = plain_type(table.schema.field(name).type)
        what = f"the table's column {name} is {known} and the batch's is {plain_type(change.column.type)}"
        cure = "cast it with `sql`"
    return ConfigurationError(
        f"{key}: {what}: run `{table.statement(change)}`, set `schema: evolve`, or {cure}"
    )
