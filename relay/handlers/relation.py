"""Loads the events that a statement reads into the relation `batch`, in commit order, by COPY.

A temporary table holds the events. A table does not keep the order of its rows, so the table numbers them, and the
temporary view `relay_batch` sorts them.

`batch` itself is a WITH query of the statement. A temporary relation of that name would hide a user's table `batch` in
everything that the session runs, triggers and functions included. Only the statement sees a WITH query, cannot write to
it, and plans it like the view itself.

Source: PostgreSQL documentation, "COPY", "SELECT" (WITH clause), "Client Connection Defaults" (search_path).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import LiteralString, NamedTuple

import numpy as np
import psycopg
from psycopg import sql
from psycopg.rows import scalar_row

from relay.faults import ConfigurationError, is_transient
from relay.handlers import copy_binary
from relay.model.events import COMMIT_FIELDS, EVENT_FIELDS, SQL_TYPES
from relay.model.transactions import Int64Array, Routed, Rows, Values
from relay.store.connections import Connection
from relay.store.session_settings import PIN_PATH_LOCALLY, USERS_PATH_LOCALLY, users_schemas

CHUNK_EVENTS = 10_000
CHUNK_BYTES = 4 * 1024 * 1024
"""How many events, and bytes, are encoded at once, which bounds the memory for a large transaction."""

RESERVED = ("relay_batch", "relay_batch_rows")
"""The names of relay's temporary relations."""

_CREATE_ROWS = sql.SQL(
    "create temporary table if not exists relay_batch_rows (relay_order bigint, {}) using heap"
    " on commit delete rows"
)
_CREATE_VIEW = sql.SQL(
    "create or replace temporary view relay_batch as"
    " select {} from pg_temp.relay_batch_rows order by relay_order"
)
_BLANK = re.compile(r"[\s;]+|--[^\r\n]*")
_COMMENT_MARK = re.compile(r"/\*|\*/")
_WITH = re.compile(r"with\b", re.IGNORECASE)
_RECURSIVE = re.compile(r"recursive\b", re.IGNORECASE)
_MAY_HAVE_WITH = re.compile(
    r"(?:select|insert|update|delete|merge|values|table)\b|\(", re.IGNORECASE
)
_QUERY = " batch as not materialized (select * from pg_temp.relay_batch)"
_PROBE_PATH = """
    select pg_catalog.set_config('search_path', pg_catalog.btrim(
        pg_catalog.concat('pg_temp, ', pg_catalog.current_setting('search_path')), ', '), true)
"""
_PROBE_VIEW = "create temporary view batch as select * from pg_temp.relay_batch"
_PROBE = sql.SQL(
    "create function pg_temp.relay_probe() returns void language sql begin atomic\n{}\n;end"
)
_READ = """
    with probe as (select oid, prosqlbody::text as body from pg_proc where oid = 'pg_temp.relay_probe'::regproc),
    needed as (select refclassid, refobjid, refobjsubid from pg_depend, probe
                where classid = 'pg_proc'::regclass and objid = probe.oid)
    select column_name.attname
      from pg_attribute as column_name
     where attrelid = 'pg_temp.batch'::regclass and attnum > 0
       and ((select body like '%:varattno 0 %' from probe)
         or exists (select from needed where refclassid = 'pg_proc'::regclass)
         or exists (select from needed where refobjid = attrelid and refobjsubid = attnum))
     order by attnum
"""
_COPY = sql.SQL("copy pg_temp.relay_batch_rows ({}) from stdin (format {})")
_NULL = rb"\N"
_ESCAPES = {b"\\": rb"\\", b"\t": rb"\t", b"\n": rb"\n", b"\r": rb"\r"}


class Chunk(NamedTuple):
    """Undecoded events of `routed`. `owners` (int64, ascending) has the index of each row's transaction there."""

    routed: Routed
    rows: Rows
    owners: Int64Array


Types = Mapping[str, LiteralString]
"""The PostgreSQL type of each event field: the columns of the relation, in their order."""


