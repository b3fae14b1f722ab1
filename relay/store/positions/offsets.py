"""Stores the positions of a group's partitions in `relay.positions`, where those of its sinks are too (`sinks.py`).

Positions are appended: the one with the greatest number is the state, which the view `relay.consumer_offsets` shows.
Whoever appends one has locked the partition's row of `relay.group_partitions`, or has stopped the group.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, LiteralString

import numpy as np
import psycopg
from psycopg import sql
from psycopg.rows import scalar_row

from relay.faults import ConfigurationError
from relay.model.events import Lsn
from relay.model.keys import host_part
from relay.model.snapshots import RowCounts, Snapshot
from relay.store import literals, trips
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
PORTION = 10_000
"""How many superseded positions of a partition are deleted in one statement."""


@dataclass(frozen=True, slots=True)
class PartitionPosition:
    """The position of one partition: see the comments on the table's columns."""

    partition_id: int
    number: int
    applied_lsn: Lsn
    snapshot_id: int | None
    polled_offset: int
    next_offset: int


@dataclass(frozen=True, slots=True)
class Locked:
    """The state that a task reads under the lock of its partitions.

    `last` is the newest snapshot of the group, None where only the WAL is read. `holding` are those of the task's hosts
    that have a held key, `streaks` are those of failing handlers, and `source_epoch` is that of `relay.groups`, None
    for a group that has never run. `queues` is the revision of the group's queues, None where there never was one.
    """

    positions: Mapping[int, PartitionPosition]
    last: ChainLink | None
    holding: set[str]
    streaks: dict[str, Streak]
    source_epoch: int | None
    queues: int | None

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
    select partition_id, number, applied_lsn::text, snapshot_id, polled_offset, next_offset
      from relay.consumer_offsets where group_id = %s and topic_id = %s
"""

_LOCK = b"""
    select partition_id, number, applied_lsn, snapshot_id, polled_offset, next_offset, snapshot, to_jsonb(holding),
           streaks, source_epoch, case when partition_id is null then relay.queues_revision($1) end
      from relay.lock_positions($1, $2::int, $3::int[], $4::text[])
"""
"""The function in FROM has returned before the one in the list is called, so that its lock is held."""

_APPEND = """
    insert into relay.positions (group_id, topic_id, partition_id, number, applied_lsn, snapshot_id, polled_offset,
                                 next_offset{noted})
    select $1, $2::int, a.partition_id, a.number, a.applied_lsn, a.snapshot_id, a.polled_offset, a.next_offset{notes}
      from unnest($3::int[], $4::bigint[], $5::pg_lsn[], $6::bigint[], $7::bigint[], $8::bigint[])
           as a (partition_id, number, applied_lsn, snapshot_id, polled_offset, next_offset)
    returning case when $9::bool and current_setting('synchronous_commit') not in ('on', 'remote_apply')
                   then set_config('synchronous_commit', 'on', true) end
