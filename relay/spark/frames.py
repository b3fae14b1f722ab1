"""The DataFrame of a Spark sink's batch, to the one that is written.

The executors read a difference and keep the events routed to the sink; then the sink's `sql` and `transform` apply.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import psycopg
from psycopg import sql

from relay.config.handlers import SPARK_COLUMNS, SparkHandler
from relay.config.imports import load
from relay.config.settings import Settings
from relay.config.source import SourceSettings
from relay.faults import ConfigurationError, Unrouted
from relay.model import headers
from relay.model.events import FIELDS, INSERTED_BY, SQL_TYPES, timestamp
from relay.model.snapshots import XID_CYCLE
from relay.pipeline.routing import RouteRules, Values
from relay.source.outbox.differences import XID, Difference, condition, without
from relay.spark import pruning
from relay.spark.descriptions import of_function, safe_description
from relay.spark.reading import PARTITION, MappedTable, TaskPortion, by_xid, map_type, read
from relay.spark.writers import BATCH_COLUMN
from relay.store.deferred import event_key
from relay.store.positions.sinks import BEFORE_FIRST
from relay.store.positions.spark_batches import Contents, OpenBatch

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

TASK_EVENTS = 10_000
"""The rows of one task: a batch has another task for each as many."""
PRUNED_ROWS = 10_000
"""The rows from which on a batch reads only the columns that its query needs."""
_SLOTS = 8
"""The most tasks of a batch where the session does not report its Spark slots."""
_POSTGRES_EPOCH = 946_684_800_000_000
"""2000-01-01 in microseconds since 1970."""

_TYPES = {
    **{
        name: {"timestamptz": "timestamp", "bigint": "bigint", "int": "int"}.get(kind, "string")
        for name, kind in SQL_TYPES.items()
    },
    "date": "date",
    "host_bucket": "int",
    headers.FIELD: "map<string,string>",
}


def columns(source: SourceSettings) -> tuple[str, ...]:
    """The columns of a frame, with `headers` where the source has any."""
    return (*SPARK_COLUMNS, headers.FIELD) if source.headers else SPARK_COLUMNS


def spark_type(name: str) -> str:
    """The type of a frame's column in Spark's SQL."""
    return _TYPES[name]


def arrow_schema(names: Sequence[str]) -> pa.Schema:
    """The columns of a frame as Arrow's types."""
    import pyarrow as pa

    kinds = {
        "string": pa.string(),
        "bigint": pa.int64(),
        "int": pa.int32(),
        "timestamp": pa.timestamp("us", "UTC"),
        "date": pa.date32(),
        "map<string,string>": map_type(),
    }
    return pa.schema([(name, kinds[_TYPES[name]]) for name in names])


def frame(
    session: SparkSession,
    slots: int | None,
    conn: psycopg.Connection[Any],
    settings: Settings,
    sink: str,
    batch: OpenBatch,
) -> DataFrame:
    """The DataFrame of a batch: `columns` and `relay_batch`.

    `conn` is a connection to the source, `slots` the session's Spark slots. Raises psycopg.Error.
    """
    from pyspark.sql import functions

    contents = batch.contents
    tasks = min(slots or _SLOTS, 1 + contents.rows // TASK_EVENTS)
    between = Difference(contents.before, contents.after)
    portions: list[TaskPortion] = []
    if contents.rows:
        portions = by_xid(conn, _table(settings), between, tasks)
    plain = replace(contents, data=None)
    task = _Task(pickle.dumps(settings), sink, batch.host_buckets, plain, tuple(portions), batch.id)
    # The rows are numbers of portions. The task comes with the function, which query plans do not show.
    numbers = session.range(0, len(portions), 1, max(1, len(portions)))
    schema = ", ".join(f"`{name}` {_TYPES[name]}" for name in columns(settings.source))
    rows = numbers.mapInArrow(partial(_rows, task), schema)
    if contents.data is not None:
        # A batch that was stored before source.headers was set has no such column.
        rows = rows.unionByName(
            session.createDataFrame(_unpacked_rows(contents.data)), allowMissingColumns=True
        )
    return rows.withColumn(BATCH_COLUMN, functions.lit(batch.id))


def read_only_needed(
    session: SparkSession, source: SourceSettings, transformed: DataFrame | None, batch: OpenBatch
) -> None:
    """Let the tasks of a batch's frame read no more columns than `transformed` needs, in the jobs that come next.

    None stands for all columns, for the jobs of a user's function that has the frame. Small batches read all of them:
    the plan takes as long to read as to optimise. For a classic session.
    """
    wanted = None
    if transformed is not None and batch.contents.rows > PRUNED_ROWS:
        wanted = pruning.needed(transformed, columns(source))
    pruning.apply(session, batch.id, wanted)


def left_out(table: MappedTable, contents: Contents) -> sql.Composable | None:
    """The condition on rows of a batch's difference that the sink has not received yet; None where all are new."""
    offset = sql.Identifier(table.mapping["c_offset"])
    wanted: list[sql.Composable] = []
    if contents.left_out:
        wanted.append(without(contents.left_out))
    if contents.polled_offset != BEFORE_FIRST:
        wanted.append(
            sql.SQL(
                "case when {xid} is null then {offset} > {polled}"
                " else {xid} in (select {xid} from {table} where {between} group by {xid}"
                " having max({offset}) > {polled}) end"
            ).format(
                xid=XID,
                offset=offset,
                polled=sql.Literal(contents.polled_offset),
                table=table.identifier,
                between=condition(Difference(contents.before, contents.after)),
            )
        )
    return sql.SQL(" and ").join(wanted) if wanted else None


def rows_of(table: MappedTable, contents: Contents) -> sql.Composable:
    """The condition on the rows of a batch."""
    between = condition(Difference(contents.before, contents.after))
    wanted = left_out(table, contents)
    return between if wanted is None else sql.SQL("{} and {}").format(between, wanted)


def packed_rows(rows: Sequence[Sequence[Any]], names: Sequence[str]) -> bytes:
    """Rows of a frame's columns as an Arrow IPC stream. Times are microseconds since 1970, dates days since 1970."""
    import pyarrow as pa

    schema = arrow_schema(names)
    arrays = [
        pa.array(column, kind)
        for column, kind in zip(zip(*rows, strict=True), schema.types, strict=True)
    ]
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, schema) as stream:
        stream.write_batch(pa.RecordBatch.from_arrays(arrays, schema=schema))
    return sink.getvalue()


