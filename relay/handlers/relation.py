"""The temporary relation `batch`: events on their way into a statement, in commit order, loaded by COPY.

A table does not keep the order of its rows: PostgreSQL puts a row where there is room. So the table behind it numbers
them, and `batch` is a view that sorts.

Source: PostgreSQL documentation, "COPY", text format.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import count, islice
from typing import NamedTuple

import psycopg
from psycopg import sql
from psycopg.rows import scalar_row

from relay.events import COMMIT_FIELDS, EVENT_FIELDS, SQL_TYPES, Commit, Decoder, Transaction
from relay.faults import ConfigurationError
from relay.handlers import Connection

CHUNK_EVENTS = 10_000
CHUNK_BYTES = 4 * 1024 * 1024
"""How much is encoded at once: what bounds memory in a large transaction."""

_CREATE = (
    sql.SQL(
        "create temporary table if not exists relay_batch (relay_order bigint, {}) on commit delete rows"
    ).format(
        sql.SQL(", ").join(
            sql.SQL("{} {}").format(sql.Identifier(name), sql.SQL(SQL_TYPES[name]))
            for name in EVENT_FIELDS
        )
    ),
    sql.SQL(
        "create or replace temporary view batch as select {} from pg_temp.relay_batch order by relay_order"
    ).format(sql.SQL(", ").join(map(sql.Identifier, EVENT_FIELDS))),
)
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
_COPY = sql.SQL("copy pg_temp.relay_batch ({}) from stdin")
_NULL = rb"\N"
_ESCAPES = {b"\\": rb"\\", b"\t": rb"\t", b"\n": rb"\n", b"\r": rb"\r"}


class Chunk(NamedTuple):
    """Undecoded events of one layout, and how many of them came in which commit."""

    decoder: Decoder
    rows: Sequence[bytes]
    commits: Sequence[tuple[Commit, int]]


def create(conn: Connection) -> None:
    """Create the relation in this session, unless it is there. It is empty at the start of every transaction."""
    for statement in _CREATE:
        conn.execute(statement)


def columns_read(conn: Connection, statement: str) -> tuple[str, ...]:
    """The columns of `batch` that a statement reads, as the server's own parser understands it.

    All of them where a whole row is read, where a function that does not belong to PostgreSQL might read them, and
    where the statement cannot be the body of a function.

    Source: PostgreSQL documentation, "CREATE FUNCTION" (sql_body, whose dependencies are tracked) and "pg_depend".
    """
    try:
        with conn.transaction(force_rollback=True), conn.cursor(row_factory=scalar_row) as cursor:
            cursor.execute(_PROBE.format(sql.SQL(statement)))
            return tuple(cursor.execute(_READ).fetchall())
    except (psycopg.ProgrammingError, psycopg.NotSupportedError):
        return EVENT_FIELDS


def chunks(transactions: Sequence[Transaction]) -> Iterator[Chunk]:
    """The events of transactions, in order, as many together as are encoded at once."""
    rows: list[bytes] = []
    commits: list[tuple[Commit, int]] = []
    size = 0
    decoder: Decoder | None = None
    for transaction in transactions:
        events = transaction.events
        if decoder is not None and decoder is not events.decoder and rows:
            yield Chunk(decoder, rows, commits)
            rows, commits, size = [], [], 0
        decoder = events.decoder
        # Spooled rows come one by one: a few of them may be all that fits into memory.
        step = CHUNK_EVENTS if isinstance(events.tuples, tuple) else 1
        remaining = iter(events.tuples)
        while some := list(islice(remaining, step)):
            rows += some
            commits.append((transaction.commit, len(some)))
            size += sum(map(len, some))
            if len(rows) >= CHUNK_EVENTS or size >= CHUNK_BYTES:
                yield Chunk(decoder, rows, commits)
                rows, commits, size = [], [], 0
    if decoder is not None and rows:
        yield Chunk(decoder, rows, commits)


def load(conn: Connection, found: Iterable[Chunk], fields: Sequence[str] = EVENT_FIELDS) -> None:
    """Fill the empty relation; fields that are not named stay null."""
    columns = ("relay_order", *fields)
    statement = _COPY.format(sql.SQL(", ").join(map(sql.Identifier, columns)))
    numbers = count()
    with conn.cursor() as cursor, cursor.copy(statement) as copy:
        for chunk in found:
            copy.write(_encoded(chunk, fields, numbers))


def clear(conn: Connection, truncate: bool = False) -> None:
    """Remove what the relation holds: `truncate` where it is much, since deleted rows are still read past.

    Raises ConfigurationError if it is gone.
    """
    try:
        conn.execute(
            b"truncate pg_temp.relay_batch" if truncate else b"delete from pg_temp.relay_batch"
        )
    except psycopg.errors.UndefinedTable:
        raise ConfigurationError(
            "target.dsn: what belongs to a session is gone in the next transaction, as behind a pooler of "
            "transactions: connect to PostgreSQL itself, or let the pooler keep sessions"
        ) from None


def _encoded(chunk: Chunk, fields: Sequence[str], numbers: Iterator[int]) -> bytes:
    """Lines of COPY's text format, numbered."""
    order = map(b"%d".__mod__, islice(numbers, len(chunk.rows)))
    lines = zip(order, *map(_escaped, _columns(chunk, fields)), strict=True)
    return b"\n".join((*map(b"\t".join, lines), b""))


def _escaped(column: Sequence[bytes | None]) -> Sequence[bytes]:
    """A column's values as COPY's text format writes them; few columns hold what has to be escaped."""
    text = b"".join(filter(None, column))
    if not any(special in text for special in _ESCAPES):
        return [_NULL if value is None else value for value in column]
    return [_NULL if value is None else _escape(value) for value in column]


def _escape(value: bytes) -> bytes:
    for special, escape in _ESCAPES.items():
        value = value.replace(special, escape)
    return value


def _columns(chunk: Chunk, fields: Sequence[str]) -> list[Sequence[bytes | None]]:
    stored = [field for field in fields if field not in COMMIT_FIELDS]
    found: dict[str, Sequence[bytes | None]] = dict(
        zip(stored, chunk.decoder.columns(chunk.rows, stored), strict=True)
    )
    of_commit = [field for field in fields if field in COMMIT_FIELDS]
    found.update(zip(of_commit, _commit_columns(chunk.commits, of_commit), strict=True))
    return [found[field] for field in fields]


def _commit_columns(
    commits: Sequence[tuple[Commit, int]], fields: Sequence[str]
) -> list[list[bytes | None]]:
    places = [COMMIT_FIELDS.index(field) for field in fields]
    columns: list[list[bytes | None]] = [[] for _ in fields]
    for commit, events in commits if fields else ():
        texts = commit.fields
        for column, place in zip(columns, places, strict=True):
            text = texts[place]
            column += [None if text is None else text.encode()] * events
    return columns
