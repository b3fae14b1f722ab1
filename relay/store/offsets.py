"""Progress of a consumer group: `relay.consumer_offsets`."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg.rows import scalar_row

from relay.events import Lsn
from relay.faults import ConfigurationError
from relay.store import arrays
from relay.store.brakes import Streak, streaks_of

TOPIC = 1
"""The one topic that the outbox is."""


@dataclass(frozen=True, slots=True)
class Cursor:
    """How far one partition is: see the comments on the table's columns."""

    partition_id: int
    next_offset: int
    applied_lsn: Lsn
    handover_offset: int


@dataclass(frozen=True, slots=True)
class Locked:
    """What a task finds under the lock of its partitions.

    `holding` are those of its hosts of which a waiting transaction holds a key, `streaks` the handlers that fail, and
    `source_epoch` is that of `relay.groups`, None for a group that has never run.
    """

    cursors: Mapping[int, Cursor]
    holding: set[str]
    streaks: dict[str, Streak]
    source_epoch: int | None


@dataclass(frozen=True, slots=True)
class Advance:
    """Where a partition stands after a task."""

    partition_id: int
    next_offset: int
    applied_lsn: Lsn


_SELECT = """
    select partition_id, next_offset, applied_lsn::text, handover_offset
      from relay.consumer_offsets
     where group_id = %s and topic_id = %s
"""


def _cursors(rows: Iterable[tuple[Any, ...]]) -> list[Cursor]:
    """Of rows that begin with a cursor's columns."""
    return [
        Cursor(partition, next_offset, Lsn.parse(lsn), handover)
        for partition, next_offset, lsn, handover, *_ in rows
    ]


def lock(
    conn: psycopg.Connection[Any], group: str, partitions: Sequence[int], hosts: Collection[str]
) -> Locked:
    """Lock the partitions' rows to the end of the transaction, in order.

    Raises ConfigurationError if a row is not there: the group was not initialised, or has another number of partitions.
    """
    *rows, (*_, holding, streaks, epoch) = conn.execute(
        "select * from relay.lock_partitions(%s, %s, %s::int[], %s::text[])",
        (group, TOPIC, arrays.of_numbers(partitions), arrays.of_texts(hosts)),
    )
    found = {cursor.partition_id: cursor for cursor in _cursors(rows)}
    missing = [partition for partition in partitions if partition not in found]
    if missing:
        raise ConfigurationError(
            f"group {group!r} has no offsets for partition {missing[0]}: run `relay init`, "
            "or restore the number of partitions that the group began with"
        )
    return Locked(found, set(holding or ()), streaks_of(streaks), epoch)


def claim(
    conn: psycopg.Connection[Any], group: str, partitions: Sequence[int]
) -> Mapping[int, Cursor] | None:
    """Lock the partitions' rows to the end of the transaction if nobody else holds one of them; else None."""
    rows = conn.execute(
        _SELECT + " and partition_id = any(%s) order by partition_id for update skip locked",
        (group, TOPIC, list(partitions)),
    ).fetchall()
    if len(rows) < len(partitions):
        return None
    return {cursor.partition_id: cursor for cursor in _cursors(rows)}


def hand_over(
    conn: psycopg.Connection[Any],
    group: str,
    partitions: Sequence[int],
    next_offset: int,
    durable: bool = True,
) -> None:
    """Everything below `next_offset` in these partitions was applied by another way than the WAL; they are locked.

    See `advance` about `durable`.
    """
    conn.execute(
        """
        update relay.consumer_offsets
           set next_offset     = greatest(next_offset, %(next)s),
               handover_offset = greatest(handover_offset, %(next)s),
               updated_at      = now()
         where group_id = %(group)s and topic_id = %(topic)s and partition_id = any(%(partitions)s)
        returning case when %(durable)s and current_setting('synchronous_commit') not in ('on', 'remote_apply')
                       then set_config('synchronous_commit', 'on', true) end
        """,
        {
            "next": next_offset,
            "group": group,
            "topic": TOPIC,
            "partitions": list(partitions),
            "durable": durable,
        },
    )


def advance(
    conn: psycopg.Connection[Any],
    group: str,
    advances: Sequence[Advance],
    durable: bool = True,
) -> None:
    """Move the partitions forward; they must be locked. No cursor ever moves back.

    `durable` commits wait for the disk, whatever a handler has set for its transaction.
    """
    conn.execute(
        """
        update relay.consumer_offsets as o
           set next_offset = greatest(o.next_offset, a.next_offset),
               applied_lsn = greatest(o.applied_lsn, a.applied_lsn),
               updated_at  = now()
          from unnest(%(partitions)s::int[], %(offsets)s::bigint[], %(lsns)s::pg_lsn[])
               as a (partition_id, next_offset, applied_lsn)
         where o.group_id = %(group)s and o.topic_id = %(topic)s and o.partition_id = a.partition_id
        returning case when %(durable)s and current_setting('synchronous_commit') not in ('on', 'remote_apply')
                       then set_config('synchronous_commit', 'on', true) end
        """,
        {
            "partitions": arrays.of_numbers(a.partition_id for a in advances),
            "offsets": arrays.of_numbers(a.next_offset for a in advances),
            "lsns": arrays.of_texts([str(a.applied_lsn) for a in advances]),
            "group": group,
            "topic": TOPIC,
            "durable": durable,
        },
    )


