"""Stores the position, the claim and the pause of each sink: `relay.sinks`.

All statements on `relay.sinks` and `relay.sink_commits` are here: a claim, `read` and `move` share the form of a
position.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

import psycopg

from relay.model.events import Lsn
from relay.model.snapshots import BEGINNING, Snapshot, Xids
from relay.store import literals, locks
from relay.store.brakes import Streak, streaks
from relay.store.connections import Connection, Dsn, connect
from relay.store.groups import APPLICATION_NAME, INSTANCE
from relay.store.positions import snapshots
from relay.store.positions.snapshots import xids_of

log = logging.getLogger(__name__)

HELD_SECONDS = 10.0
"""After how many seconds the log names the session that has the claim of a sink."""
BEFORE_FIRST = -(1 << 63)
"""The position before the first transaction of a difference."""
ATTACHED, LAGGING, CAUGHT_UP = "attached", "lagging", "caught up"
"""States of a sink: fed from the stream; polling the outbox; or it has polled everything and is not attached."""


class SinkMoved(Exception):
    """The sink was moved or removed meanwhile: the state in memory is no longer valid."""


@dataclass(frozen=True, slots=True)
class SinkPosition:
    """The position of a sink, as its row in `relay.sinks` has it.

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
    `epoch` counts its moves, those to another source too; `series` is a new text after each move by an operator.
    `left_out_since` is the time from which the WAL is read without it; None if it is read for it.
    """

    position: SinkPosition
    done: Xids
    paused: bool
    attached: bool
    lags: bool
    needs_outbox: bool
    epoch: int
    series: str
    streaks: Mapping[str, Streak]
    left_out_since: datetime | None


class Claim:
    """Claims a sink, so that one process works it, for as long as its session of the target lasts.

    Not thread-safe. Every method raises psycopg.Error.
    """

    def __init__(self, dsn: Dsn, group: str, sink: str) -> None:
        self._dsn = dsn
        self._conn: Connection | None = None
        self._key = locks.sink(group, sink)
        self._of = {"group": group, "sink": sink, "instance": INSTANCE}
        self._refused_since: float | None = None
        self._is_logged = False

    @property
    def conn(self) -> Connection:
        """The session that has the claim."""
        assert self._conn is not None  # noqa: S101
        return self._conn

    def take(self) -> bool:
        """Claim the sink; returns False while another process works it. Keeps the session for the next attempt."""
        if self._conn is None:
            self._conn = connect(self._dsn, application_name=APPLICATION_NAME)
        try:
            taken = locks.try_lock(self._conn, self._key)
            if taken:
                self._refused_since, self._is_logged = None, False
            else:
                self._log_holder(self._conn)
            return taken
        except BaseException:
            self.release()
            raise

    def _log_holder(self, conn: Connection) -> None:
        """Log once who has the claim, if it has been another session for a while: it need not be a relay that works."""
        now = time.monotonic()
        if self._refused_since is None:
            self._refused_since = now
        if self._is_logged or now - self._refused_since < HELD_SECONDS:
            return
        self._is_logged = True
        log.info(
            "another session has the claim of a sink, and works it if it is a relay",
            extra={"handler": self._of["sink"], "holder": locks.holder(conn, self._key)},
        )

    def release(self) -> None:
        """End the session, and with it the claim: another process may work the sink."""
        if self._conn is not None:
            self._conn.close()
            self._conn = None

    def load(self) -> SinkState | None:
        """Read the sink's state, from which this instance continues; None if it has none yet."""
        row = self.conn.execute(
            """
            update relay.sinks set instance = %(instance)s where group_id = %(group)s and sink = %(sink)s
            returning snapshot::text, following::text, polled_offset, applied_lsn::text, delivered_lsn::text,
                      paused_at is not null, state = 'attached', state = 'lagging', state in ('lagging', 'caught up'),
                      epoch, series::text,
                      case when state = 'left out' then updated_at end
            """,
            self._of,
        ).fetchone()
        if row is None:
            return None
        *position, paused, attached, lags, needs_outbox, epoch, series, left_out_since = row
        group, sink = self._of["group"], self._of["sink"]
        return SinkState(
            _position(*position),
            done(self.conn, group, sink),
            paused,
            attached,
            lags,
            needs_outbox,
            epoch,
            series,
            streaks(self.conn, group),
            left_out_since,
        )

    def store(
        self, position: SinkPosition, epoch: int, done: Sequence[int], state: str
    ) -> bool | None:
        """Store the sink's position; returns whether it is to be paused, None if it was moved or removed meanwhile.

        `done` are delivered transactions (full xids) that are not part of the position: all of them without a snapshot,
        otherwise those that are not stored yet. Stored ones that the snapshot sees are deleted.
        """
        with self.conn.transaction(), self.conn.cursor() as cursor:
            row = cursor.execute(
                """
                update relay.sinks as new
                   set snapshot = %(snapshot)s::pg_snapshot, following = %(following)s::pg_snapshot,
                       polled_offset = %(polled)s, applied_lsn = %(applied)s::pg_lsn,
                       delivered_lsn = %(delivered)s::pg_lsn, state = %(state)s, updated_at = now()
                  from relay.sinks as old
                 where new.group_id = %(group)s and new.sink = %(sink)s and new.epoch = %(epoch)s
                   and (old.group_id, old.sink) = (new.group_id, new.sink)
                returning new.paused_at is not null, old.snapshot::text is distinct from new.snapshot::text
                """,
                {**self._of, **_columns(position), "epoch": epoch, "state": state},
            ).fetchone()
            if row is None:
                return None
            paused, moved = row
            if position.snapshot is None:
                cursor.execute(
                    "delete from relay.sink_commits where group_id = %(group)s and sink = %(sink)s",
                    self._of,
                )
            elif moved:
                _forget(cursor, self._of, position)
            if done:
                cursor.execute(
                    """
                    insert into relay.sink_commits (group_id, sink, xids)
                    values (%(group)s, %(sink)s, %(xids)s::xid8[])
                    """,
                    {**self._of, "xids": literals.of_numbers(done)},
                )
        return bool(paused)

    def is_paused(self, epoch: int) -> bool | None:
        """Whether the sink is to be paused; None if it was moved or removed."""
        row = self.conn.execute(
            """
            select paused_at is not null from relay.sinks
             where group_id = %(group)s and sink = %(sink)s and epoch = %(epoch)s
            """,
            {**self._of, "epoch": epoch},
        ).fetchone()
        return None if row is None else bool(row[0])

    def note_fault(self, fault: str | None) -> None:
        """Store why nothing is delivered, for `relay sink list` and `relay status`; None if the sink delivers."""
        self.conn.execute(
            """
            update relay.sinks
               set fault = %(fault)s,
                   fault_since = case when %(fault)s is not null then coalesce(fault_since, now()) end
             where group_id = %(group)s and sink = %(sink)s and fault is distinct from %(fault)s
            """,
            {**self._of, "fault": fault},
        )


