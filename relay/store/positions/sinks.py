"""Stores where each sink is, its claim and its pause.

A position is appended to `relay.positions`, as those of partitions are; so is one with what others note as done. Claims
and pauses are in `relay.sink_claims`, whose row is locked by whoever appends one. The view `relay.sinks` shows both.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

import numpy as np
import psycopg
from psycopg import sql
from psycopg.types.json import Jsonb

from relay.faults import RelayError
from relay.model.events import Lsn
from relay.model.snapshots import BEGINNING, Snapshot, Xids, full_xids
from relay.store import actions, completeness, endpoints, literals, locks
from relay.store.brakes import Streak, streaks
from relay.store.connections import APPLICATION_NAME, INSTANCE, Connection, Dsn, connect
from relay.store.deferred import due
from relay.store.positions import offsets, snapshots
from relay.store.positions.offsets import TOPIC
from relay.store.positions.snapshots import xids_of

log = logging.getLogger(__name__)

HELD_SECONDS = 10.0
"""After how many seconds the log names the session that has the claim of a sink."""
BEFORE_FIRST = -(1 << 63)
"""The position before the first transaction of a difference."""
_ONE = "sink = %(sink)s"
ATTACHED, LAGGING, CAUGHT_UP = "attached", "lagging", "caught up"
"""States of a sink: fed from the stream; polling the outbox; or it has polled everything and is not attached."""


class SinkMoved(Exception):
    """The sink was moved or removed meanwhile: the state in memory is no longer valid."""


@dataclass(frozen=True, slots=True)
class SinkPosition:
    """The position of a sink, as `relay.sinks` shows it.

    Everything that `snapshot` sees is delivered. While the difference to `following` is polled, so are its transactions
    up to the position `polled_offset`. Without a snapshot only the WAL is read, up to `applied_lsn`. No delivered
    transaction ends after `delivered_lsn`.
    """

    snapshot: Snapshot | None
    following: Snapshot | None = None
    polled_offset: int = BEFORE_FIRST
    applied_lsn: Lsn = Lsn(0)  # noqa: RUF009
    delivered_lsn: Lsn = Lsn(0)  # noqa: RUF009


@dataclass(frozen=True, slots=True)
class SinkState:
    """The stored state of a sink.

    `done` are the transactions (full xids) that are delivered and not part of `position`. `paused`: an operator has
    paused it. `attached`: the WAL has what is not done. `lags`: the last process that worked it had not read all of the
    outbox. `needs_outbox`: only the outbox has what it has not read: it lags, or had caught up and was not attached.
    `claim` is the number of this process's claim; `epoch` counts the sink's moves, those to another source too;
    `series` is a new text after each move by an operator. `left_out_since` is the time from which the WAL is read
    without it; None if it is read for it. `streaks` are those of all failing handlers of the group.
    """

    streaks: Mapping[str, Streak]
    position: SinkPosition
    done: Xids
    paused: bool
    attached: bool
    lags: bool
    needs_outbox: bool
    claim: int
    epoch: int
    series: str
    left_out_since: datetime | None


class Claims:
    """Claims sinks in one session of the target: this process works them for as long as the session lasts.

    Each claim has a number, one more than the one before. A position is stored only with the newest number of its sink,
    in whatever session: whoever has lost a claim stores nothing once another has it. Rows that another session has
    locked are left out, so that nobody who holds one holds up the other sinks.

    Not thread-safe. Every method raises psycopg.Error.
    """

    def __init__(self, dsn: Dsn, group: str) -> None:
        self._dsn = dsn
        self._group = group
        self._conn: Connection | None = None
        self._held: set[str] = set()
        self._refused: dict[str, float] = {}
        """Since when others have the claims (monotonic clock, seconds)."""

    @property
    def conn(self) -> Connection:
        """The session that has the claims. Raises psycopg.OperationalError without one."""
        if self._conn is None:
            raise psycopg.OperationalError("the connection with the claims is closed")
        return self._conn

    def take(self, sinks: Collection[str]) -> set[str]:
        """Claim sinks; returns those that this process has now, without those that another one works."""
        if self._conn is None:
            self._conn = connect(self._dsn, application_name=APPLICATION_NAME)
        names = [name for name in sinks if name not in self._held]
        taken = locks.try_lock_each(self._conn, [locks.sink(self._group, name) for name in names])
        for name, is_taken in zip(names, taken, strict=True):
            if is_taken:
                self._held.add(name)
                self._refused.pop(name, None)
            else:
                self._log_holder(self._conn, name)
        return self._held.intersection(sinks)

    def _log_holder(self, conn: Connection, sink: str) -> None:
        """Log once who has a claim, if it has been another session for a while: it need not be a relay that works."""
        now = time.monotonic()
        since = self._refused.setdefault(sink, now)
        if now - since < HELD_SECONDS:
            return
        self._refused[sink] = math.inf
        log.info(
            "another session has the claim of a sink, and works it if it is a relay",
            extra={"handler": sink, "holder": locks.holder(conn, locks.sink(self._group, sink))},
        )

    def release(self, sink: str) -> None:
        """Give up a claim: another process may work the sink."""
        if sink in self._held and self._conn is not None:
            self._held.discard(sink)
            locks.unlock(self._conn, locks.sink(self._group, sink))

    def close(self) -> None:
        """End the session, and with it all claims."""
        if self._conn is not None:
            self._conn.close()
            self._conn = None
        self._held.clear()

    def load(
        self, starts: Mapping[str, str], polls: bool = True, by_spark: bool = False
    ) -> dict[str, SinkState]:
        """Read the state of claimed sinks, from which this process continues, under a new number of each claim.

        `starts` has, for each sink, where it begins if it is new, as for `begin`. Where it `polls`, a sink that has no
        snapshot gets the group's: it was never older than the slot, which the group reads. Unless they are worked
        `by_spark`, sinks whose row another session has locked are left out, and a batch that Spark has begun, when it
        worked one, is given up: it would move the sink back. Raises RelayError if a sink has lost its positions.
        """
        conn, group = self.conn, self._group
        with conn.transaction():
            taken = _take(conn, group, list(starts), by_spark)
            begun = [
                sink
                for sink in starts
                if sink not in taken and begin(conn, group, sink, starts[sink])
            ]
            for sink in begun:
                log.info("a new sink begins", extra={"handler": sink, "from": starts[sink]})
            taken += _take(conn, group, begun, by_spark)
            if not by_spark:
                conn.execute(
                    """
                    update relay.spark_batches set batch = null, data = null, files = null
                     where group_id = %s and sink = any(%s) and batch is not null
                    """,
                    (group, taken),
                )
            if polls:
                _give_snapshots(conn, group, taken)
            # Read under the locks of the rows: whoever had a claim before stores nothing any more.
            found = states(conn, group, taken)
            lacking = sorted(set(taken).difference(found))
            if lacking:
                raise RelayError(
                    f"relay.positions: has none of the sink {lacking[0]!r}, which relay.sink_claims has: one of the "
                    "tables was changed or restored without the other: restore both"
                )
            return found

    def store(self, entries: Sequence[SinkEntry]) -> dict[str, bool]:
        """Store sinks in one transaction as `store` does, without those whose row another session has locked."""
        return store(self.conn, self._group, entries, waits=False)

    def watch(self, sinks: Collection[str]) -> dict[str, Watched]:
        """Read what others may have changed of sinks; those without a row or a claim of this session are left out."""
        return watch(self.conn, self._group, self._held.intersection(sinks))


class Claim:
    """The claim of one sink, in a session of its own. Not thread-safe; every method raises psycopg.Error."""

    def __init__(self, dsn: Dsn, group: str, sink: str) -> None:
        self._claims = Claims(dsn, group)
        self._group = group
        self._sink = sink
        self._number = 0

    @property
    def conn(self) -> Connection:
        """The session that has the claim."""
        return self._claims.conn

    def take(self) -> bool:
        """Claim the sink; returns False while another process works it. Keeps the session for the next attempt."""
        try:
            return bool(self._claims.take([self._sink]))
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """End the session, and with it the claim: another process may work the sink."""
        self._number = 0
        self._claims.close()

    def load(self, start: str) -> SinkState:
        """Read the sink's state, from which this process continues; a new one begins at `start`. Raises SinkMoved.

        The claim gets its number with the first state that is read.
        """
        if self._number:
            state = states(self.conn, self._group, [self._sink]).get(self._sink)
        else:
            state = self._claims.load({self._sink: start}, by_spark=True).get(self._sink)
        if state is None or self._number not in (0, state.claim):
            self._number = 0
            raise SinkMoved
        self._number = state.claim
        return state

    def store(
        self, position: SinkPosition, epoch: int, state: str, done: Sequence[int] = ()
    ) -> None:
        """Store the sink's position, in the open transaction if there is one. Raises SinkMoved.

        `done` are more transactions (full xids) that the sink does not read after this position.
        """
        entry = SinkEntry(self._sink, self._number, epoch, position, done, state, None)
        if not store(self.conn, self._group, [entry], has_fault=False):
            raise SinkMoved

    def note_fault(self, fault: str | None) -> None:
        """Store why nothing is delivered, for `relay sink list` and `relay status`; None if the sink delivers."""
        note_fault(self.conn, self._group, self._sink, fault)


def note_fault(conn: Connection, group: str, sink: str, fault: str | None) -> None:
    """Store why nothing of a sink is delivered; None if it delivers. Raises psycopg.Error."""
    conn.execute(
        """
        update relay.sink_claims
           set fault = %(fault)s,
               fault_since = case when %(fault)s is not null then coalesce(fault_since, now()) end
         where group_id = %(group)s and sink = %(sink)s and fault is distinct from %(fault)s
        """,
        {"group": group, "sink": sink, "fault": literals.storable(conn, fault)},
    )


def _take(conn: Connection, group: str, sinks: list[str], waits: bool) -> list[str]:
    """Give sinks the next number of a claim, and lock their rows; returns those that have it."""
    if not sinks:
        return []
    rows = conn.execute(
        sql.SQL(
            """
            with present as materialized (
                select group_id, sink from relay.sink_claims where group_id = %s and sink = any(%s)
                 order by sink for no key update {})
            update relay.sink_claims as s set instance = %s, claim = s.claim + 1
              from present where (s.group_id, s.sink) = (present.group_id, present.sink)
            returning s.sink
            """
        ).format(sql.SQL("" if waits else "skip locked")),
        (group, sinks, INSTANCE),
    )
    return [sink for (sink,) in rows]


def _give_snapshots(conn: Connection, group: str, sinks: list[str]) -> None:
    """Append the group's snapshot to sinks that have none; the caller has locked their rows."""
    first = "(select c.snapshot from relay.snapshots as c where c.group_id = %(group)s order by c.id limit 1)"
    offsets.append(
        conn,
        group,
        offsets.SINKS,
        f"sink = any(%(sinks)s) and snapshot is null and {first} is not null",
        {"sinks": sinks},
        snapshot=first,
    )


