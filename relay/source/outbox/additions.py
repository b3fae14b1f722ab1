"""Creates, describes and drops what relay adds to the outbox: an index on c_xid, and two triggers.

The index lets polling read only the rows between two snapshots. One trigger notifies of each insert, for `poll.listen`;
the other fills c_offset from a counter instead of a sequence, without gaps (`source.offsets: gapless`).

Sources: PostgreSQL documentation, "CREATE INDEX", "NOTIFY", "CREATE TRIGGER" and "pg_trigger"; light-portal's
`log_counter`.
"""

from __future__ import annotations

from psycopg import sql

from relay.config.settings import Settings
from relay.config.source import SourceSettings
from relay.faults import ConfigurationError
from relay.model.events import INSERTED_BY
from relay.source.outbox.columns import columns
from relay.store.connections import Connection

NOTIFY_TRIGGER = "relay_notify_event"
COUNTER_TRIGGER = "relay_fill_offset"

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
    """Raise ConfigurationError if the outbox has no column for gapless offsets, and `relay init` adds none."""
    column = source.mapping["c_offset"]
    if source.offsets == "sequence" or source.mode != "wal" or source.owns_table:
        return
    existing = columns(conn, source.table_name)
    if existing and column not in existing:
        raise ConfigurationError(
            f"source.offsets: gapless fills the column {column!r}, which {source.table} does not have and `relay init` "
            "does not add in mode wal: add it (bigint), map another column (columns: {c_offset: …}), or set "
            "source.offsets: sequence"
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