def _forget(cursor: psycopg.Cursor[Any], of: Mapping[str, str], position: SinkPosition) -> None:
    """Delete the transactions that a snapshot sees; store the others as one row."""
    cursor.execute(
        """
        with deleted as (
            delete from relay.sink_commits where group_id = %(group)s and sink = %(sink)s returning xids)
        insert into relay.sink_commits (group_id, sink, xids)
        select %(group)s, %(sink)s, array_agg(xid) from deleted, unnest(xids) as xid
         where not pg_visible_in_snapshot(xid, %(snapshot)s::pg_snapshot) having count(*) > 0
        """,
        {**of, "snapshot": _columns(position)["snapshot"]},
    )


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
            """
            insert into relay.sinks (group_id, sink, snapshot, following, polled_offset, applied_lsn)
            select %(group)s, %(sink)s, %(snapshot)s::pg_snapshot, %(following)s::pg_snapshot,
                   case when %(following)s is null then %(polled)s
                        else coalesce(min(polled_offset) filter (where snapshot_id = %(link)s), %(polled)s) end,
                   coalesce(max(applied_lsn), '0/0')
              from relay.consumer_offsets where group_id = %(group)s
            on conflict do nothing
            """,
            {
                **_columns(position),
                "group": group,
                "sink": sink,
                "link": links[0].id if links else None,
            },
        )
        if not begun.rowcount:
            return False
        if start == "now":
            conn.execute(
                """
                insert into relay.sink_commits (group_id, sink, xids)
                select group_id, %s, xids from relay.applied_commits where group_id = %s
                """,
                (sink, group),
            )
    return True


