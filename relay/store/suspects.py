"""Counts the deaths of processes over transactions in flight: `relay.suspects`.

It is written only after a crash, on connections of its own, since the crash rolls back the task's own transaction.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from typing import Any
from zlib import crc32

import psycopg

from relay.config.settings import Settings
from relay.model.keys import LONGEST
from relay.model.transactions import Undecoded
from relay.store.connections import Pool, open_pool


def name_of(transaction: Undecoded) -> str:
    """Return a name of a business transaction that is the same in every attempt.

    It has the c_offset or, without one, the end of the commit, and the transaction_id. Without these two, a checksum of
    the first row distinguishes it from others of the commit.
    """
    location, name = transaction.last_offset, shortened(transaction.transaction_id or "")
    if not location:
        location = transaction.commit.end_lsn
        name = name or f"{crc32(next(iter(transaction.tuples))):08x}"
    return f"{location:d}/{name}"


def shortened(transaction_id: str) -> str:
    """Return the transaction_id as names have it: a digest if it is long or not ASCII."""
    if transaction_id.isascii() and len(transaction_id) <= LONGEST:
        return transaction_id
    return sha256(transaction_id.encode("utf-8", "surrogateescape")).hexdigest()


class Suspects:
    """Notes each transaction before it is handled; a note that is left shows which one killed the process."""

    def __init__(self, settings: Settings, connections: int) -> None:
        self._group = settings.group
        self._survived: set[str] = set()
        self._in_flight: set[str] = set()
        self._pool: Pool = open_pool(settings.target_dsn, connections, _without_sync)

    def close(self) -> None:
        """Close the connections."""
        self._pool.close()

    @contextmanager
    def in_flight(self, name: str) -> Iterator[None]:
        """Handle a noted transaction in the block. An exception takes the note back: only a death leaves it."""
        self._in_flight.add(name)
        try:
            yield
        except BaseException:
            self._survived.add(name)
            # During an outage of the target, `note_next` takes the note back before it counts.
            with suppress(psycopg.Error):
                self.take_back(name)
            raise
        finally:
            self._in_flight.discard(name)

    def note_orderly_exit(self) -> None:
        """Take back the notes of transactions in flight: an orderly exit is not a death. Raises psycopg.Error."""
        for name in tuple(self._in_flight):
            self.take_back(name)

    def clear(self, name: str) -> None:
        """Delete the count of a transaction that was handled or dead-lettered."""
        with self._pool.connection() as conn:
            conn.execute(
                "delete from relay.suspects where group_id = %s and suspect = %s",
                (self._group, name),
            )

    def note(self, name: str) -> None:
        """Count a death in advance, before the transaction is handled."""
        with self._pool.connection() as conn:
            conn.execute(
                """
                insert into relay.suspects as s (group_id, suspect) values (%s, %s)
                on conflict (group_id, suspect) do update set attempts = s.attempts + 1, noted_at = now()
                """,
                (self._group, name),
            )

    def note_next(self, former: str | None, name: str, limit: int) -> bool:
        """Delete the count of the former transaction, and count a death of the next one, `name`, in advance.

        Returns whether it was counted: not if it has `limit` deaths already.
        """
        if name in self._survived:
            self.take_back(name)
        with self._pool.connection() as conn:
            noted = conn.execute(
                """
                with forgotten as (
                    delete from relay.suspects where group_id = %(group)s and suspect = %(former)s
                )
                insert into relay.suspects as s (group_id, suspect) values (%(group)s, %(name)s)
                on conflict (group_id, suspect) do update set attempts = s.attempts + 1, noted_at = now()
                 where s.attempts < %(limit)s
                """,
                {"group": self._group, "former": former, "name": name, "limit": limit},
            )
            return noted.rowcount == 1

    def take_back(self, name: str) -> None:
        """Take back a death that was counted in advance, since the attempt ended without one."""
        with self._pool.connection() as conn:
            conn.execute(
                """
                with forgotten as (
                    delete from relay.suspects where group_id = %(group)s and suspect = %(name)s and attempts <= 1
                )
                update relay.suspects set attempts = attempts - 1
                 where group_id = %(group)s and suspect = %(name)s and attempts > 1
                """,
                {"group": self._group, "name": name},
            )
        self._survived.discard(name)


def _without_sync(conn: psycopg.Connection[Any]) -> None:
    # A note must survive a crash of this process, not of the server.
    conn.execute("set synchronous_commit = off")
