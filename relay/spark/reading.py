"""Reads a difference of the outbox as Arrow record batches, in portions, one for each task.

Tasks read side by side, so their portions are of hosts or of c_xid; those of `relay.source.outbox.cursor` follow one
another, and are read as transactions. A portion is a COPY in CSV, parsed by pyarrow. ADBC, which makes Arrow of a
binary COPY, costs more a row and a connection.

Source: PostgreSQL documentation, "COPY"; Arrow, "Reading and Writing CSV files".
"""

from __future__ import annotations

import re
from codecs import BOM_UTF8
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING
from uuid import UUID

import numpy as np
import psycopg
from psycopg import sql
from psycopg.abc import PQGen
from psycopg.pq import ExecStatus
from psycopg.pq.abc import PGconn
from psycopg.waiting import Wait
from tenacity import (
    retry,
    retry_if_exception,
    retry_if_exception_type,
    stop_after_delay,
    wait_fixed,
)

from relay.faults import (
    NotNow,
    RelayError,
    TransientFault,
    first_line,
    is_transient,
    kind_of,
    refused_for_good,
    server_error,
)
from relay.model import headers
from relay.model.events import FIELDS, INSERTED_BY, SQL_TYPES
from relay.model.snapshots import Snapshot
from relay.source.decode.translation import Encoding
from relay.source.outbox.differences import XID, Difference, condition
from relay.source.outbox.table import partition_of
from relay.source.outbox.visibility import TASK_SECONDS, require_visible
from relay.source.server import is_standby
from relay.source.witnesses import holds
from relay.store.connections import Connection, Dsn, connect

if TYPE_CHECKING:
    import pyarrow as pa

PARTITION = "partition"
COLUMNS = (*FIELDS, INSERTED_BY, PARTITION)
"""The columns of an event in Spark: its fields, the transaction that inserted it, and the partition of its host.

A table with headers has a column `headers` too, the last one unless the reader wants another order.
"""

CONNECT_SECONDS = 30.0
"""How long a task tries to connect: a local Spark gives it no second attempt, and a cluster three more at once."""
MOST_PLANNED_ROWS = 1_000_000
"""The most rows of a difference whose commits the driver looks up: about 6 bytes each in its memory."""
_BLOCK_BYTES = 1 << 20
_OTHER_COLUMN = "give the field another column with the option or setting `columns`, or none"
_DELIMITER, _QUOTE = "\x01", "\x02"
"""Characters that JSON text cannot contain, so that the server quotes no payload and the parser unquotes none."""


@dataclass(frozen=True, slots=True)
class TaskPortion:
    """The rows of a difference that one task reads.

    `hosts` is (modulus, residue) of the host's hash; `xids` is the first c_xid and the one after the last; None stands
    for all. `unmarked` says whether rows without c_xid, inserted before `relay init`, belong to the portion, which has
    no others where it has `xids`. `commits`
    has the c_xid of all its other rows as an array of PostgreSQL; None where nobody has looked them up. `witness` names
    the history of the difference; None where nobody has.
    """

    between: Difference
    hosts: tuple[int, int] | None = None
    xids: tuple[int, int] | None = None
    unmarked: bool = True
    commits: str | None = None
    witness: UUID | None = None


@dataclass(frozen=True)
class MappedTable:
    """An outbox: its schema and name, and the column of each field and header; "" for a field without a column."""

    name: tuple[str, str]
    mapping: Mapping[str, str]
    named: frozenset[str] = frozenset()
    """Columns that the user named: the table must have them."""

    @property
    def identifier(self) -> sql.Identifier:
        """The table's name in a statement."""
        return sql.Identifier(*self.name)

    @property
    def headers(self) -> tuple[str, ...]:
        """The names of the headers."""
        fields = (name for name in self.mapping if name.startswith(headers.PREFIX))
        return tuple(name.removeprefix(headers.PREFIX) for name in fields)

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of its rows in Spark."""
        return (*COLUMNS, headers.FIELD) if self.headers else COLUMNS


def map_type() -> pa.DataType:
    """Arrow's type of the column `headers`."""
    import pyarrow as pa

    return pa.map_(pa.string(), pa.string())