def states(conn: Connection, group: str, sinks: Collection[str]) -> dict[str, SinkState]:
    """Read the states of sinks; those that have none are left out. Raises psycopg.Error."""
    names = list(sinks)
    rows = conn.execute(
        """
        select sink, snapshot::text, following::text, polled_offset, applied_lsn::text, delivered_lsn::text,
               paused_at is not null, state = 'attached', state = 'lagging', state in ('lagging', 'caught up'), claim,
               epoch, series::text,
               case when state = 'left out' then (
                   select c.updated_at from relay.sink_claims as c
                    where (c.group_id, c.sink) = (s.group_id, s.sink)) end
          from relay.sinks as s where group_id = %s and sink = any(%s)
        """,
        (group, names),
        prepare=False,
    ).fetchall()
    delivered = _done(conn, group, names)
    failing = streaks(conn, group)
    return {
        sink: SinkState(
            failing, _position(*values[:5]), delivered.get(sink, xids_of(None)), *values[5:]
        )
        for sink, *values in rows
    }


@dataclass(frozen=True, slots=True, eq=False)
class SinkEntry:
    """What is to be stored of a sink.

    `claim` and `epoch` are those with which it was loaded. `done` are delivered transactions (full xids) that are not
    part of the position: all of them without a snapshot, otherwise those that are not stored yet. `fault` says why
    nothing is delivered; None if the sink delivers.
    """

    sink: str
    claim: int
    epoch: int
    position: SinkPosition
    done: Sequence[int]
    state: str
    fault: str | None


