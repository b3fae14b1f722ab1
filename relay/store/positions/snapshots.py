"""Stores the chain of a group's snapshots, and notes the transactions applied from the WAL since the last one.

The tables are `relay.snapshots` and `relay.applied_commits`. A session locks the chain before it changes it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from relay.model.events import Lsn
from relay.model.snapshots import RowCounts, Snapshot, Xids
from relay.store.connections import Connection

_ALL_ROWS = 1 << 40
"""More rows than a transaction has."""


@dataclass(frozen=True, slots=True)
class ChainLink:
    """A snapshot of the chain."""

    id: int
    snapshot: Snapshot


def chain(conn: Connection, group: str) -> list[ChainLink]:
    """List the group's snapshots, oldest first; none where only the WAL is read."""
    rows = conn.execute(
        "select id, snapshot::text from relay.snapshots where group_id = %s order by id", (group,)
    )
    return [ChainLink(number, Snapshot.parse(text)) for number, text in rows]


def begin(
    conn: Connection,
    group: str,
    snapshots: Sequence[Snapshot],
    polled_lsn: Lsn = Lsn(0),  # noqa: B008
) -> list[ChainLink]:
    """Begin a new chain in place of the former one; the noted transactions stay.

    All polled commits end at or before the position `polled_lsn`; 0/0 if none were polled.
    """
    conn.execute("delete from relay.snapshots where group_id = %s", (group,))
    return [_insert(conn, group, snapshot, polled_lsn) for snapshot in snapshots]


def remove(conn: Connection, group: str) -> None:
    """Delete the chain and the noted transactions."""
    conn.execute("delete from relay.snapshots where group_id = %s", (group,))
    conn.execute("delete from relay.applied_commits where group_id = %s", (group,))


def append(
    conn: Connection, group: str, last: ChainLink, snapshot: Snapshot, polled_lsn: Lsn
) -> ChainLink | None:
    """Add a snapshot after the last one; None if another session has changed the chain.

    The difference is to be polled. Every commit that the snapshot sees ends at or before the position `polled_lsn`.
    """
    with conn.transaction():
        if _locked(conn, group) != last:
            return None
        return _insert(conn, group, snapshot, polled_lsn)


def replace(conn: Connection, group: str, last: ChainLink, snapshot: Snapshot) -> bool:
    """Replace the last snapshot by a newer one up to which everything is applied; delete the notes of what it sees.

    Returns False and changes nothing if a partition has not reached the last one, or another session has changed the
    chain.
    """
    with conn.transaction():
        if _locked(conn, group) != last or not _is_reached(conn, group, last):
            return False
        conn.execute(
            "update relay.snapshots set snapshot = %s::pg_snapshot, taken_at = now() where group_id = %s and id = %s",
            (str(snapshot), group, last.id),
        )
        forget(conn, group, snapshot)
        return True


def prune(conn: Connection, group: str) -> None:
    """Delete the snapshots that no partition needs any more, and the notes of what the first remaining one sees."""
    with conn.transaction():
        _locked(conn, group)
        conn.execute(
            """
            delete from relay.snapshots as s
             where s.group_id = %(group)s
               and s.id < (select max(id) from relay.snapshots where group_id = %(group)s)
               and not exists (select from relay.consumer_offsets as o
                                where o.group_id = %(group)s and (o.snapshot_id = s.id or
                                      s.id = (select min(n.id) from relay.snapshots as n
                                               where n.group_id = %(group)s and n.id > o.snapshot_id)))
            """,
            {"group": group},
        )
        remaining = chain(conn, group)
        if remaining:
            forget(conn, group, remaining[0].snapshot)


def forget(conn: Connection, group: str, snapshot: Snapshot) -> None:
    """Delete the notes of transactions that a snapshot sees."""
    conn.execute(
        """
        delete from relay.applied_commits
         where group_id = %s
           and not exists (select from unnest(xids) as xid where not pg_visible_in_snapshot(xid, %s::pg_snapshot))
        """,
        (group, str(snapshot)),
    )


def forget_in(conn: Connection, group: str, partitions: Collection[int]) -> None:
    """Delete the notes of some partitions."""
    conn.execute(
        """
        update relay.applied_commits
           set partitions = array(select p from unnest(partitions) as p where p <> all (%s::int[]))
         where group_id = %s and partitions && %s::int[]
        """,
        (list(partitions), group, list(partitions)),
    )
    conn.execute(
        "delete from relay.applied_commits where group_id = %s and partitions = '{}'", (group,)
    )


def noted(conn: Connection, group: str) -> Xids:
    """Return the full xids that are noted in any partition: int64, unordered."""
    (row,) = conn.execute(
        "select string_agg(xid8send(xid), '') from relay.applied_commits, unnest(xids) as xid where group_id = %s",
        (group,),
    )
    return xids_of(row[0])


def noted_rows(conn: Connection, group: str) -> RowCounts:
    """Return how many rows were applied of each transaction that is noted, in all partitions together.

    Where a former edition has noted one it counts as whole.
    """
    (row,) = conn.execute(
        """
        select string_agg(xid8send(xid), ''), string_agg(int8send(coalesce(applied, %s)), '')
          from relay.applied_commits, unnest(xids, rows) as note (xid, applied) where group_id = %s
        """,
        (_ALL_ROWS, group),
    )
    return RowCounts.summed(xids_of(row[0]), xids_of(row[1]))


def noted_in(conn: Connection, group: str, partitions: Collection[int]) -> dict[int, Xids]:
    """Return the full xids that are noted in partitions, int64, unordered, for each partition that has any."""
    rows = conn.execute(
        """
        select partition_id, string_agg(xid8send(xid), '')
          from relay.applied_commits, unnest(partitions) as partition_id, unnest(xids) as xid
         where group_id = %s and partition_id = any(%s) group by partition_id
        """,
        (group, list(partitions)),
    )
    return {partition: xids_of(sent) for partition, sent in rows}


def xids_of(sent: bytes | None) -> Xids:
    """Return full xids, a new array of int64, from concatenated results of `xid8send` (8 bytes each, big-endian)."""
    return np.frombuffer(sent or b"", ">i8").astype(np.int64)


def _insert(conn: Connection, group: str, snapshot: Snapshot, polled_lsn: Lsn) -> ChainLink:
    (row,) = conn.execute(
        """
        insert into relay.snapshots (group_id, id, snapshot, polled_lsn)
        values (%s, nextval('relay.snapshot_ids'), %s::pg_snapshot, %s) returning id
        """,
        (group, str(snapshot), str(polled_lsn)),
    )
    return ChainLink(row[0], snapshot)


def _locked(conn: Connection, group: str) -> ChainLink | None:
    """Lock the chain until the database transaction ends; returns the last snapshot."""
    conn.execute("select from relay.snapshots where group_id = %s order by id for update", (group,))
    # Read after the lock: another session may have added a snapshot before it.
    links = chain(conn, group)
    return links[-1] if links else None


def _is_reached(conn: Connection, group: str, last: ChainLink) -> bool:
    others = conn.execute(
        "select from relay.consumer_offsets where group_id = %s and snapshot_id is distinct from %s limit 1",
        (group, last.id),
    )
    return not others.rowcount