def arrow_schema(names: Sequence[str]) -> pa.Schema:
    """The schema of some of `COLUMNS`: strings, integers, and times in UTC microseconds."""
    import pyarrow as pa

    types = {
        "timestamptz": pa.timestamp("us", tz="UTC"),
        "bigint": pa.int64(),
        "int": pa.int32(),
    }
    kinds = {**SQL_TYPES, INSERTED_BY: "bigint", PARTITION: "int"}
    return pa.schema([(name, types.get(kinds[name], pa.string())) for name in names])


def read(
    dsn: Dsn,
    table: MappedTable,
    portion: TaskPortion,
    partitions: int,
    conditions: sql.Composable | None,
    names: Sequence[str] | None = None,
    afterwards: Callable[[Connection], None] | None = None,
) -> Iterator[pa.RecordBatch]:
    """Read a portion as record batches, in order of c_offset unless it is a range of xids.

    `names` are the columns of the batches, in this order, and PostgreSQL sends no others; None stands for all that the
    table has. `partitions` is the modulus of the column `partition`; only rows for which `conditions` hold are read.
    `afterwards` gets the connection when all rows are read. It closes the connection at the end. Raises TransientFault
    where the server has not reached the portion's snapshot after TASK_SECONDS, psycopg.Error for a transient fault
    and where no connection can be opened for CONNECT_SECONDS, RelayError where the table cannot be read.
    """
    names = table.columns if names is None else names
    with _connected(dsn) as conn:
        wait_until_visible(conn, portion.between.after, portion.witness)
        known = columns(conn, table, names)
        statement = _statement(table, known, portion, partitions, conditions, names).as_bytes(conn)
        encoding = Encoding.of(conn.info.parameter_status("server_encoding"))
        if encoding is not None:
            # With client_encoding UTF8 the query would fail at the first byte that the server cannot convert. A
            # character of a filter that the server's encoding lacks is in no row.
            statement = statement.decode().encode(encoding.codec, "replace")
            conn.execute(sql.SQL("set client_encoding to {}").format(encoding.name))
        try:
            with conn.cursor() as cursor, cursor.copy(statement):
                yield from _parsed(_blocks(conn), encoding, names, table.headers)
            if afterwards is not None:
                afterwards(conn)
        except UnreadableValue as error:
            raise RelayError(f"table: {'.'.join(table.name)} cannot be read: {error}") from None
        except psycopg.Error as error:
            if is_transient(error):
                raise
            raise RelayError(
                f"table: {'.'.join(table.name)} cannot be read: {without_values(error)}"
            ) from None


def _may_pass(error: BaseException) -> bool:
    """Return whether a connection may succeed later: the server starts, or has as many sessions as it allows."""
    return isinstance(error, psycopg.OperationalError) and not refused_for_good(error)


@retry(
    retry=retry_if_exception(_may_pass),
    stop=stop_after_delay(CONNECT_SECONDS),
    wait=wait_fixed(0.5),
    reraise=True,
)
def _connected(dsn: Dsn) -> Connection:
    return connect(dsn, application_name="relay spark")


_NO_TIME = frozenset({"22007", "22008", "22023"})


def without_values(error: psycopg.Error) -> str:
    """What the server says, unless it may quote a value: it casts times, and runs the functions of a view."""
    state = error.sqlstate or ""
    if state in _NO_TIME:
        return f"{kind_of(error)}: a value that is no time: {_OTHER_COLUMN}"
    return kind_of(error) if state.startswith(("22", "P0")) else first_line(error)


