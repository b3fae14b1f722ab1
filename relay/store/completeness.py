"""Stores up to which time each reader of the outbox has everything; the view `relay.watermarks` shows it.

A snapshot sees every event whose COMMIT had returned before the query that read the snapshot began. So a reader that
has everything which the snapshot sees is complete up to that time, by the clock of the source. A snapshot that was cut
has no time of its own: who has everything that it sees is complete up to the time of the latest whole snapshot that it
covers.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime
from threading import Lock

from relay.model.snapshots import Snapshot
from relay.store.connections import Connection

_MOST_MOMENTS = 64
"""How many moments are kept of a reader that lags; every other one is dropped beyond that."""
NOTE_SECONDS = 10.0
"""Seconds between two notes of the times up to which the sinks of a process without new events are complete."""
TARGET = ""
"""The reader that stands for the group's target."""

_NOTE = """
    insert into relay.completeness as c (group_id, reader, since, snapshot, complete_before)
    {rows}
    on conflict (group_id, reader) do update
       set since = case when %(is_part)s and c.complete_before is null and c.since::text = c.snapshot::text
                        then excluded.since else c.since end,
           snapshot = excluded.snapshot,
           complete_before = coalesce(excluded.complete_before, c.complete_before),
           noted_at = excluded.noted_at, lost = false
"""
_NOTE_ONE = _NOTE.format(
    rows="values (%(group)s, %(reader)s, %(since)s::pg_snapshot, %(snapshot)s::pg_snapshot, %(before)s)"
)
_NOTE_CLAIMED = _NOTE.format(
    rows="""
    select %(group)s, n.sink, n.since::pg_snapshot, n.snapshot::pg_snapshot, n.before
      from unnest(%(sinks)s::text[], %(claims)s::bigint[], %(epochs)s::int[], %(since)s::text[], %(snapshots)s::text[],
                  %(before)s::timestamptz[]) as n (sink, claim, epoch, since, snapshot, before)
      join (select c.sink, c.claim, c.epoch from relay.sink_claims as c
             where c.group_id = %(group)s and c.sink = any(%(sinks)s)
             order by c.sink for no key update skip locked) as held using (sink, claim, epoch)
    """
)


@dataclass(frozen=True, slots=True)
class Completeness:
    """Everything that `snapshot` sees is there; it sees every event that was committed before `before`.

    `before` is None where no such time is known: the source is a hot standby, or the reader has not caught up yet with
    any moment at which relay looked.
    """

    snapshot: Snapshot
    before: datetime | None


class Moments:
    """Snapshots of the source with the times before which they were taken, oldest first. Not thread-safe."""

    def __init__(self) -> None:
        self._moments: list[tuple[Snapshot, datetime]] = []

    def clear(self) -> None:
        """Forget all moments: they are of another history of the source."""
        self._moments.clear()

    def note(self, snapshot: Snapshot, at: datetime | None) -> None:
        """Note that `snapshot` was taken after the time `at`; None where that is not known."""
        if at is None:
            return
        if self._moments and self._moments[-1][0] == snapshot:
            self._moments.pop()
        self._moments.append((snapshot, at))
        if len(self._moments) > _MOST_MOMENTS:
            # The last one stays, by which a reader that catches up is complete, and so does the first.
            del self._moments[1:-1:2]

    def reached(self, position: Snapshot) -> Completeness:
        """Return up to which time a reader is complete that has everything which `position` sees."""
        covered = [n for n, (taken, _) in enumerate(self._moments) if position.covers(taken)]
        if not covered:
            return Completeness(position, None)
        before = self._moments[covered[-1]][1]
        # A position is never moved back in between; what is older than this moment is of no use.
        del self._moments[: covered[-1]]
        return Completeness(position, before)


@dataclass(frozen=True, slots=True)
class Watermark:
    """A row of `relay.watermarks`.

    `reader` is a sink, or '' for the target. It has all events after the snapshot `since` that were committed before
    `complete_before`, but for `dead_letters` events and `deferred` transactions. Both counts are None where they were
    not asked for.
    """

    reader: str
    since: str
    snapshot: str
    complete_before: datetime | None
    noted_at: datetime
    dead_letters: int | None
    deferred: int | None


def begin(conn: Connection, group: str, reader: str, since: Snapshot) -> None:
    """Store that a reader begins, or goes on, after what `since` sees. Raises psycopg.Error."""
    forget(conn, group, [reader])
    note(conn, group, reader, since, Completeness(since, None))


def expect(conn: Connection, group: str, sinks: Collection[str]) -> None:
    """Store that sinks begin at their positions, unless something is stored of them. Raises psycopg.Error."""
    conn.execute(
        """
        insert into relay.completeness (group_id, reader, since, snapshot)
        select group_id, sink, snapshot, snapshot from relay.sinks
         where group_id = %s and sink = any(%s) and snapshot is not null
        on conflict do nothing
        """,
        (group, list(sinks)),
    )


