"""Reads the notifications that a connection has received, for all who listen: service, API, workers and readers."""

from __future__ import annotations

from typing import Any


def take_notifications(pgconn: Any) -> int:
    """Read all pending notifications of a `psycopg.pq.PGconn`; returns how many there were.

    It reads until the socket has nothing more: TLS may buffer data that select() does not show. Raises
    psycopg.OperationalError.
    """
    before, count = -1, 0
    while count > before:
        before = count
        pgconn.consume_input()
        while pgconn.notifies() is not None:
            count += 1
    return count
