"""A range of the outbox as a DataFrame over Spark's JDBC source, which is faster than a data source in Python.

The rows are those of `format("outbox")`: the same plan of ranges, and each task's statement refuses to read where the
server lacks the witness of the range's end, or where retention has removed rows of the range. Both are decided in the
snapshot in which the rows are read. What pgjdbc would read otherwise than relay does goes over the data source.

Sources: Spark documentation, "JDBC To Other Databases"; pgjdbc documentation, "Connecting to the Database".
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING
from urllib.parse import quote

from psycopg import sql
from pyspark.sql import functions
from pyspark.sql.types import StringType, StructField, StructType

from relay.faults import ConfigurationError, first_line
from relay.model import headers
from relay.model.events import INSERTED_BY
from relay.retention.lost_events import losses
from relay.source.decode.translation import Encoding
from relay.source.outbox.differences import XID, condition
from relay.source.server import durable_position
from relay.spark.data_source import (
    HEADERS_SCHEMA,
    SCHEMA,
    RowsPartition,
    one_line,
    planned_batch,
    register,
    removed_line,
    wanted_columns,
)
from relay.spark.data_source_options import Options, parse
from relay.spark.query_positions import (
    QueryPosition,
    StreamPositions,
    keeping_refusal,
    witness_of,
)
from relay.spark.reading import MappedTable, columns, lost, values, xid_range
from relay.store.connections import Connection, connect
from relay.store.session_settings import SessionKind, statements

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

log = logging.getLogger(__name__)

DRIVER = "org.postgresql.Driver"
_FETCHED_ROWS = 1_000
"""How many rows a task has in memory, beside those of Spark: a payload may have megabytes."""
_TYPES = {field.name: field.dataType.simpleString() for field in SCHEMA}
_SAME = {
    "string": frozenset({20, 21, 23, 25, 114, 1043, 2950, 3802}),
    "bigint": frozenset({20, 21, 23, 5069}),
    "int": frozenset({21, 23}),
    "timestamp": frozenset({1114, 1184}),
}
"""The oids of the types that pgjdbc reads as relay does, by the type of a column in Spark."""
_LIBPQ = {
    **{"sslmode": "sslmode", "sslrootcert": "sslrootcert", "options": "options"},
    **{"connect_timeout": "connectTimeout"},
}
"""Parameters of libpq that pgjdbc has too."""
_OF_LIBPQ = frozenset(
    {
        *("user", "dbname", "host", "hostaddr", "port", "passfile", "application_name"),
        *("client_encoding", "keepalives", "keepalives_idle", "keepalives_interval"),
        *("keepalives_count", "tcp_user_timeout", "target_session_attrs", "load_balance_hosts"),
        *("fallback_application_name", "gssencmode"),
    }
)
"""Those that are known of the connection that libpq has made, or do not matter."""


def position(options: Mapping[str, str]) -> str:
    """Return the position of all that is committed; see `relay.spark.position`."""
    parsed = parse(options, "batch")
    with one_line(parsed), connect(parsed.dsn, application_name="relay spark") as conn:
        return str(_now(conn, parsed))


def read(
    spark: SparkSession, options: Mapping[str, str], names: Sequence[str] | None = None
) -> DataFrame:
    """Return the frame of a range; see `relay.spark.read`."""
    given = {name.lower(): value for name, value in options.items()}
    parsed = parse({"ordered": "false", **given}, "batch")
    if parsed.ordered:
        raise ConfigurationError(
            "option ordered: rows come in no order: leave it out, and sort them"
        )
    full = HEADERS_SCHEMA if parsed.table.headers else SCHEMA
    known = {field.name: field for field in full}
    schema = full
    if names is not None:
        schema = StructType([known.get(each, StructField(each, StringType())) for each in names])
    wanted = wanted_columns(schema, full)
    with one_line(parsed), connect(parsed.dsn, application_name="relay spark") as conn:
        end = _end(conn, parsed)
        try:
            return _over_jdbc(spark, conn, replace(parsed, to_snapshot=end), schema, wanted)
        except _Otherwise as why:
            log.info("the outbox is read over the data source", extra={"reason": str(why)})
    register(spark)
    rest = {"ordered": "false", **given, "tosnapshot": str(end)}
    return spark.read.format("outbox").schema(schema).options(**rest).load()


class _Otherwise(Exception):
    """Why a range is read over the data source."""


def _now(conn: Connection, options: Options) -> QueryPosition:
    positions = StreamPositions(options.table, options.fail_on_data_loss)
    positions.begin_session(conn)
    return positions.now(conn)


def _end(conn: Connection, options: Options) -> QueryPosition:
    """The end of a range, with a witness where this role can have one. Raises RelayError, psycopg.Error."""
    end = options.to_snapshot
    if keeping_refusal(conn) is not None:
        return end or QueryPosition(durable_position(conn).snapshot)
    if end is None:
        return _now(conn, options)
    return end if end.witness else QueryPosition(end.snapshot, witness_of(conn, end.snapshot).id)


def _over_jdbc(
    spark: SparkSession,
    conn: Connection,
    options: Options,
    schema: StructType,
    names: Sequence[str],
) -> DataFrame:
    """The frame over Spark's JDBC source. Raises _Otherwise, RelayError, psycopg.Error."""
    if options.push_filters:
        raise _Otherwise("pushFilters is set")
    if options.to_snapshot is None or options.to_snapshot.witness is None:
        raise _Otherwise("the role cannot keep a position")
    url, properties = _address(conn)
    known = columns(conn, options.table, names)
    _require_same_types(conn, options.table, known, names)
    parts = planned_batch(conn, options)
    outputs = _outputs(options, known, names)
    table = sql.SQL("(select {} from {} where {}) as outbox").format(
        sql.SQL(", ").join(
            sql.SQL("{} as {}").format(value, sql.Identifier(name)) for name, _, value in outputs
        ),
        options.table.identifier,
        sql.SQL(" and ").join(_conditions(options, parts)),
    )
    properties |= {
        "driver": DRIVER,
        "fetchsize": str(_FETCHED_ROWS),
        "customSchema": ", ".join(f"`{name}` {kind}" for name, kind, _ in outputs),
        # Spark compares texts by their bytes, and PostgreSQL by a collation; and jsonb as no text.
        "pushDownPredicate": "false",
        # A role may have another isolation, in whose older snapshot a partition is dropped that the plan does not have.
        "sessionInitStatement": "set transaction isolation level read committed; "
        + statements(SessionKind.OWN).decode(),
    }
    predicates = [xid_range(part.portion).as_string(conn) for part in parts] or ["false"]
    reading = spark.read.option("numPartitions", str(len(predicates)))
    try:
        frame = reading.jdbc(
            url, table.as_string(conn), predicates=predicates, properties=properties
        )
        frame = frame.select(*_frame_columns(options.table, names))
        found = {field.name: field.dataType for field in frame.schema}
    except Exception as error:
        raise _Otherwise(f"Spark's JDBC source fails: {first_line(error)[:300]}") from None
    if found != {field.name: field.dataType for field in schema}:
        raise _Otherwise(f"Spark's JDBC source has other types: {found}")
    return frame


