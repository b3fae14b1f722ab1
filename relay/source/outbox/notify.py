"""Creates and drops the trigger that notifies of each insert into the outbox, for `poll.listen`.

Source: PostgreSQL documentation, "NOTIFY" and "CREATE TRIGGER".
"""

from __future__ import annotations

from typing import Any

import psycopg
from psycopg import sql

from relay.config.source import SourceSettings
from relay.source.outbox.triggers import fires

TRIGGER = "relay_notify_event"


def sends_notify(conn: psycopg.Connection[Any], source: SourceSettings) -> bool:
    """Whether relay's trigger is on the outbox and fires. Raises psycopg.Error."""
    return fires(conn, source, TRIGGER, "notify_event")


def set_notify(conn: psycopg.Connection[Any], source: SourceSettings, wanted: bool) -> bool:
    """Create relay's trigger on the outbox, or drop it; returns whether that changed anything.

    A change locks the outbox until the database transaction ends. Raises psycopg.Error.
    """
    row = conn.execute(
        "select relay.set_notify(%s::regclass, %s)",
        (sql.Identifier(*source.table_name).as_string(conn), wanted),
    ).fetchone()
    return bool(row and row[0])
