"""Writes batches to a table of a PostgreSQL database exactly once, without a jar: executors copy, the driver commits.

The tasks of each attempt copy into a staging table of their own. The driver then moves the rows of the task attempts
whose results it received, in one transaction with a row of the ledger `relay_batches`, whose primary key is the
application and the batch's number. Where several drivers write the same batch, one inserts that row and the others move
nothing; nor does a driver that was suspended and comes with a batch before the last one.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any
from uuid import UUID, uuid4

import psycopg
import pyarrow as pa
import pyarrow.compute as pc
from psycopg import sql

from relay.config import handlers
from relay.config.dsn import DatabaseAccess
from relay.faults import ConfigurationError, NotNow, RelayError
from relay.spark.writers import BATCH_COLUMN, BatchId, Facts, lost
from relay.spark.writers.arrow import arrow_schema, gathered
from relay.spark.writers.schema_changes import (
    COMMENT,
    Change,
    accept,
    comment_of,
    is_wider,
    sql_type,
)
from relay.store.connections import connect
from relay.store.positions.spark_batches import LastBatch
from relay.store.session_settings import USERS_PATH_LOCALLY, SessionKind, users_path

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_COUNTS = "attempt string, number bigint"
_COUNTS_SCHEMA = pa.schema([("attempt", pa.string()), ("number", pa.int64())])
_ATTEMPT = "relay_attempt"
"""The staging table's column with the UUID of the task attempt that copied the row."""
_LEDGER = "relay_batches"
_COPIED_COLUMN = re.compile(r"^COPY relay_\w+, line \d+, column (.+?): ", re.MULTILINE)
"""A line of the context of the server's error about a value that is copied; the value follows, and may precede it."""
_DROP_LOCK_TIMEOUT = "1s"
"""How long a drop waits for a task of an earlier attempt that still copies."""
_CHANGE_LOCK_TIMEOUT = "5s"
"""How long a change of columns waits for others that use the table: meanwhile new ones wait behind it."""