"""
_NOTES = """,
           case when a.partition_id = $10::int then $3::int[] end,
           case when a.partition_id = $10::int then $11::xid8[] end,
           case when a.partition_id = $10::int then $12::int[] end"""
_APPENDED = _APPEND.format(noted="", notes="").encode()
_APPENDED_AND_NOTED = _APPEND.format(noted=", partitions, xids, rows", notes=_NOTES).encode()

_Parts = tuple[LiteralString, LiteralString, tuple[LiteralString, ...]]
PARTITIONS: _Parts = (
    "relay.consumer_offsets",
    "'', topic_id, partition_id",
    ("applied_lsn", "snapshot_id", "polled_offset", "next_offset"),
)
SINKS: _Parts = (
    "relay.sinks",
    "sink, 1, 0",
    ("applied_lsn", "snapshot", "following", "polled_offset", "delivered_lsn", "notes_from"),
)
"""What has positions: the view of the newest ones, which part a row is of, and the columns that a position keeps."""


def append(
    conn: psycopg.Connection[Any],
    group: str,
    of: _Parts,
    which: LiteralString = "true",
    bound: Mapping[str, Any] | None = None,
    **columns: LiteralString,
) -> int:
    """Append a position to some parts, with other values of some columns; returns to how many.

    The caller has locked their rows, or has stopped the group. `bound` are the parameters of `which` and `columns`.
    """
    view, part, kept = of
    values = {**dict(zip(kept, kept, strict=True)), **columns}
    return conn.execute(
        sql.SQL(
            "insert into relay.positions (group_id, owner, topic_id, partition_id, number, {})"
            " select group_id, {}, number + 1, {} from {} where group_id = %(group)s and {}"
        ).format(
            *(
                sql.SQL(each)
                for each in (", ".join(values), part, ", ".join(values.values()), view, which)
            )
        ),
        {"group": group, **(bound or {})},
        prepare=False,
    ).rowcount


def _positions(rows: Iterable[tuple[Any, ...]]) -> list[PartitionPosition]:
    """Read positions from rows that begin with the columns of `_SELECT`."""
    return [
        PartitionPosition(partition, number, Lsn.parse(lsn), snapshot, polled, following)
        for partition, number, lsn, snapshot, polled, following, *_ in rows
    ]


def lock(
    conn: psycopg.Connection[Any], group: str, partitions: Sequence[int], hosts: Collection[str]
) -> Locked:
    """Lock the partitions in order, until the database transaction ends.

    Raises ConfigurationError if a row is missing: the group is not initialised, or has another number of partitions.
    """
    codec = codec_of(conn)
    asked = {writable(host_part(host), codec): host for host in hosts}
    numbers = literals.of_numbers(partitions)
    hosts_asked = literals.of_texts(asked)
    locking = trips.BoundStatement.of(_LOCK, group, TOPIC, numbers, hosts_asked)
    *rows, of_group = trips.run(conn, locking)
    positions = {each.partition_id: each for each in map(_position, rows)}
    missing = [partition for partition in partitions if partition not in positions]
    if missing:
        raise ConfigurationError(
            f"group {group!r} has no offsets for partition {missing[0]}: run `relay init`, "
            "or restore the number of partitions that the group began with"
        )
    last, snapshot = of_group[3], of_group[6]
    holding, streaks, epoch, queues = (
        None if each is None else json.loads(each) for each in of_group[7:]
    )
    return Locked(
        positions,
        None
        if last is None or snapshot is None
        else ChainLink(int(last), Snapshot.parse(snapshot)),
        {asked[host] for host in holding or ()},
        streaks_of(streaks),
        epoch,
        queues,
    )


def _position(row: Sequence[str | None]) -> PartitionPosition:
    """Read a position from a row of texts that begins with the columns of `_SELECT`."""
    partition, number, lsn, snapshot, polled, following = (each or "" for each in row[:6])
    return PartitionPosition(
        int(partition),
        int(number),
        Lsn.parse(lsn),
        int(snapshot) if snapshot else None,
        int(polled),
        int(following),
    )


def claim(
    conn: psycopg.Connection[Any], group: str, partitions: Sequence[int]
) -> Mapping[int, PartitionPosition] | None:
    """Lock the partitions until the database transaction ends; None if another session has locked one."""
    rows = conn.execute(
        "select * from relay.claim_positions(%s, %s, %s::int[])",
        (group, TOPIC, literals.of_numbers(partitions)),
    ).fetchall()
    if len(rows) < len(partitions):
        return None
    return {each.partition_id: each for each in _positions(rows)}


def advance(
    group: str,
    positions: Mapping[int, PartitionPosition],
    advances: Sequence[Advance],
    noted: RowCounts | None = None,
    durable: bool = True,
) -> trips.BoundStatement:
    """What moves partitions forward in the WAL from `positions`, which were read under their lock. None moves back.

    `noted` are the transactions that were applied in them, which polling leaves out; None in mode wal. With `durable`
    the commit waits for the disk, whatever a handler has set for its transaction.
    """
    moved = []
    for each in advances:
        former = positions[each.partition_id]
        moved.append(
            PartitionPosition(
                former.partition_id,
                former.number,
                max(former.applied_lsn, each.applied_lsn),
                former.snapshot_id,
                former.polled_offset,
                max(former.next_offset, each.next_offset),
            )
        )
    return _append(group, moved, noted, durable)


def polled(
    conn: psycopg.Connection[Any],
    group: str,
    positions: Mapping[int, PartitionPosition],
    ends: Mapping[int, int],
    upto: int,
    durable: bool = True,
) -> None:
    """Store that partitions have applied everything up to a position in a difference.

    `positions` were read under the lock of the partitions, `ends` has the greatest c_offset that was applied in each of
    them; `durable` is as in `advance`.
    """
    moved = []
    for partition, end in ends.items():
        former = positions[partition]
        moved.append(
            replace(
                former,
                polled_offset=max(former.polled_offset, upto),
                next_offset=max(former.next_offset, min(end, LAST - 1) + 1),
            )
        )
    trips.run_each(conn, [_append(group, moved, None, durable)])


def _append(
    group: str, moved: Sequence[PartitionPosition], noted: RowCounts | None, durable: bool
) -> trips.BoundStatement:
    """What appends a position to each partition, after the one that `moved` was made from."""
    values: list[str | int | None] = [
        group,
        TOPIC,
        literals.of_numbers(each.partition_id for each in moved),
        literals.of_numbers(each.number + 1 for each in moved),
        literals.of_texts([str(each.applied_lsn) for each in moved]),
        literals.of_values(each.snapshot_id for each in moved),
        literals.of_numbers(each.polled_offset for each in moved),
        literals.of_numbers(each.next_offset for each in moved),
        durable,
    ]
    if noted is None:
        return trips.BoundStatement.of(_APPENDED, *values)
    first, xids, rows = moved[0].partition_id, noted.xids.tolist(), noted.rows.tolist()
    values += [first, literals.of_numbers(xids), literals.of_numbers(rows)]
    return trips.BoundStatement.of(_APPENDED_AND_NOTED, *values)


def complete(
    conn: psycopg.Connection[Any], group: str, before: int, after: int, ends: Mapping[int, int]
) -> int:
    """Move partitions from the snapshot `before` to `after` if they have applied the whole difference.

    `ends` has the end of the difference in each of them. Returns how many were moved; partitions that another session
    has locked are left to it.
    """
    with conn.transaction():
        # What the statement that locks has read may have changed before it had the lock.
        free = conn.execute(
            """
            select p.partition_id from relay.group_partitions as p
             where p.group_id = %s and p.topic_id = %s and p.partition_id = any(%s::int[])
               and %s = (
                   select o.snapshot_id from relay.consumer_offsets as o
                    where (o.group_id, o.topic_id, o.partition_id) = (p.group_id, p.topic_id, p.partition_id))
             order by p.partition_id for update skip locked
            """,
            (group, TOPIC, literals.of_numbers(ends), before),
            prepare=False,
        ).fetchall()
        partitions = [partition for (partition,) in free]
        return append(
            conn,
            group,
            PARTITIONS,
            """
            partition_id = any(%(partitions)s::int[]) and snapshot_id = %(before)s
            and polled_offset >= (%(ends)s::bigint[])[array_position(%(partitions)s::int[], partition_id)]
            and exists (select from relay.snapshots where group_id = %(group)s and id = %(after)s)
            """,
            {
                "before": before,
                "after": after,
                "first": FIRST,
                "partitions": literals.of_numbers(partitions),
                "ends": literals.of_numbers(ends[partition] for partition in partitions),
            },
            snapshot_id="%(after)s",
            polled_offset="%(first)s",
        )


def move(
    conn: psycopg.Connection[Any],
    group: str,
    partitions: Sequence[int],
    snapshot: int | None,
    polled_offset: int = FIRST,
    applied_lsn: Lsn = Lsn(0),  # noqa: B008
) -> None:
    """Set partitions of a stopped group to a snapshot, or to a position in the WAL, forward or backward."""
    append(
        conn,
        group,
        PARTITIONS,
        "partition_id = any(%(partitions)s)",
        {
            "snapshot": snapshot,
            "polled": polled_offset,
            "lsn": str(applied_lsn),
            "partitions": list(partitions),
        },
        snapshot_id="%(snapshot)s",
        polled_offset="%(polled)s",
        applied_lsn="%(lsn)s::pg_lsn",
        next_offset="greatest(1, least(%(polled)s::bigint, 9223372036854775806) + 1)",
    )


def set_wal_position(
    conn: psycopg.Connection[Any], group: str, applied_lsn: Lsn, next_offset: int
) -> None:
    """Set all partitions of a stopped group to one position in the WAL."""
    bound = {"lsn": str(applied_lsn), "next": next_offset}
    append(
        conn,
        group,
        PARTITIONS,
        bound=bound,
        applied_lsn="%(lsn)s::pg_lsn",
        next_offset="%(next)s",
    )


def discard_lsns(conn: psycopg.Connection[Any], group: str) -> None:
    """Set all partitions and sinks to the beginning of the WAL; they must be locked."""
    append(conn, group, PARTITIONS, applied_lsn="'0/0'")
    append(conn, group, SINKS, applied_lsn="'0/0'", delivered_lsn="'0/0'")


def lock_all(conn: psycopg.Connection[Any], group: str) -> None:
    """Lock all partitions in order, until the database transaction ends."""
    conn.execute(
        "select from relay.group_partitions where group_id = %s order by topic_id, partition_id for update",
        (group,),
    )


def lock_sinks(conn: psycopg.Connection[Any], group: str) -> None:
    """Lock all sinks in order, until the database transaction ends."""
    conn.execute(
        "select from relay.sink_claims where group_id = %s order by sink for update", (group,)
    )


def rename_snapshots(conn: psycopg.Connection[Any], group: str, names: Mapping[int, int]) -> None:
    """Replace the ids of snapshots in the positions of a stopped group's partitions, as `names` maps them."""
    append(
        conn,
        group,
        PARTITIONS,
        "snapshot_id = any(%(former)s::bigint[])",
        {"former": literals.of_numbers(names), "new": literals.of_numbers(names.values())},
        snapshot_id="(%(new)s::bigint[])[array_position(%(former)s::bigint[], snapshot_id)]",
    )