def store(
    conn: Connection,
    group: str,
    entries: Sequence[SinkEntry],
    *,
    waits: bool = True,
    has_fault: bool = True,
) -> dict[str, bool]:
    """Store the positions of sinks in one transaction; returns those that are stored, and whether each is to be paused.

    The others were moved, removed or claimed by somebody else meanwhile or, unless it `waits`, their rows are locked by
    another session. Of the transactions that are noted as done, those that the snapshot sees no longer count. Without
    `has_fault` the fault stays as it is.
    """
    positions = [_columns(each.position) for each in entries]
    rows = conn.execute(
        """
        select * from relay.store_sinks(
            %s, %s, %s, %s::text[], %s::bigint[], %s::int[], %s::text[], %s::text[], %s::text[], %s::text[],
            %s::bigint[], %s::text[], %s::text[], %s::text[])
        """,
        (
            group,
            waits,
            has_fault,
            [each.sink for each in entries],
            [each.claim for each in entries],
            [each.epoch for each in entries],
            [each.state for each in entries],
            [literals.storable(conn, each.fault) for each in entries],
            *(
                [each[name] for each in positions]
                for name in ("snapshot", "following", "polled", "applied", "delivered")
            ),
            [literals.of_numbers(each.done) for each in entries],
        ),
    )
    return dict(rows.fetchall())


