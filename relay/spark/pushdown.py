"""Turns those of Spark's filters into conditions of PostgreSQL for which both give the same result on every value."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from psycopg import sql
from pyspark.sql.datasource import EqualTo, Filter, GreaterThanOrEqual, In, IsNotNull, LessThan

from relay.model.events import SQL_TYPES
from relay.spark.reading import MappedTable

# Types that PostgreSQL compares as Spark does. Not jsonb: Spark compares its text. Texts only for equality: their order
# depends on the collation.
_EQUAL = ("text", "uuid", "bigint", "int")
_ORDERED = ("bigint", "int")


def condition_of(filters: Iterable[Filter], table: MappedTable) -> sql.Composable | None:
    """The filters that PostgreSQL can apply, as one condition on the outbox; None without any.

    Spark applies all filters again, so a filter that this leaves out costs time only.
    """
    conditions = [
        condition
        for condition in (_condition(each, table) for each in filters)
        if condition is not None
    ]
    return sql.SQL(" and ").join(conditions) if conditions else None


def _condition(each: Filter, table: MappedTable) -> sql.Composable | None:
    attribute: tuple[str, ...] = getattr(each, "attribute", ())
    field = attribute[0] if len(attribute) == 1 else ""
    column = table.mapping.get(field)
    if not column:
        return None
    name, kind = sql.Identifier(column), SQL_TYPES[field]
    if isinstance(each, IsNotNull):
        return sql.SQL("{} is not null").format(name)
    if isinstance(each, EqualTo) and kind in _EQUAL:
        return _compared(name, kind, "=", each.value)
    if isinstance(each, In) and kind in _EQUAL:
        values = sql.SQL(", ").join(sql.Literal(_plain(value)) for value in each.value)
        return sql.SQL("concat({}) in ({})").format(name, values) if each.value else None
    if isinstance(each, GreaterThanOrEqual) and kind in _ORDERED:
        return _compared(name, kind, ">=", each.value)
    if isinstance(each, LessThan) and kind in _ORDERED:
        return _compared(name, kind, "<", each.value)
    return None


def _compared(name: sql.Identifier, kind: str, operator: str, value: Any) -> sql.Composable:
    if kind in _ORDERED:
        return sql.SQL("{} {} {}").format(name, sql.SQL(operator), sql.Literal(int(value)))
    # Not a cast to text, which removes the trailing spaces of a `char`.
    return sql.SQL("concat({}) = {}").format(name, sql.Literal(_plain(value)))


def _plain(value: Any) -> str:
    return str(value)
