"""Stores how far the log has been read for the queues that are filled from it: `relay.queue_fills`.

Whoever fills a queue locks its row first, so that a queue is dropped, or rebuilt, between two portions only. Nobody
waits for that lock: the transaction of who drops or rebuilds one may stay open, and other queues are to be filled.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, LiteralString, NamedTuple

import numpy as np
from psycopg.types.json import Jsonb

from relay.faults import RelayError
from relay.model.snapshots import Snapshot
from relay.model.transactions import Int64Array
from relay.store import literals
from relay.store.connections import Connection
from relay.store.positions import offsets

PURGED_AT_ONCE = 10_000
"""How many messages of a queue that is rebuilt are deleted in one database transaction."""


@dataclass(frozen=True, slots=True)
class QueueFill:
    """A queue that is being filled, and how far: see the comments on the table's columns.

    `before` is None until the fill has begun. `asked_at` tells it from one that was asked for later.
    """

    queue_id: int
    queue: str
    key: str
    is_conditional: bool
    match: dict[str, Any] | None
    start: str
    asked_at: datetime
    purge_upto: int | None
    from_offset: int | None
    seen: Snapshot | None
    before: Snapshot | None
    after: Snapshot | None
    polled_offset: int


class Passed(NamedTuple):
    """A business transaction that a fill has passed by; `keys` find its rows, `last_offset` identifies it."""

    last_offset: int
    position: int
    unmarked: bool
    keys: Sequence[int]


_READ: LiteralString = """
    select f.queue_id, q.name, q.key, q.condition is not null, q.match, f.start, f.asked_at, f.purge_upto,
           f.from_offset, f.seen::text, f.before::text, f.after::text, f.polled_offset
      from relay.queue_fills as f join relay.queues as q on q.id = f.queue_id
"""
_PENDING = """
    select string_agg(int8send(last_offset), '')
      from (select last_offset from relay.deferred where group_id = %(group)s and sink = ''
             union
            select max(c_offset) from relay.dead_letter_queue
             where group_id = %(group)s and sink = '' and status in ('dead', 'replaying') and c_offset is not null
             group by dead_transaction) as unapplied