_RESOLVE = "select pg_catalog.to_regclass(%s)::pg_catalog.oid"
_FIND_TABLE = """
    select pg_class.oid, nspname, relname
      from pg_class join pg_namespace on pg_namespace.oid = relnamespace
     where pg_class.oid = %s and relkind in ('r', 'p')
"""
_COLUMNS = """
    select a.attname, a.attgenerated <> '', t.typname, a.atttypmod, pg_catalog.col_description(a.attrelid, a.attnum)
      from pg_catalog.pg_attribute as a
      join pg_catalog.pg_type as t on t.oid = a.atttypid
     where a.attrelid = %s and a.attnum > 0 and not a.attisdropped
     order by a.attnum
"""
_OWNER = """
    select pg_catalog.pg_get_userbyid(relowner), pg_catalog.pg_has_role(relowner, 'usage')
      from pg_catalog.pg_class where oid = %s
"""
_TYPES = {
    "tinyint": "smallint",
    "int": "integer",
    "float": "real",
    "double": "double precision",
    "string": "text",
    "timestamp": "timestamp with time zone",
    "timestamp_ntz": "timestamp",
}
"""The types of Spark whose names are others in PostgreSQL."""
_NUMBERS = {
    "int2": pa.int16(),
    "int4": pa.int32(),
    "int8": pa.int64(),
    "float4": pa.float32(),
    "float8": pa.float64(),
}
_MOST_NAME_BYTES = 63
"""The most bytes of the name of a column, which the server cuts off."""
_STAGING_TABLES = r"""
    select relname from pg_class join pg_namespace on pg_namespace.oid = relnamespace
     where nspname = %s and relkind = 'r' and starts_with(relname, %s)
"""
_CREATE_LEDGER = """
    create table if not exists {ledger} (
        application uuid not null,
        number bigint not null,
        batch text not null,
        written_at timestamptz not null default now(),
        primary key (application, number)
    )
"""
_CREATE_STAGING = """
    create unlogged table {staging} as select {columns}, null::uuid as {attempt} from {target} with no data
"""
_CLAIM = """
    insert into {ledger} (application, number, batch) select {application}, {number}, {id}
     where not exists (select from {ledger} where application = {application} and number >= {number})
    on conflict do nothing
"""
"""A batch that was given up, since the sink was moved, is not inserted after a later one."""
_IS_CLAIMED = (
    "select from {ledger} where application = {application} and number >= {number} limit 1"
)
_LACKED = """
    select pg_catalog.quote_ident(current_user), needed.privilege, needed.name
      from (select 1, 'usage', pg_catalog.format('schema %%I', n.nspname),
                   pg_catalog.has_schema_privilege(n.oid, 'usage')
              from pg_catalog.pg_namespace as n where n.nspname = %(schema)s
             union all
            select 2, 'create', pg_catalog.format('schema %%I', n.nspname),
                   pg_catalog.has_schema_privilege(n.oid, 'create')
              from pg_catalog.pg_namespace as n where n.nspname = %(schema)s
             union all
            select 3, privilege, pg_catalog.format('%%I.%%I', n.nspname, c.relname),
                   pg_catalog.has_any_column_privilege(c.oid, privilege)
              from pg_catalog.pg_class as c join pg_catalog.pg_namespace as n on n.oid = c.relnamespace,
                   pg_catalog.unnest(array['select', 'insert']) as privilege
             where n.nspname = %(schema)s and c.relname = any (array[%(table)s, %(ledger)s])
           ) as needed (number, privilege, name, may)
     where not needed.may order by needed.number, needed.name, needed.privilege desc
"""
"""The rights that `write` needs and the session's role does not have."""
_IDENTITY = """
    select (select format('%%s %%s', s.system_identifier, d.oid)
              from pg_catalog.pg_control_system() as s, pg_catalog.pg_database as d
             where datname = pg_catalog.current_database()),
           pg_catalog.pg_relation_filenode(%s::pg_catalog.oid)::pg_catalog.int8
"""
"""The database among all, and the table's file, which TRUNCATE and VACUUM FULL change."""
_MAY_IDENTIFY = (
    "select pg_catalog.has_function_privilege('pg_catalog.pg_control_system()', 'execute')"
)
_MOVE = """
    insert into {target} ({columns}) overriding system value
    select {columns} from {staging} where {attempt} operator(pg_catalog.=) any({attempts}::pg_catalog.uuid[])
"""
"""Run under the user's search_path, since triggers of the table may count on it."""
_STAGED = """
    select pg_catalog.count(*) from {staging}
     where {attempt} operator(pg_catalog.=) any({attempts}::pg_catalog.uuid[])
"""


@dataclass(frozen=True, slots=True)
class Staging:
    """The staging table of one attempt, into which its tasks copy. `key` is the sink's for errors; `dsn` is secret."""

    key: str
    dsn: DatabaseAccess
    schema_name: str
    table: str
    schema: pa.Schema

    def __repr__(self) -> str:
        return f"Staging({self.schema_name}.{self.table})"

    @property
    def name(self) -> sql.Identifier:
        """The quoted name."""
        return sql.Identifier(self.schema_name, self.table)