def place(
    conn: psycopg.Connection[Any], group: str, partitions: Sequence[int], offset: int
) -> None:
    """Let partitions go on at a c_offset, wherever they were; it alone decides what of the WAL is new to them."""
    conn.execute(
        """
        update relay.consumer_offsets
           set next_offset = %(offset)s, handover_offset = %(offset)s, applied_lsn = '0/0', updated_at = now()
         where group_id = %(group)s and topic_id = %(topic)s and partition_id = any(%(partitions)s)
        """,
        {"offset": offset, "group": group, "topic": TOPIC, "partitions": list(partitions)},
    )


def replace(conn: psycopg.Connection[Any], group: str, partitions: int, offset: int) -> None:
    """Give the group another number of partitions, all of which go on at a c_offset."""
    remove(conn, group)
    create(conn, group, partitions, offset, offset)


def all_cursors(conn: psycopg.Connection[Any], group: str) -> list[Cursor]:
    """Every partition of the group, in order."""
    return _cursors(conn.execute(_SELECT + " order by partition_id", (group, TOPIC)))


def initialised(conn: psycopg.Connection[Any], group: str) -> list[Cursor]:
    """Every partition of the group, in order. Raises ConfigurationError if it has none."""
    found = all_cursors(conn, group)
    if not found:
        raise not_initialised(group)
    return found


def not_initialised(group: str) -> ConfigurationError:
    """The fault of a group without partitions."""
    return ConfigurationError(f"group: {group!r} is not initialised: run `relay init`")


def with_wal_position(
    conn: psycopg.Connection[Any], group: str
) -> tuple[Mapping[int, Cursor], str]:
    """Every partition of the group, and a position of the target's WAL that their commits lie below."""
    rows = conn.execute(
        """
        select partition_id, next_offset, applied_lsn::text, handover_offset, pg_current_wal_insert_lsn()::text
          from relay.consumer_offsets where group_id = %s and topic_id = %s
        """,
        (group, TOPIC),
    ).fetchall()
    position = max((row[-1] for row in rows), key=Lsn.parse, default="0/0")
    return {cursor.partition_id: cursor for cursor in _cursors(rows)}, position


def is_flushed(conn: psycopg.Connection[Any], position: str) -> bool:
    """Whether the target's WAL is on its disk up to a position."""
    row = conn.execute("select pg_current_wal_flush_lsn() >= %s::pg_lsn", (position,)).fetchone()
    return bool(row and row[0])


def create(
    conn: psycopg.Connection[Any],
    group: str,
    partitions: int,
    next_offset: int,
    handover_offset: int = 1,
) -> int:
    """Create the cursors of a new group; returns how many were missing. Existing cursors stay as they are."""
    return conn.execute(
        """
        insert into relay.consumer_offsets (group_id, topic_id, partition_id, next_offset, handover_offset)
        select %s, %s, partition_id, %s, %s from generate_series(0, %s - 1) as partition_id
        on conflict do nothing
        """,
        (group, TOPIC, next_offset, handover_offset, partitions),
    ).rowcount


def remove(conn: psycopg.Connection[Any], group: str) -> None:
    """Forget the group's progress."""
    conn.execute(
        "delete from relay.consumer_offsets where group_id = %s and topic_id = %s", (group, TOPIC)
    )


def partition_count(conn: psycopg.Connection[Any], group: str) -> int:
    """How many partitions the group began with; 0 if it is not initialised."""
    with conn.cursor(row_factory=scalar_row) as cursor:
        found = cursor.execute(
            "select count(*) from relay.consumer_offsets where group_id = %s and topic_id = %s",
            (group, TOPIC),
        ).fetchone()
    return int(found or 0)


def require_partition_count(stored: int, group: str, partitions: int) -> None:
    """Raise ConfigurationError if the configured number of partitions is not the stored one."""
    if stored not in (0, partitions):
        raise ConfigurationError(
            f"partitions: the configuration says {partitions}, but the group {group!r} was initialised with {stored}: "
            f"set partitions: {stored}, choose another group, or stop this one and run "
            f"`relay offsets repartition --partitions {partitions}`"
        )
