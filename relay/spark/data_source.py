"""The outbox as a Spark data source: `spark.read.format("outbox")` and `spark.readStream.format("outbox")`.

A batch query reads the difference between two snapshots of the source. The offset of a stream is a snapshot, so a
micro-batch is a difference too: it has the same rows each time, and a query that restarts from its checkpoint repeats
its last micro-batch exactly. The offset names a witness too, by which a restart knows whether the server still has what
was read. Any number of queries may read, because none uses a replication slot.

Source: Spark documentation, "Python Data Source API".
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
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
from relay.retention.lost_events import lost_after, removals
from relay.retention.reader_positions import note_reader
from relay.source.outbox.differences import Difference, cut
from relay.source.server import durable_position, is_standby
from relay.source.witnesses import holds
from relay.spark.data_source_options import Options, parse
from relay.spark.query_positions import (
    QueryPosition,
    StreamPositions,
    keeping_refusal,
    known_here,
    require_begun,
    require_known,
)
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

log = logging.getLogger(__name__)

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


@dataclass(frozen=True, slots=True)
class ReadFrom:
    """Of what comes after the position `since`, nothing may be removed before it is read.

    `removals` numbers what had been removed when a batch was planned, which one from the beginning does not miss; None
    for a stream, and where a batch need not ask later, or cannot.
    """

    since: Snapshot
    removals: tuple[int, ...] | None = None


class RowsPartition(InputPartition):
    """The input of one task."""

    def __init__(self, portion: TaskPortion, dsn: DatabaseAccess, kept: ReadFrom) -> None:
        super().__init__(None)
        self.portion = portion
        self.kept = kept
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
            one_line(options),
            connect(options.dsn, application_name="relay spark") as conn,
        ):
            columns(conn, options.table, self._names)
            return planned_batch(conn, options)

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
        self._positions = StreamPositions(options.table, options.fail_on_data_loss)
        self._noted = False
        self._warned = False
        self._end: QueryPosition | None = None
        self._ahead: Difference | None = None
        """What the server had after the end of the newest micro-batch, `_end`; None where that is not known."""

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_conn": None}

    def initialOffset(self) -> dict[str, str]:  # noqa: N802
        options, position = self._options, self._options.starting
        with one_line(options):
            if position is None:
                position = self._on_session(self._positions.now)
            elif not position.is_proven and options.fail_on_data_loss:
                given = position
                self._on_session(lambda conn: _require_proven(conn, "startingPosition", given))
        return _offset(position, self._origin)

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        most = self._options.max_events
        return ReadAllAvailable() if most is None else ReadMaxRows(most)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        with one_line(self._options):
            self._positions.target = self._on_session(durable_position).snapshot

    def latestOffset(self, start: dict[str, str], limit: ReadLimit) -> dict[str, str]:  # noqa: N802
        position, positions = QueryPosition.of(start), self._positions
        self._ahead = None
        most = limit.max_rows if isinstance(limit, ReadMaxRows) else None
        since = positions.since(position.snapshot)

        def advance(conn: psycopg.Connection[Any]) -> tuple[QueryPosition, int, Snapshot]:
            seen, elsewhere = durable_position(conn), self._is_elsewhere(start)
            return *positions.advance(conn, position, seen, elsewhere, most), seen.snapshot

        with one_line(self._options):
            end, count, seen = self._on_session(advance)
            if not self._noted:
                # Retention must keep the query's first position too.
                self.commit(start)
            self._on_session(lambda conn: _require_kept(conn, self._options, ReadFrom(since)))
            positions.note_kept()
        self._end, self._ahead = end, Difference(end.snapshot, seen)
        return _offset(end, self._origin) if count else start

    def reportLatestOffset(self) -> dict[str, Any] | None:  # noqa: N802
        """The server's snapshot and the number of rows after the micro-batch, for the query's progress.

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
            **_offset(QueryPosition(self._ahead.after), self._origin),
            "position": str(self._end),
            "rowsBehind": rows,
            "moreRowsBehind": rows >= MOST_ROWS_BEHIND,
        }

    def partitions(self, start: dict[str, str], end: dict[str, str]) -> Sequence[InputPartition]:
        before, after = QueryPosition.of(start), QueryPosition.of(end)
        if before.snapshot == after.snapshot:
            return []
        with one_line(self._options):
            # A query that begins again repeats its last micro-batch before it asks for another offset.
            self._connected()
            elsewhere, since = self._is_elsewhere(end), self._positions.since(before.snapshot)
            shown = self._on_session(
                lambda conn: self._positions.shown(conn, before, after, elsewhere)
            )
            return self._on_session(
                lambda conn: _partitions(conn, self._options, before, shown, ReadFrom(since))
            )

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, RowsPartition)  # noqa: S101
        return _rows(self._options, self._names, partition, None)

    def commit(self, end: dict[str, str]) -> None:
        """Let retention remove the events that a query with a `reader` name has read."""
        if self._options.reader is not None:
            with one_line(self._options):
                self._connected()
                self._on_session(lambda conn: _note(conn, self._options, end["snapshot"]))
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
            self._positions.begin_session(self._conn)
        return self._conn

    def _is_elsewhere(self, offset: dict[str, str]) -> bool:
        """Whether an offset is of a server with another identifier, which its witness may let go on.

        One at the beginning does not name its server or its outbox, nor does one that an earlier relay has written.
        Raises RelayError where it is of another outbox, in which its snapshot may look valid too.
        """
        own, folder = self._origin, "give each query a folder of its own"
        outbox, server = offset.get("outbox", own.outbox), offset.get("server", own.server)
        position = QueryPosition.of(offset)
        if outbox != own.outbox:
            raise RelayError(
                f"option checkpointLocation: the checkpoint is of the outbox {outbox}, not of {own.outbox}: {folder}; "
                f"where the outbox has a new name, begin with a new one and startingPosition {position}"
            )
        if server != own.server and not self._positions.can_prove(position):
            same = str(position)
            if self._positions.keeps:
                same = self._on_session(lambda conn: known_here(conn, position.snapshot))
            raise RelayError(
                f"option checkpointLocation: the checkpoint is of the server {server}, not of {own.server}, and their "
                f"transaction ids mean different events: {folder}; where this is the same server after pg_upgrade, "
                f"begin with a new one and startingPosition {same}"
            )
        if not position.is_proven and self._options.fail_on_data_loss and not self._warned:
            self._warned = True
            log.warning(
                "the checkpoint names no witness, as those of an earlier relay, so nothing proves that this server has "
                "what was read: the next offset names one"
            )
        return server != own.server

    def _on_session(self, action: Callable[[psycopg.Connection[Any]], Result]) -> Result:
        """Run an action, once more where the server has ended the session."""
        try:
            return action(self._connected())
        except psycopg.OperationalError:
            self.stop()
            return action(self._connected())