def leave_out(conn: Connection, group: str, configured: Collection[str]) -> list[str]:
    """Store that the WAL is read without the sinks that are not `configured`; returns their names."""
    rows = conn.execute(
        """
        update relay.sinks
           set state = 'left out', updated_at = case when state = 'left out' then updated_at else now() end
         where group_id = %s and sink <> all(%s) returning sink
        """,
        (group, list(configured)),
    )
    return sorted(str(name) for (name,) in rows)


def give_snapshot(conn: Connection, group: str, sink: str) -> None:
    """Set the snapshot of a sink that has only a position in the WAL to the group's, if there is one.

    This loses no event: the sink was never older than the slot, which the group reads.
    """
    conn.execute(
        """
        update relay.sinks
           set snapshot = (select snapshot from relay.snapshots where group_id = %(group)s order by id limit 1)
         where group_id = %(group)s and sink = %(sink)s and snapshot is null
        """,
        {"group": group, "sink": sink},
    )


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
    """A sink as commands show it. `state` is that of its row in `relay.sinks`, `paused`, NEW or GONE.

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
    (row,) = conn.execute(
        """
        select string_agg(xid8send(xid), '') from relay.sink_commits, unnest(xids) as xid
         where group_id = %s and sink = %s
        """,
        (group, sink),
    )
    return xids_of(row[0])


def move(conn: Connection, group: str, sink: str, position: SinkPosition) -> bool:
    """Set the position of a sink, even while relay runs; returns whether the sink exists."""
    with conn.transaction():
        moved = conn.execute(
            """
            update relay.sinks
               set snapshot = %(snapshot)s::pg_snapshot, following = %(following)s::pg_snapshot,
                   polled_offset = %(polled)s, applied_lsn = %(applied)s::pg_lsn,
                   delivered_lsn = %(delivered)s::pg_lsn, epoch = epoch + 1, series = gen_random_uuid(),
                   state = 'lagging', updated_at = now()
             where group_id = %(group)s and sink = %(sink)s
            """,
            {"group": group, "sink": sink, **_columns(position)},
        )
        conn.execute(
            "delete from relay.sink_commits where group_id = %s and sink = %s", (group, sink)
        )
    return moved.rowcount > 0


def pause(conn: Connection, group: str, sink: str, paused: bool, reason: str | None) -> bool:
    """Pause or resume a sink; returns whether that changed anything."""
    changed = conn.execute(
        """
        update relay.sinks
           set paused_at = case when %(paused)s then now() end,
               paused_by = case when %(paused)s
                                then coalesce(nullif(current_setting('relay.operator', true), ''), session_user) end,
               reason = case when %(paused)s then %(reason)s end
         where group_id = %(group)s and sink = %(sink)s and (paused_at is not null) <> %(paused)s
        """,
        {"group": group, "sink": sink, "paused": paused, "reason": reason},
    )
    return changed.rowcount > 0


def remove(conn: Connection, group: str, sinks: Collection[str]) -> int:
    """Delete the positions of sinks; returns how many there were."""
    names = list(sinks)
    with conn.transaction():
        conn.execute(
            "delete from relay.sink_commits where group_id = %s and sink = any(%s)", (group, names)
        )
        conn.execute(
            "delete from relay.spark_batches where group_id = %s and sink = any(%s)", (group, names)
        )
        return conn.execute(
            "delete from relay.sinks where group_id = %s and sink = any(%s)", (group, names)
        ).rowcount


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