class JdbcWriter:
    """Appends to an existing table; the ledger `relay_batches` is in the same schema."""

    kind = "jdbc"

    def __init__(self, name: str, settings: handlers.JdbcSettings, evolves: bool = False) -> None:
        self._name = name
        self._evolves = evolves
        self._key = f"handlers.{name}.jdbc.table"
        self._dsn = settings.access
        self._table = settings.table

    def check(self, session: SparkSession) -> None:
        """Do what `require` does, in a session of its own."""
        with connect(self._dsn, SessionKind.HANDLER) as conn:
            self.require(conn)

    def require(self, conn: psycopg.Connection[Any]) -> None:
        """Raise ConfigurationError if there is no such table or the role may not write it, and psycopg.Error."""
        key = f"handlers.{self._name}.jdbc.dsn"
        try:
            oid, schema_name, table = self._find(conn)
        except psycopg.errors.InsufficientPrivilege as error:
            raise ConfigurationError(
                f"{key}: {error.diag.message_primary}: grant usage and create on the schema of {self._table}"
            ) from None
        names = {"schema": schema_name, "table": table, "ledger": _LEDGER}
        lacked = conn.execute(_LACKED, names).fetchall()
        if lacked:
            role, privilege, name = lacked[0]
            more = f" (and {len(lacked) - 1} more)" if len(lacked) > 1 else ""
            raise ConfigurationError(
                f"{key}: the role {role} has no right to {privilege} on {name}{more}: run "
                f"`grant {privilege} on {name} to {role}`"
            )
        owner, may_change = conn.execute(_OWNER, [oid]).fetchone() or ("", False)
        if self._evolves and not may_change:
            raise ConfigurationError(
                f"handlers.{self._name}.schema: evolve changes {self._table}, as only its owner {owner} may: make the "
                "role of jdbc.dsn a member of it, or leave schema out"
            )

    def write(self, frame: DataFrame, batch: BatchId) -> None:
        """Insert the batch unless the ledger has it.

        Raises ConfigurationError if the table lacks a column of the frame, TransientFault if staged rows are missing,
        and psycopg.Error.
        """
        with connect(self._dsn, SessionKind.HANDLER) as conn:
            oid, schema_name, table = self._find(conn)
            target = sql.Identifier(schema_name, table)
            ledger = sql.Identifier(schema_name, _LEDGER)
            conn.execute(sql.SQL(_CREATE_LEDGER).format(ledger=ledger))
            if _is_claimed(conn, ledger, batch):
                return
            schema = self._columns(conn, oid, target, arrow_schema(frame))
            prefix = f"relay_{UUID(batch.application).hex}_"
            _drop_stale(conn, schema_name, prefix)
            staging = Staging(
                self._key, self._dsn, schema_name, f"{prefix}{uuid4().hex[:16]}", schema
            )
            columns = sql.SQL(", ").join(map(sql.Identifier, schema.names))
            names = {
                "staging": staging.name,
                "target": target,
                "columns": columns,
                "attempt": sql.Identifier(_ATTEMPT),
            }
            conn.execute(sql.SQL(_CREATE_STAGING).format(**names))
            try:
                selected = frame.select(*schema.names)
                counts = selected.mapInArrow(partial(copy_rows, staging), _COUNTS).collect()
                _move(conn, names, ledger, batch, {row.attempt: row.number for row in counts})
            finally:
                _drop(conn, staging.name)

    def left(
        self, session: SparkSession | None, batch: LastBatch, files: Sequence[str] | None
    ) -> Facts:
        """The table's oid and file, and which of all databases has it."""
        with connect(self._dsn, SessionKind.HANDLER) as conn:
            found = self._found(conn)
            if found is None or not self._has(conn, found[1], batch):
                raise lost(self._name, self._absence(found is not None), batch)
            database, file = self._identity(conn, found[0])
            return {"table": found[0], "database": database, "file": file}

    def lacks(self, session: SparkSession | None, last: LastBatch, facts: Facts) -> str | None:
        """Why the table is another one, is empty since a TRUNCATE, or its ledger does not have the batch.

        In another database, as after a dump and restore, the ledger alone tells.
        """
        with connect(self._dsn, SessionKind.HANDLER) as conn:
            found = self._found(conn)
            if found is None or not self._has(conn, found[1], last):
                return self._absence(found is not None)
            oid, schema_name, table = found
            database, file = self._identity(conn, oid)
            if database is None or database != facts["database"]:
                return None
            if oid != facts["table"]:
                return f"{self._table} is another table, with the oid {oid}"
            if file == facts["file"]:
                return None
            some = sql.SQL("select from {} limit 1").format(sql.Identifier(schema_name, table))
            if conn.execute(some).rowcount:
                return None
            return f"{self._table} was emptied"

    def _has(
        self, conn: psycopg.Connection[Any], schema_name: str, batch: BatchId | LastBatch
    ) -> bool:
        (ledger,) = conn.execute(
            "select pg_catalog.to_regclass(pg_catalog.format('%%I.%%I', %s::text, %s::text)) is not null",
            [schema_name, _LEDGER],
        ).fetchone() or (False,)
        return ledger and _is_claimed(conn, sql.Identifier(schema_name, _LEDGER), batch)

    def _absence(self, is_there: bool) -> str:
        if not is_there:
            return f"there is no table {self._table}"
        return f"the ledger {_LEDGER} beside {self._table} does not have it"

    def _identity(self, conn: psycopg.Connection[Any], oid: int) -> tuple[str | None, int | None]:
        """The database among all, None where this role may not know, and the table's file."""
        (may,) = conn.execute(_MAY_IDENTIFY).fetchone() or (False,)
        if not may:
            return None, None
        return conn.execute(_IDENTITY, [oid]).fetchone() or (None, None)

    def _find(self, conn: psycopg.Connection[Any]) -> tuple[int, str, str]:
        """The oid, the schema and the name of the table. Raises ConfigurationError if there is none."""
        found = self._found(conn)
        if found is None:
            raise ConfigurationError(
                f"{self._key}: there is no table {self._table}: create it, with the columns that the batches have"
            )
        return found

    def _found(self, conn: psycopg.Connection[Any]) -> tuple[int, str, str] | None:
        try:
            with conn.transaction(), users_path(conn):
                found = conn.execute(_RESOLVE, [self._table]).fetchone()
            row = conn.execute(_FIND_TABLE, found).fetchone()
        except psycopg.errors.InvalidName:
            return None
        return None if row is None else (row[0], row[1], row[2])

    def _columns(
        self, conn: psycopg.Connection[Any], oid: int, target: sql.Identifier, frame: pa.Schema
    ) -> pa.Schema:
        """The frame's columns that the table has then: all, or all but `relay_batch`."""
        for field in frame:
            if pa.types.is_nested(field.type) or pa.types.is_binary(field.type):
                raise ConfigurationError(
                    f"{self._key}: the batch's column {field.name} is {field.type}: convert it to text with `sql`, "
                    "such as with to_json or hex"
                )
        table = _PostgresqlColumns(self._key, conn, oid, target, frame, self._evolves)
        batch = pa.schema(
            [each for each in frame if each.name in table.schema.names or each.name != BATCH_COLUMN]
        )
        accept(self._name, self._key, table, batch, self._evolves)
        return batch


