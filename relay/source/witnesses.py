"""Takes and compares witnesses: rows of the source by which a position that is kept elsewhere knows its history.

A snapshot is a number of one history of one server. On another one it is wrong, and looks right again as soon as the
new server's transaction ids have passed it. A witness is a row whose commit comes after all that its snapshot sees:
where the row is still there as it was inserted, so is all of that. `sql/source/004_witnesses.sql` tells how.
"""

from __future__ import annotations

from contextlib import suppress
from typing import LiteralString
from uuid import UUID
from weakref import WeakKeyDictionary

import psycopg
from psycopg import sql

from relay.faults import ConfigurationError, NotNow, TransientFault, first_line
from relay.model.snapshots import Snapshot, Witness
from relay.source.server import is_standby
from relay.store import groups
from relay.store.connections import Connection


def take(conn: Connection) -> Witness | None:
    """Insert a witness, which is flushed; None where this session may not: on a standby, or without the right.

    The connection is in no transaction. Raises psycopg.Error.
    """
    return _called(conn, "select witness, snapshot::text, lsn::text from relay.take_witness()")


def recent(conn: Connection) -> Witness | None:
    """Return the newest witness, or insert one where that is older than 0.2 s; None where there is none.

    On a standby the newest one that it has replayed. The connection is in no transaction. Raises psycopg.Error.
    """
    return _called(conn, "select witness, snapshot::text, lsn::text from relay.recent_witness()")


def newest_of(conn: Connection, outbox: str) -> tuple[Witness | None, bool]:
    """Return the newest witness that the server holds, and whether it sees everything that the outbox has.

    Writes nothing. Raises psycopg.Error.
    """
    row = conn.execute(
        sql.SQL(
            """
            select w.id, w.snapshot::text, w.lsn::text,
                   not exists (select from {} as o
                                where o.c_xid >= pg_snapshot_xmin(w.snapshot)
                                  and not pg_visible_in_snapshot(o.c_xid, w.snapshot))
              from (select * from relay.witnesses order by number desc limit 10) as w
             where relay.holds_witness(w.id) order by w.number desc limit 1
            """
        ).format(sql.Identifier(*outbox.split(".")))
    ).fetchone()
    if row is None:
        return None, False
    *found, sees_all = row
    return Witness.parse(*found), sees_all


def _called(conn: Connection, statement: LiteralString) -> Witness | None:
    standby = is_standby(conn)
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
    return Witness.parse(*row)


def _may_take(conn: Connection) -> bool:
    """Whether a session may insert a witness; False on a standby. Raises psycopg.Error."""
    row = conn.execute(
        """
        select not pg_is_in_recovery() and exists (
                   select from pg_proc as p join pg_namespace as n on n.oid = p.pronamespace
                    where n.nspname = 'relay' and p.proname = 'take_witness'
                      and has_schema_privilege(n.oid, 'usage') and has_function_privilege(p.oid, 'execute'))
        """
    ).fetchone()
    return bool(row and row[0])


def _newer(conn: Connection, origin: groups.SourceOrigin, target: str) -> Witness | None:
    """The newest witness of a server, where a session may take none; None unless it is newer than the group's.

    Otherwise the group would keep its first one until retention removes it. Once that has happened, no other one is
    noted, and nobody waits for one. Raises psycopg.Error.
    """
    found, known = recent(conn), origin.witness
    if found is None or (known is not None and found.snapshot.xmax <= known.snapshot.xmax):
        return None
    with suppress(TransientFault):
        require_held(conn, origin, target)
        return found
    return None


def cover(source: Connection, target: Connection, group: str, snapshot: Snapshot) -> None:
    """Note for a group a witness of what a snapshot sees, before a position with that snapshot is stored.

    A witness is noted only of a source that holds the one before, so that each proves the whole history of the group.
    Where a session may take none, the newest one of the source is noted; beyond it LSNs and timelines alone tell. Both
    connections are in no transaction. Raises TransientFault where the source does not hold the newest witness, as long
    as nobody has compared both histories, and psycopg.Error.
    """
    origin, here = groups.origin(target, group), running_database(target)
    newest = origin.witness
    if newest is not None and newest.proves(snapshot):
        require_held(source, origin, here)
        return
    if _may_take(source):
        require_held(source, origin, here)
        taken = take(source)
    else:
        taken = _newer(source, origin, here)
    if taken is not None:
        groups.note_witness(target, group, taken)


def require_history(source: Connection, target: Connection, group: str) -> None:
    """Raise TransientFault where the source does not hold the newest witness of a group; psycopg.Error.

    For what is read again by a position that is stored already.
    """
    require_held(source, groups.origin(target, group), running_database(target))


def require_held(source: Connection, origin: groups.SourceOrigin, target: str) -> None:
    """Raise TransientFault where the source does not hold the newest witness of a group; psycopg.Error.

    `target` is the group's database as `running_database` names it.
    """
    witness = origin.witness
    if witness is None or holds(source, witness.id) or is_one(source, origin, target):
        return
    raise NotNow(
        f"source.dsn: its server does not hold the witness {witness.id} of what was read: it is another history, or a "
        "replica that lags"
    )


def is_one(source: Connection, origin: groups.SourceOrigin, target: str) -> bool:
    """Whether positions and outbox are one database, in the server that the positions are of.

    A dump has both of one moment, and copies of the witnesses; the transaction ids of its server go on.
    """
    here = running_database(source)
    return here == target and origin.identifier in (None, here.partition("/")[0])


def running_database(conn: Connection) -> str:
    """The database of a connection, in the server that runs: a copy of its disk has its identifier and is another one.

    Raises psycopg.Error.
    """
    row = conn.execute(
        """
        select concat_ws('/', system_identifier, current_database(), extract(epoch from pg_postmaster_start_time()))
          from pg_control_system()
        """
    ).fetchone()
    return str(row and row[0])


class HeldWitnesses:
    """Remembers which witnesses the servers of connections hold: none loses one while it runs.

    By the connection itself, since another server gives its sessions the same process ids.
    """

    _MOST = 1000

    def __init__(self) -> None:
        self._of: WeakKeyDictionary[Connection, set[UUID]] = WeakKeyDictionary()

    def has(self, conn: Connection, witness: UUID) -> bool:
        """Whether the server holds a witness, as `holds` says, with its errors."""
        known = self._of.setdefault(conn, set())
        if witness in known:
            return True
        if not holds(conn, witness):
            return False
        if len(known) >= self._MOST:
            known.clear()
        known.add(witness)
        return True


def holds(conn: Connection, witness: UUID) -> bool:
    """Whether the server of a connection has a witness as it was inserted.

    False on a standby that has not replayed it yet, and where relay is not installed. Raises ConfigurationError where
    the role may not ask, and psycopg.Error.
    """
    try:
        row = conn.execute("select relay.holds_witness(%s)", (witness,)).fetchone()
    except (psycopg.errors.UndefinedFunction, psycopg.errors.InvalidSchemaName):
        return False
    except psycopg.errors.InsufficientPrivilege as error:
        raise ConfigurationError(
            f"source.dsn: {first_line(error)}: run `relay init` again, which lets all who may read the outbox know "
            "another history of it, or grant the role relay"
        ) from None
    return bool(row and row[0])
