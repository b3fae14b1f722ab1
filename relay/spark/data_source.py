"""The outbox as a Spark data source: `spark.read.format("outbox")` and `spark.readStream.format("outbox")`.

A batch query reads the difference between two snapshots of the source. The offset of a stream is a snapshot, so a
micro-batch is a difference too: it has the same rows each time, and a query that restarts from its checkpoint repeats
its last micro-batch exactly. Any number of queries may read, because none uses a replication slot.

Source: Spark documentation, "Python Data Source API".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import psycopg
from psycopg import sql
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    EqualTo,
    Filter,
    GreaterThanOrEqual,
    In,
    InputPartition,
    IsNotNull,
    LessThan,
)
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import (
    DataType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from relay.config.dsn import DatabaseAccess
from relay.faults import ConfigurationError, RelayError, first_line
from relay.model import headers
from relay.model.events import SQL_TYPES
from relay.model.snapshots import Snapshot
from relay.retention.reader_positions import note_reader
from relay.retention.removals import lost_after
from relay.source.outbox.differences import Difference, cut
from relay.source.server import durable_position
from relay.spark.data_source_options import Options, parse
from relay.spark.reading import (
    COLUMNS,
    MappedTable,
    TaskPortion,
    by_host,
    by_xid,
    columns,
    read,
    wait_until_visible,
    without_values,
)
from relay.store.connections import connect

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import SparkSession

Result = TypeVar("Result")

MOST_ROWS_BEHIND = 100_000
"""How many rows after a micro-batch are counted at most for the query's progress, along the index on c_xid."""

_TYPES: Mapping[str, DataType] = {
    "timestamptz": TimestampType(),
    "bigint": LongType(),
    "int": IntegerType(),
    "xid8": LongType(),
}
SCHEMA = StructType(
    [
        StructField(
            name,
            _TYPES.get(
                {"c_xid": "xid8", "partition": "int"}.get(name) or SQL_TYPES[name], StringType()
            ),
        )
        for name in COLUMNS
    ]
)
"""The columns of an event. Ids, payload and metadata are strings; payload and metadata hold JSON."""

HEADERS_SCHEMA = StructType(
    [*SCHEMA, StructField(headers.FIELD, MapType(StringType(), StringType()))]
)
"""The same where the option `headers` names columns."""


def register(spark: SparkSession) -> None:
    """Register `format("outbox")` in a session. The executors need relay too, installed or as an archive."""
    spark.dataSource.register(OutboxDataSource)


class OutboxDataSource(DataSource):
    """The outbox of a database; docs/reference/data-source.md lists the options."""

    @classmethod
    def name(cls) -> str:
        """The format's name."""
        return "outbox"

    def schema(self) -> StructType:
        return HEADERS_SCHEMA if parse(self.options).table.headers else SCHEMA

    def reader(self, schema: StructType) -> DataSourceReader:
        options = parse(self.options, "batch")
        names = wanted_columns(schema, self.schema())
        kind = FilteringReader if options.push_filters else DifferenceReader
        return kind(options, names)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802
        return StreamReader(parse(self.options, "stream"), wanted_columns(schema, self.schema()))


def wanted_columns(given: StructType, full: StructType) -> tuple[str, ...]:
    """The columns that a query's own schema names, which may be fewer than the source's and in another order.

    Raises ConfigurationError for a column that the source does not have, or that is of another type.
    """
    known = {column.name: column.dataType for column in full}
    names = tuple(column.name for column in given)
    for column in given:
        name, kind = column.name, column.dataType.simpleString()
        if name not in known:
            hint = (
                "set the option headers"
                if name == headers.FIELD
                else f"the columns are {', '.join(known)}"
            )
            raise ConfigurationError(f"schema: there is no column {name}: {hint}")
        if column.dataType != known[name]:
            raise ConfigurationError(
                f"schema: column {name} is {known[name].simpleString()}, not {kind}: read it as that, and cast it"
            )
        if not column.nullable:
            raise ConfigurationError(f"schema: column {name} may be null: leave out `not null`")
    if not names:
        raise ConfigurationError("schema: it has no column: name at least one")
    if len(set(names)) < len(names):
        raise ConfigurationError("schema: it names a column twice: name each once")
    return names


