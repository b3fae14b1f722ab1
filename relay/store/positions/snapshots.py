"""Stores the chain of a group's snapshots, and notes the transactions applied from the WAL since the last one.

A snapshot is a row of `relay.snapshots`; one that replaces it is another row, its next version. What is noted are
transactions on positions of partitions, which the view `relay.applied_commits` shows; the newest snapshot says for each
partition from which position on they count. So nobody reads rows that were deleted: while somebody holds a snapshot of
the target, such rows stay. A session locks the chain before it changes it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from relay.model.events import Lsn
from relay.model.snapshots import RowCounts, Snapshot, Xids
from relay.store import completeness, locks
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
    rows = conn.execute("select id, snapshot::text from relay.chain(%s)", (group,), prepare=False)
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
    newest = _newest(conn, group)
    conn.execute("delete from relay.snapshots where group_id = %s", (group,))
    if snapshots:
        completeness.begin(conn, group, completeness.TARGET, snapshots[0])
    else:
        # What reads the WAL alone has no chain.
        completeness.forget(conn, group, [completeness.TARGET])
    notes_from = newest.notes_from if newest else []
    return [
        ChainLink(_insert(conn, group, snapshot, polled_lsn, notes_from), snapshot)
        for snapshot in snapshots
    ]


def remove(conn: Connection, group: str) -> None:
    """Delete the chain and the noted transactions of a stopped group."""
    conn.execute("delete from relay.snapshots where group_id = %s", (group,))
    completeness.forget(conn, group, [completeness.TARGET])
    conn.execute(
        """
        update relay.positions set partitions = null, xids = null, rows = null
         where group_id = %s and owner = '' and xids is not null
        """,
        (group,),
    )


def append(
    conn: Connection, group: str, last: ChainLink, snapshot: Snapshot, polled_lsn: Lsn
) -> ChainLink | None:
    """Add a snapshot after the last one; None if another session has changed the chain.

    The difference is to be polled. Every commit that the snapshot sees ends at or before the position `polled_lsn`.
    """
    with conn.transaction():
        if _locked(conn, group) != last:
            return None
        (first, *_) = chain(conn, group)
        notes_from = _notes_after(conn, group, first.snapshot)
        return ChainLink(_insert(conn, group, snapshot, polled_lsn, notes_from), snapshot)


def replace(conn: Connection, group: str, last: ChainLink, snapshot: Snapshot) -> bool:
    """Replace the last snapshot by a newer one up to which everything is applied; forget the notes of what it sees.

    Returns False and changes nothing if a partition has not reached the last one, or another session has changed the
    chain.
    """
    with conn.transaction():
        if _locked(conn, group) != last or not _is_reached(conn, group, last):
            return False
        forget(conn, group, snapshot, snapshot)
        return True


def prune(conn: Connection, group: str, since: int) -> None:
    """Delete the snapshots from the id `since` on that no partition needs any more.

    Forget the notes of what the first remaining one sees.
    """
    with conn.transaction():
        _locked(conn, group)
        conn.execute(
            """
            delete from relay.snapshots as s
             where s.group_id = %(group)s and s.id >= %(since)s
               and s.id < (select n.id from relay.snapshots as n
                            where n.group_id = %(group)s order by n.id desc limit 1)
               and not exists (select from relay.consumer_offsets as o
                                where o.group_id = %(group)s and (o.snapshot_id = s.id or
                                      s.id = (select n.id from relay.snapshots as n
                                               where n.group_id = %(group)s and n.id > o.snapshot_id
                                               order by n.id limit 1)))
            """,
            {"group": group, "since": since},
            prepare=False,
        )
        remaining = chain(conn, group)
        if remaining:
            forget(conn, group, remaining[0].snapshot)


def forget(
    conn: Connection, group: str, seen: Snapshot, replacement: Snapshot | None = None
) -> None:
    """Forget the notes of transactions that the snapshot `seen` sees; the last one may get a `replacement`."""
    newest = _newest(conn, group)
    if newest is None:
        return
    if replacement is None and not len(noted(conn, group)):
        return
    conn.execute(
        """
        insert into relay.snapshots (group_id, id, snapshot, polled_lsn, taken_at, version, notes_from)
        select group_id, id, coalesce(%(snapshot)s::pg_snapshot, snapshot), polled_lsn,
               case when %(snapshot)s::text is null then taken_at else now() end, version + 1, %(notes_from)s
          from relay.snapshots where group_id = %(group)s and id = %(id)s and version = %(version)s
        """,
        {
            "group": group,
            "id": newest.id,
            "version": newest.version,
            "snapshot": None if replacement is None else str(replacement),
            "notes_from": _notes_after(conn, group, seen),
        },
    )
    conn.execute(
        "delete from relay.snapshots where group_id = %s and id = %s and version = %s",
        (group, newest.id, newest.version),
    )


def forget_in(conn: Connection, group: str, partitions: Collection[int]) -> None:
    """Forget the notes of some partitions of a stopped group."""
    conn.execute(
        """
        update relay.positions
           set partitions = array(select p from unnest(partitions) as p where p <> all (%(chosen)s::int[])),
               xids = case when not partitions <@ %(chosen)s::int[] then xids end
         where group_id = %(group)s and owner = '' and xids is not null and partitions && %(chosen)s::int[]
        """,
        {"group": group, "chosen": list(partitions)},
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


@dataclass(frozen=True, slots=True)
class _Newest:
    """The newest row of the chain: `notes_from` has the number of a position for each partition."""

    id: int
    version: int
    snapshot: Snapshot
    notes_from: list[int]


def _newest(conn: Connection, group: str) -> _Newest | None:
    row = conn.execute(
        """
        select id, version, snapshot::text, notes_from from relay.snapshots
         where group_id = %s order by id desc, version desc limit 1
        """,
        (group,),
        prepare=False,
    ).fetchone()
    return None if row is None else _Newest(row[0], row[1], Snapshot.parse(row[2]), row[3])


def _notes_after(conn: Connection, group: str, seen: Snapshot) -> list[int]:
    """For each partition, the number of the first position with a transaction that a snapshot does not see."""
    (row,) = conn.execute("select relay.notes_after(%s, %s::pg_snapshot)", (group, str(seen)))
    return list(row[0])


def _insert(
    conn: Connection,
    group: str,
    snapshot: Snapshot,
    polled_lsn: Lsn,
    notes_from: Sequence[int],
) -> int:
    """Append a snapshot to the chain; returns its id."""
    (row,) = conn.execute(
        """
        insert into relay.snapshots (group_id, id, snapshot, polled_lsn, notes_from)
        values (%s, nextval('relay.snapshot_ids'), %s::pg_snapshot, %s, %s) returning id
        """,
        (group, str(snapshot), str(polled_lsn), list(notes_from)),
    )
    return int(row[0])


def _locked(conn: Connection, group: str) -> ChainLink | None:
    """Lock the chain until the database transaction ends; returns the last snapshot."""
    locks.lock_in_transaction(conn, locks.chain(group))
    # Read after the lock: another session may have added a snapshot before it.
    newest = _newest(conn, group)
    return None if newest is None else ChainLink(newest.id, newest.snapshot)


def discard_lsns(conn: Connection, group: str) -> None:
    """Discard the positions in the WAL up to which the chain was polled."""
    _locked(conn, group)
    conn.execute("update relay.snapshots set polled_lsn = '0/0' where group_id = %s", (group,))


def _is_reached(conn: Connection, group: str, last: ChainLink) -> bool:
    others = conn.execute(
        "select from relay.consumer_offsets where group_id = %s and snapshot_id is distinct from %s limit 1",
        (group, last.id),
        prepare=False,
    )
    return not others.rowcount