def create(conn: Connection, types: Types = SQL_TYPES) -> None:
    """Create the relation in this session, if it does not exist. Each database transaction starts with it empty."""
    columns = (
        sql.SQL("{} {}").format(sql.Identifier(name), sql.SQL(kind)) for name, kind in types.items()
    )
    conn.execute(_CREATE_ROWS.format(sql.SQL(", ").join(columns)))
    conn.execute(_CREATE_VIEW.format(sql.SQL(", ").join(map(sql.Identifier, types))))


def require_reserved(conn: Connection) -> None:
    """Raise ConfigurationError if relay's temporary relations would hide a user's relation of the same name."""
    hidden = conn.execute(
        "select nspname, relname from pg_class join pg_namespace on pg_namespace.oid = relnamespace"
        " where relname = any(%s) and nspname = any(%s)",
        (list(RESERVED), users_schemas(conn)),
    ).fetchone()
    if hidden:
        raise ConfigurationError(
            f"target.dsn: relay's temporary relations would hide {'.'.join(hidden)}: rename it, or take its schema "
            "out of the search_path of relay's role"
        )


def bound(statement: str) -> str:
    """The statement with `batch` added as a WITH query; a statement that cannot have one (CALL, DO) is unchanged."""
    start = _first_word(statement)
    clause = _WITH.match(statement, start)
    if clause is None:
        if _MAY_HAVE_WITH.match(statement, start) is None:
            return statement
        return f"{statement[:start]}with{_QUERY} {statement[start:]}"
    after = clause.end()
    recursive = _RECURSIVE.match(statement, _first_word(statement, after))
    after = recursive.end() if recursive else after
    return f"{statement[:after]}{_QUERY},{statement[after:]}"


def _first_word(statement: str, start: int = 0) -> int:
    """The index of the first word from `start` on, after blanks, comments (they nest) and empty statements.

    Source: PostgreSQL documentation, "Lexical Structure" (Comments).
    """
    while start < len(statement):
        blank = _BLANK.match(statement, start)
        if blank is not None:
            start = blank.end()
        elif statement.startswith("/*", start):
            start = _end_of_comment(statement, start)
        else:
            break
    return start


def _end_of_comment(statement: str, start: int) -> int:
    depth = 0
    for mark in _COMMENT_MARK.finditer(statement, start):
        depth += 1 if mark[0] == "/*" else -1
        if depth == 0:
            return mark.end()
    return len(statement)


def columns_read(
    conn: Connection, statement: str, fields: Iterable[str] = EVENT_FIELDS
) -> tuple[str, ...]:
    """Determine the columns of `batch` that a statement reads, with the server's parser.

    Returns all `fields` if the statement reads a whole row, calls a function other than PostgreSQL's that may read
    them, or cannot be the body of a function.

    Source: PostgreSQL documentation, "CREATE FUNCTION" (sql_body, whose dependencies are tracked) and "pg_depend".
    """
    try:
        with conn.transaction(force_rollback=True), conn.cursor(row_factory=scalar_row) as cursor:
            # A view, since the server does not record which columns of a WITH query are read. Like the WITH query, it
            # must hide a user's table, whatever the search_path says of temporary relations.
            cursor.execute(USERS_PATH_LOCALLY)
            cursor.execute(_PROBE_PATH)
            cursor.execute(_PROBE_VIEW)
            cursor.execute(_PROBE.format(sql.SQL(statement)))
            cursor.execute(PIN_PATH_LOCALLY)
            return tuple(cursor.execute(_READ).fetchall())
    except psycopg.Error as error:
        if is_transient(error):
            raise
        return tuple(fields)  # the error is reported when the statement runs


def chunks(routed: Routed) -> Iterator[Chunk]:
    """Split the events of transactions, in order, into chunks of at most CHUNK_EVENTS and about CHUNK_BYTES."""
    transactions = routed.transactions
    owners = np.repeat(np.arange(len(transactions)), transactions.facts["events"])
    for rows in transactions.portions(CHUNK_EVENTS, CHUNK_BYTES):
        yield Chunk(routed, rows, owners[: len(rows)])
        owners = owners[len(rows) :]