class Superseded:
    """Deletes the positions of a group's partitions and sinks that newer ones have superseded.

    It remembers how far it has deleted of each, and does not read there again: while somebody holds a snapshot, the
    dead rows stay. Not thread-safe.
    """

    def __init__(self, group: str) -> None:
        self._group = group
        self._next: dict[tuple[str, int], int] = {}

    def delete(self, conn: psycopg.Connection[Any]) -> int:
        """Delete what has been superseded and is not noted any more; returns how many. Raises psycopg.Error."""
        bounds = conn.execute(
            """
            select '', o.partition_id, o.number,
                   case when last.notes_from is null then o.number
                        else coalesce(last.notes_from[o.partition_id + 1], 0) end
              from relay.consumer_offsets as o
              left join lateral (
                   select s.notes_from from relay.snapshots as s
                    where s.group_id = %(group)s order by s.id desc, s.version desc limit 1) as last on true
             where o.group_id = %(group)s and o.topic_id = %(topic)s
             union all
            select s.sink, 0, s.number, s.notes_from from relay.sinks as s where s.group_id = %(group)s
             order by 1, 2 -- in which two instances wait for each other's rows
            """,
            {"group": self._group, "topic": TOPIC},
            prepare=False,
        ).fetchall()
        following = dict[tuple[str, int], int]()
        left: list[tuple[str, int, int, int, int]] = []
        for owner, partition, newest, noted_from in bounds:
            oldest = self._oldest(conn, owner, partition, newest)
            if oldest < newest:
                left.append((owner, partition, oldest, newest, noted_from))
            # What is noted stays, and is looked at again.
            following[owner, partition] = min(newest, max(noted_from, oldest))
        deleted = self._delete_all(conn, left) if left else 0
        # What was rolled back is still to be deleted.
        self._next = following
        return deleted

    def _delete_all(
        self, conn: psycopg.Connection[Any], left: list[tuple[str, int, int, int, int]]
    ) -> int:
        """Delete the rows of each part, in portions, in one database transaction; returns how many."""
        deleted = 0
        with conn.transaction():
            while left:
                deleted += self._delete(conn, left)
                left = [
                    (owner, partition, first + PORTION, newest, noted_from)
                    for owner, partition, first, newest, noted_from in left
                    if first + PORTION < newest
                ]
        return deleted

    def _oldest(
        self, conn: psycopg.Connection[Any], owner: str, partition: int, newest: int
    ) -> int:
        """A number to which everything is deleted; numbers leave gaps where one begins again."""
        known = self._next.get((owner, partition), FIRST)
        if newest - known <= PORTION:
            return known
        row = conn.execute(
            """
            select number from relay.positions
             where (group_id, owner, topic_id, partition_id) = (%s, %s, %s, %s) and number >= %s order by number limit 1
            """,
            (self._group, owner, TOPIC, partition, known),
            prepare=False,
        ).fetchone()
        return newest if row is None else int(row[0])

    def _delete(
        self, conn: psycopg.Connection[Any], left: Sequence[tuple[str, int, int, int, int]]
    ) -> int:
        """Delete a portion of each part; returns how many."""
        owners, partitions, firsts, newest, noted_from = zip(*left, strict=True)
        ends = (min(last, first + PORTION) for first, last in zip(firsts, newest, strict=True))
        (row,) = conn.execute(
            "select relay.delete_positions(%s, %s::text[], %s::int[], %s::bigint[], %s::bigint[], %s::bigint[])",
            (
                self._group,
                literals.of_texts(owners),
                literals.of_numbers(partitions),
                literals.of_numbers(firsts),
                literals.of_numbers(ends),
                literals.of_numbers(noted_from),
            ),
        )
        return int(row[0])


