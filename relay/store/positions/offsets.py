"""Stores the positions of a group's partitions: `relay.consumer_offsets`."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, LiteralString

import numpy as np
import psycopg
from psycopg import sql
from psycopg.rows import scalar_row

from relay.faults import ConfigurationError
from relay.model.events import Lsn
from relay.model.keys import host_part
from relay.model.snapshots import RowCounts, Snapshot
from relay.store import literals
from relay.store.brakes import Streak, streaks_of
from relay.store.literals import codec_of, writable
from relay.store.positions import snapshots
from relay.store.positions.snapshots import ChainLink

TOPIC = 1
"""The topic_id of every row: an outbox is one topic."""


FIRST = np.iinfo(np.int64).min
"""The `polled_offset` before the first transaction of a difference."""
LAST = np.iinfo(np.int64).max
"""The greatest c_offset."""


@dataclass(frozen=True, slots=True)
class PartitionPosition:
    """The position of one partition: see the comments on the table's columns."""

    partition_id: int
    applied_lsn: Lsn
    snapshot_id: int | None
    polled_offset: int
    next_offset: int


@dataclass(frozen=True, slots=True)
class Locked:
    """The state that a task reads under the lock of its partitions.

    `last` is the newest snapshot of the group, None where only the WAL is read. `holding` are those of the task's hosts
    that have a held key, `streaks` are those of failing handlers, and `source_epoch` is that of `relay.groups`, None
    for a group that has never run.
    """

    positions: Mapping[int, PartitionPosition]
    last: ChainLink | None
    holding: set[str]
    streaks: dict[str, Streak]
    source_epoch: int | None

    @property
    def has_no_open_difference(self) -> bool:
        """Whether no difference is open: events that are not applied are in the WAL."""
        newest = self.last.id if self.last else None
        return all(each.snapshot_id == newest for each in self.positions.values())


@dataclass(frozen=True, slots=True)
class Advance:
    """The position of a partition after a task."""

    partition_id: int
    applied_lsn: Lsn
    next_offset: int


_SELECT: LiteralString = """
    select partition_id, applied_lsn::text, snapshot_id, polled_offset, next_offset
      from relay.consumer_offsets where group_id = %s and topic_id = %s
"""

_DURABLE = sql.SQL(
    """
    returning case when %(durable)s and current_setting('synchronous_commit') not in ('on', 'remote_apply')
                   then set_config('synchronous_commit', 'on', true) end
    """
)

_ADVANCE = sql.SQL(
    """
    {note}
    update relay.consumer_offsets as o
       set next_offset = greatest(o.next_offset, a.next_offset),
           applied_lsn = greatest(o.applied_lsn, a.applied_lsn),
           updated_at  = now()
      from unnest(%(partitions)s::int[], %(offsets)s::bigint[], %(lsns)s::pg_lsn[])
           as a (partition_id, next_offset, applied_lsn)
     where o.group_id = %(group)s and o.topic_id = %(topic)s and o.partition_id = a.partition_id
    {durable}
    """
)
_NOTE = sql.SQL(
    """
    with noted as (
        insert into relay.applied_commits (group_id, partitions, xids, rows)
        values (%(group)s, %(partitions)s::int[], %(xids)s::xid8[], %(rows)s::int[]))
    """
)
_ADVANCED = _ADVANCE.format(note=sql.SQL(""), durable=_DURABLE).as_bytes(None)
_ADVANCED_AND_NOTED = _ADVANCE.format(note=_NOTE, durable=_DURABLE).as_bytes(None)

_POLLED = (
    sql.SQL(
        """
        update relay.consumer_offsets as o
           set polled_offset = greatest(o.polled_offset, %(upto)s),
               next_offset   = greatest(o.next_offset, least(a.last_offset, 9223372036854775806) + 1),
               updated_at    = now()
          from unnest(%(partitions)s::int[], %(ends)s::bigint[]) as a (partition_id, last_offset)
         where o.group_id = %(group)s and o.topic_id = %(topic)s and o.partition_id = a.partition_id
        {durable}
        """
    )
    .format(durable=_DURABLE)
    .as_bytes(None)
)


def _positions(rows: Iterable[tuple[Any, ...]]) -> list[PartitionPosition]:
    """Read positions from rows that begin with the columns of `_SELECT`."""
    return [
        PartitionPosition(partition, Lsn.parse(lsn), snapshot, polled, following)
        for partition, lsn, snapshot, polled, following, *_ in rows
    ]


