"""Keeps a handler's code from ending the database transaction that relay runs it in.

A row of a temporary table is marked with the id of the transaction while the code runs. The mark is gone when the
transaction was rolled back, wholly or to a savepoint before the mark, and names another one when it was committed. A
deferred trigger refuses the commit itself, so that nothing of it becomes visible.

Source: PostgreSQL documentation, "CREATE TRIGGER" (CONSTRAINT) and "SET CONSTRAINTS".
"""

from __future__ import annotations

import psycopg

from relay.faults import ConfigurationError
from relay.handlers import Connection

_CREATE = (
    "create temporary table relay_transaction (id xid8)",
    "insert into pg_temp.relay_transaction values (null)",
    # SET CONSTRAINTS, which a handler may use, fires the trigger as a commit does.
    r"""
    create function pg_temp.relay_refuse_commit() returns trigger language plpgsql as $$
    begin
        if current_query() ~* '\m(commit|end|prepare)\M'
           and exists (select from pg_temp.relay_transaction where id is not null) then
            raise exception 'a handler may not commit: relay commits its effects with offsets and dead letters'
                  using errcode = 'invalid_transaction_termination';
        end if;
        return null;
    end $$
    """,
    """
    create constraint trigger relay_refuse_commit after update on pg_temp.relay_transaction
        deferrable initially deferred
        for each row when (new.id is not null) execute function pg_temp.relay_refuse_commit()
    """,
)


def create(conn: Connection) -> None:
    """Create table and trigger in this session, unless they are there."""
    with conn.transaction():
        if conn.execute("select to_regclass('pg_temp.relay_transaction')").fetchone() == (None,):
            for statement in _CREATE:
                conn.execute(statement)


def mark(conn: Connection) -> None:
    """Mark the current transaction. Raises ConfigurationError if the session is another one than was prepared."""
    try:
        conn.execute("update pg_temp.relay_transaction set id = pg_current_xact_id()")
    except psycopg.errors.UndefinedTable:
        raise ConfigurationError(
            "target.dsn: what belongs to a session is gone in the next transaction, as behind a pooler of "
            "transactions: connect to PostgreSQL itself, or let the pooler keep sessions"
        ) from None


def take_back(conn: Connection) -> bool:
    """Remove the mark; returns whether it was still there, and of this transaction."""
    found = conn.execute(
        "update pg_temp.relay_transaction set id = null where id = pg_current_xact_id()"
    )
    return found.rowcount == 1