@contextmanager
def one_line(options: Options) -> Iterator[None]:
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

    `outbox` is the database, schema and name of the outbox, `server` the system identifier.
    """

    outbox: str = ""
    server: str = ""


def origin_of(conn: psycopg.Connection[Any], table: MappedTable) -> SnapshotOrigin:
    """Read where the snapshots of a connection's server are valid. Raises psycopg.Error."""
    ((database, server),) = conn.execute(
        "select pg_catalog.current_database(), system_identifier::text from pg_catalog.pg_control_system()"
    )
    return SnapshotOrigin(".".join((database, *table.name)), server)


def _offset(position: QueryPosition, origin: SnapshotOrigin) -> dict[str, str]:
    known = {name: text for name, text in asdict(origin).items() if text}
    witness = {"witness": str(position.witness)} if position.witness else {}
    return {"snapshot": str(position.snapshot), **witness, **known}


def _opened(
    conn: psycopg.Connection[Any],
    options: Options,
    option: str,
    position: QueryPosition,
    seen: Snapshot,
) -> QueryPosition:
    """A position of a batch, once a replica has come to it. Raises RelayError where the server lacks what it sees."""
    if position.witness is None:
        require_begun(seen, position.snapshot)
        return position
    refusal = keeping_refusal(conn)
    if refusal is not None:
        raise RelayError(f"option {option}: {refusal}")
    if holds(conn, position.witness):
        return position
    if not is_standby(conn):
        require_known(conn, options.table, position, options.fail_on_data_loss)
        return QueryPosition(position.snapshot)
    wait_until_visible(conn, position.snapshot, position.witness)
    return position


