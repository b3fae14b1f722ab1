"""Whether a reader whose position nobody else knows has lost events: `relay.removed` says what retention removed.

The newest transaction of which events were removed decides, except for transactions that were open at the reader's
position: one that began before the newest may have ended and been removed since. Nothing tells whether such a
transaction had published at all, so it counts as lost.

Source: Spark documentation, "Structured Streaming + Kafka Integration Guide", `failOnDataLoss`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import psycopg

from relay.faults import RelayError
from relay.model.snapshots import Snapshot
from relay.store.connections import Connection

_REMOVED = """
    select newest::text::bigint, snapshot::text from relay.removed
     -- Not one of another cluster, which a dump has brought.
     where outbox = %s and newest < pg_snapshot_xmax(pg_current_snapshot())
"""
_COMMITTED = """
    select x from unnest(%s::bigint[]) as x
     where pg_xact_status(x::text::xid8) is distinct from 'aborted' order by x limit 1
"""
_RETAINS = """
    select from pg_proc join pg_namespace as n on n.oid = pronamespace
     where nspname = 'relay' and proname = 'delete_portion' and prosecdef
"""
"""Whether events are removed: `relay.retain` lends this function the rights of the outbox's owner.

Unlike relay's tables, every role may read this.
"""


@dataclass(frozen=True, slots=True)
class Loss:
    """Events after a position, of the transaction `xid`, that were removed, for certain or perhaps."""

    xid: int
    is_certain: bool


def lost_after(conn: Connection, outbox: str, position: Snapshot) -> Loss | None:
    """What retention has removed of an outbox that a reader at a position had still to read; None if nothing.

    A reader at the beginning loses nothing. Raises RelayError where that cannot be found out, and psycopg.Error.
    """
    if position.is_beginning:
        return None
    try:
        rows = conn.execute(_REMOVED, (outbox,)).fetchall()
    except (psycopg.errors.UndefinedTable, psycopg.errors.InvalidSchemaName):
        _require_kept(conn, "run `relay init`, which brings relay's schema up to date")
        return None
    except psycopg.errors.InsufficientPrivilege:
        user = conn.info.user
        _require_kept(conn, f"grant {user} USAGE on schema relay and SELECT on relay.removed")
        return None
    if not rows:
        return None
    newest = max(xid for xid, _ in rows)
    if not position.shows(np.array([newest])):
        return Loss(newest, is_certain=True)
    were_open = np.array([xid for xid in position.in_progress if xid < newest], np.int64)
    ended = np.zeros(len(were_open), np.bool_)
    for _, taken_at_removal in rows:
        ended |= Snapshot.parse(taken_at_removal).sees(were_open)
    perhaps = conn.execute(_COMMITTED, (were_open[ended].tolist(),)).fetchone()
    return None if perhaps is None else Loss(perhaps[0], is_certain=False)


def _require_kept(conn: Connection, remedy: str) -> None:
    """Raise RelayError unless nothing is removed from the outboxes of the database."""
    if conn.execute(_RETAINS).rowcount:
        raise RelayError(
            f"option failOnDataLoss: whether retention has removed events cannot be read: {remedy}, or set the option "
            "to false"
        )
