"""Finds a pooler that gives the statements of one session to several sessions of the server.

relay's claims are advisory locks, and its settings are those of a session: both would stay behind in the pooler's
sessions, and belong to whoever gets these next.

Source: PgBouncer documentation, "SQL feature map for pooling modes".
"""

from __future__ import annotations

from contextlib import closing

import psycopg

from relay.faults import ConfigurationError
from relay.store.connections import Connection, Dsn, connect

_TRIES = 3
"""How often the two sessions are compared: a pooler may hand out its sessions in turn."""


def require_session(conn: Connection, dsn: Dsn, key: str) -> None:
    """Raise ConfigurationError if `conn` does not keep one session of the server between its transactions.

    `dsn` is how `conn` was opened, and another one is. Raises psycopg.Error.
    """
    before = _server_process(conn)
    if before == conn.info.backend_pid:
        # A pooler answers the start of a connection with a number of its own.
        return
    with closing(connect(dsn)) as other:
        other.autocommit = False
        for _ in range(_TRIES):
            # In a transaction, the other one keeps what it gets.
            if _server_process(other) == before or _server_process(conn) != before:
                raise _no_session(conn, key)
            other.rollback()


def _server_process(conn: psycopg.Connection[tuple[int]]) -> int:
    ((process,),) = conn.execute("select pg_backend_pid()")
    return int(process)


def _no_session(conn: Connection, key: str) -> ConfigurationError:
    host = conn.info.host or ""
    if "-pooler." in host:
        # Neon's pooled addresses.
        cure = f"use the host {host.replace('-pooler.', '.', 1)}"
    elif ".pooler.supabase." in host:
        cure = "use the direct connection, db.<project>.supabase.co on port 5432"
    else:
        cure = "connect to PostgreSQL itself, or set the pooler to session mode"
    return ConfigurationError(
        f"{key}: {host or 'the address'} is a pooler that gives each transaction to another session of the server, and "
        f"relay's locks and settings belong to a session: {cure}"
    )
