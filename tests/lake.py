"""A DataFrame and a session that run what is an executor's in this process: tests of tables without Spark."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa
from pyspark.sql.pandas.types import from_arrow_schema

Task = Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]


class Results:
    """What tasks have returned."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self._rows = rows

    def collect(self) -> list[Any]:
        """The rows, with their columns as attributes."""
        return [namedtuple("Row", row)(**row) for row in self._rows]


class LocalSession:
    """Runs a task for each number."""

    def range(self, start: int, end: int, step: int, tasks: int) -> LocalFrame:
        """The numbers, each of which is a task's."""
        numbers = pa.table({"id": pa.array(range(start, end, step), pa.int64())})
        return LocalFrame(numbers, tasks)


class LocalFrame:
    """The rows of a batch, split evenly among some tasks."""

    def __init__(self, rows: pa.Table, tasks: int = 2) -> None:
        self.rows = rows
        self.schema = from_arrow_schema(rows.schema)
        for field, given in zip(self.schema, rows.schema, strict=True):
            known = given.metadata or {}
            field.metadata = {name.decode(): text.decode() for name, text in known.items()}
        self.columns = rows.column_names
        self.sparkSession = LocalSession()
        self._tasks = tasks

    def select(self, *columns: str) -> LocalFrame:
        """Some columns of the rows."""
        return LocalFrame(self.rows.select(list(columns)), self._tasks)

    def mapInArrow(self, task: Task, _: str) -> Results:  # noqa: N802
        """Run the task on each part of the rows."""
        size = -(-self.rows.num_rows // self._tasks)
        parts = [self.rows.slice(n * size, size) for n in range(self._tasks)]
        return Results(
            [
                row
                for part in parts
                for done in task(iter(part.to_batches()))
                for row in done.to_pylist()
            ]
        )
