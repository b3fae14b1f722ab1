"""Creates, describes and drops what relay adds to the outbox: two indexes, and two triggers.

The index on c_xid lets polling read only the rows between two snapshots; the one on c_offset is for those who read the
table by it (`source.index_offsets`). One trigger notifies of each insert, for `poll.listen`; the other fills c_offset
from a counter instead of a sequence, without gaps (`source.offsets: gapless`).

Sources: PostgreSQL documentation, "CREATE INDEX", "NOTIFY", "CREATE TRIGGER" and "pg_trigger"; light-portal's
`log_counter`.
"""

from __future__ import annotations

from typing import Literal

from psycopg import sql

from relay.config.source import SourceSettings
from relay.faults import ConfigurationError
from relay.model.events import INSERTED_BY
from relay.source.outbox.columns import columns
from relay.store.connections import Connection

NOTIFY_TRIGGER = "relay_notify_event"
COUNTER_TRIGGER = "relay_fill_offset"

_SUFFIXES = {INSERTED_BY: "_relay_c_xid", "c_offset": "_relay_c_offset"}
"""The ends of the names of relay's indexes, by the field that each is on."""
Indexed = Literal["c_xid", "c_offset"]


def indexed_column(source: SourceSettings, field: Indexed) -> str:
    """The column of an index."""
    return INSERTED_BY if field == INSERTED_BY else source.mapping[field]


def has_index(conn: Connection, source: SourceSettings, field: Indexed) -> bool:
    """Whether the outbox has a valid index that begins with the field's column and is not partial."""
    index = conn.execute(
        """
        select from pg_index i join pg_attribute a on a.attrelid = i.indrelid and a.attnum = i.indkey[0]
         where i.indrelid = to_regclass(%s) and a.attname = %s and i.indisvalid and i.indpred is null
        """,
        (
            sql.Identifier(*source.table_name).as_string(conn),
            indexed_column(source, field),
        ),
    )
    return index.rowcount > 0


def has_own_index(conn: Connection, source: SourceSettings, field: Indexed) -> bool:
    """Whether there is an index that relay created, valid or not."""
    schema, _ = source.table_name
    name = sql.Identifier(schema, _name(source, field)).as_string(conn)
    return conn.execute("select where to_regclass(%s) is not null", (name,)).rowcount > 0


def create_index(conn: Connection, source: SourceSettings, field: Indexed) -> None:
    """Create an index without blocking publishers.

    A partitioned table is locked meanwhile, since PostgreSQL cannot build its indexes concurrently.
    The connection must be in autocommit mode. Raises psycopg.Error.
    """
    # An interrupted build leaves an invalid index.
    drop_index(conn, source, field)
    conn.execute(
        sql.SQL("create index {} {} on {} ({})").format(
            _concurrently(conn, source),
            sql.Identifier(_name(source, field)),
            sql.Identifier(*source.table_name),
            sql.Identifier(indexed_column(source, field)),
        )
    )


def drop_index(conn: Connection, source: SourceSettings, field: Indexed) -> bool:
    """Drop an index that relay created, as it was created; returns whether it existed. Raises psycopg.Error."""
    if not has_own_index(conn, source, field):
        return False
    schema, _ = source.table_name
    name = sql.Identifier(schema, _name(source, field))
    conn.execute(sql.SQL("drop index {} {}").format(_concurrently(conn, source), name))
    return True


def _concurrently(conn: Connection, source: SourceSettings) -> sql.SQL:
    partitioned = conn.execute(
        "select from pg_partitioned_table where partrelid = to_regclass(%s)",
        (sql.Identifier(*source.table_name).as_string(conn),),
    ).rowcount
    return sql.SQL("" if partitioned else "concurrently")


def drop_all_indexes(conn: Connection) -> None:
    """Drop the indexes that relay created on all outboxes of the database. Raises psycopg.Error."""
    indexes = conn.execute(
        """
        select n.nspname, i.relname
          from pg_index as x join pg_class as i on i.oid = x.indexrelid join pg_class as t on t.oid = x.indrelid
               join pg_namespace as n on n.oid = i.relnamespace
         where i.relname in (select left(t.relname, 40) || suffix from unnest(%s::text[]) as suffix)
           and exists (select from pg_attribute where attrelid = t.oid and attname = %s) and not i.relispartition
        """,
        (list(_SUFFIXES.values()), INSERTED_BY),
    ).fetchall()
    for names in indexes:
        conn.execute(sql.SQL("drop index {}").format(sql.Identifier(*names)))


def _name(source: SourceSettings, field: Indexed) -> str:
    _, table = source.table_name
    return f"{table[:40]}{_SUFFIXES[field]}"


def _fires(conn: Connection, source: SourceSettings, trigger: str, function: str) -> bool:
    """Whether a trigger with that function of the schema `relay` is on the outbox and fires. Raises psycopg.Error."""
    rows = conn.execute(
        """
        select from pg_trigger join pg_proc as p on p.oid = tgfoid
         where tgrelid = to_regclass(%s) and tgname = %s and tgenabled in ('O', 'A')
           and p.proname = %s and p.pronamespace = to_regnamespace('relay')
        """,
        (sql.Identifier(*source.table_name).as_string(conn), trigger, function),
    )
    return rows.rowcount > 0


def sends_notify(conn: Connection, source: SourceSettings) -> bool:
    """Whether relay's trigger is on the outbox and fires. Raises psycopg.Error."""
    return _fires(conn, source, NOTIFY_TRIGGER, "notify_event")


def set_notify(conn: Connection, source: SourceSettings, wanted: bool) -> bool:
    """Create relay's trigger on the outbox, or drop it; returns whether that changed anything.

    A change locks the outbox until the database transaction ends. Raises psycopg.Error.
    """
    row = conn.execute(
        "select relay.set_notify(%s::regclass, %s)",
        (sql.Identifier(*source.table_name).as_string(conn), wanted),
    ).fetchone()
    return bool(row and row[0])


def is_gapless(conn: Connection, source: SourceSettings) -> bool:
    """Whether relay's trigger is on the outbox and fires. Raises psycopg.Error."""
    return _fires(conn, source, COUNTER_TRIGGER, "fill_offset")


def require_numbered(conn: Connection, source: SourceSettings) -> None:
    """Raise ConfigurationError if the outbox lacks the column of the numbers, and `relay init` does not add it."""
    column = source.mapping["c_offset"]
    if source.mode != "wal" or source.owns_table:
        return
    if source.offsets == "gapless":
        wanted, without = "source.offsets: gapless fills", "source.offsets: sequence"
    elif source.index_offsets:
        wanted, without = "source.index_offsets: indexes", "source.index_offsets: false"
    else:
        return
    existing = columns(conn, source.table_name)
    if existing and column not in existing:
        raise ConfigurationError(
            f"{wanted} the column {column!r}, which {source.table} does not have and `relay init` does not add in mode "
            f"wal: add it (bigint), map another column (columns: {{c_offset: …}}), or set {without}"
        )


def set_gapless(conn: Connection, source: SourceSettings, wanted: bool) -> bool:
    """Switch between the counter and the sequence; returns whether that changed anything.

    A change locks the outbox until the database transaction ends. Raises psycopg.Error.
    """
    row = conn.execute(
        "select relay.set_gapless(%s::regclass, %s, %s)",
        (
            sql.Identifier(*source.table_name).as_string(conn),
            source.mapping["c_offset"],
            wanted,
        ),
    ).fetchone()
    return bool(row and row[0])