@retry(
    retry=retry_if_exception_type(TransientFault),
    stop=stop_after_delay(TASK_SECONDS),
    wait=wait_fixed(0.1),
    reraise=True,
)
def wait_until_visible(conn: Connection, snapshot: Snapshot, witness: UUID | None = None) -> None:
    """Wait until the server shows what a snapshot sees, in the history that a witness names.

    Raises TransientFault after TASK_SECONDS, RelayError where the server has another history, and psycopg.Error.
    """
    if witness is None:
        require_visible(conn, snapshot)
    elif not holds(conn, witness):
        if not is_standby(conn):
            raise lost(f"{snapshot}@{witness}")
        raise NotNow(
            f"position {snapshot}@{witness}: this server, a standby, does not have its witness: it lags, or follows "
            "another primary than that of the position"
        )


def lost(
    position: str, elsewhere: bool | None = None, removed: bool = False, earlier: str = ""
) -> RelayError:
    """The refusal of a position whose witness the server does not have as it was written.

    `elsewhere`: whether it has another identifier than the server of the position, None where that is not known.
    `removed`: whether retention may have removed the witness. `earlier` is an earlier position that the server has.
    """
    same = "it has failed over with a loss, or was restored from a backup or a dump"
    other = "it is another one, or one into which a dump was restored"
    what = {True: other, False: same, None: f"{same}, or is another one"}[elsewhere]
    if removed:
        what += ", or retention has removed it together with events that were still to be read"
    return RelayError(
        f"position {position}: this server does not have its witness: {what}. It may lack what was read, and other "
        "events may have the transaction ids of that: begin with a new checkpoint and startingPosition "
        f"{earlier or 'beginning, now or an earlier position of the query'} (a batch: fromSnapshot), or read the "
        "server that the position is of"
    )


def columns(
    conn: Connection, table: MappedTable, names: Sequence[str] | None = None
) -> frozenset[str]:
    """The columns that an outbox has.

    Raises psycopg.Error, and RelayError where those of `names` (None: all of `MappedTable.columns`) cannot be read.
    """
    name = ".".join(table.name)
    try:
        rows = conn.execute(
            "select attname from pg_attribute"
            " where attrelid = to_regclass(%s) and attnum > 0 and not attisdropped",
            [table.identifier.as_string(conn)],
        )
        known = frozenset(column for (column,) in rows)
        if not known:
            raise RelayError(
                f"table: there is no table {name} in database {conn.info.dbname}: name the outbox with its schema"
            )
        _require_named(table, known)
        # Refuses what the tasks could not read: rights, and types that are none of the field's.
        wanted = values(table, known, 1, table.columns if names is None else names)
        conn.execute(
            sql.SQL("select {} from {} limit 0").format(
                sql.SQL(", ").join([XID, *wanted]), table.identifier
            ),
            prepare=False,
        )
    except psycopg.errors.InsufficientPrivilege as error:
        raise RelayError(
            f"table: {name} cannot be read: {first_line(error)}: grant {conn.info.user} USAGE on the schema and "
            "SELECT on the table, or on the columns that the query's schema has"
        ) from None
    return known


def _require_named(table: MappedTable, known: Collection[str]) -> None:
    name = ".".join(table.name)
    if INSERTED_BY not in known:
        raise RelayError(
            f"table: {name} has no column {INSERTED_BY}, by which it is read: run `relay init`, which "
            "adds it"
        )
    missing = sorted(table.named.difference(known))
    if missing:
        raise RelayError(f"columns: {name} has no column {missing[0]}: name one that it has")
    missing = sorted(
        {table.mapping[headers.PREFIX + each] for each in table.headers}.difference(known)
    )
    if missing:
        raise RelayError(f"headers: {name} has no column {missing[0]}: name one that it has")


def values(
    table: MappedTable, known: Collection[str], partitions: int, names: Sequence[str]
) -> list[sql.Composable]:
    """The expressions of the columns of `names`; those of the headers, one each, are the last ones."""
    computed = {INSERTED_BY: XID, PARTITION: partition_of(table.mapping["host_id"], partitions)}
    found = [
        expression(name, table.mapping[name], known) if name in table.mapping else computed[name]
        for name in names
        if name != headers.FIELD
    ]
    if headers.FIELD in names:
        found += [sql.Identifier(table.mapping[headers.PREFIX + name]) for name in table.headers]
    return found


