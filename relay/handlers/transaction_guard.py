"""Keeps a handler's code from ending the database transaction that relay runs it in.

A cursor WITH HOLD is open while the code runs. PostgreSQL runs its query when the transaction is committed, and the
query refuses that, so that nothing becomes visible. The cursor is gone when the transaction was rolled back, wholly or
to a savepoint before the cursor. A transaction with such a cursor cannot be prepared.

Source: PostgreSQL documentation, "DECLARE" (WITH HOLD).
"""

from __future__ import annotations

import psycopg

from relay.faults import ConfigurationError
from relay.handlers import Connection

_CREATE = r"""
    create or replace function pg_temp.relay_refuse_commit() returns void language plpgsql as $$
    begin
        raise exception 'a handler may not commit: relay commits its effects with offsets and dead letters'
              using errcode = 'invalid_transaction_termination';
    end $$
"""


def create(conn: Connection) -> None:
    """Create in this session what refuses a commit."""
    conn.execute(_CREATE)


def mark(conn: Connection) -> None:
    """Mark the current transaction. Raises ConfigurationError if the session is another one than was prepared."""
    try:
        conn.execute(
            "declare relay_transaction cursor with hold for select pg_temp.relay_refuse_commit()"
        )
    except (psycopg.errors.UndefinedFunction, psycopg.errors.InvalidSchemaName):
        raise ConfigurationError(
            "target.dsn: what belongs to a session is gone in the next transaction, as behind a pooler of "
            "transactions: connect to PostgreSQL itself, or let the pooler keep sessions"
        ) from None


def take_back(conn: Connection) -> bool:
    """Remove the mark; returns whether it was still there. If not, the transaction is aborted."""
    try:
        conn.execute("close relay_transaction")
    except psycopg.errors.InvalidCursorName:
        return False
    return True
