"""Whether a reader whose position nobody else knows has lost events: `relay.removed` says what retention removed.

The newest transaction of which events were removed decides, except for transactions that were open at the reader's
position: one that began before the newest may have ended and been removed since. Nothing tells whether such a
transaction had published at all, so it counts as lost.

Source: Spark documentation, "Structured Streaming + Kafka Integration Guide", `failOnDataLoss`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg import sql

from relay.faults import RelayError
from relay.model.snapshots import Snapshot
from relay.store import literals
from relay.store.connections import Connection

_LOST = """
    with removals as (
        select newest, snapshot from relay.removed
         where outbox = {outbox} and number <> all ({known}::bigint[])
           -- Not one of another cluster, which a dump has brought.
           and newest < pg_snapshot_xmax(pg_current_snapshot()))
    select xid, is_certain
      from (select newest::text::bigint as xid, true as is_certain
              from removals where not pg_visible_in_snapshot(newest, {position})
            union all
            select x::text::bigint, false from removals, pg_snapshot_xip({position}) as x
             where case when x < newest and pg_visible_in_snapshot(x, snapshot)
                        then pg_xact_status(x) is distinct from 'aborted' end) as each
     order by is_certain desc, case when is_certain then -xid else xid end limit 1
"""
_REMOVALS = "select number from relay.removed where outbox = {}"
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


def losses(outbox: str, position: Snapshot, known: Sequence[int] = ()) -> sql.Composed:
    """The query of what a reader at a position has lost by removals other than those of the numbers `known`."""
    return sql.SQL(_LOST).format(
        outbox=sql.Literal(outbox),
        known=sql.Literal(literals.of_numbers(known)),
        position=sql.SQL("{}::pg_snapshot").format(str(position)),
    )


def lost_after(
    conn: Connection, outbox: str, position: Snapshot, known: Sequence[int] | None = None
) -> Loss | None:
    """What retention has removed of an outbox that a reader at a position had still to read; None if nothing.

    A reader at the beginning loses nothing by what was removed before it read; `known` has the numbers of that for a
    reader that is reading. Raises RelayError where that cannot be found out, and psycopg.Error.
    """
    if position.is_beginning and known is None:
        return None
    rows = _asked(conn, losses(outbox, position, known or ()))
    return Loss(*rows[0]) if rows else None


def removals(conn: Connection, outbox: str) -> tuple[int, ...] | None:
    """The numbers of what retention has removed of an outbox; None where nobody notes that.

    Raises as `lost_after`.
    """
    rows = _asked(conn, sql.SQL(_REMOVALS).format(outbox))
    return None if rows is None else tuple(number for (number,) in rows)


def _asked(conn: Connection, query: sql.Composed) -> list[Any] | None:
    try:
        return conn.execute(query, prepare=False).fetchall()
    except (psycopg.errors.UndefinedTable, psycopg.errors.InvalidSchemaName):
        _require_kept(conn, "run `relay init`, which brings relay's schema up to date")
    except psycopg.errors.InsufficientPrivilege:
        user = conn.info.user
        _require_kept(conn, f"grant {user} USAGE on schema relay and SELECT on relay.removed")
    return None


def _require_kept(conn: Connection, remedy: str) -> None:
    """Raise RelayError unless nothing is removed from the outboxes of the database."""
    if conn.execute(_RETAINS).rowcount:
        raise RelayError(
            f"option failOnDataLoss: whether retention has removed events cannot be read: {remedy}, or set the option "
            "to false"
        )