def _statement(
    table: MappedTable,
    known: Collection[str],
    portion: TaskPortion,
    partitions: int,
    conditions: sql.Composable | None,
    names: Sequence[str],
) -> sql.Composed:
    where: list[sql.Composable] = [condition(portion.between)]
    if portion.xids is not None:
        where.append(xid_range(portion))
    if portion.commits is not None:
        own = sql.SQL("{} = any({}::xid8[])").format(XID, sql.Literal(portion.commits))
        where.append(sql.SQL("({} or {} is null)").format(own, XID) if portion.unmarked else own)
    if portion.hosts is not None:
        modulus, residue = portion.hosts
        its_host = partition_of(table.mapping["host_id"], modulus)
        where.append(sql.SQL("{} = {}").format(its_host, sql.Literal(residue)))
    if conditions is not None:
        where.append(conditions)
    order = sql.SQL(" order by {}").format(sql.Identifier(table.mapping["c_offset"]))
    return sql.SQL(
        "copy (select {values} from {table} where {where}{order}) to stdout "
        "(format csv, delimiter {delimiter}, quote {quote})"
    ).format(
        delimiter=sql.Literal(_DELIMITER),
        quote=sql.Literal(_QUOTE),
        values=sql.SQL(", ").join(values(table, known, partitions, names)),
        table=table.identifier,
        where=sql.SQL(" and ").join(where),
        order=order if portion.xids is None else sql.SQL(""),
    )


def xid_range(portion: TaskPortion) -> sql.Composable:
    """The condition on the c_xid of a portion of `by_xid`."""
    if portion.unmarked:
        return sql.SQL("{} is null").format(XID)
    low, high = portion.xids or (0, 0)
    return sql.SQL("{0} >= {1}::xid8 and {0} < {2}::xid8").format(XID, str(low), str(high))


def expression(field: str, column: str, known: Collection[str]) -> sql.Composable:
    """A field as an expression of the COPY; times outside the years 1 to 9999 are null."""
    if column not in known:
        return sql.SQL("null")
    name = sql.Identifier(column)
    if SQL_TYPES[field] == "timestamptz":
        return sql.SQL(
            "case when {0} >= '0001-01-01 UTC' and {0} < '10000-01-01 UTC' then {0} end"
        ).format(sql.SQL("{}::timestamptz").format(name))
    return name


class UnreadableValue(Exception):
    """A value of the table that is not of its field's type."""

    @classmethod
    def of(cls, text: str, schema: pa.Schema) -> UnreadableValue:
        """From an error of the parser, whose text has the value too. The rows of a COPY are well-formed."""
        found = re.match(r"In CSV column #(\d+): ", text)
        if found is None:
            return cls("its rows are not what pyarrow takes for CSV")
        column = schema.field(int(found[1]))
        kind = {"int64": "bigint", "int32": "int"}.get(str(column.type), str(column.type))
        return cls(f"{column.name} has a value that is not of type {kind}: {_OTHER_COLUMN}")


