"""The partition of a host in SQL. `relay.model.host_hash` computes the same of the bytes that the stream brings."""

from __future__ import annotations

from psycopg import sql

from relay.faults import RelayError
from relay.model.host_hash import hashes
from relay.store.connections import Connection

_PROBE = "relay: is it the same hash?"


def partition_of(column: str, partitions: int) -> sql.Composed:
    """The expression of the partition of a row, whose host is in the column `column`; '' stands for null.

    `concat` gives the text that the stream has, with the blanks of a char(n), where a cast would strip them. Under a
    nondeterministic collation equal texts of different bytes would have one hash: the collation "C" has the bytes'.
    """
    return sql.SQL('mod(abs(hashtext(concat({}) collate "C")::bigint), {})::int').format(
        sql.Identifier(column), sql.Literal(partitions)
    )


def require_same_hash(conn: Connection) -> None:
    """Raise RelayError if the server's hash of a text is not that of `relay.model.host_hash`. Raises psycopg.Error."""
    (row,) = conn.execute(sql.SQL("select hashtext({})").format(_PROBE))
    if row[0] != hashes([_PROBE.encode()])[0]:
        raise RelayError(
            "source.dsn: the server's hashtext is not that of PostgreSQL on a little-endian machine, so that hosts "
            "would have other partitions in the WAL than in the table: set source.mode: poll"
        )