def lock(
    conn: psycopg.Connection[Any], group: str, partitions: Sequence[int], hosts: Collection[str]
) -> Locked:
    """Lock the partitions' rows in order, until the database transaction ends.

    Raises ConfigurationError if a row is missing: the group is not initialised, or has another number of partitions.
    """
    codec = codec_of(conn)
    asked = {writable(host_part(host), codec): host for host in hosts}
    *rows, (_, _, last, _, _, snapshot, holding, streaks, epoch) = conn.execute(
        "select * from relay.lock_partitions(%s, %s, %s::int[], %s::text[])",
        (group, TOPIC, literals.of_numbers(partitions), literals.of_texts(asked)),
    )
    positions = {each.partition_id: each for each in _positions(rows)}
    missing = [partition for partition in partitions if partition not in positions]
    if missing:
        raise ConfigurationError(
            f"group {group!r} has no offsets for partition {missing[0]}: run `relay init`, "
            "or restore the number of partitions that the group began with"
        )
    newest = None if last is None else ChainLink(last, Snapshot.parse(snapshot))
    return Locked(
        positions, newest, {asked[host] for host in holding or ()}, streaks_of(streaks), epoch
    )


def claim(
    conn: psycopg.Connection[Any], group: str, partitions: Sequence[int]
) -> Mapping[int, PartitionPosition] | None:
    """Lock the partitions' rows until the database transaction ends; None if another session has locked one."""
    rows = conn.execute(
        _SELECT + " and partition_id = any(%s) order by partition_id for update skip locked",
        (group, TOPIC, list(partitions)),
    ).fetchall()
    if len(rows) < len(partitions):
        return None
    return {each.partition_id: each for each in _positions(rows)}


def advance(
    conn: psycopg.Connection[Any],
    group: str,
    advances: Sequence[Advance],
    noted: RowCounts | None = None,
    durable: bool = True,
) -> None:
    """Move the partitions forward in the WAL; they must be locked. No position moves back.

    `noted` are the transactions that were applied in them, which polling leaves out; None in mode wal. With `durable`
    the commit waits for the disk, whatever a handler has set for its transaction.
    """
    conn.execute(
        _ADVANCED if noted is None else _ADVANCED_AND_NOTED,
        {
            "partitions": literals.of_numbers(a.partition_id for a in advances),
            "offsets": literals.of_numbers(a.next_offset for a in advances),
            "lsns": literals.of_texts([str(a.applied_lsn) for a in advances]),
            "xids": None if noted is None else literals.of_numbers(noted.xids.tolist()),
            "rows": None if noted is None else literals.of_numbers(noted.rows.tolist()),
            "group": group,
            "topic": TOPIC,
            "durable": durable,
        },
    )


def polled(
    conn: psycopg.Connection[Any],
    group: str,
    ends: Mapping[int, int],
    upto: int,
    durable: bool = True,
) -> None:
    """Store that partitions have applied everything up to a position in a difference; they must be locked.

    `ends` has the greatest c_offset that was applied in each of them; `durable` is as in `advance`.
    """
    conn.execute(
        _POLLED,
        {
            "upto": upto,
            "partitions": literals.of_numbers(ends),
            "ends": literals.of_numbers(ends.values()),
            "group": group,
            "topic": TOPIC,
            "durable": durable,
        },
    )


def complete(
    conn: psycopg.Connection[Any], group: str, before: int, after: int, ends: Mapping[int, int]
) -> int:
    """Move partitions from the snapshot `before` to `after` if they have applied the whole difference.

    `ends` has the end of the difference in each of them. Returns how many were moved; rows that another session has
    locked are left to it.
    """
    return conn.execute(
        """
        update relay.consumer_offsets as o
           set snapshot_id = %(after)s, polled_offset = %(first)s, updated_at = now()
          from (select c.partition_id
                  from relay.consumer_offsets as c
                  join unnest(%(partitions)s::int[], %(ends)s::bigint[]) as done (partition_id, polled_offset)
                    on c.partition_id = done.partition_id and c.polled_offset >= done.polled_offset
                 where c.group_id = %(group)s and c.topic_id = %(topic)s and c.snapshot_id = %(before)s
                   and exists (select from relay.snapshots where group_id = %(group)s and id = %(after)s)
                   for update of c skip locked) as free
         where o.group_id = %(group)s and o.topic_id = %(topic)s and o.partition_id = free.partition_id
        """,
        {
            "before": before,
            "after": after,
            "first": FIRST,
            "partitions": literals.of_numbers(ends),
            "ends": literals.of_numbers(ends.values()),
            "group": group,
            "topic": TOPIC,
        },
    ).rowcount


def move(
    conn: psycopg.Connection[Any],
    group: str,
    partitions: Sequence[int],
    snapshot: int | None,
    polled_offset: int = FIRST,
    applied_lsn: Lsn = Lsn(0),  # noqa: B008
) -> None:
    """Set partitions to a snapshot, or to a position in the WAL, forward or backward."""
    conn.execute(
        """
        update relay.consumer_offsets
           set snapshot_id = %(snapshot)s, polled_offset = %(polled)s, applied_lsn = %(lsn)s, updated_at = now(),
               next_offset = greatest(1, least(%(polled)s::bigint, 9223372036854775806) + 1)
         where group_id = %(group)s and topic_id = %(topic)s and partition_id = any(%(partitions)s)
        """,
        {
            "snapshot": snapshot,
            "polled": polled_offset,
            "lsn": str(applied_lsn),
            "group": group,
            "topic": TOPIC,
            "partitions": list(partitions),
        },
    )