def _parsed(
    blocks: Iterable[bytearray],
    encoding: Encoding | None,
    names: Sequence[str],
    header_names: Sequence[str],
) -> Iterator[pa.RecordBatch]:
    import pyarrow as pa
    from pyarrow import csv

    schema = arrow_schema([name for name in names if name != headers.FIELD])
    with_map = headers.FIELD in names
    if with_map:
        for name in header_names:
            schema = schema.append(pa.field(headers.PREFIX + name, pa.string()))
    convert = csv.ConvertOptions(
        column_types=schema,
        null_values=[""],
        strings_can_be_null=True,
        quoted_strings_can_be_null=False,
    )
    parse = csv.ParseOptions(
        delimiter=_DELIMITER,
        quote_char=_QUOTE,
        newlines_in_values=True,
        ignore_empty_lines=False,  # nulls of a single column
    )
    for stored in blocks:
        block: bytes | bytearray = stored
        if encoding is not None and not stored.isascii():
            block = stored.decode(encoding.codec, "replace").encode()
        if block.startswith(BOM_UTF8):
            # The parser takes away the first one, although it belongs to the value of the first column.
            block = BOM_UTF8 + block
        # One block, whatever its size: the parser rejects a row that spans two blocks.
        options = csv.ReadOptions(
            column_names=schema.names, block_size=len(block) + 1, use_threads=False
        )
        try:
            rows = csv.read_csv(pa.BufferReader(block), options, parse, convert)
        except pa.ArrowInvalid as error:
            raise UnreadableValue.of(str(error), schema) from None
        for batch in rows.to_batches():
            yield _with_map(batch, header_names).select(names) if with_map else batch


def _with_map(batch: pa.RecordBatch, names: Sequence[str]) -> pa.RecordBatch:
    """The batch with its last columns, one for each header, combined into a map."""
    import pyarrow as pa

    count, width = len(batch), len(names)
    fields = batch.select(range(batch.num_columns - width))
    items = pa.concat_arrays(batch.columns[-width:])
    order = np.arange(count * width).reshape(width, count).T.ravel()
    maps = pa.MapArray.from_arrays(
        pa.array(range(0, count * width + 1, width), pa.int32()),
        pa.array(list(names) * count, pa.string()),
        items.take(pa.array(order)),
    )
    return pa.RecordBatch.from_arrays(
        [*fields.columns, maps], schema=fields.schema.append(pa.field(headers.FIELD, map_type()))
    )


def _blocks(conn: Connection) -> Iterator[bytearray]:
    """The rows of a COPY that has begun, joined to blocks of at least `_BLOCK_BYTES`.

    The server sends each row as a message of its own, and psycopg's iterator makes several Python calls of each, and an
    object that the garbage collector visits. So this takes a row with one call, and keeps none.
    """
    is_over = False
    while not is_over:
        block = bytearray()
        is_over = conn.wait(_filled(conn.pgconn, block))
        if block:
            yield block


def _filled(pgconn: PGconn, block: bytearray) -> PQGen[bool]:
    """Append rows until the block is full; returns whether it has the last one. Raises psycopg.Error."""
    receive = pgconn.get_copy_data
    while len(block) < _BLOCK_BYTES:
        size, row = receive(1)
        if size > 0:
            block += row
        elif size == 0:
            yield from _more(pgconn)
        else:
            yield from _ended(pgconn)
            return True
    return False


def _more(pgconn: PGconn) -> PQGen[None]:
    while not (yield Wait.R):
        pass
    pgconn.consume_input()


def _ended(pgconn: PGconn) -> PQGen[None]:
    """Take the results of a COPY whose rows are read. Raises psycopg.Error where it failed."""
    while True:
        while pgconn.is_busy():
            yield from _more(pgconn)
        result = pgconn.get_result()
        if result is None:
            return
        if result.status != ExecStatus.COMMAND_OK:
            raise server_error(result)


def by_host(
    conn: Connection, table: MappedTable, between: Difference, tasks: int
) -> list[TaskPortion]:
    """A portion for each residue of the hosts' hashes, so that the events of one host are in one portion.

    The commits of each are looked up, so that a task reads from the index what is its own, and a residue without rows
    needs no task. Where there are more rows than `MOST_PLANNED_ROWS`, whose commits would be many to keep and to send,
    each task reads the whole difference instead and leaves out what belongs to the others. Raises psycopg.Error.
    """
    if tasks == 1:
        return [TaskPortion(between)]
    rows = conn.execute(
        sql.SQL(
            """
            select residue, sum(rows), bool_or(x is null), (array_agg(x) filter (where x is not null))::text
              from (select residue, x, count(*) as rows
                      from (select {host} as residue, {xid} as x from {table} where {between} limit {most}) as each_row
                     group by residue, x) as each_commit
             group by residue order by residue
            """
        ).format(
            host=partition_of(table.mapping["host_id"], tasks),
            xid=XID,
            table=table.identifier,
            between=condition(between),
            most=sql.Literal(MOST_PLANNED_ROWS + 1),
        ),
        prepare=False,
    ).fetchall()
    if sum(count for _, count, _, _ in rows) > MOST_PLANNED_ROWS:
        return [TaskPortion(between, hosts=(tasks, residue)) for residue in range(tasks)]
    return [
        TaskPortion(between, (tasks, residue), None, unmarked, commits or "{}")
        for residue, _, unmarked, commits in rows
    ]