class _PostgresqlColumns:
    """The columns of a table. The server converts what a batch has, so types matter where a wider one is needed."""

    def __init__(
        self,
        key: str,
        conn: psycopg.Connection[Any],
        oid: int,
        name: sql.Identifier,
        batch: pa.Schema,
        widens: bool,
    ) -> None:
        self._key = key
        self._conn = conn
        self._oid = oid
        self._name = name
        self._batch = batch
        self._widens = widens
        self._read()

    def _read(self) -> None:
        self._rows = self._conn.execute(_COLUMNS, [self._oid]).fetchall()
        generated = [name for name, is_generated, *_ in self._rows if is_generated]
        for name in generated:
            if name in self._batch.names:
                raise ConfigurationError(
                    f"{self._key}: the column {name} is generated by the server: leave it out with `sql`"
                )

    @property
    def schema(self) -> pa.Schema:
        return pa.schema(
            [
                pa.field(name, self._type(name, kind, modifier), metadata=text and {COMMENT: text})
                for name, _, kind, modifier, text in self._rows
            ]
        )

    @property
    def rigid(self) -> Collection[str]:
        return ()

    def _type(self, name: str, kind: str, modifier: int) -> pa.DataType:
        """The type of a column that is to be widened; null, of which any value is accepted, for all others."""
        known = _NUMBERS.get(kind)
        if kind == "numeric" and modifier >= 0:
            known = _decimal(modifier)
        if known is None or not self._widens or name not in self._batch.names:
            return pa.null()
        return known if is_wider(self._batch.field(name).type, known) else pa.null()

    def statement(self, change: Change) -> str:
        """The statement, quoted for the server."""
        return "; ".join(each.as_string(self._conn) for each in self._statements(change))

    def _statements(self, change: Change) -> Iterator[sql.Composed]:
        field = change.column
        names = {"table": self._name, "column": sql.Identifier(field.name)}
        if change.kind != "comment":
            form = "alter table {table} alter column {column} type {type}"
            if change.kind == "add":
                form = "alter table {table} add column {column} {type}"
            yield sql.SQL(form).format(**names, type=sql.SQL(_type_name(field.type)))
        text = comment_of(field)
        if text is not None and change.kind != "widen":
            yield sql.SQL("comment on column {table}.{column} is {text}").format(
                **names, text=sql.Literal(text)
            )

    def change(self, changes: Sequence[Change]) -> None:
        """Make all changes in one transaction, under a lock, unless somebody else has changed the columns meanwhile."""
        statement = "; ".join(map(self.statement, changes))
        for each in changes:
            if len(each.column.name.encode()) > _MOST_NAME_BYTES:
                raise ConfigurationError(
                    f"{self._key}: the name of the batch's column {each.column.name} has more than {_MOST_NAME_BYTES} "
                    "bytes: shorten it with `sql`"
                )
        before = self._rows
        try:
            with self._conn.transaction():
                self._conn.execute(
                    sql.SQL("set local lock_timeout = {}").format(_CHANGE_LOCK_TIMEOUT)
                )
                self._conn.execute(
                    sql.SQL("lock table {} in access exclusive mode").format(self._name)
                )
                self._read()
                if self._rows != before:
                    raise NotNow(f"{self._key}: another program has changed the columns")
                for each in changes:
                    for one in self._statements(each):
                        self._conn.execute(one)
                self._read()
        except psycopg.errors.LockNotAvailable:
            raise NotNow(
                f"{self._key}: others use the table, so its columns cannot be changed yet"
            ) from None
        except (psycopg.ProgrammingError, psycopg.NotSupportedError) as error:
            raise ConfigurationError(
                f"{self._key}: the server refuses `{statement}`: {error.diag.message_primary}: change it yourself"
            ) from None