def _unpacked_rows(data: bytes) -> pa.Table:
    import pyarrow as pa

    with pa.ipc.open_stream(data) as stream:
        return stream.read_all()


def packed_ids(data: bytes | None) -> list[str]:
    """The ids of the events of an Arrow stream, as `deferred.event_key` has them."""
    if data is None:
        return []
    return [event_key(each or "") for each in _unpacked_rows(data).column("id").to_pylist()]


def _table(settings: Settings) -> MappedTable:
    return MappedTable(settings.source.table_name, settings.source.mapping)


VIEW = "events"
"""The name of the frame in a sink's query."""


class Transform:
    """The query and the function of one sink."""

    def __init__(self, name: str, handler: SparkHandler) -> None:
        """Raises ConfigurationError for a callable that cannot be imported."""
        self._key = f"handlers.{name}"
        self._query = handler.sql
        self._function = (
            load(f"{self._key}.transform", handler.transform, "frame")
            if handler.transform
            else None
        )

    @property
    def has_function(self) -> bool:
        """Whether the sink has a user's function, whose errors may quote values."""
        return self._function is not None

    def applied(self, session: SparkSession, frame: DataFrame) -> DataFrame:
        """The frame to write: `frame` itself where the sink has neither a query nor a function.

        The view is one of `session`, which no other sink may use: a Connect server resolves it when the frame is
        written. Raises ConfigurationError.
        """
        if self._query:
            frame.createOrReplaceTempView(VIEW)
            frame = self._queried(session, self._query)
        return self._transformed(frame) if self._function else frame

    def _queried(self, session: SparkSession, query: str) -> DataFrame:
        from pyspark.errors import AnalysisException

        try:
            return session.sql(query)
        except AnalysisException as error:
            raise ConfigurationError(f"{self._key}.sql: {safe_description(error)}") from error

    def _transformed(self, frame: DataFrame) -> DataFrame:
        from pyspark.sql import DataFrame

        assert self._function is not None  # noqa: S101
        key = f"{self._key}.transform"
        with of_function(key):
            transformed = self._function(frame)
        if not isinstance(transformed, DataFrame):
            raise ConfigurationError(
                f"{key}: the function returned {type(transformed).__name__}: return the DataFrame to write"
            )
        return transformed


# On the executors.


@dataclass(frozen=True)
class _Task:
    """The input of a batch's tasks, each of which reads a portion. `settings`, pickled, hold passwords."""

    settings: bytes
    sink: str
    host_buckets: int
    contents: Contents
    portions: tuple[TaskPortion, ...]
    key: str
    """Names the frame to `pruning`."""

    def __repr__(self) -> str:
        return f"_Task(sink={self.sink})"


