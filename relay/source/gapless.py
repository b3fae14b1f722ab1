"""Numbers of events without gaps (`source.offsets: gapless`), for those who want them: a counter instead of a sequence.

Source: light-portal's `log_counter`.
"""

from __future__ import annotations

from typing import Any

import psycopg
from psycopg import sql

from relay.config import Source


def set_gapless(conn: psycopg.Connection[Any], source: Source, wanted: bool) -> bool:
    """Let numbers come from the counter, or from the sequence; returns whether that changed anything.

    A change locks the outbox to the end of the transaction. Raises psycopg.Error.
    """
    row = conn.execute(
        "select relay.set_gapless(%s::regclass, %s, %s)",
        (
            sql.Identifier(*source.table_name).as_string(conn),
            source.mapping["c_offset"],
            wanted,
        ),
    ).fetchone()
    return bool(row and row[0])