class RowsPartition(InputPartition):
    """The input of one task. Of what comes after the position `since`, nothing may be removed before it is read."""

    def __init__(self, portion: TaskPortion, dsn: DatabaseAccess, since: Snapshot) -> None:
        super().__init__(None)
        self.portion = portion
        self.since = since
        # Spark pickles the reader of a stream once, and each partition when it is planned: with the newest secrets.
        self.dsn = dsn


class DifferenceReader(DataSourceReader):
    """Reads one difference, from `fromSnapshot` to `toSnapshot` or to the snapshot when the query begins."""

    def __init__(self, options: Options, names: Sequence[str] | None = None) -> None:
        self._options = options
        self._names = names
        self._filter: sql.Composable | None = None

    def partitions(self) -> Sequence[InputPartition]:
        options = self._options
        with (
            _one_line(options),
            connect(options.dsn, application_name="relay spark") as conn,
        ):
            columns(conn, options.table, self._names)
            seen = durable_position(conn).snapshot
            after = options.to_snapshot or seen
            _require_seen(seen, options.from_snapshot)
            _require_seen(seen, after)
            between = Difference(options.from_snapshot, after)
            return _partitions(conn, options, between, options.from_snapshot)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        if not isinstance(partition, RowsPartition):
            # Spark makes one where there is none.
            return iter(())
        wanted = [each for each in (self._options.conditions, self._filter) if each is not None]
        condition = sql.SQL(" and ").join(wanted) if wanted else None
        return _rows(self._options, self._names, partition, condition)


