"""What the source's server lets relay do, by what it shows, and what to do where it does not.

Managed servers differ from PostgreSQL: they show settings of their own, and give rights by other ways.

Sources: PostgreSQL 19 documentation, `effective_wal_level`; documentation of logical replication on Amazon RDS, Cloud
SQL, AlloyDB, Azure and Neon.
"""

from __future__ import annotations

import psycopg
from psycopg import sql

from relay.faults import ConfigurationError, first_line
from relay.source.server import current_position, server_of
from relay.store.connections import Connection

OLDEST_SERVER = 140000

_WAL_HINTS = {
    "rds.logical_replication": "set rds.logical_replication to 1 in the parameter group, and reboot the instance",
    "cloudsql.logical_decoding": "set the flag cloudsql.logical_decoding to on, which restarts the instance",
    "alloydb.logical_decoding": "set the flag alloydb.logical_decoding to on, which restarts the instance",
    "azure.extensions": "set the server parameter wal_level to logical, and restart the server",
    "neon.timeline_id": "turn on logical replication in the settings of the project",
}
"""What makes a managed server write logical WAL, by a setting that only it has."""

_WAL_HINT = "run `alter system set wal_level = logical` and restart the server"

_RDS_ROLE = "rds_replication"
"""The role whose members may replicate on Amazon RDS and Aurora, where no role can be given the attribute."""

_FUNCTIONS = (
    "pg_create_logical_replication_slot",
    "pg_drop_replication_slot",
    "pg_logical_emit_message",
)
"""Functions that relay calls when it needs them, and that cannot be tried without an effect."""


def decodes(version: int, level: str, effective: str | None) -> bool:
    """Whether a server can decode WAL logically.

    From PostgreSQL 19 on (`effective` is not None) the first logical slot raises the level of a server with
    `wal_level = replica`, without a restart.
    """
    if "logical" in (level, effective):
        return True
    return version >= 190000 and effective is not None and level == "replica"


def require_logical_wal(conn: Connection) -> None:
    """Raise ConfigurationError if the server does not write what logical decoding needs."""
    version = conn.info.server_version
    if version < OLDEST_SERVER:
        raise ConfigurationError(
            f"source.dsn: the server is PostgreSQL {version // 10000}, relay needs 14 or later"
        )
    (row,) = conn.execute(
        "select current_setting('wal_level'), current_setting('effective_wal_level', true)"
    )
    level, effective = row
    if not decodes(version, level, effective):
        raise ConfigurationError(
            f"source.dsn: the server runs with wal_level={level}, relay needs logical: {_logical_wal_hint(conn)}, "
            "or set source.mode: poll, which needs no logical WAL"
        )


def _logical_wal_hint(conn: Connection) -> str:
    for setting, hint in _WAL_HINTS.items():
        (row,) = conn.execute("select current_setting(%s, true)", (setting,))
        if row[0] is not None:
            return hint
    return _WAL_HINT


def require_replication_right(conn: Connection) -> None:
    """Raise ConfigurationError if the connection's role may not replicate."""
    (row,) = conn.execute(
        """
        select rolname, rolreplication or rolsuper or coalesce(pg_has_role(oid, to_regrole(%(rds)s), 'member'), false),
               to_regrole(%(rds)s) is not null
          from pg_roles where rolname = current_user
        """,
        {"rds": _RDS_ROLE},
    )
    name, may, grants = row
    if not may:
        hint = f"grant {_RDS_ROLE} to {name}" if grants else f"alter role {name} replication"
        raise ConfigurationError(
            f"source.dsn: the role {name} may not replicate: run `{hint}` as an administrator, or connect as a role "
            "that may"
        )


def give_replication_right(conn: Connection, role: str) -> bool:
    """Let a role replicate, in the way of this server; returns whether that was new, and allowed."""
    (row,) = conn.execute(
        """
        select coalesce(pg_has_role(to_regrole(%(role)s), to_regrole(%(rds)s), 'member'), false),
               to_regrole(%(rds)s) is not null,
               coalesce((select rolreplication from pg_roles where rolname = %(role)s), true)
        """,
        {"role": role, "rds": _RDS_ROLE},
    )
    is_member, grants, may = row
    if may or is_member:
        return False
    right = sql.Identifier(role)
    statement = (
        sql.SQL("grant {} to {}").format(sql.Identifier(_RDS_ROLE), right)
        if grants
        else sql.SQL("alter role {} replication").format(right)
    )
    try:
        with conn.transaction():
            conn.execute(statement)
    except psycopg.errors.InsufficientPrivilege:
        return False
    return True


def require_functions(conn: Connection) -> None:
    """Raise ConfigurationError if the server lacks, or refuses the role, a function that relay calls."""
    try:
        server_of(conn)
        current_position(conn)
    except (
        psycopg.errors.InsufficientPrivilege,
        psycopg.errors.UndefinedFunction,
        psycopg.errors.FeatureNotSupported,
        psycopg.errors.ObjectNotInPrerequisiteState,
    ) as error:
        raise ConfigurationError(
            f"source.dsn: {first_line(error)}: relay cannot work without it: grant it to the role, or ask who runs the "
            "server"
        ) from None
    rows = conn.execute(
        """
        select name, bool_or(proname is not null)
          from unnest(%s::text[]) as name
          left join pg_proc on proname = name and pronamespace = 'pg_catalog'::regnamespace
         group by name having not coalesce(bool_or(has_function_privilege(pg_proc.oid, 'execute')), false)
        """,
        (list(_FUNCTIONS),),
    ).fetchall()
    if not rows:
        return
    name, exists = rows[0]
    hint = (
        f"run `grant execute on function {name} to relay`" if exists else "ask who runs the server"
    )
    raise ConfigurationError(
        f"source.dsn: {'the role may not call' if exists else 'the server has no'} {name}(), which relay needs: {hint}"
    )
