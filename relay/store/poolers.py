"""Finds a pooler that gives the statements of one session to several sessions of the server.

relay's claims are advisory locks, and its settings are those of a session: both would stay behind in the pooler's
sessions, and belong to whoever gets these next.

Source: PgBouncer documentation, "SQL feature map for pooling modes".
"""

from __future__ import annotations

import select
import time
from collections.abc import Callable
from contextlib import closing
from secrets import token_hex
from typing import Any

import psycopg
from psycopg.pq import ExecStatus

from relay.faults import ConfigurationError

POOLER_HINT = (
    "a pooler such as PgBouncer cannot stream the WAL: name the server itself, which has another address or port "
    "(Neon: the host without -pooler; Supabase: db.<project>.supabase.co, port 5432)"
)
"""What to do where a pooler answers."""

_TRIES = 3
"""How often the two sessions are compared: a pooler may hand out its sessions in turn."""
_ANSWER_SECONDS = 2.0
_known: set[tuple[str, int, str, str]] = set()
"""Addresses behind which each connection has a session of the server for itself."""


def require_session(
    conn: psycopg.Connection[Any], open_other: Callable[[], psycopg.Connection[Any]], key: str
) -> None:
    """Raise ConfigurationError if `conn` does not keep one session of the server for itself.

    `open_other` opens another connection to the same address; both are in autocommit mode. Asks once for each address,
    before relay sets anything that others would notice. Raises psycopg.Error.
    """
    info = conn.info
    address = (info.host, info.port, info.dbname, info.user)
    if address in _known:
        return
    if leads_to_pooler(conn):
        with closing(open_other()) as other:
            if _share_session(conn, other):
                raise _no_session(info.host, key)
    _known.add(address)


def leads_to_pooler(conn: psycopg.Connection[Any]) -> bool:
    """Whether a pooler answers instead of the server: it makes up the process id that a client gets."""
    row = conn.execute("select pg_catalog.pg_backend_pid()").fetchone()
    return row is not None and bool(row[0] != conn.info.backend_pid)


def _share_session(conn: psycopg.Connection[Any], other: psycopg.Connection[Any]) -> bool:
    """Whether a setting of one session is seen in another one, or is lost by its own."""
    token = token_hex(8)
    conn.execute("select pg_catalog.set_config('relay.session', %s, false)", (token,))
    for _ in range(_TRIES):
        seen = _token(other)
        if seen is None:
            break
        if seen == token or _token(conn) not in (token, None):
            return True
    conn.execute("reset relay.session")
    return False


def _token(conn: psycopg.Connection[Any]) -> str | None:
    """What `relay.session` is; None without an answer in time, since the pooler has no session left."""
    pgconn = conn.pgconn
    pgconn.send_query(b"select coalesce(pg_catalog.current_setting('relay.session', true), '')")
    deadline = time.monotonic() + _ANSWER_SECONDS
    while pgconn.is_busy():
        if not select.select([pgconn.socket], [], [], max(0.0, deadline - time.monotonic()))[0]:
            return None
        pgconn.consume_input()
    token = None
    while (result := pgconn.get_result()) is not None:
        if result.status == ExecStatus.TUPLES_OK:
            token = (result.get_value(0, 0) or b"").decode()
    return token


def _no_session(host: str | None, key: str) -> ConfigurationError:
    host = host or ""
    if "-pooler." in host:
        # Neon's pooled addresses.
        hint = f"use the host {host.replace('-pooler.', '.', 1)}"
    elif ".pooler.supabase." in host:
        hint = "use the direct connection, db.<project>.supabase.co on port 5432"
    else:
        hint = "connect to PostgreSQL itself, or set the pooler to session mode"
    return ConfigurationError(
        f"{key}: {host or 'the address'} is a pooler that gives each transaction to another session of the server, and "
        f"relay's locks and settings belong to a session: {hint}"
    )