def _decimal(modifier: int) -> pa.DataType | None:
    """The type of a `numeric` with a precision; None for one that no batch has."""
    precision, scale = (modifier - 4) >> 16, (modifier - 4) & 0x7FF
    return pa.decimal128(precision, scale) if precision <= 38 and scale <= precision else None


def _type_name(kind: pa.DataType) -> str:
    """The name of a column's type for the server. `kind` is neither nested nor binary."""
    name = sql_type(kind)
    return _TYPES.get(name, name.replace("decimal", "numeric"))


def _is_claimed(
    conn: psycopg.Connection[Any], ledger: sql.Identifier, batch: BatchId | LastBatch
) -> bool:
    statement = sql.SQL(_IS_CLAIMED).format(ledger=ledger, **_identity_of(batch))
    return conn.execute(statement).fetchone() is not None


def _identity_of(batch: BatchId | LastBatch) -> dict[str, sql.Literal]:
    """A batch in a statement without parameters: with them, a name with a percent sign would be taken for one."""
    return {
        "application": sql.Literal(UUID(batch.application)),
        "number": sql.Literal(batch.number),
        "id": sql.Literal(batch.id),
    }


def _move(
    conn: psycopg.Connection[Any],
    names: dict[str, sql.Composable],
    ledger: sql.Identifier,
    batch: BatchId,
    counts: dict[str, int],
) -> None:
    """Insert the rows of the task attempts and the batch's row of the ledger, in one transaction.

    `counts` has the rows that each attempt copied, by its UUID.
    """
    with conn.transaction():
        claimed = conn.execute(sql.SQL(_CLAIM).format(ledger=ledger, **_identity_of(batch)))
        if not claimed.rowcount:
            return
        names = {**names, "attempts": sql.Literal(list(counts))}
        conn.execute(USERS_PATH_LOCALLY)
        moved = conn.execute(sql.SQL(_MOVE).format(**names))
        expected = sum(counts.values())
        if moved.rowcount == expected:
            return
        # A trigger that returns null, or a rule, leaves rows out of the count. An unlogged table is empty after a crash
        # of the server.
        row = conn.execute(sql.SQL(_STAGED).format(**names)).fetchone()
        staged = row[0] if row is not None else 0
        if staged != expected:
            raise NotNow(f"{staged} of {expected} rows are staged")


