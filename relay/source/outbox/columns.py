"""Reads the types of the outbox's columns, and finds those that relay cannot read.

Source: PostgreSQL documentation, "pg_attribute", "pg_type" and "Generated Columns".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from psycopg.rows import class_row

from relay.config.source import SourceSettings
from relay.faults import ConfigurationError
from relay.model import headers
from relay.model.events import ID_FIELDS, INSERTED_BY, NEEDED_FIELDS
from relay.store.connections import Connection

PUBLISHES_GENERATED = 180000
"""The first server version whose publications can hold stored generated columns."""


@dataclass(frozen=True, slots=True)
class OutboxColumn:
    """A column of the outbox.

    `type` is as it was declared; `base` and `category` are the name and the category of the type below all domains.
    `generated` is "s" for a stored, "v" for a virtual generated column, else "".
    """

    name: str
    type: str
    base: str
    category: str
    generated: str


@dataclass(frozen=True, slots=True)
class ColumnProblem:
    """Why relay cannot read a column or, if `readable`, on which condition it can."""

    text: str
    readable: bool


def columns(conn: Connection, table: tuple[str, str]) -> dict[str, OutboxColumn]:
    """The columns of a table by name; none where there is no such table. Raises psycopg.Error."""
    with conn.cursor(row_factory=class_row(OutboxColumn)) as cursor:
        rows = cursor.execute(
            """
            with recursive declared as (
                select a.attname::text as name, format_type(a.atttypid, a.atttypmod) as type,
                       a.attgenerated::text as generated, a.atttypid as oid
                  from pg_attribute a
                  join pg_class c on c.oid = a.attrelid join pg_namespace n on n.oid = c.relnamespace
                 where n.nspname = %s and c.relname = %s and c.relkind in ('r', 'p')
                   and a.attnum > 0 and not a.attisdropped
            ), below as (
                select d.name, d.type, d.generated, t.typname, t.typcategory, t.typtype, t.typbasetype
                  from declared d join pg_type t on t.oid = d.oid
                union all
                select b.name, b.type, b.generated, t.typname, t.typcategory, t.typtype, t.typbasetype
                  from below b join pg_type t on t.oid = b.typbasetype
                 where b.typtype = 'd'
            )
            select name, type, typname::text as base, typcategory::text as category, generated
              from below where typtype <> 'd'
            """,
            table,
        )
        return {column.name: column for column in rows}


def is_partitioned(conn: Connection, source: SourceSettings) -> bool:
    """Whether the outbox is a partitioned table. Raises psycopg.Error."""
    table = conn.execute(
        "select from pg_class c join pg_namespace n on n.oid = c.relnamespace"
        " where n.nspname = %s and c.relname = %s and c.relkind = 'p'",
        source.table_name,
    )
    return table.rowcount > 0


def mapped(conn: Connection, source: SourceSettings) -> dict[str, OutboxColumn]:
    """The outbox's columns that hold fields, by field. Raises psycopg.Error."""
    existing = columns(conn, source.table_name)
    return {field: existing[name] for field, name in source.mapping.items() if name in existing}


def require_readable(conn: Connection, source: SourceSettings) -> None:
    """Raise ConfigurationError with a line for each mapped column that relay cannot read."""
    lines = [problem.text for problem in problems(conn, source) if not problem.readable]
    if lines:
        raise ConfigurationError("\n".join(lines))


def problems(conn: Connection, source: SourceSettings) -> Iterator[ColumnProblem]:
    """Find the mapped columns that relay cannot read, or only on a condition. Raises psycopg.Error."""
    version = conn.info.server_version
    own = columns(conn, source.table_name).get(INSERTED_BY)
    if own is not None and own.base != "xid8":
        yield ColumnProblem(
            f"source.table: {source.table} has a column {INSERTED_BY!r} of type {own.type}, relay needs one of that "
            "name for itself (xid8): rename the column",
            readable=False,
        )
    for field, column in mapped(conn, source).items():
        problem = None
        if not field.startswith(headers.PREFIX):
            problem = _type_problem(field, column, source)
        if problem is not None:
            yield problem
        if column.generated and source.mode != "poll":
            unpublished = _unpublished(field, column, source.table, version)
            if unpublished is not None:
                yield unpublished


