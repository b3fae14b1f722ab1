"""The clock of a database. What is due, old or expired is judged by the clock of the database that stores it.

The clocks of relay's hosts differ from it, and from each other. Durations within a process are measured with
`time.monotonic`.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime

from relay.store.connections import Connection


def present(conn: Connection) -> datetime:
    """Return the database's present time in UTC. Raises psycopg.Error."""
    # As a number: psycopg reads a timestamp only where the session's DateStyle is ISO.
    ((seconds,),) = conn.execute("select extract(epoch from clock_timestamp())::float8")
    return datetime.fromtimestamp(seconds, UTC)


def ahead(conn: Connection, moments: Mapping[int, datetime]) -> dict[int, datetime]:
    """Return those of the moments that are still to come. Queries only if there are any. Raises psycopg.Error."""
    if not moments:
        return {}
    now = present(conn)
    return {index: moment for index, moment in moments.items() if moment > now}
