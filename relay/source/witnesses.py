"""Takes and compares witnesses: rows of the source by which a position that is kept elsewhere knows its history.

A snapshot is a number of one history of one server. On another one it is wrong, and looks right again as soon as the
new server's transaction ids have passed it. A witness is a row whose commit comes after all that its snapshot sees:
where the row is still there as it was inserted, so is all of that. `sql/source/004_witnesses.sql` tells how.
"""

from __future__ import annotations

from typing import LiteralString
from uuid import UUID

import psycopg

from relay.model.events import Lsn
from relay.model.snapshots import Snapshot, Witness
from relay.store import groups
from relay.store.connections import Connection


def take(conn: Connection) -> Witness | None:
    """Insert a witness, which is flushed; None where this session may not: on a standby, or without the right.

    The connection is in no transaction. Raises psycopg.Error.
    """
    return _called(conn, "select witness, snapshot::text, lsn::text from relay.take_witness()")


def recent(conn: Connection) -> Witness | None:
    """Return the newest witness, or insert one where that is older than a second; None where there is none.

    On a standby the newest one that it has replayed. The connection is in no transaction. Raises psycopg.Error.
    """
    return _called(conn, "select witness, snapshot::text, lsn::text from relay.recent_witness()")


def _called(conn: Connection, statement: LiteralString) -> Witness | None:
    (standby,) = conn.execute("select pg_is_in_recovery()").fetchone() or (False,)
    try:
        with conn.transaction():
            if not standby:
                conn.execute("set transaction isolation level read committed, read write")
            row = conn.execute(statement).fetchone()
    except (
        psycopg.errors.InsufficientPrivilege,
        psycopg.errors.UndefinedFunction,
        psycopg.errors.InvalidSchemaName,
        psycopg.errors.ReadOnlySqlTransaction,
    ):
        return None
    if row is None or row[0] is None:
        return None
    return Witness(row[0], Snapshot.parse(row[1]), Lsn.parse(row[2]))


class Covering:
    """Notes for a group a witness of what a snapshot sees, before a position with that snapshot is stored.

    Where a session may take none, LSNs and timelines are all that tells another history.
    """

    def __init__(self, group: str) -> None:
        self._group = group
        self._newest: Witness | None = None

    def take(self, source: Connection, snapshot: Snapshot) -> Witness | None:
        """Take a witness that is to be noted; None where the newest noted one covers the snapshot, or none can be.

        The connection is in no transaction. Raises psycopg.Error.
        """
        newest = self._newest
        return None if newest is not None and newest.proves(snapshot) else take(source)

    def note(self, target: Connection, taken: Witness | None) -> None:
        """Note what `take` has returned. Raises psycopg.Error."""
        if taken is not None:
            groups.note_witness(target, self._group, taken)
            self._newest = taken


def cover(source: Connection, target: Connection, group: str, snapshot: Snapshot) -> None:
    """Note a witness of what a snapshot sees once, as `Covering` does. Raises psycopg.Error."""
    covering = Covering(group)
    covering.note(target, covering.take(source, snapshot))


def holds(conn: Connection, witness: UUID) -> bool:
    """Whether the server of a connection has a witness as it was inserted.

    False on a standby that has not replayed it yet. Raises psycopg.Error.
    """
    row = conn.execute("select relay.holds_witness(%s)", (witness,)).fetchone()
    return bool(row and row[0])