def _address(conn: Connection) -> tuple[str, dict[str, str]]:
    """The server that libpq has connected to, and the login, as pgjdbc takes them. Raises _Otherwise."""
    info = conn.info
    host = info.host or info.hostaddr
    if host.startswith(("/", "@")):
        raise _Otherwise("the server is reached by a Unix socket")
    properties = {"user": info.user, "ApplicationName": "relay spark"}
    if info.password:
        properties["password"] = info.password
    for name, value in info.get_parameters().items():
        if name in _LIBPQ:
            properties[_LIBPQ[name]] = value
        elif name not in _OF_LIBPQ and (name, value) != ("sslcertmode", "allow"):
            raise _Otherwise(f"pgjdbc does not know the parameter {name}")
    if properties.get("sslrootcert") == "system":
        raise _Otherwise("pgjdbc does not know the system's certificates")
    host = f"[{host}]" if ":" in host else host
    return f"jdbc:postgresql://{host}:{info.port}/{quote(info.dbname, safe='')}", properties


def _require_same_types(
    conn: Connection, table: MappedTable, known: Collection[str], names: Sequence[str]
) -> None:
    """Raise _Otherwise where pgjdbc may read a value otherwise than relay."""
    encoding = conn.info.parameter_status("server_encoding")
    if Encoding.of(encoding) is not None:
        raise _Otherwise(f"the database's encoding is {encoding}")
    fields = [(name, table.mapping[name]) for name in names if table.mapping.get(name, "") in known]
    if headers.FIELD in names:
        fields += [(headers.FIELD, table.mapping[headers.PREFIX + name]) for name in table.headers]
    if not fields:
        return
    chosen = sql.SQL(", ").join(sql.Identifier(column) for _, column in fields)
    cursor = conn.execute(
        sql.SQL("select {} from {} limit 0").format(chosen, table.identifier), prepare=False
    )
    for (name, column), found in zip(fields, cursor.description or (), strict=True):
        if found.type_code not in _SAME[_TYPES.get(name, "string")]:
            raise _Otherwise(f"column {column} is of another type than relay's")


