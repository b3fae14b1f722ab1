"""Keeps code of the user's from ending the database transaction that relay runs it in.

A cursor WITH HOLD is open until relay commits. PostgreSQL runs its query when the transaction is committed, and the
query refuses that, so that nothing becomes visible. The cursor is gone when the transaction was rolled back. A
transaction with such a cursor cannot be prepared.

Source: PostgreSQL documentation, "DECLARE" (WITH HOLD).
"""

from __future__ import annotations

from typing import Any

import psycopg

CREATE = r"""
    create or replace function pg_temp.relay_refuse_commit() returns void language plpgsql as $$
    begin
        raise exception 'a handler may not commit: relay commits its effects with offsets and dead letters'
              using errcode = 'invalid_transaction_termination';
    end $$
"""
"""Run once in each session."""
BEGIN = (
    b"begin; declare relay_transaction cursor with hold for select pg_temp.relay_refuse_commit()"
)
CLOSE = b"close relay_transaction; "
"""Run before the commit, in its round trip. Raises InvalidCursorName if the open transaction is not the one begun."""


def is_open(conn: psycopg.Connection[Any]) -> bool:
    """Whether the open transaction is still the one that was begun."""
    found = conn.execute("select from pg_cursors where name = 'relay_transaction'")
    return found.rowcount == 1
