"""Prevents user code from ending the database transaction in which relay runs it.

A cursor WITH HOLD is open until relay commits. If user code commits, PostgreSQL runs the cursor's query, which raises
an error, so that nothing becomes visible. After a rollback the cursor no longer exists. A transaction with such a
cursor cannot be prepared.

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
"""Creates the function of the cursor. Run once in each session."""
BEGIN = (
    b"begin; declare relay_transaction cursor with hold for select pg_temp.relay_refuse_commit()"
)
_IS_OPEN = "select from pg_catalog.pg_cursors where name operator(pg_catalog.=) 'relay_transaction'"
"""Asked under the user's search_path."""
CLOSE = b"close relay_transaction; "
"""Run before the commit, in its round trip. Raises InvalidCursorName if the open transaction is not relay's."""


def is_open(conn: psycopg.Connection[Any]) -> bool:
    """Whether the open transaction is still the one that relay began."""
    cursor = conn.execute(_IS_OPEN)
    return cursor.rowcount == 1
