"""The columns of a Spark sink's events that its query needs, so that PostgreSQL reads no others.

Spark prunes no columns of a Python function's result. But its optimiser puts the columns that a query needs right above
the function, and a job has properties that its tasks see. So the plan is read before the job begins, and each task
reads these columns. Where the plan does not tell, tasks read all of them; so they do on Spark Connect, whose client has
neither the plan nor the properties.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

PROPERTY = "relay.columns"
"""The property of a job: the key of the frame, and the columns that its tasks read."""

_FUNCTION = "MapInArrow"
_READ_BY_SPARK = frozenset(
    {
        *("LocalRelation", "OneRowRelation", "Range", "EmptyRelation"),
        *("LogicalRelation", "HiveTableRelation", "RelationV2", "DataSourceV2ScanRelation"),
    }
)
"""Leaves of a plan that cannot have another of its frames inside, as a cached frame or an RDD can."""


class _UnknownPlan(Exception):
    """The plan does not tell which columns it needs."""


def needed(frame: DataFrame, columns: Sequence[str]) -> frozenset[str] | None:
    """The columns of the events that a classic session's frame needs; None where its plan does not tell.

    `columns` are all that the function on the executors returns.
    """
    plan = frame._jdf.queryExecution().optimizedPlan()
    found: set[str] = set()
    try:
        seen = sum(_visit(plan, tuple(columns), found))
    except _UnknownPlan:
        return None
    return frozenset(found) if seen else None


def apply(session: SparkSession, key: str, columns: frozenset[str] | None) -> None:
    """Let the jobs that this thread starts next read `columns` only of the frame with this key; None for all."""
    value = "" if columns is None else f"{key} {' '.join(sorted(columns))}"
    session.sparkContext.setLocalProperty(PROPERTY, value)


def of_task(key: str) -> frozenset[str] | None:
    """The columns that the present task reads of the frame with a key; None for all."""
    from pyspark import TaskContext

    context = TaskContext.get()
    value = context.getLocalProperty(PROPERTY) if context else None
    if not value:
        return None
    frame, _, columns = value.partition(" ")
    return frozenset(columns.split()) if frame == key else None


def _visit(node: Any, columns: tuple[str, ...], found: set[str]) -> Iterator[int]:
    """Add what is needed of the events to `found`; yields 1 each time that the plan has them."""
    above = [node]
    below = node
    if node.nodeName() in ("Project", "Aggregate"):
        below = node.child()
        while below.nodeName() == "Filter":
            above.append(below)
            below = below.child()
    if _is_events(below, columns):
        if below is node:
            # Nothing above it cuts its columns.
            raise _UnknownPlan
        for each in above:
            found.update(attribute.name() for attribute in _items(each.references().toSeq()))
            for subquery in _items(each.subqueries()):
                yield from _visit(subquery, columns, found)
        yield 1
        return
    children = list(_items(node.children()))
    if not children and node.nodeName().split(" ")[0] not in _READ_BY_SPARK:
        raise _UnknownPlan
    for each in (*children, *_items(node.subqueries())):
        yield from _visit(each, columns, found)


def _is_events(node: Any, columns: tuple[str, ...]) -> bool:
    return (
        node.nodeName() == _FUNCTION
        and node.child().nodeName() == "Range"
        and tuple(each.name() for each in _items(node.output())) == columns
    )


def _items(sequence: Any) -> list[Any]:
    return [sequence.apply(index) for index in range(sequence.size())]