def set_wal_position(
    conn: psycopg.Connection[Any], group: str, applied_lsn: Lsn, next_offset: int
) -> None:
    """Set all partitions to one position in the WAL."""
    conn.execute(
        "update relay.consumer_offsets set applied_lsn = %s, next_offset = %s where group_id = %s and topic_id = %s",
        (str(applied_lsn), next_offset, group, TOPIC),
    )


def rename_snapshots(conn: psycopg.Connection[Any], group: str, names: Mapping[int, int]) -> None:
    """Replace the ids of snapshots in the partitions' positions, as `names` maps them."""
    conn.execute(
        """
        update relay.consumer_offsets as o set snapshot_id = renamed.new
          from unnest(%s::bigint[], %s::bigint[]) as renamed (old, new)
         where o.group_id = %s and o.topic_id = %s and o.snapshot_id = renamed.old
        """,
        (literals.of_numbers(names), literals.of_numbers(names.values()), group, TOPIC),
    )


def positions_and_chain(
    conn: psycopg.Connection[Any], group: str
) -> tuple[list[PartitionPosition], list[ChainLink]]:
    """Read every partition and every snapshot of the group, both in order, in one statement."""
    rows = conn.execute(
        """
        select partition_id, applied_lsn::text, snapshot_id, polled_offset, next_offset, null
          from relay.consumer_offsets where group_id = %(group)s and topic_id = %(topic)s
         union all
        select null, null, id, null, null, snapshot::text from relay.snapshots where group_id = %(group)s
         order by 1, 3
        """,
        {"group": group, "topic": TOPIC},
    ).fetchall()
    links = [ChainLink(row[2], Snapshot.parse(row[5])) for row in rows if row[0] is None]
    return _positions(row for row in rows if row[0] is not None), links


def initialised(conn: psycopg.Connection[Any], group: str) -> list[PartitionPosition]:
    """Read every partition of the group, in order. Raises ConfigurationError if it has none."""
    positions = _positions(conn.execute(_SELECT + " order by partition_id", (group, TOPIC)))
    if not positions:
        raise not_initialised(group)
    return positions


def not_initialised(group: str) -> ConfigurationError:
    """Return the error for a group without partitions."""
    return ConfigurationError(f"group: {group!r} is not initialised: run `relay init`")


def with_wal_position(
    conn: psycopg.Connection[Any], group: str
) -> tuple[Mapping[int, PartitionPosition], str]:
    """Read every partition of the group, and a position of the target's WAL at or after the end of their commits."""
    rows = conn.execute(
        """
        select partition_id, applied_lsn::text, snapshot_id, polled_offset, next_offset,
               pg_current_wal_insert_lsn()::text
          from relay.consumer_offsets where group_id = %s and topic_id = %s
        """,
        (group, TOPIC),
    ).fetchall()
    position = max((row[-1] for row in rows), key=Lsn.parse, default="0/0")
    return {each.partition_id: each for each in _positions(rows)}, position


def is_flushed(conn: psycopg.Connection[Any], position: str) -> bool:
    """Whether the target's WAL is flushed up to a position."""
    row = conn.execute("select pg_current_wal_flush_lsn() >= %s::pg_lsn", (position,)).fetchone()
    return bool(row and row[0])


def create(
    conn: psycopg.Connection[Any],
    group: str,
    partitions: int,
    snapshot: int | None,
    polled_offset: int = FIRST,
) -> int:
    """Create the offsets of a new group; returns how many were missing. Existing ones are not changed."""
    return conn.execute(
        """
        insert into relay.consumer_offsets (group_id, topic_id, partition_id, snapshot_id, polled_offset)
        select %s, %s, partition_id, %s, %s from generate_series(0, %s - 1) as partition_id
        on conflict do nothing
        """,
        (group, TOPIC, snapshot, polled_offset, partitions),
    ).rowcount


def remove(conn: psycopg.Connection[Any], group: str) -> None:
    """Delete the group's offsets and snapshots."""
    conn.execute(
        "delete from relay.consumer_offsets where group_id = %s and topic_id = %s", (group, TOPIC)
    )
    snapshots.remove(conn, group)


def partition_count(conn: psycopg.Connection[Any], group: str) -> int:
    """Count the group's partitions; 0 if it is not initialised."""
    with conn.cursor(row_factory=scalar_row) as cursor:
        count = cursor.execute(
            "select count(*) from relay.consumer_offsets where group_id = %s and topic_id = %s",
            (group, TOPIC),
        ).fetchone()
    return int(count or 0)


def require_partition_count(stored: int, group: str, partitions: int) -> None:
    """Raise ConfigurationError if the configured number of partitions is not the stored one."""
    if stored not in (0, partitions):
        raise ConfigurationError(
            f"partitions: the configuration says {partitions}, but the group {group!r} was initialised with {stored}: "
            f"set partitions: {stored}, choose another group, or stop this one and run "
            f"`relay offsets repartition --partitions {partitions}`"
        )
