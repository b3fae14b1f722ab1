"""Records in the target which deliveries a function has completed in a database transaction of its own.

The record is written in that transaction: the function's effects and the record are there together, or neither is. A
delivery that comes again finds its record, and is done. `relay.sink_completions` is for that only; a record is removed
once the position of its sink, or the table of deferred transactions, no longer brings the delivery.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from relay.model.events import Lsn
from relay.store import locks
from relay.store.connections import Connection
from relay.store.positions.sinks import SinkMoved

_OLDEST_XID = 3
"""Of rows that are older than the column c_xid: the first difference has them, before every snapshot after it."""


@dataclass(frozen=True, slots=True)
class Completion:
    """A delivery that a function completes.

    `series` and `claim` are those with which this process works the sink; within a series `key` is the same for each
    attempt, and no other delivery's. `xid` is the full xid of the commit, 0 for one that is older than the column
    c_xid, and None for a deferred one, which the position does not bring again. `first_offset` is its first c_offset.
    """

    group: str
    sink: str
    series: str
    claim: int
    key: str
    xid: int | None
    end_lsn: Lsn
    first_offset: int


def complete(conn: Connection, completions: Sequence[Completion]) -> list[str]:
    """Record completions of one sink in the open transaction; returns the keys that a transaction before it has.

    Waits for another transaction that is about to complete one of the deliveries. If there are such keys, the caller
    rolls back. Raises SinkMoved if another process works the sink, or it was moved, and psycopg.Error.
    """
    # Sorted, so that two transactions do not deadlock.
    ordered = sorted(completions, key=lambda each: each.key)
    one = ordered[0]
    inserted = conn.execute(
        """
        with locked as materialized (select pg_advisory_xact_lock_shared(%s, hashtext(%s)))
        insert into relay.sink_completions (group_id, sink, series, key, xid, end_lsn, first_offset)
        select %s, %s, %s, given.*
          from locked, unnest(%s::text[], %s::xid8[], %s::pg_lsn[], %s::bigint[]) as given
        on conflict do nothing returning key
        """,
        (
            *locks.completions(one.group, one.sink),
            one.group,
            one.sink,
            one.series,
            [each.key for each in ordered],
            [None if each.xid is None else str(each.xid or _OLDEST_XID) for each in ordered],
            [str(each.end_lsn) for each in ordered],
            [each.first_offset for each in ordered],
        ),
    )
    if inserted.rowcount < len(ordered):
        own = {key for (key,) in inserted}
        return [each.key for each in ordered if each.key not in own]
    # After the insert: whoever claims the sink now waits for it, or finds its record; a move waits for the lock.
    current = conn.execute(
        "select from relay.sink_claims where (group_id, sink, series, claim) = (%s, %s, %s, %s)",
        (one.group, one.sink, one.series, one.claim),
    )
    if not current.rowcount:
        raise SinkMoved
    return []


def forget(conn: Connection, group: str, sink: str) -> int:
    """Remove the records that nothing needs any more; returns how many. Raises psycopg.Error."""
    return conn.execute(
        """
        delete from relay.sink_completions as c using relay.sinks as s
         where (c.group_id, c.sink) = (%s, %s) and (s.group_id, s.sink) = (c.group_id, c.sink)
           and case when c.series <> s.series or c.xid is null then true
                    when s.snapshot is not null then pg_visible_in_snapshot(c.xid, s.snapshot)
                    else c.end_lsn <= s.applied_lsn end
           and (c.series <> s.series
                or not exists (select from relay.deferred as d
                                where (d.group_id, d.sink, d.first_offset) = (c.group_id, c.sink, c.first_offset)))
        """,
        (group, sink),
    ).rowcount