@dataclass(frozen=True, slots=True)
class Watched:
    """What others may change of a sink that this process works.

    `claim` and `epoch` differ from those with which it was loaded once it was claimed by somebody else or moved.
    `is_due`: a deferred transaction may be retried now. `holds`: deferred transactions hold keys.
    """

    claim: int
    epoch: int
    paused: bool
    is_due: bool
    holds: bool


def watch(conn: Connection, group: str, sinks: Collection[str]) -> dict[str, Watched]:
    """Read what others may have changed of sinks; those without a row are left out. Raises psycopg.Error."""
    rows = conn.execute(
        sql.SQL(
            """
            select s.sink, s.claim, s.epoch, s.paused_at is not null,
                   exists (select from relay.deferred as d
                            where d.group_id = s.group_id and d.sink = s.sink and {due} and d.dead_transaction is null)
                   or exists (select from relay.deferred as d
                               where d.group_id = s.group_id and d.sink = s.sink and {due}
                                 and d.dead_transaction is not null),
                   exists (select from relay.deferred_keys as k where k.group_id = s.group_id and k.sink = s.sink)
              from relay.sink_claims as s where s.group_id = %s and s.sink = any(%s)
            """
        ).format(due=due.MAY_BE_DUE),
        (group, list(sinks)),
        # A plan made while a table was empty would later read all of it.
        prepare=False,
    )
    return {sink: Watched(*values) for sink, *values in rows}


@dataclass(frozen=True, slots=True)
class ReadRange:
    """What a sink that polls has read, or reads now: what `snapshots` see, and the transactions `done` (full xids)."""

    snapshots: list[Snapshot]
    done: Xids

    def unread(self, xid: int) -> int | None:
        """The full xid of a transaction, by its xid of the WAL; None if it has read it."""
        newest = max(each.xmax for each in self.snapshots)
        full = full_xids(np.array([xid], np.uint32), newest)
        is_read = np.isin(full, self.done) | [each.sees(full)[0] for each in self.snapshots]
        return None if is_read.any() else int(full[0])


