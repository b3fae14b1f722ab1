"""Transactions that a process had in flight when it died: `relay.suspects`.

Written only after a crash, by connections of its own, since what the crash rolls back would not be remembered.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any

import psycopg
from psycopg.rows import scalar_row
from psycopg_pool import ConnectionPool

from relay.config import Settings
from relay.store.connections import connect, open_pool
from relay.transactions import Undecoded


def name_of(transaction: Undecoded) -> str:
    """What a business transaction is called in every attempt: by c_offset, or by its commit where there is none."""
    place = transaction.last_offset or transaction.commit.end_lsn
    return f"{place:d}/{transaction.transaction_id or ''}"


class Suspects:
    """Notes each transaction before it is handled, so that it shows what a process died of.

    It keeps up to so many connections; with 0 each note opens one.
    """

    def __init__(self, settings: Settings, connections: int) -> None:
        self._group = settings.group
        self._survived: set[str] = set()
        self._in_flight: set[str] = set()
        self._dsn = settings.target_dsn
        self._pool: ConnectionPool[psycopg.Connection[Any]] | None = (
            open_pool(settings.target_dsn, connections, _without_sync) if connections else None
        )

    def close(self) -> None:
        """Close the connections."""
        if self._pool is not None:
            self._pool.close()

    def _connection(self) -> AbstractContextManager[psycopg.Connection[Any]]:
        return connect(self._dsn) if self._pool is None else self._pool.connection()

    def deaths(self, name: str) -> int:
        """How many processes died while they had this transaction in flight."""
        if name in self._survived:
            self.take_back(name)
        with self._connection() as conn, conn.cursor(row_factory=scalar_row) as cursor:
            found = cursor.execute(
                "select attempts from relay.suspects where group_id = %s and suspect = %s",
                (self._group, name),
            ).fetchone()
        return int(found or 0)

    @contextmanager
    def noted(self, name: str) -> Iterator[None]:
        """Note a transaction while it is handled. A fault takes the note back: only a death leaves it."""
        self.note(name)
        self._in_flight.add(name)
        try:
            yield
        except BaseException:
            self._survived.add(name)
            # The target may be away, which must not count as a death: the note is taken back before it is read.
            with suppress(psycopg.Error):
                self.take_back(name)
            raise
        finally:
            self._in_flight.discard(name)

    def forgive(self) -> None:
        """The process ends itself now: that is no death over what it has in flight. Raises psycopg.Error."""
        for name in tuple(self._in_flight):
            self.take_back(name)

    def clear(self, name: str) -> None:
        """Forget the deaths over a transaction: it was handled, or is dead-lettered."""
        with self._connection() as conn:
            conn.execute(
                "delete from relay.suspects where group_id = %s and suspect = %s",
                (self._group, name),
            )

    def note(self, name: str) -> None:
        """Count a death in advance."""
        with self._connection() as conn:
            conn.execute(
                """
                insert into relay.suspects as s (group_id, suspect) values (%s, %s)
                on conflict (group_id, suspect) do update set attempts = s.attempts + 1, noted_at = now()
                """,
                (self._group, name),
            )

    def take_back(self, name: str) -> None:
        """The attempt ended without a death."""
        with self._connection() as conn:
            conn.execute(
                "update relay.suspects set attempts = attempts - 1 where group_id = %s and suspect = %s",
                (self._group, name),
            )
        self._survived.discard(name)


def _without_sync(conn: psycopg.Connection[Any]) -> None:
    # A note has to outlive this process, not the server.
    conn.execute("set synchronous_commit = off")