"""


def open_fills(conn: Connection, group: str) -> list[QueueFill]:
    """List the queues of a group that are to be filled and not stopped, those that were asked for first first.

    Raises psycopg.Error.
    """
    rows = conn.execute(
        _READ + " where q.group_id = %s and f.ended_at is null and q.stopped_at is null"
        " order by f.asked_at, f.queue_id",
        (group,),
    )
    return [_fill(*row) for row in rows]


def lock(conn: Connection, fill: QueueFill) -> QueueFill | None:
    """Lock a fill until the database transaction ends; None if the queue was dropped, rebuilt or moved on since.

    Raises RelayError while another session drops or rebuilds it, and psycopg.Error.
    """
    row = conn.execute(
        _READ + " where f.queue_id = %s and f.ended_at is null for update of f skip locked",
        (fill.queue_id,),
    ).fetchone()
    found = None if row is None else _fill(*row)
    if found is None and _is_asked(conn, fill):
        raise RelayError("another session drops or rebuilds the queue in an open transaction")
    if found is None or _progress(found) != _progress(fill):
        return None
    return found


def _is_asked(conn: Connection, fill: QueueFill) -> bool:
    return bool(
        conn.execute(
            "select from relay.queue_fills where queue_id = %s and asked_at = %s and ended_at is null",
            (fill.queue_id, fill.asked_at),
        ).rowcount
    )


def _progress(fill: QueueFill) -> tuple[object, ...]:
    return fill.asked_at, fill.before, fill.after, fill.polled_offset


def _fill(*row: Any) -> QueueFill:
    *of, seen, before, after, polled = row
    last = offsets.FIRST if polled is None else polled
    return QueueFill(*(*of, _snapshot(seen), _snapshot(before), _snapshot(after), last))


def _snapshot(text: str | None) -> Snapshot | None:
    return None if text is None else Snapshot.parse(text)


def begin(
    conn: Connection,
    fill: QueueFill,
    from_offset: int | None,
    seen: Snapshot | None,
    before: Snapshot,
) -> None:
    """Store that a fill begins, and delete what the queue has up to now if that was asked for. Raises psycopg.Error."""
    conn.execute(
        """
        update relay.queue_fills
           set from_offset = %s, seen = %s::pg_snapshot, before = %s::pg_snapshot, begun_at = clock_timestamp(),
               purge_upto = case when purges then (select last_value from relay.queue_message_ids) end
         where queue_id = %s
        """,
        (from_offset, None if seen is None else str(seen), str(before), fill.queue_id),
    )


def purge(conn: Connection, fill: QueueFill) -> bool:
    """Delete some of what a queue had before it is filled; False once there is none. Raises psycopg.Error.

    Waits for the transactions of workers that have taken messages.
    """
    bound = (fill.queue_id, fill.purge_upto, PURGED_AT_ONCE)
    deleted = conn.execute(
        """
        delete from relay.queue_messages where ctid = any (array(
            select m.ctid from relay.queue_messages as m where m.queue_id = %s and m.id <= %s limit %s))
        """,
        bound,
        prepare=False,
    ).rowcount
    if not deleted:
        deleted = conn.execute(
            """
            delete from relay.queue_dead_letters where id = any (array(
                select d.id from relay.queue_dead_letters as d where d.queue_id = %s and d.id <= %s limit %s))
            """,
            bound,
        ).rowcount
    if not deleted:
        conn.execute(
            "update relay.queue_fills set purge_upto = null where queue_id = %s and asked_at = %s",
            (fill.queue_id, fill.asked_at),
        )
    return bool(deleted)


def open_difference(conn: Connection, fill: QueueFill, after: Snapshot) -> None:
    """Store the snapshot up to which the log is read next. Raises psycopg.Error."""
    polled = offsets.FIRST
    if fill.from_offset is not None and fill.before is not None and fill.before.is_beginning:
        polled = fill.from_offset - 1
    conn.execute(
        "update relay.queue_fills set after = %s::pg_snapshot, polled_offset = %s where queue_id = %s",
        (str(after), polled, fill.queue_id),
    )


def advance(conn: Connection, fill: QueueFill, upto: int, messages: int) -> None:
    """Store that the current difference has been read up to a position. Raises psycopg.Error."""
    conn.execute(
        """
        update relay.queue_fills set polled_offset = %s, messages = messages + %s, error = null where queue_id = %s
        """,
        (upto, messages, fill.queue_id),
    )


def end_difference(conn: Connection, fill: QueueFill) -> None:
    """Store that the current difference has been read. Raises psycopg.Error."""
    conn.execute(
        "update relay.queue_fills set before = after, after = null, polled_offset = null where queue_id = %s",
        (fill.queue_id,),
    )


def end(conn: Connection, group: str, fill: QueueFill, messages: int) -> None:
    """Store that a queue is filled like others from now on. Raises psycopg.Error."""
    conn.execute(
        """
        update relay.queue_fills set ended_at = clock_timestamp(), messages = messages + %s, error = null
         where queue_id = %s
        """,
        (messages, fill.queue_id),
    )
    conn.execute("delete from relay.queue_fill_deferred where queue_id = %s", (fill.queue_id,))
    conn.execute("select relay.note_queues(%s)", (group,))


def fails(conn: Connection, fill: QueueFill, fault: str) -> None:
    """Store why a fill cannot go on, unless another session drops or rebuilds the queue. Raises psycopg.Error."""
    conn.execute(
        """
        update relay.queue_fills set error = %s
         where queue_id in (select queue_id from relay.queue_fills
                             where queue_id = %s and asked_at = %s and ended_at is null for update skip locked)
        """,
        (fault, fill.queue_id, fill.asked_at),
    )


def unapplied(conn: Connection, group: str) -> Int64Array:
    """Return the greatest c_offset of each business transaction that the target has deferred or dead-lettered.

    Not of those that were discarded: a seek delivers such a one again. int64, unordered. Raises psycopg.Error.
    """
    (row,) = conn.execute(_PENDING, {"group": group})
    return np.frombuffer(row[0] or b"", ">i8").astype(np.int64)


def pass_by(conn: Connection, fill: QueueFill, passed: Collection[Passed]) -> None:
    """Note transactions that a fill has passed by. Raises psycopg.Error."""
    for each in passed:
        conn.execute(
            """
            insert into relay.queue_fill_deferred (queue_id, last_offset, position, unmarked, keys)
            values (%s, %s, %s, %s, %s::bigint[]) on conflict do nothing
            """,
            (
                fill.queue_id,
                each.last_offset,
                each.position,
                each.unmarked,
                literals.of_numbers(each.keys),
            ),
        )


def take_passed(conn: Connection, fill: QueueFill, but: Int64Array) -> list[Passed]:
    """Forget the transactions that were passed by, but for some, by their last_offset; returns them in order.

    Raises psycopg.Error.
    """
    rows = conn.execute(
        """
        with taken as (
            delete from relay.queue_fill_deferred where queue_id = %s and last_offset <> all (%s::bigint[])
            returning last_offset, position, unmarked, keys)
        select * from taken order by position, last_offset
        """,
        (fill.queue_id, literals.of_numbers(but.tolist())),
        prepare=False,
    )
    return [Passed(*row) for row in rows]


def leave_out(conn: Connection, fill: QueueFill, fields: dict[str, str | None], why: str) -> None:
    """Store an event that cannot be put into a queue as a dead letter of it, without contents. Raises psycopg.Error."""
    conn.execute(
        """
        insert into relay.queue_dead_letters (id, queue_id, attempts, enqueued_at, event_id, event_type, host_id,
                                              transaction_id, error)
        select nextval('relay.queue_message_ids'), %s, 0, clock_timestamp(), f.event_id, f.event_type, f.host_id,
               f.transaction_id, %s
          from jsonb_to_record(%s) as f (event_id text, event_type text, host_id text, transaction_id text)
        """,
        (fill.queue_id, why, Jsonb(fields)),
    )