def read_ranges(conn: Connection, group: str, sinks: Collection[str]) -> dict[str, ReadRange]:
    """What sinks have read of the outbox; those that do not poll, or were never worked, are left out.

    Raises psycopg.Error.
    """
    rows = conn.execute(
        """
        select sink, array_remove(array[s.snapshot::text, s.following::text,
                                        (select b.after::text from relay.spark_batches as b
                                          where b.group_id = s.group_id and b.sink = s.sink and b.batch is not null
                                          order by b.begun_at desc limit 1)], null)
          from relay.sinks as s where group_id = %s and sink = any(%s) and snapshot is not null
        """,
        (group, list(sinks)),
    ).fetchall()
    known = _done(conn, group, [sink for sink, _ in rows])
    return {
        sink: ReadRange([Snapshot.parse(each) for each in texts], known.get(sink, xids_of(None)))
        for sink, texts in rows
    }


def begin(conn: Connection, group: str, sink: str, start: str) -> bool:
    """Store the first position of a sink; returns whether it had none yet.

    `start` is `beginning` (every event of the outbox) or `now` (events that the group has not applied yet).
    """
    with conn.transaction():
        links = snapshots.chain(conn, group)
        position = SinkPosition(links[0].snapshot if links else None)
        if links and start == "beginning":
            position = SinkPosition(BEGINNING)
        elif len(links) > 1:
            position = replace(position, following=links[1].snapshot)
        begun = conn.execute(
            "insert into relay.sink_claims (group_id, sink) values (%s, %s) on conflict do nothing",
            (group, sink),
        )
        if not begun.rowcount:
            return False
        # Numbers are greater than those of a former sink of that name: see relay.store.positions.offsets.create.
        conn.execute(
            """
            insert into relay.positions (group_id, owner, topic_id, partition_id, number, snapshot, following,
                                         polled_offset, applied_lsn, delivered_lsn, notes_from, xids)
            select %(group)s, %(sink)s, %(topic)s, 0, new.number, %(snapshot)s::pg_snapshot,
                   %(following)s::pg_snapshot,
                   case when %(following)s::text is null then %(polled)s
                        else coalesce(min(polled_offset) filter (where snapshot_id = %(link)s), %(polled)s) end,
                   coalesce(max(applied_lsn), '0/0'), '0/0', new.number,
                   case when %(knows)s then (
                       select array_agg(xid) from relay.applied_commits as a, unnest(a.xids) as xid
                        where a.group_id = %(group)s) end
              from (select pg_current_xact_id()::text::bigint * 16) as new (number)
              left join relay.consumer_offsets on group_id = %(group)s
             group by new.number
            """,
            {
                **_columns(position),
                "group": group,
                "sink": sink,
                "topic": TOPIC,
                "link": links[0].id if links else None,
                "knows": start == "now",
            },
        )
        conn.execute(
            "update relay.sink_claims set begun = %s where group_id = %s and sink = %s",
            (Jsonb(mark(conn, group, sink)), group, sink),
        )
    return True


_MOST_MARKED = 1_000


def mark(conn: Connection, group: str, sink: str) -> dict[str, Any] | None:
    """What a sink has read now, as JSON values, so that one can tell later which events were before that.

    None where only the WAL is read, and where more than some transactions are done after its position.
    """
    row = conn.execute(
        """
        select s.snapshot::text, s.following::text, s.polled_offset,
               array(select xid::text from relay.sink_commits as c, unnest(c.xids) as xid
                      where (c.group_id, c.sink) = (s.group_id, s.sink) limit %s)
          from relay.sinks as s where s.group_id = %s and s.sink = %s and s.snapshot is not null
        """,
        (_MOST_MARKED + 1, group, sink),
        prepare=False,
    ).fetchone()
    if row is None or len(row[3]) > _MOST_MARKED:
        return None
    return dict(zip(("snapshot", "following", "polled", "done"), row, strict=True))


def begun(conn: Connection, group: str) -> dict[str, dict[str, Any]]:
    """What each sink had read when it began, as `mark` has noted it, where that is known."""
    rows = conn.execute(
        "select sink, begun from relay.sink_claims where group_id = %s and begun is not null",
        (group,),
    )
    return dict(rows.fetchall())