def note(
    conn: Connection,
    group: str,
    reader: str,
    since: Snapshot,
    complete: Completeness,
    is_part: bool = False,
) -> None:
    """Store up to where a reader is complete; `since` counts only for a reader that has none yet. Raises psycopg.Error.

    `since` is the position from which the reader has read without being moved. It counts for an expected reader, too,
    that begins with `is_part` of what comes after its position.
    """
    conn.execute(
        _NOTE_ONE,
        {
            "group": group,
            "reader": reader,
            "since": str(since),
            "snapshot": str(complete.snapshot),
            "before": complete.before,
            "is_part": is_part,
        },
    )


@dataclass(frozen=True, slots=True)
class CaughtUp:
    """A sink that has read everything at its position `since`, with the claim and the epoch of that position."""

    sink: str
    claim: int
    epoch: int
    since: Snapshot
    complete: Completeness


class CaughtUpNotes:
    """Stores up to where the sinks of a process are complete that have nothing to read: all in one transaction.

    Thread-safe; every sink has a session of its own. Raises psycopg.Error.
    """

    def __init__(self, group: str) -> None:
        self._group = group
        self._lock = Lock()
        self._entries: dict[str, CaughtUp] = {}
        self._stored = -math.inf

    def note(self, conn: Connection, entry: CaughtUp) -> None:
        """Keep a note and, every NOTE_SECONDS, store all that are kept, but those of sinks with another claim."""
        with self._lock:
            self._entries[entry.sink] = entry
            now = time.monotonic()
            if now - self._stored < NOTE_SECONDS:
                return
            kept, self._entries = list(self._entries.values()), {}
            self._stored = now
            # Within the lock: what is discarded is not stored afterwards.
            conn.execute(
                _NOTE_CLAIMED,
                {
                    "group": self._group,
                    "sinks": [each.sink for each in kept],
                    "claims": [each.claim for each in kept],
                    "epochs": [each.epoch for each in kept],
                    "since": [str(each.since) for each in kept],
                    "snapshots": [str(each.complete.snapshot) for each in kept],
                    "before": [each.complete.before for each in kept],
                    "is_part": False,
                },
            )

    def discard(self, sink: str) -> None:
        """Forget what is kept of a sink: it moves, or nobody knows any more what its destination has."""
        with self._lock:
            self._entries.pop(sink, None)


def withdraw(conn: Connection, group: str, reader: str) -> None:
    """Store that nobody knows up to when a reader is complete: its destination lost events. Raises psycopg.Error."""
    conn.execute(
        """
        update relay.completeness set complete_before = null, lost = true
         where (group_id, reader) = (%s, %s) and not (lost and complete_before is null)
        """,
        (group, reader),
    )


def is_lost(conn: Connection, group: str, reader: str) -> bool:
    """Whether the destination of a reader lacks what was written to it, as far as is known. Raises psycopg.Error."""
    found = conn.execute(
        "select from relay.completeness where (group_id, reader) = (%s, %s) and lost",
        (group, reader),
    )
    return found.rowcount > 0


def stored(conn: Connection, group: str, reader: str) -> Completeness | None:
    """Read what is stored of a reader; None where nothing is. Raises psycopg.Error."""
    row = conn.execute(
        "select snapshot::text, complete_before from relay.completeness where (group_id, reader) = (%s, %s)",
        (group, reader),
    ).fetchone()
    return None if row is None else Completeness(Snapshot.parse(row[0]), row[1])


def forget(conn: Connection, group: str, readers: Collection[str]) -> int:
    """Delete what is stored of readers that were moved or dropped; returns of how many. Raises psycopg.Error."""
    return conn.execute(
        "delete from relay.completeness where group_id = %s and reader = any(%s)",
        (group, list(readers)),
    ).rowcount


def watermarks(conn: Connection, group: str, counts: bool = True) -> list[Watermark]:
    """List the watermarks of a group, by reader; without `counts` neither table of failures is read."""
    rows = conn.execute(
        """
        select reader, since::text, snapshot::text, complete_before, noted_at, dead_letters, deferred
          from relay.watermarks where group_id = %s order by reader
        """
        if counts
        else """
        select reader, since::text, snapshot::text, complete_before, noted_at, null::bigint, null::bigint
          from relay.completeness where group_id = %s order by reader
        """,
        (group,),
    )
    return [Watermark(*row) for row in rows]


def exceptions(
    conn: Connection, group: str, reader: str
) -> tuple[list[str], list[tuple[int, int, int]]]:
    """What a reader lacks, or may have otherwise: ids of events, and deferred rows. Raises psycopg.Error.

    The events are dead letters, in replay, or were edited and replayed. Deferred rows are those of a 32-bit xid between
    two c_offsets.
    """
    ids = conn.execute(
        """
        select distinct event_id from relay.dead_letter_queue
         where group_id = %(group)s and event_id is not null
           and (status in ('dead', 'replaying') or original_payload is not null and status = 'replayed')
           and (sink = %(reader)s or sink = '' and undelivered)
        """,
        {"group": group, "reader": reader},
    ).fetchall()
    deferred = conn.execute(
        """
        select xid, first_offset, last_offset from relay.deferred
         where group_id = %(group)s and (sink = %(reader)s or sink = '' and undelivered)
        """,
        {"group": group, "reader": reader},
    ).fetchall()
    return [event for (event,) in ids], [(int(xid), first, last) for xid, first, last in deferred]