def _drop_stale(conn: psycopg.Connection[Any], schema_name: str, prefix: str) -> None:
    """Drop the staging tables of earlier attempts; a driver that still uses one can no longer commit."""
    for (table,) in conn.execute(_STAGING_TABLES, [schema_name, prefix]).fetchall():
        _drop(conn, sql.Identifier(schema_name, table))


def _drop(conn: psycopg.Connection[Any], table: sql.Identifier) -> None:
    """Drop a staging table; if a task uses it or the connection is lost, the next batch drops it."""
    with suppress(psycopg.errors.LockNotAvailable, psycopg.OperationalError), conn.transaction():
        conn.execute(sql.SQL("set local lock_timeout = {}").format(_DROP_LOCK_TIMEOUT))
        conn.execute(sql.SQL("drop table if exists {}").format(table))


# On the executors.


def copy_rows(staging: Staging, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Copy a task's rows in one transaction; yields a row with the attempt's UUID and the count.

    Raises RelayError, with the name of the column, for a value that the table refuses, and psycopg.Error.
    """
    attempt, number = str(uuid4()), 0
    columns = sql.SQL(", ").join(map(sql.Identifier, [*staging.schema.names, _ATTEMPT]))
    statement = sql.SQL("copy {} ({}) from stdin (format csv)").format(staging.name, columns)
    try:
        with connect(staging.dsn) as conn, conn.cursor().copy(statement) as copy:
            for table in gathered(staging.schema, batches):
                number += _send(copy, staging.key, table, attempt)
    except psycopg.DataError as error:
        raise RelayError(f"{staging.key}: {_refused(error, staging.schema)}") from None
    yield pa.RecordBatch.from_pylist(
        [{"attempt": attempt, "number": number}], schema=_COUNTS_SCHEMA
    )


def _send(copy: psycopg.Copy, key: str, table: pa.Table, attempt: str) -> int:
    """Send rows as CSV, in which null is an empty field and "" is quoted; returns how many.

    Raises RelayError, which names `key`, for a NUL character: the server's error does not tell the column.
    """
    import pyarrow.csv

    marks = pa.repeat(pa.scalar(attempt), table.num_rows)
    sink = pa.BufferOutputStream()
    options = pyarrow.csv.WriteOptions(include_header=False)
    pyarrow.csv.write_csv(table.append_column(_ATTEMPT, marks), sink, options)
    text = sink.getvalue().to_pybytes()
    if b"\0" in text:
        name = _column_with_nul(table)
        raise RelayError(
            f"{key}: the batch's column {name} has a NUL character, which PostgreSQL cannot store: remove it with "
            f"`sql`, such as with replace({name}, char(0), '')"
        )
    copy.write(text)
    return int(table.num_rows)


def _column_with_nul(table: pa.Table) -> str:
    names: Iterator[str] = (
        name
        for name, column in zip(table.column_names, table.columns, strict=True)
        if pa.types.is_string(column.type) and pc.any(pc.match_substring(column, "\0")).as_py()
    )
    return next(names)


def _refused(error: psycopg.DataError, schema: pa.Schema) -> str:
    """Why the server refuses a value, with the column where its message is in English, and without the value."""
    found = [
        name for name in _COPIED_COLUMN.findall(error.diag.context or "") if name in schema.names
    ]
    column = f"the batch's column {found[-1]}" if found else "a column of the batch"
    return (
        f"the table refuses a value of {column} ({type(error).__name__}, sqlstate {error.sqlstate}): convert it with "
        "`sql`, or change the table"
    )