def _outputs(
    options: Options, known: Collection[str], names: Sequence[str]
) -> list[tuple[str, str, sql.Composable]]:
    """The columns that PostgreSQL sends: name, type in Spark, expression. Times are microseconds since 1970."""
    table = options.table
    fields = [name for name in names if name != headers.FIELD]
    if headers.FIELD in names:
        fields += [headers.PREFIX + name for name in table.headers]
    outputs: list[tuple[str, str, sql.Composable]] = []
    for name, value in zip(fields, values(table, known, options.partitions, names), strict=True):
        kind = _TYPES.get(name, "string")
        if kind == "timestamp":
            micros = sql.SQL("(extract(epoch from ({})::timestamptz) * 1000000)::bigint")
            outputs.append((name, "bigint", micros.format(value)))
        else:
            outputs.append((name, kind, value))
    if INSERTED_BY not in names:
        # The ranges of the tasks are of it.
        outputs.append((INSERTED_BY, "bigint", XID))
    return outputs


def _frame_columns(table: MappedTable, names: Sequence[str]) -> list[Column]:
    def column(name: str) -> Column:
        if name == headers.FIELD:
            pairs = [
                each
                for header in table.headers
                for each in (functions.lit(header), functions.col(f"`{headers.PREFIX}{header}`"))
            ]
            return functions.create_map(*pairs)
        found = functions.col(f"`{name}`")
        return functions.timestamp_micros(found) if _TYPES[name] == "timestamp" else found

    return [column(name).alias(name, metadata={}) for name in names]


def _conditions(options: Options, parts: Sequence[RowsPartition]) -> list[sql.Composable]:
    """What holds for the rows of all tasks, after what must hold of the server while they are read."""
    if not parts:
        return [sql.SQL("false")]
    portion, kept = parts[0].portion, parts[0].kept
    held = sql.SQL("relay.holds_witness({})").format(sql.Literal(str(portion.witness)))
    asked = [_required(held, str(lost(f"{portion.between.after}@{portion.witness}")))]
    if kept.removals is not None:
        outbox = ".".join(options.table.name)
        nothing = sql.SQL("not exists ({})").format(losses(outbox, kept.since, kept.removals))
        asked.append(_required(nothing, removed_line(outbox, kept)))
    asked.append(condition(portion.between))
    return asked if options.conditions is None else [*asked, options.conditions]


def _required(holds: sql.Composable, line: str) -> sql.Composable:
    """A condition of which the server makes an error that has a line where it does not hold.

    It is decided once, before the rows are read. Without `concat` the planner would make the error.
    """
    return sql.SQL("(select case when {} then true else concat({})::boolean end)").format(
        holds, sql.Literal(line)
    )
