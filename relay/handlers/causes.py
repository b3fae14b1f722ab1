"""Sets in the database what a handler with `publishes: true` is called with, for `relay.publish`.

The setting `relay.cause` holds in relay's transaction only. It is JSON: what the metadata of a published event say, and
`max_hops`. Without the former, as in a statement over many events, each published event says by itself which one is its
cause.
"""

from __future__ import annotations

import json

from relay.causes import Causing
from relay.store import trips
from relay.store.connections import Connection

_SET = "select pg_catalog.set_config('relay.cause', %s, true)"
END = trips.BoundStatement(b"select pg_catalog.set_config('relay.cause', '', true)")
"""Lets the next statements of the transaction publish as anybody's do."""


def begin(conn: Connection, causing: Causing) -> None:
    """Set what the next statements are called with."""
    metadata = causing.metadata or {}
    conn.execute(_SET, (json.dumps({**metadata, "max_hops": causing.max_hops}, default=str),))


def end(conn: Connection) -> None:
    """Let the next statements of the transaction publish as anybody's do."""
    trips.run_each(conn, [END])