class FilteringReader(DifferenceReader):
    """Passes Spark's filters on to PostgreSQL, so that it sends fewer rows."""

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:  # noqa: N802
        self._filter = condition_of(filters, self._options.table)
        return filters


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads the outbox as a stream. The driver keeps its connection while the query runs; executors do not get it."""

    def __init__(self, options: Options, names: Sequence[str] | None = None) -> None:
        self._options = options
        self._names = names
        self._conn: psycopg.Connection[Any] | None = None
        self._origin = SnapshotOrigin()
        self._target: Snapshot | None = None
        self._noted = False
        self._empty: Difference | None = None
        """A difference after the end of the newest micro-batch that has no rows, for ever."""
        self._ahead: Difference | None = None
        """What the server had after the end of the newest micro-batch; None where that is not known."""

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_conn": None}

    def initialOffset(self) -> dict[str, str]:  # noqa: N802
        snapshot = self._options.starting or self._seen()
        return _offset(snapshot, self._origin)

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        most = self._options.max_events
        return ReadAllAvailable() if most is None else ReadMaxRows(most)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        self._target = self._seen()

    def latestOffset(self, start: dict[str, str], limit: ReadLimit) -> dict[str, str]:  # noqa: N802
        before = Snapshot.parse(start["snapshot"])
        self._ahead = None
        seen = self._seen()
        self._require_own(start)
        if not self._noted:
            # Retention must keep the query's first position too.
            self.commit(start)
        _require_seen(seen, before)
        after = self._target or seen
        if not after.covers(before):
            # This replica has not reached the position of the one that gave `start`.
            return start
        most = limit.max_rows if isinstance(limit, ReadMaxRows) else None
        table = self._options.table.identifier
        with _one_line(self._options):
            between = Difference(before, after)
            end, count = self._on_session(lambda conn: cut(conn, table, between, most or 1))
            since = self._since(before)
            self._on_session(lambda conn: _require_kept(conn, self._options, since))
        if not count:
            # Neither there nor removed: a transaction that is open at `before` and ends now is not suspected later.
            self._empty = Difference(before, after)
        if most is None:
            end = after
        self._ahead = Difference(end, seen)
        return _offset(end, self._origin) if count else start

    def reportLatestOffset(self) -> dict[str, Any] | None:  # noqa: N802
        """The server's position and the number of rows after the micro-batch, for the query's progress.

        Spark calls it after `latestOffset`, and no other method gets its result.
        """
        if self._ahead is None:
            return None
        rows = 0
        if not self._ahead.is_empty:
            table = self._options.table.identifier
            try:
                _, rows = cut(self._connected(), table, self._ahead, MOST_ROWS_BEHIND)
            except (psycopg.Error, RelayError):
                # The next trigger tells it, where it matters: progress is no reason to end a query.
                return None
        return {
            **_offset(self._ahead.after, self._origin),
            "rowsBehind": rows,
            "moreRowsBehind": rows >= MOST_ROWS_BEHIND,
        }

    def partitions(self, start: dict[str, str], end: dict[str, str]) -> Sequence[InputPartition]:
        before, after = Snapshot.parse(start["snapshot"]), Snapshot.parse(end["snapshot"])
        if before == after:
            return []
        with _one_line(self._options):
            # A query that begins again repeats its last micro-batch before it asks for another offset.
            self._connected()
            self._require_own(end)
            between, since = Difference(before, after), self._since(before)
            return self._on_session(lambda conn: _partitions(conn, self._options, between, since))

    def _since(self, position: Snapshot) -> Snapshot:
        """A position at or after the given one, with the same rows after it."""
        empty = self._empty
        return position if empty is None or empty.before != position else empty.after

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, RowsPartition)  # noqa: S101
        return _rows(self._options, self._names, partition, None)

    def commit(self, end: dict[str, str]) -> None:
        """Let retention remove the events that a query with a `reader` name has read."""
        if self._options.reader is not None:
            reader, outbox = self._options.reader, ".".join(self._options.table.name)
            with _one_line(self._options):
                self._connected()
            try:
                self._on_session(lambda conn: note_reader(conn, reader, end["snapshot"], outbox))
            except psycopg.Error as error:
                raise RelayError(
                    f"option reader: its position cannot be stored: {first_line(error)}: run `relay init`, and read "
                    "the primary with a role that may write relay.readers, such as `relay`"
                ) from None
        self._noted = True

    def stop(self) -> None:
        conn, self._conn = self._conn, None
        if conn is not None:
            conn.close()

    def _connected(self) -> psycopg.Connection[Any]:
        if self._conn is None or self._conn.closed:
            self._conn = connect(self._options.dsn, application_name="relay spark")
            columns(self._conn, self._options.table, self._names)
            self._origin = origin_of(self._conn, self._options.table)
        return self._conn

    def _require_own(self, offset: dict[str, str]) -> None:
        """Raise RelayError where a checkpoint is of another outbox, in which its snapshot may look valid too.

        One from before the first rows, or of an earlier relay, does not name its outbox or its server.
        """
        own, folder = self._origin, "give each query a folder of its own"
        outbox = offset.get("outbox", own.outbox)
        if outbox != own.outbox:
            raise RelayError(
                f"option checkpointLocation: the checkpoint is of the outbox {outbox}, not of {own.outbox}: {folder}; "
                "where the outbox has a new name, begin with a new one and startingPosition "
                f"{offset['snapshot']}"
            )
        server, installed = offset.get("server", own.server), offset.get("installed")
        if server != own.server and (installed is None or installed != own.installed):
            raise RelayError(
                f"option checkpointLocation: the checkpoint is of the server {server}, not of {own.server}, and their "
                f"transaction ids mean different events: {folder}; where this is the same server after pg_upgrade, "
                f"begin with a new one and startingPosition {offset['snapshot']}"
            )

    def _seen(self) -> Snapshot:
        with _one_line(self._options):
            return self._on_session(durable_position).snapshot

    def _on_session(self, action: Callable[[psycopg.Connection[Any]], Result]) -> Result:
        """Run an action, once more where the server has ended the session."""
        try:
            return action(self._connected())
        except psycopg.OperationalError:
            self.stop()
            return action(self._connected())


@contextmanager
def _one_line(options: Options) -> Iterator[None]:
    """Turn PostgreSQL's errors into a RelayError of one line: the option, what is wrong, what to do."""
    try:
        yield
    except psycopg.Error as error:
        what = (
            without_values(error)
            .removeprefix("connection failed: ")
            .removeprefix("connection is bad: ")
        )
        if isinstance(error, psycopg.OperationalError) and error.sqlstate is None:
            hint = (
                "name a server and a role that can log in"
                if options.names_server
                else "set the option dsn, dsn.env, dsn.file or dsn.call, without which libpq's PG* variables count"
            )
            raise RelayError(f"option dsn: no connection: {what}: {hint}") from None
        raise RelayError(f"table: {'.'.join(options.table.name)} cannot be read: {what}") from None