def _unpublished(
    field: str, column: OutboxColumn, table: str, version: int
) -> ColumnProblem | None:
    """The problem of a generated column that PostgreSQL cannot publish; None if it can."""
    if column.generated == "s" and version >= PUBLISHES_GENERATED:
        return None
    kind = "stored" if column.generated == "s" else "virtual"
    return ColumnProblem(
        f"{_key(field)}: the column {column.name!r} of {table} is a {kind} generated column, which "
        f"PostgreSQL {version // 10000} does not publish: fill an ordinary column instead (by a trigger"
        + (
            f", or after `alter table {table} alter column {column.name} drop expression`"
            if kind == "stored"
            else ""
        )
        + f"), or read the table with source.mode: poll{_or_leave_out(field)}",
        readable=False,
    )


def _type_problem(field: str, column: OutboxColumn, source: SourceSettings) -> ColumnProblem | None:
    wanted = source.sql_types[field]
    readable = (_IDS[wanted] if field in ID_FIELDS else _READABLE[field])(column)
    if readable is True:
        return None
    table = source.table
    has = (
        f"source.columns: {field}: the column {column.name!r} of {table} has the type {column.type}"
    )
    alter = f"`alter table {table} alter column {column.name} type {wanted} using {_cast(column, wanted)}`"
    if readable:
        return ColumnProblem(f"{has}: {readable}; {alter} ensures it", readable=True)
    castable = wanted != "uuid" and column.category in "SN"
    fitting = _fitting_id(column) if field in ID_FIELDS else None
    first = (
        f"set source.types: {{{field}: {fitting}}}, or "
        if fitting
        else f"run {alter}, or "
        if castable
        else ""
    )
    hint = f"{first}map a column of type {wanted} (columns: {{{field}: …}})"
    return ColumnProblem(
        f"{has}, relay reads {wanted}: {hint}{_or_leave_out(field)}", readable=False
    )


def _cast(column: OutboxColumn, wanted: str) -> str:
    if wanted == "timestamptz" and column.base == "timestamp":
        return f"{column.name} at time zone 'UTC'"
    return f"{column.name}::{wanted}"


def _key(field: str) -> str:
    """The configuration key that names a field's column."""
    return f"source.{field}" if field.startswith(headers.PREFIX) else f"source.columns: {field}"


def _or_leave_out(field: str) -> str:
    if field.startswith(headers.PREFIX):
        return ", or leave the header out"
    return (
        "" if field in NEEDED_FIELDS else f", or leave the field out (columns: {{{field}: null}})"
    )


TypeCheck = bool | str
"""Whether relay reads a type, or on which condition."""

_INTEGERS = frozenset({"int2", "int4", "int8"})


def _fitting_id(column: OutboxColumn) -> str | None:
    """The type of `source.types` that a column has as it is; None if there is none."""
    return next((kind for kind, readable in _IDS.items() if readable(column) is True), None)


def _uuid(column: OutboxColumn) -> TypeCheck:
    if column.category == "S":
        return "every value must be a UUID, unless source.types says text"
    return column.base == "uuid"


def _text(column: OutboxColumn) -> TypeCheck:
    if column.base == "bpchar":
        return "values come padded with blanks, which routes compare"
    return column.category in "SE" or column.base in {"uuid", "numeric", *_INTEGERS}


def _json(column: OutboxColumn) -> TypeCheck:
    if column.category == "S":
        return "every value must be JSON, since handlers and dead letters get it as jsonb"
    return column.base in {"json", "jsonb"}


def _time(column: OutboxColumn) -> TypeCheck:
    if column.base == "timestamp":
        return "its times are taken as UTC"
    return column.base == "timestamptz"


def _integer(column: OutboxColumn) -> TypeCheck:
    return column.base in _INTEGERS


def _offset(column: OutboxColumn) -> TypeCheck:
    if column.base in {"int2", "int4"}:
        return "offsets can exceed its range"
    return column.base == "int8"


_IDS: dict[str, Callable[[OutboxColumn], TypeCheck]] = {
    "uuid": _uuid,
    "bigint": _integer,
    "text": _text,
}
"""The check of an id's column, by the type that `source.types` gives the id."""

_READABLE: dict[str, Callable[[OutboxColumn], TypeCheck]] = {
    "aggregate_id": _text,
    "aggregate_version": _integer,
    "aggregate_type": _text,
    "event_type": _text,
    "event_ts": _time,
    "payload": _json,
    "metadata": _json,
    "c_offset": _offset,
    "transaction_ordinal": _integer,
    "transaction_count": _integer,
    "deliver_at": _time,
}
