"""The publication and the replication slot: creating, describing and dropping them.

Source: PostgreSQL documentation, "Replication Slots", "CREATE PUBLICATION" and "Replication Management Functions".
"""

from __future__ import annotations

from dataclasses import dataclass

import psycopg
from psycopg import sql
from psycopg.rows import args_row, class_row, scalar_row

from relay.events import Lsn
from relay.faults import ConfigurationError

PLUGIN = "pgoutput"


@dataclass(frozen=True, slots=True)
class SlotState:
    """A slot as `pg_replication_slots` shows it; `lag_bytes` is the WAL that it still has to confirm."""

    name: str
    plugin: str
    database: str | None
    active: bool
    active_pid: int | None
    wal_status: str | None
    confirmed_flush_lsn: str | None
    lag_bytes: int | None
    invalidation_reason: str | None

    @property
    def lost(self) -> bool:
        """Whether the server has removed what the slot needed, so that it can never serve again."""
        return self.wal_status == "lost" or self.invalidation_reason is not None


def slot_state(conn: psycopg.Connection[object], name: str) -> SlotState | None:
    """The slot of that name, or None."""
    with conn.cursor(row_factory=class_row(SlotState)) as cursor:
        return cursor.execute(
            """
            select slot_name::text as name, plugin::text as plugin, database::text as database, active, active_pid,
                   wal_status, confirmed_flush_lsn::text as confirmed_flush_lsn,
                   coalesce(to_jsonb(s) ->> 'invalidation_reason',
                            case when (to_jsonb(s) ->> 'conflicting')::boolean then 'conflict'
                                 when wal_status = 'lost' then 'wal_removed' end) as invalidation_reason,
                   case when pg_is_in_recovery() then null
                        else pg_wal_lsn_diff(pg_current_wal_lsn(), confirmed_flush_lsn)::bigint end as lag_bytes
              from pg_replication_slots as s where slot_name = %s
            """,
            (name,),
        ).fetchone()


def slot_reader(conn: psycopg.Connection[object], name: str) -> str | None:
    """The application_name of the connection that reads the slot; None if nobody does."""
    with conn.cursor(row_factory=scalar_row) as cursor:
        found: str | None = cursor.execute(
            "select a.application_name from pg_replication_slots s join pg_stat_activity a on a.pid = s.active_pid"
            " where s.slot_name = %s",
            (name,),
        ).fetchone()
    return found


def create_slot(conn: psycopg.Connection[object], name: str) -> Lsn:
    """Create the slot, as a failover slot where the server has them (PostgreSQL 17 and later); returns its position.

    The publication must be there already: a slot decodes with the catalogue as it was, and would stumble over changes
    from before the publication. Waits for the transactions that are running. Raises psycopg.Error.
    """
    failover = sql.SQL(", failover => true") if conn.info.server_version >= 170000 else sql.SQL("")
    with conn.cursor(row_factory=args_row(Lsn.parse)) as cursor:
        cursor.execute(
            sql.SQL(
                "select lsn::text from pg_create_logical_replication_slot({name}, {plugin}{failover})"
            ).format(name=name, plugin=PLUGIN, failover=failover)
        )
        return next(cursor)


def ensure_slot(conn: psycopg.Connection[object], name: str) -> bool:
    """Create the slot if it is not there; returns whether it was created.

    Raises ConfigurationError if it is there but not ours.
    """
    state = slot_state(conn, name)
    if state is None:
        create_slot(conn, name)
        return True
    require_ours(state, conn.info.dbname)
    return False


def require_ours(state: SlotState, database: str) -> None:
    """Raise ConfigurationError if the slot decodes with another plugin or for another database."""
    if state.plugin != PLUGIN:
        raise ConfigurationError(
            f"source.slot: the slot {state.name!r} uses the plugin {state.plugin!r}, relay needs {PLUGIN!r}: "
            "name another slot, or drop this one if nobody uses it"
        )
    if state.database != database:
        raise ConfigurationError(
            f"source.slot: the slot {state.name!r} belongs to the database {state.database!r}, "
            f"not to {database!r}: name another slot"
        )


def drop_slot(conn: psycopg.Connection[object], name: str) -> bool:
    """Drop the slot if it is there; returns whether it was. Raises psycopg.errors.ObjectInUse while it is read."""
    cursor = conn.execute(
        "select pg_drop_replication_slot(slot_name) from pg_replication_slots where slot_name = %s",
        (name,),
    )
    return cursor.rowcount > 0


def publication_tables(conn: psycopg.Connection[object], name: str) -> list[str] | None:
    """The tables of the publication as schema.table, or None if there is no such publication."""
    if not conn.execute("select from pg_publication where pubname = %s", (name,)).rowcount:
        return None
    rows = conn.execute(
        "select schemaname || '.' || tablename from pg_publication_tables where pubname = %s order by 1",
        (name,),
    ).fetchall()
    return [row[0] for row in rows if isinstance(row, tuple)]


def ensure_publication(conn: psycopg.Connection[object], name: str, table: tuple[str, str]) -> bool:
    """Create the publication of the table's inserts if it is not there; returns whether it was created.

    Only inserts are published, so that pruning the outbox makes no noise, and through the root of a partitioned table.
    Raises ConfigurationError if it is there but does not publish the table.
    """
    tables = publication_tables(conn, name)
    if tables is None:
        conn.execute(
            sql.SQL(
                "create publication {} for table {} with (publish = 'insert', publish_via_partition_root = true)"
            ).format(sql.Identifier(name), sql.Identifier(*table))
        )
        return True
    if ".".join(table) not in tables:
        raise ConfigurationError(
            f"source.publication: {name!r} does not publish {'.'.join(table)}: "
            f"run `alter publication {name} add table {'.'.join(table)}`, or name another publication"
        )
    return False


def drop_publication(conn: psycopg.Connection[object], name: str) -> None:
    """Drop the publication if it is there."""
    conn.execute(sql.SQL("drop publication if exists {}").format(sql.Identifier(name)))
