"""Creates and drops the index on c_xid, with which polling reads only the rows between two snapshots.

Source: PostgreSQL documentation, "CREATE INDEX".
"""

from __future__ import annotations

from psycopg import sql

from relay.config.settings import Settings
from relay.model.events import INSERTED_BY
from relay.store.connections import Connection

_SUFFIX = "_relay_c_xid"


def has_index(conn: Connection, settings: Settings) -> bool:
    """Whether the outbox has a valid index that begins with c_xid and is not partial."""
    index = conn.execute(
        """
        select from pg_index i join pg_attribute a on a.attrelid = i.indrelid and a.attnum = i.indkey[0]
         where i.indrelid = to_regclass(%s) and a.attname = %s and i.indisvalid and i.indpred is null
        """,
        (sql.Identifier(*settings.source.table_name).as_string(conn), INSERTED_BY),
    )
    return index.rowcount > 0


def ensure_index(conn: Connection, settings: Settings) -> bool:
    """Create the index if it does not exist, without blocking publishers; returns whether it was created.

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
    # An interrupted build leaves an invalid index.
    conn.execute(
        sql.SQL("drop index {} if exists {}").format(
            concurrently, sql.Identifier(schema, _name(settings))
        )
    )
    conn.execute(
        sql.SQL("create index {} {} on {} ({})").format(
            concurrently,
            sql.Identifier(_name(settings)),
            sql.Identifier(schema, table),
            sql.Identifier(INSERTED_BY),
        )
    )
    return True


def drop_index(conn: Connection, settings: Settings) -> bool:
    """Drop the index that relay created; returns whether it existed. Raises psycopg.Error."""
    schema, _ = settings.source.table_name
    name = sql.Identifier(schema, _name(settings))
    row = conn.execute("select to_regclass(%s)", (name.as_string(conn),)).fetchone()
    if not row or row[0] is None:
        return False
    conn.execute(sql.SQL("drop index {}").format(name))
    return True


def drop_all_indexes(conn: Connection) -> None:
    """Drop the indexes that relay created on all outboxes of the database. Raises psycopg.Error."""
    indexes = conn.execute(
        """
        select n.nspname, i.relname
          from pg_index as x join pg_class as i on i.oid = x.indexrelid join pg_class as t on t.oid = x.indrelid
               join pg_namespace as n on n.oid = i.relnamespace
               join pg_attribute as a on a.attrelid = t.oid and a.attnum = x.indkey[0]
         where a.attname = %s and i.relname = left(t.relname, 40) || %s and not i.relispartition
        """,
        (INSERTED_BY, _SUFFIX),
    ).fetchall()
    for names in indexes:
        conn.execute(sql.SQL("drop index {}").format(sql.Identifier(*names)))


def _name(settings: Settings) -> str:
    _, table = settings.source.table_name
    return f"{table[:40]}{_SUFFIX}"
