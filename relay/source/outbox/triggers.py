"""Checks whether a trigger of relay is on the outbox.

Source: PostgreSQL documentation, "pg_trigger".
"""

from __future__ import annotations

from typing import Any

import psycopg
from psycopg import sql

from relay.config.source import SourceSettings


def fires(
    conn: psycopg.Connection[Any], source: SourceSettings, trigger: str, function: str
) -> bool:
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