def _rows(task: _Task, numbers: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    settings: Settings = pickle.loads(task.settings)  # noqa: S301
    routes = _Routes(settings, task.sink)
    wanted = left_out(_table(settings), task.contents)
    needed = pruning.of_task(task.key)
    names = None if needed is None else _read_columns({*needed, *routes.fields})
    for batch in numbers:
        for (number,) in zip(*(column.to_pylist() for column in batch.columns), strict=True):
            reading = partial(
                read,
                settings.source_dsn,
                _table(settings),
                task.portions[number],
                task.host_buckets,
                wanted,
                names,
            )
            for rows in routes.chosen(reading):
                yield _shaped(rows, columns(settings.source))


def _read_columns(needed: Collection[str]) -> list[str]:
    """The columns of a read from which columns of a frame are made; at least one."""
    made_from = {"xid": INSERTED_BY, "date": "event_ts", "host_bucket": PARTITION}
    readable = (*FIELDS, headers.FIELD, INSERTED_BY, PARTITION)
    return sorted({made_from.get(name, name) for name in needed}.intersection(readable)) or [
        INSERTED_BY
    ]


class _Routes:
    """Chooses the rows of a sink, with the results of `relay.pipeline.routing.BatchRouter`."""

    def __init__(self, settings: Settings, sink: str) -> None:
        self._sink = sink
        self._rules = RouteRules(settings.routes)
        self._unrouted = settings.unrouted
        self._is_total = any(not route.match for route in settings.routes)

    @property
    def fields(self) -> set[str]:
        """The columns that are read to choose the rows."""
        matched = {
            headers.FIELD if field.startswith(headers.PREFIX) else field
            for field in self._rules.fields
        }
        return matched if self._reads_once else {*matched, *_TRANSACTION}

    @property
    def _reads_once(self) -> bool:
        return self._is_total or self._unrouted == "ignore"

    def chosen(self, reading: Callable[[], Iterator[pa.RecordBatch]]) -> Iterator[pa.RecordBatch]:
        """The rows that are routed to the sink.

        The sink gets no event of a business transaction that has an unrouted event. To know these transactions, it
        reads the portion twice, unless a route takes every event or `unrouted` is `ignore`. Raises Unrouted where
        `unrouted` is `fail`.
        """
        import pyarrow as pa

        refused: set[tuple[Any, ...]] = set()
        if not self._reads_once:
            for batch in reading():
                names = self._handlers(batch)
                lost = pa.array([not each for each in names], pa.bool_())
                refused.update(_transactions(batch.filter(lost)))
            self._require_routed(refused)
        for batch in reading():
            wanted = [self._sink in names for names in self._handlers(batch)]
            if refused:
                keys = zip(wanted, _transactions(batch), strict=True)
                wanted = [is_wanted and key not in refused for is_wanted, key in keys]
            if any(wanted):
                yield batch.filter(pa.array(wanted, pa.bool_()))

    def _require_routed(self, refused: set[tuple[Any, ...]]) -> None:
        if refused and self._unrouted == "fail":
            raise Unrouted(
                "routes: no route matches an event, and unrouted is `fail`: add a route, or set unrouted"
            )

    def _handlers(self, batch: pa.RecordBatch) -> list[tuple[str, ...]]:
        if not self._rules.fields:
            return [self._rules.choose(())] * len(batch)
        values = [_texts(batch, field) for field in self._rules.fields]
        rows: Iterator[Values] = zip(*values, strict=True)
        return [self._rules.choose(row) for row in rows]


_TRANSACTION = (INSERTED_BY, "transaction_id", "host_id", "user_id")


def _transactions(batch: pa.RecordBatch) -> list[tuple[Any, ...]]:
    """The business transaction of each row: its commit with its transaction_id or, without one, its host and user."""
    columns = (batch.column(name).to_pylist() for name in _TRANSACTION)
    return [
        (xid, each) if each is not None else (xid, None, host, user)
        for xid, each, host, user in zip(*columns, strict=True)
    ]


def _texts(batch: pa.RecordBatch, field: str) -> list[str | None]:
    """A field's values as PostgreSQL prints them; None for a field that only the WAL has, as when polling."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if field.startswith(headers.PREFIX):
        name = pa.scalar(field.removeprefix(headers.PREFIX))
        values: list[str | None] = pc.map_lookup(
            batch.column(headers.FIELD), name, "first"
        ).to_pylist()
        return values
    if field == "xid":
        return [
            None if xid is None else str(xid % XID_CYCLE)
            for xid in batch.column(INSERTED_BY).to_pylist()
        ]
    if field not in FIELDS:
        return [None] * len(batch)
    column = batch.column(field)
    if not pa.types.is_timestamp(column.type):
        return [None if each is None else str(each) for each in column.to_pylist()]
    return [
        None if each is None else timestamp(each - _POSTGRES_EPOCH)
        for each in column.cast(pa.int64()).to_pylist()
    ]


def _shaped(batch: pa.RecordBatch, names: Sequence[str]) -> pa.RecordBatch:
    """Rows of the outbox as the columns of a frame; those that were not read are null."""
    import pyarrow as pa
    import pyarrow.compute as pc

    schema = arrow_schema(names)
    known = dict(zip(batch.schema.names, batch.columns, strict=True))
    if INSERTED_BY in known:
        known["xid"] = pc.bit_wise_and(known[INSERTED_BY], pa.scalar(XID_CYCLE - 1, pa.int64()))
    if "event_ts" in known:
        known["date"] = pc.floor_temporal(known["event_ts"], unit="day").cast(pa.date32())
    if PARTITION in known:
        known["host_bucket"] = known[PARTITION]
    arrays = [known.get(name) for name in names]
    return pa.RecordBatch.from_arrays(
        [
            pa.nulls(len(batch), field.type) if column is None else column
            for column, field in zip(arrays, schema, strict=True)
        ],
        schema=schema,
    )