def positions_and_chain(
    conn: psycopg.Connection[Any], group: str
) -> tuple[list[PartitionPosition], list[ChainLink]]:
    """Read every partition and every snapshot of the group, both in order, in one statement."""
    rows = conn.execute(
        """
        select partition_id, number, applied_lsn::text, snapshot_id, polled_offset, next_offset, null
          from relay.consumer_offsets where group_id = %(group)s and topic_id = %(topic)s
         union all
        select null, null, null, id, null, null, snapshot::text from relay.chain(%(group)s)
         order by 1, 4
        """,
        {"group": group, "topic": TOPIC},
        prepare=False,
    ).fetchall()
    links = [ChainLink(row[3], Snapshot.parse(row[6])) for row in rows if row[0] is None]
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
        select partition_id, number, applied_lsn::text, snapshot_id, polled_offset, next_offset,
               pg_current_wal_insert_lsn()::text
          from relay.consumer_offsets where group_id = %s and topic_id = %s
        """,
        (group, TOPIC),
        prepare=False,
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
    """Create the partitions of a new group; returns how many were missing. Existing ones are not changed."""
    # Numbers are greater than those of a former partition, whose dead rows would stand before the newest one. Each
    # position costs a transaction, and a command appends a few in one.
    return conn.execute(
        """
        with created as (
            insert into relay.group_partitions (group_id, topic_id, partition_id)
            select %(group)s, %(topic)s, partition_id from generate_series(0, %(partitions)s - 1) as partition_id
            on conflict do nothing returning partition_id)
        insert into relay.positions (group_id, topic_id, partition_id, number, snapshot_id, polled_offset)
        select %(group)s, %(topic)s, partition_id, pg_current_xact_id()::text::bigint * 16, %(snapshot)s, %(polled)s
          from created
        """,
        {
            "group": group,
            "topic": TOPIC,
            "partitions": partitions,
            "snapshot": snapshot,
            "polled": polled_offset,
        },
    ).rowcount


def remove(conn: psycopg.Connection[Any], group: str) -> None:
    """Delete the group's partitions, positions and snapshots."""
    for table, which in (
        ("group_partitions", sql.SQL("")),
        ("positions", sql.SQL(" and owner = ''")),
    ):
        conn.execute(
            sql.SQL("delete from relay.{} where group_id = %s and topic_id = %s{}").format(
                sql.Identifier(table), which
            ),
            (group, TOPIC),
        )
    snapshots.remove(conn, group)


def partition_count(conn: psycopg.Connection[Any], group: str) -> int:
    """Count the group's partitions; 0 if it is not initialised."""
    with conn.cursor(row_factory=scalar_row) as cursor:
        count = cursor.execute(
            "select count(*) from relay.group_partitions where group_id = %s and topic_id = %s",
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