def load(
    conn: Connection,
    parts: Iterable[Chunk],
    types: Types = SQL_TYPES,
    fields: Sequence[str] = EVENT_FIELDS,
) -> None:
    """Fill the empty relation with `fields` of the events; other fields stay null."""
    first = 0
    for chunk in parts:
        values = dict(zip(fields, columns(chunk, fields), strict=True))
        fill(conn, values, types, len(chunk.rows), first)
        first += len(chunk.rows)


def fill(
    conn: Connection, columns: Mapping[str, Values], types: Types, count: int, first: int = 0
) -> None:
    """Add `count` rows of values, given as PostgreSQL's text, numbered from `first`."""
    numbers = np.arange(first, first + count)
    binary = copy_binary.rows(numbers, columns, types)
    if binary is None:
        _copy(conn, columns, "text", _lines(numbers, columns.values()))
    else:
        order, data = binary
        _copy(conn, order, "binary", copy_binary.START, data, copy_binary.END)


def _copy(conn: Connection, fields: Iterable[str], form: str, *data: bytes) -> None:
    names = sql.SQL(", ").join(map(sql.Identifier, ("relay_order", *fields)))
    with conn.cursor() as cursor, cursor.copy(_COPY.format(names, sql.Identifier(form))) as copy:
        for part in data:
            copy.write(part)


def clear(conn: Connection, truncate: bool = False) -> None:
    """Empty the relation. `truncate` is for many rows, since scans still read deleted ones.

    Raises ConfigurationError if the relation no longer exists.
    """
    try:
        conn.execute(
            b"truncate pg_temp.relay_batch_rows"
            if truncate
            else b"delete from pg_temp.relay_batch_rows"
        )
    except psycopg.errors.UndefinedTable:
        raise ConfigurationError(
            "target.dsn: the session's temporary relations no longer exist, as with a pooler in transaction mode: "
            "connect to PostgreSQL itself, or use session mode"
        ) from None


def _lines(numbers: Int64Array, columns: Iterable[Values]) -> bytes:
    """Rows in COPY's text format, each with its number first."""
    order = map(b"%d".__mod__, numbers.tolist())
    lines = zip(order, *map(_escaped, columns), strict=True)
    return b"\n".join((*map(b"\t".join, lines), b""))


def _escaped(column: Values) -> Sequence[bytes]:
    """A column in COPY's text format. One search of all values shows that most columns need no escapes."""
    text = b"".join(filter(None, column))
    if not any(special in text for special in _ESCAPES):
        return [_NULL if value is None else value for value in column]
    return [_NULL if value is None else _escape(value) for value in column]


def _escape(value: bytes) -> bytes:
    for special, escape in _ESCAPES.items():
        value = value.replace(special, escape)
    return value


def columns(chunk: Chunk, fields: Sequence[str]) -> list[Values]:
    """The values of some fields of a chunk's events, undecoded, a sequence for each field."""
    stored = [field for field in fields if field not in COMMIT_FIELDS]
    undecoded = chunk.routed.decoder.columns(chunk.rows, stored)
    by_field: dict[str, Values] = dict(zip(stored, undecoded, strict=True))
    of_commit = [field for field in fields if field in COMMIT_FIELDS]
    by_field.update(zip(of_commit, _commit_columns(chunk, of_commit), strict=True))
    return [by_field[field] for field in fields]


def _commit_columns(chunk: Chunk, fields: Sequence[str]) -> list[list[bytes | None]]:
    if not fields:
        return []
    transactions = chunk.routed.transactions
    first = int(chunk.owners[0])
    texts = [each.commit.fields for each in transactions.part(first, int(chunk.owners[-1]) + 1)]
    owners = (chunk.owners - first).tolist()
    columns = []
    for field in fields:
        index = COMMIT_FIELDS.index(field)
        column = [None if (text := row[index]) is None else text.encode() for row in texts]
        columns.append([column[owner] for owner in owners])
    return columns
