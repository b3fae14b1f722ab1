"""The index by which polling reads only the rows of its partitions.

Source: PostgreSQL documentation, "Indexes on Expressions" and "CREATE INDEX".
"""

from __future__ import annotations

import re
from typing import Any

import psycopg
from psycopg import sql

from relay.config import Settings
from relay.source.rows import partition_expression

Connection = psycopg.Connection[Any]


def has_index(conn: Connection, settings: Settings) -> bool:
    """Whether the index for the configured number of partitions is there and whole."""
    found = conn.execute(
        """
        select from pg_index i join pg_class c on c.oid = i.indexrelid
         where i.indrelid = to_regclass(%s) and c.relname = %s and i.indisvalid
        """,
        (sql.Identifier(*settings.source.table_name).as_string(conn), _name(settings)),
    )
    return found.rowcount > 0


def ensure_index(conn: Connection, settings: Settings) -> bool:
    """Create the index if it is not there, without holding up publishers; returns whether it was created.

    A partitioned table is locked meanwhile, since PostgreSQL cannot build its indexes concurrently.
    The connection must be in autocommit mode. Raises psycopg.Error.
    """
    if has_index(conn, settings):
        return False
    schema, table = settings.source.table_name
    partitioned = conn.execute(
        "select from pg_partitioned_table where partrelid = to_regclass(%s)",
        (sql.Identifier(schema, table).as_string(conn),),
    ).rowcount
    concurrently = sql.SQL("" if partitioned else "concurrently")
    # What an interrupted run has left is not valid.
    conn.execute(
        sql.SQL("drop index {} if exists {}").format(
            concurrently, sql.Identifier(schema, _name(settings))
        )
    )
    conn.execute(
        sql.SQL("create index {} {} on {} ({}, {})").format(
            concurrently,
            sql.Identifier(_name(settings)),
            sql.Identifier(schema, table),
            partition_expression(settings.source.mapping["host_id"], settings.partitions),
            sql.Identifier(settings.source.mapping["c_offset"]),
        )
    )
    return True


def drop_indexes(conn: Connection, settings: Settings) -> int:
    """Drop the indexes for every number of partitions; returns how many there were. Raises psycopg.Error."""
    schema, table = settings.source.table_name
    names = conn.execute(
        "select indexname from pg_indexes where schemaname = %s and tablename = %s and indexname ~ %s",
        (schema, table, rf"^{re.escape(table[:40])}_relay_\d+$"),
    ).fetchall()
    for (name,) in names:
        conn.execute(sql.SQL("drop index {}").format(sql.Identifier(schema, name)))
    return len(names)


def drop_index(conn: Connection, settings: Settings) -> None:
    """Drop the index for the configured number of partitions if it is there. Raises psycopg.Error."""
    schema, _ = settings.source.table_name
    conn.execute(sql.SQL("drop index if exists {}").format(sql.Identifier(schema, _name(settings))))


def _name(settings: Settings) -> str:
    _, table = settings.source.table_name
    return f"{table[:40]}_relay_{settings.partitions}"