@dataclass(frozen=True, slots=True)
class SnapshotOrigin:
    """Where the snapshots of a stream are valid; all is "" before the first connection.

    `outbox` is the database, schema and name of the outbox, `server` the system identifier. `installed` is the time at
    which relay was installed in the database, in seconds since 1970, which pg_upgrade keeps; "" where relay is not
    installed, or this role may not see it.
    """

    outbox: str = ""
    server: str = ""
    installed: str = ""


_SERVER = """
    select pg_catalog.current_database(), s.system_identifier::text,
           (select count(*) from pg_catalog.pg_class as c join pg_catalog.pg_namespace as n on n.oid = c.relnamespace
             where nspname = 'relay' and relname = 'migrations' and pg_catalog.has_schema_privilege(n.oid, 'usage')
               and pg_catalog.has_table_privilege(c.oid, 'select'))
      from pg_catalog.pg_control_system() as s
"""
_INSTALLED = "select extract(epoch from min(applied_at))::text from relay.migrations"


def origin_of(conn: psycopg.Connection[Any], table: MappedTable) -> SnapshotOrigin:
    """Read where the snapshots of a connection's server are valid. Raises psycopg.Error."""
    ((database, server, is_readable),) = conn.execute(_SERVER)
    installed = ""
    if is_readable:
        ((installed,),) = conn.execute(_INSTALLED)
    return SnapshotOrigin(".".join((database, *table.name)), server, installed or "")


def _offset(snapshot: Snapshot, origin: SnapshotOrigin) -> dict[str, str]:
    known = {name: text for name, text in asdict(origin).items() if text}
    return {"snapshot": str(snapshot), **known}


def _require_seen(seen: Snapshot, wanted: Snapshot) -> None:
    """Raise RelayError where a snapshot names transactions that the server has not begun."""
    if wanted.xmax > seen.xmax and not wanted.is_beginning:
        raise RelayError(
            f"snapshot {wanted}: this server's next transaction is {seen.xmax}: it is an older backup, another "
            "cluster, or a replica that lags; read the server that the snapshot came from, or begin again with a new "
            "checkpoint"
        )


def _require_kept(conn: psycopg.Connection[Any], options: Options, position: Snapshot) -> None:
    """Raise RelayError where retention has removed events after a position, unless the option allows it."""
    if not options.fail_on_data_loss:
        return
    outbox = ".".join(options.table.name)
    loss = lost_after(conn, outbox, position)
    if loss is None:
        return
    what = f"events up to transaction {loss.xid}"
    has = "has removed"
    if not loss.is_certain:
        what, has = f"events of transaction {loss.xid}, which was open then", "may have removed"
    raise RelayError(
        f"option failOnDataLoss: retention {has} {what}, from {outbox}, which come after this query's position "
        f"{position}: begin with a new checkpoint, or set the option to false to go on without them; the option reader "
        "makes retention keep what a stream has not read"
    )


def _rows(
    options: Options,
    names: Sequence[str] | None,
    partition: RowsPartition,
    condition: sql.Composable | None,
) -> Iterator[pa.RecordBatch]:
    """The rows of one task."""
    return read(
        partition.dsn,
        options.table,
        partition.portion,
        options.partitions,
        condition,
        names,
        lambda conn: _require_kept(conn, options, partition.since),
    )


def _partitions(
    conn: psycopg.Connection[Any], options: Options, between: Difference, since: Snapshot
) -> list[InputPartition]:
    """The input of the tasks; `since` is a position from which on nothing may be missing."""
    # The rows that are looked up here are those that the tasks read: a replica may lag.
    wait_until_visible(conn, between.after)
    divide = by_host if options.ordered else by_xid
    portions = divide(conn, options.table, between, options.partitions)
    # Afterwards: rows that were removed before have no task that could miss them.
    _require_kept(conn, options, since)
    return [RowsPartition(portion, options.dsn, since) for portion in portions]


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
