"""Creates the service's role `relay` and grants its rights, for `relay init`."""

from __future__ import annotations

from psycopg import sql

from relay.config.settings import Settings
from relay.store.connections import Connection

ROLE = """
    do $$
    begin
        if not exists (select from pg_roles where rolname = 'relay') then
            create role relay nologin;
        end if;
    exception when insufficient_privilege then
        null;
    end
    $$
"""
"""Creates the role. The schema files do the same, and say what to do if that is not allowed."""


def grant_read(source: Connection, settings: Settings) -> None:
    """Grant the service the right to read an outbox that is not relay's own."""
    if has_role(source):
        table = sql.Identifier(*settings.source.table_name)
        source.execute(sql.SQL("grant select on {} to relay").format(table))


def has_role(conn: Connection) -> bool:
    """Return whether the server has the role `relay`."""
    return bool(conn.execute("select from pg_roles where rolname = 'relay'").rowcount)