def by_xid(
    conn: Connection, table: MappedTable, between: Difference, tasks: int
) -> list[TaskPortion]:
    """Portions of adjacent c_xid with about as many rows each, so that one task reads each row from the index once.

    Rows without c_xid, inserted before `relay init`, are a portion of their own. Raises psycopg.Error.
    """
    first, last, are_unmarked = _ends(conn, table, between)
    portions = [TaskPortion(between, xids=(0, 1))] if are_unmarked else []
    if first is None or last is None:
        return portions
    bounds = [first, *_cuts(conn, table, first, last + 1, tasks), last + 1]
    return portions + [
        TaskPortion(between, xids=(low, high), unmarked=False) for low, high in pairwise(bounds)
    ]


def _cuts(conn: Connection, table: MappedTable, first: int, end: int, tasks: int) -> list[int]:
    """Cut a range of xids, from `first` to before `end`, into portions of about as many rows each.

    Where other tables take xids too, rows are not spread evenly over them. The server's histogram knows how; without
    one, portions have as many xids each. Raises psycopg.Error.
    """
    known = _histogram(conn, table) if tasks > 1 else []
    points = np.array([first, *(each for each in known if first < each < end), end], np.float64)
    buckets = np.arange(len(known), dtype=np.float64)
    rows = np.interp(points, known, buckets) if len(known) > 1 else np.zeros(len(points))
    if len(known) > 1 and end > known[-1]:
        # Rows that are newer than the histogram: as dense as its last bucket.
        rows[-1] += (end - max(first, known[-1])) / max(1, known[-1] - known[-2])
    if rows[-1] <= rows[0]:
        points, rows = points[[0, -1]], np.array([0.0, 1.0])
    wanted = np.linspace(rows[0], rows[-1], tasks + 1)[1:-1]
    cuts = np.ceil(np.interp(wanted, rows, points)).astype(np.int64).tolist()
    return sorted({each for each in cuts if first < each < end})


def _histogram(conn: Connection, table: MappedTable) -> list[int]:
    """The xids between which there are as many rows each, ascending; empty where the table is not analysed."""
    row = conn.execute(
        "select histogram_bounds::text from pg_stats where (schemaname, tablename, attname) = (%s, %s, %s)"
        " and histogram_bounds is not null order by inherited desc limit 1",
        (*table.name, INSERTED_BY),
        prepare=False,
    ).fetchone()
    return [] if row is None else sorted({int(each) for each in row[0].strip("{}").split(",")})


def _ends(
    conn: Connection, table: MappedTable, between: Difference
) -> tuple[int | None, int | None, bool]:
    """The least and the greatest c_xid of a difference, None where it has none; whether it has rows without c_xid."""
    end = (
        "(select x::text from (select {xid} as x from {table} where {xid} is not null and {between}"
        " order by {xid} "
    )
    marked = "exists (select from {table} where {xid} is null and {between})"
    row = conn.execute(
        sql.SQL(f"select {end} limit 1) as first), {end} desc limit 1) as last), {marked}").format(
            xid=XID, table=table.identifier, between=condition(between)
        ),
        prepare=False,
    ).fetchone()
    first, last, are_unmarked = row or (None, None, False)
    if first is None or last is None:
        return None, None, bool(are_unmarked)
    return int(first), int(last), bool(are_unmarked)