def leave_out(conn: Connection, group: str, configured: Collection[str]) -> list[str]:
    """Store that the WAL is read without the sinks that are not `configured`; returns their names."""
    rows = conn.execute(
        """
        update relay.sink_claims
           set state = 'left out', updated_at = case when state = 'left out' then updated_at else now() end
         where group_id = %s and sink <> all(%s) returning sink
        """,
        (group, list(configured)),
    )
    return sorted(str(name) for (name,) in rows)


def why_not_wal(sink: str, position: SinkPosition, needs_outbox: bool) -> str | None:
    """Explain why a sink cannot run in mode wal, and what to do; None if it can."""
    if not needs_outbox or position.snapshot is None:
        return None
    return (
        f"handlers.{sink}: is not attached to the stream, and only the outbox has the events that it has not "
        "delivered: run relay with source.mode: auto until `relay sink list` says that it is attached"
    )


NEW = "not begun"
"""The state of a sink that is configured and has no position yet."""
GONE = "not configured"
"""The state of a sink that has a position and is no longer configured."""
DOWN = "down"
"""The state of a sink whose destination fails, or whose brake is on."""
STOPPED = "not running"
"""The state of a sink that no running instance works."""


@dataclass(frozen=True, slots=True)
class StoredSink:
    """A sink as commands show it. `state` is that of its row in `relay.sink_claims`, `paused`, NEW or GONE.

    `needs_outbox` is as in `SinkState`, independent of `state`.
    """

    sink: str
    state: str
    position: SinkPosition
    paused_at: datetime | None
    paused_by: str | None
    reason: str | None
    fault: str | None
    fault_since: datetime | None
    instance: str | None
    needs_outbox: bool

    def state_in(self, running: Collection[str]) -> str:
        """The state as commands show it, where `running` are the instances of the group that run."""
        if self.state not in (ATTACHED, LAGGING, CAUGHT_UP):
            return self.state
        if self.instance not in running:
            return STOPPED
        return DOWN if self.fault else self.state

    def is_fed(self, running: Collection[str]) -> bool:
        """Whether a running instance feeds the sink from the stream."""
        return self.state == ATTACHED and self.fault is None and self.instance in running


def read(conn: Connection, group: str, configured: Collection[str]) -> list[StoredSink]:
    """List the configured sinks of a group, and those that have a position but are not configured, by name."""
    rows = conn.execute(
        """
        select snapshot::text, following::text, polled_offset, applied_lsn::text, delivered_lsn::text, sink,
               case when sink <> all(%s) then %s when paused_at is not null then 'paused' else state end,
               paused_at, paused_by, reason, fault, fault_since, instance, state in ('lagging', 'caught up')
          from relay.sinks where group_id = %s
        """,
        (list(configured), GONE, group),
    )
    stored = [StoredSink(row[5], row[6], _position(*row[:5]), *row[7:]) for row in rows]
    begun = {each.sink for each in stored}
    nothing = (SinkPosition(None), None, None, None, None, None, None, False)
    stored += [StoredSink(name, NEW, *nothing) for name in configured if name not in begun]
    return sorted(stored, key=lambda each: each.sink)


def done(conn: Connection, group: str, sink: str) -> Xids:
    """Return the full xids that a sink has delivered and that are not part of its position: int64, unordered."""
    return _done(conn, group, [sink]).get(sink, xids_of(None))


def add_done(conn: Connection, group: str, done: Mapping[str, Sequence[int]]) -> None:
    """Store transactions (full xids) that sinks do not read after their positions. Raises psycopg.Error.

    Locks the rows of all these sinks, in order, until the database transaction ends: call it once in one.
    """
    with conn.transaction():
        conn.execute(
            "select from relay.sink_claims where group_id = %s and sink = any(%s) order by sink for no key update",
            (group, list(done)),
        )
        for sink, xids in done.items():
            bound = {"sink": sink, "xids": literals.of_numbers(xids)}
            offsets.append(conn, group, offsets.SINKS, _ONE, bound, xids="%(xids)s::xid8[]")