def _require_proven(conn: psycopg.Connection[Any], option: str, position: QueryPosition) -> None:
    """Raise RelayError for a position that does not name its history."""
    if position.is_proven:
        return
    refusal = keeping_refusal(conn)
    cure = refusal or (
        "give its snapshot, an @ and a witness, as relay.recent_witness() returns both; where you know that it is of "
        f"this server, {known_here(conn, position.snapshot)}"
    )
    raise RelayError(
        f"option {option}: the snapshot {position.snapshot} names no witness, so nobody can tell whether this server "
        f"has what it sees: {cure}, or set the option failOnDataLoss to false"
    )


def _require_kept(conn: psycopg.Connection[Any], options: Options, kept: ReadFrom) -> None:
    """Raise RelayError where retention has removed events that are to be read, unless the option allows it."""
    if not options.fail_on_data_loss:
        return
    outbox = ".".join(options.table.name)
    loss = lost_after(conn, outbox, kept.since, kept.removals)
    if loss is None:
        return
    what = f"events up to transaction {loss.xid}"
    has = "has removed"
    if not loss.is_certain:
        what, has = f"events of transaction {loss.xid}, which was open then", "may have removed"
    raise RelayError(removed_line(outbox, kept, what, has))


def removed_line(
    outbox: str, kept: ReadFrom, what: str = "events", has: str = "has removed"
) -> str:
    """The line that says that a query has missed rows."""
    which, again = (
        ("while this query read it", "read again")
        if kept.since.is_beginning
        else (f"which come after this query's position {kept.since}", "begin with a new checkpoint")
    )
    return (
        f"option failOnDataLoss: retention {has} {what}, from {outbox}, {which}: {again}, or set the option to false "
        "to go on without them; the option reader makes retention keep what a query has not read"
    )


def _note(conn: psycopg.Connection[Any], options: Options, snapshot: str) -> None:
    """Let retention hold what comes after a snapshot, if the query has a `reader` name."""
    if options.reader is None:
        return
    try:
        note_reader(conn, options.reader, snapshot, ".".join(options.table.name))
    except psycopg.OperationalError:
        raise
    except psycopg.Error as error:
        raise RelayError(
            f"option reader: its position cannot be stored: {first_line(error)}: run `relay init`, and read "
            "the primary with a role that may write relay.readers, such as `relay`"
        ) from None


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
        lambda conn: _require_kept(conn, options, partition.kept),
    )


def planned_batch(conn: psycopg.Connection[Any], options: Options) -> list[RowsPartition]:
    """The input of a batch's tasks: the one place that plans a range. Raises RelayError, psycopg.Error."""
    seen = durable_position(conn).snapshot
    before, after = options.from_snapshot, options.to_snapshot or QueryPosition(seen)
    before = _opened(conn, options, "fromSnapshot", before, seen)
    after = _opened(conn, options, "toSnapshot", after, seen)
    if options.fail_on_data_loss:
        _require_proven(conn, "fromSnapshot", before)
    _note(conn, options, str(before.snapshot))
    removed = None
    # Of a part of all that there is, what retention removes may be what is not read.
    is_part = before.snapshot.is_beginning and options.ranges
    if options.fail_on_data_loss and not is_part:
        removed = removals(conn, ".".join(options.table.name))
    return _partitions(conn, options, before, after, ReadFrom(before.snapshot, removed))


def _partitions(
    conn: psycopg.Connection[Any],
    options: Options,
    before: QueryPosition,
    after: QueryPosition,
    kept: ReadFrom,
) -> list[RowsPartition]:
    """The input of the tasks."""
    # The rows that are looked up here are those that the tasks read: a replica may lag.
    wait_until_visible(conn, after.snapshot, after.witness)
    divide = by_host if options.ordered else by_xid
    between = Difference(before.snapshot, after.snapshot)
    portions = divide(conn, options.table, between, options.partitions)
    # Afterwards: rows that were removed before have no task that could miss them.
    _require_kept(conn, options, replace(kept, removals=None))
    return [
        RowsPartition(replace(portion, witness=after.witness), options.dsn, kept)
        for portion in portions
    ]


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
