"""Discards deferred and dead transactions that a seek delivers again, since they would be applied twice."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

import psycopg
from psycopg import sql
from psycopg.rows import scalar_row

from relay.model.snapshots import Snapshot
from relay.store import dead_letters

# The tables have only the low 32 bits of the xid, as the WAL has; 2 stands for a row without c_xid.
_AGAIN = sql.SQL(
    """
    not pg_visible_in_snapshot(
        case when coalesce(xid, 0) = 0 then 2
             when (%(next)s & ~4294967295) | xid >= %(next)s then ((%(next)s & ~4294967295) | xid) - 4294967296
             else (%(next)s & ~4294967295) | xid end::text::xid8, %(snapshot)s::pg_snapshot)
    """
)
_DEAD = sql.SQL(
    """
    select dead_transaction from relay.dead_letter_queue
     where group_id = %(group)s and sink = %(sink)s and status in ('dead', 'replaying')
     group by dead_transaction
    having (coalesce(max(c_offset) > %(polled)s, true) or bool_or(xid = any(%(split)s))) and bool_or({again})
       and bool_or(mod(abs(hashtext(coalesce(host_id, ''))::bigint), %(partitions)s) = any(%(chosen)s))
    """
).format(again=_AGAIN)
_DEFERRED = sql.SQL(
    """
    delete from relay.deferred
     where group_id = %(group)s and sink = %(sink)s
       and (last_offset > %(polled)s or last_offset = 0 or xid = any(%(split)s)) and {again}
       and exists (select from unnest(hosts) as host
                    where mod(abs(hashtext(host)::bigint), %(partitions)s) = any(%(chosen)s))
    """
).format(again=_AGAIN)


class GivenUp(NamedTuple):
    """How many dead transactions were discarded, and how many deferred ones were deleted."""

    dead: int
    deferred: int

    def plus(self, other: GivenUp) -> GivenUp:
        """Return the sum of both."""
        return GivenUp(self.dead + other.dead, self.deferred + other.deferred)


def give_up(
    conn: psycopg.Connection[Any],
    group: str,
    goal: Snapshot,
    polled_offset: int,
    split: Collection[int],
    next_xid: int,
    partitions: int,
    chosen: Collection[int],
    sink: str = "",
) -> GivenUp:
    """Discard the transactions of partitions that a seek to a snapshot and a c_offset delivers again; returns how many.

    `sink` is the one that seeks, '' for the target. `split` are the 32-bit xids of transactions that have rows on both
    sides of the c_offset, and `next_xid` is the next full xid of the source. Raises psycopg.Error.
    """
    bound = {
        "group": group,
        "sink": sink,
        "snapshot": str(goal),
        "polled": polled_offset,
        "split": list(split),
        "next": next_xid,
        "partitions": partitions,
        "chosen": list(chosen),
    }
    with conn.cursor(row_factory=scalar_row) as cursor:
        dead = cursor.execute(_DEAD, bound).fetchall()
    dead_letters.mark(conn, group, dead, "discard", "discarded", "delivered again after a seek")
    return GivenUp(len(dead), conn.execute(_DEFERRED, bound).rowcount)