def _done(conn: Connection, group: str, sinks: list[str]) -> dict[str, Xids]:
    rows = conn.execute(
        """
        select sink, string_agg(xid8send(xid), '') from relay.sink_commits, unnest(xids) as xid
         where group_id = %s and sink = any(%s) group by sink
        """,
        (group, sinks),
    )
    return {sink: xids_of(packed) for sink, packed in rows}


def move(conn: Connection, group: str, sink: str, position: SinkPosition) -> bool:
    """Set the position of a sink, even while relay runs; returns whether the sink exists."""
    with conn.transaction():
        # What a function commits after this counts for its former position no more.
        locks.lock_in_transaction(conn, locks.completions(group, sink))
        conn.execute(
            """
            update relay.sink_claims
               set epoch = epoch + 1, series = gen_random_uuid(), state = 'lagging', updated_at = now()
             where group_id = %s and sink = %s
            """,
            (group, sink),
        )
        moved = offsets.append(
            conn,
            group,
            offsets.SINKS,
            _ONE,
            {"sink": sink, **_columns(position)},
            snapshot="%(snapshot)s::pg_snapshot",
            following="%(following)s::pg_snapshot",
            polled_offset="%(polled)s",
            applied_lsn="%(applied)s::pg_lsn",
            delivered_lsn="%(delivered)s::pg_lsn",
            notes_from="number + 1",
        )
        if completeness.forget(conn, group, [sink]):
            completeness.expect(conn, group, [sink])
    return moved > 0


def pause(conn: Connection, group: str, sink: str, paused: bool, reason: str | None) -> bool:
    """Pause or resume a sink; returns whether that changed anything."""
    changed = conn.execute(
        f"""
        update relay.sink_claims
           set paused_at = case when %(paused)s then now() end,
               paused_by = case when %(paused)s then {actions.WHO} end,
               reason = case when %(paused)s then %(reason)s end
         where group_id = %(group)s and sink = %(sink)s and (paused_at is not null) <> %(paused)s
        """,  # noqa: S608
        {"group": group, "sink": sink, "paused": paused, "reason": reason},
    )
    return changed.rowcount > 0


def log_pause(sink: str, paused: bool) -> None:
    """Log that the worker of a sink has noticed a pause, or its end."""
    log.info("a sink is paused" if paused else "a sink is resumed", extra={"handler": sink})


def log_move(sink: str) -> None:
    """Log that the worker of a sink has noticed that it was moved."""
    log.info("a sink continues from its stored position", extra={"handler": sink})


def remove(conn: Connection, group: str, sinks: Collection[str]) -> int:
    """Delete the positions of sinks; returns how many there were."""
    names = list(sinks)
    with conn.transaction():
        # First: whoever stores a position meanwhile is waited for, and stores none after this.
        removed = conn.execute(
            "delete from relay.sink_claims where group_id = %s and sink = any(%s)", (group, names)
        ).rowcount
        conn.execute(
            "delete from relay.positions where group_id = %s and owner = any(%s) and owner <> ''",
            (group, names),
        )
        conn.execute(
            "delete from relay.sink_completions where group_id = %s and sink = any(%s)",
            (group, names),
        )
        conn.execute(
            "delete from relay.spark_batches where group_id = %s and sink = any(%s)", (group, names)
        )
        completeness.forget(conn, group, names)
        endpoints.forget(conn, group, names)
    return removed


def _columns(position: SinkPosition) -> dict[str, Any]:
    return {
        "snapshot": None if position.snapshot is None else str(position.snapshot),
        "following": None if position.following is None else str(position.following),
        "polled": position.polled_offset,
        "applied": str(position.applied_lsn),
        "delivered": str(position.delivered_lsn),
    }


def _position(
    snapshot: str | None, following: str | None, polled: int, applied: str, delivered: str
) -> SinkPosition:
    return SinkPosition(
        _parse(snapshot), _parse(following), polled, Lsn.parse(applied), Lsn.parse(delivered)
    )


def _parse(text: str | None) -> Snapshot | None:
    return None if text is None else Snapshot.parse(text)
