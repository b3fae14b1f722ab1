"""Transactions that a process had in hand when it died: `relay.suspects`.

Written only after a crash, by connections of its own, since what the crash rolls back would not be remembered.
"""

from __future__ import annotations

from typing import Any

import psycopg
from psycopg.rows import scalar_row
from psycopg_pool import ConnectionPool

from relay.config import Settings
from relay.store.connections import open_pool
from relay.transactions import Undecoded


def name_of(transaction: Undecoded) -> str:
    """What a business transaction is called in every attempt: by c_offset, or by its commit where there is none."""
    place = transaction.last_offset or transaction.commit.end_lsn
    return f"{place:d}/{transaction.transaction_id or ''}"


class Suspects:
    """Notes each transaction before it is handled, and takes the note back when it was survived."""

    def __init__(self, settings: Settings, connections: int) -> None:
        self._group = settings.group
        self._pool: ConnectionPool[psycopg.Connection[Any]] = open_pool(
            settings.target_dsn, connections, _without_sync
        )

    def close(self) -> None:
        """Close the connections."""
        self._pool.close()

    def deaths(self, name: str) -> int:
        """How many processes died while they had this transaction in hand."""
        with self._pool.connection() as conn, conn.cursor(row_factory=scalar_row) as cursor:
            found = cursor.execute(
                "select attempts from relay.suspects where group_id = %s and suspect = %s",
                (self._group, name),
            ).fetchone()
        return int(found or 0)

    def note(self, name: str) -> None:
        """The transaction is about to be handled."""
        with self._pool.connection() as conn:
            conn.execute(
                """
                insert into relay.suspects as s (group_id, suspect) values (%s, %s)
                on conflict (group_id, suspect) do update set attempts = s.attempts + 1, noted_at = now()
                """,
                (self._group, name),
            )

    def clear(self, name: str) -> None:
        """The process has survived it."""
        with self._pool.connection() as conn:
            conn.execute(
                "delete from relay.suspects where group_id = %s and suspect = %s",
                (self._group, name),
            )


def _without_sync(conn: psycopg.Connection[Any]) -> None:
    # A note has to outlive this process, not the server.
    conn.execute("set synchronous_commit = off")
