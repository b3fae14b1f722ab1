"""Stores the state of a group: its source, mode and running instances, in `relay.groups`."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

import psycopg
from psycopg.rows import class_row, scalar_row

from relay.model.events import Lsn
from relay.model.snapshots import Witness
from relay.store.connections import INSTANCE
from relay.store.positions import offsets, snapshots


@dataclass(frozen=True, slots=True)
class GroupState:
    """The mode in which a group reads its source, why, since when, and in which instance.

    `epoch` counts the servers and timelines that the group has followed, `timeline` is the current one. `witnessed_at`
    is when the newest witness of its positions was noted, None without one.
    """

    source_mode: str | None
    source_reason: str | None
    source_since: datetime | None
    instance: str | None
    epoch: int
    timeline: int | None
    witnessed_at: datetime | None

    def active(self, running: Collection[str]) -> str | None:
        """Return the instance that reads the source, if it runs."""
        return self.instance if self.instance in running else None


def read(conn: psycopg.Connection[Any], group: str) -> GroupState | None:
    """Read the stored state of the group; None before its first run."""
    with conn.cursor(row_factory=class_row(GroupState)) as cursor:
        return cursor.execute(
            """
            select source_mode, source_reason, source_since, instance, coalesce(source_epoch, 0) as epoch, timeline,
                   (select noted_at from relay.noted_witnesses as w where w.group_id = g.group_id
                     order by number desc limit 1) as witnessed_at
              from relay.groups as g where group_id = %s
            """,
            (group,),
        ).fetchone()


def lock(conn: psycopg.Connection[Any], group: str) -> None:
    """Lock the row of the group until the database transaction ends; create it if there is none."""
    conn.execute("insert into relay.groups (group_id) values (%s) on conflict do nothing", (group,))
    conn.execute("select from relay.groups where group_id = %s for update", (group,))


def begin(
    conn: psycopg.Connection[Any], group: str, running_now: Callable[[str], Collection[str]]
) -> bool:
    """Register this instance; returns whether another one has died. `running_now` lists the group's that run."""
    with conn.transaction():
        lock(conn, group)
        row = conn.execute(
            "select running, instances from relay.groups where group_id = %s", (group,)
        ).fetchone()
        running, instances = row or (False, [])
        running_instances = running_now(group) if instances else ()
        kept = [name for name in instances if name in running_instances and name != INSTANCE]
        conn.execute(
            "update relay.groups set running = true, instances = %s where group_id = %s",
            ([*kept, INSTANCE], group),
        )
        conn.execute(
            "delete from relay.part_faults where group_id = %s and instance <> all (%s)",
            (group, [*kept, INSTANCE]),
        )
    return bool(running and (not instances or len(kept) < len(instances)))


def end(conn: psycopg.Connection[Any], group: str) -> None:
    """Remove this instance, which ends in order: it was stopped, or reports a fault."""
    conn.execute(
        "delete from relay.part_faults where group_id = %s and instance = %s", (group, INSTANCE)
    )
    conn.execute(
        """
        update relay.groups
           set instances = array_remove(instances, %(this)s), running = array_remove(instances, %(this)s) <> '{}'
         where group_id = %(group)s
        """,
        {"this": INSTANCE, "group": group},
    )


def note_mode(
    conn: psycopg.Connection[Any], group: str, mode: str, reason: str | None, began: bool
) -> None:
    """Store the mode in which this instance reads the source, and why; unless it `began` now, the time stays."""
    conn.execute(
        """
        insert into relay.groups as g (group_id, source_mode, source_reason, source_since, instance)
        values (%(group)s, %(mode)s, %(reason)s, now(), %(instance)s)
        on conflict (group_id) do update
           set source_mode = excluded.source_mode, source_reason = excluded.source_reason,
               source_since = case when %(began)s then excluded.source_since else g.source_since end,
               instance = excluded.instance
        """,
        {"group": group, "mode": mode, "reason": reason, "instance": INSTANCE, "began": began},
    )


def recreations(conn: psycopg.Connection[Any], group: str) -> int:
    """Count how often the slot was recreated within the last hour."""
    with conn.cursor(row_factory=scalar_row) as cursor:
        count = cursor.execute(
            """
            select count(*) from relay.groups, unnest(slot_recreations) as recreated
             where group_id = %s and recreated > now() - interval '1 hour'
            """,
            (group,),
        ).fetchone()
    return int(count or 0)


def note_recreation(conn: psycopg.Connection[Any], group: str) -> None:
    """Record that the slot was recreated now."""
    conn.execute(
        """
        insert into relay.groups as g (group_id, slot_recreations) values (%s, array[now()])
        on conflict (group_id) do update
           set slot_recreations = (select coalesce(array_agg(r), '{}') from unnest(g.slot_recreations) as r
                                    where r > now() - interval '1 hour') || now()
        """,
        (group,),
    )


@dataclass(frozen=True, slots=True)
class SourceOrigin:
    """The source that the LSNs of a group belong to, None before one was read, and the group's positions in it.

    `history` is that of its timeline as text, `applied` the greatest applied_lsn of the group's partitions, and
    `polled` a position at or after the end of all commits that were polled or delivered to sinks. `xmax` is that of the
    newest snapshot, 0 without one, and `confirmed` is how far the slot was confirmed when it was left: 0/0 if it may
    lack commits, None while it is read, or if that is unknown. `reading` names the process that has read it last.
    `witness` is the newest one that was noted; it covers the snapshots unless no witness could be taken.
    """

    identifier: str | None
    timeline: int | None
    history: str | None
    epoch: int
    applied: Lsn
    polled: Lsn
    xmax: int
    confirmed: Lsn | None
    reading: UUID | None
    witness: Witness | None = None


def origin(conn: psycopg.Connection[Any], group: str, locked: bool = False) -> SourceOrigin:
    """Read the source that the group's LSNs belong to.

    `locked` keeps tasks and sinks from storing anything until the database transaction ends.
    """
    if locked:
        lock(conn, group)
        offsets.lock_all(conn, group)
        offsets.lock_sinks(conn, group)
    (row,) = conn.execute(
        """
        select system_identifier, timeline, timeline_history, coalesce(source_epoch, 0),
               coalesce((select max(applied_lsn) from relay.consumer_offsets where group_id = %(group)s), '0/0')::text,
               greatest((select max(polled_lsn) from relay.chain(%(group)s)),
                        (select max(delivered_lsn) from relay.sinks where group_id = %(group)s), '0/0')::text,
               (select coalesce(max(pg_snapshot_xmax(seen)::text::bigint), 0)
                  from (select snapshot from relay.chain(%(group)s)
                        union all
                        select coalesce(following, snapshot) from relay.sinks
                         where group_id = %(group)s) as all_seen (seen)),
               confirmed_lsn::text, reading, w.witness, w.snapshot::text, w.lsn::text
          from (select) as one left join relay.groups on group_id = %(group)s
          left join lateral (
               -- Two processes may note theirs in another order than they took them.
               select * from (select witness, snapshot, lsn from relay.noted_witnesses
                               where group_id = %(group)s order by number desc limit 10) as newest
                order by pg_snapshot_xmax(snapshot) desc limit 1) as w on true
        """,
        {"group": group},
    )
    identifier, timeline, history, epoch, applied, polled, xmax, confirmed, reading, *noted = row
    return SourceOrigin(
        identifier,
        timeline,
        history,
        epoch,
        Lsn.parse(applied),
        Lsn.parse(polled),
        xmax,
        None if confirmed is None else Lsn.parse(confirmed),
        reading,
        None if noted[0] is None else Witness.parse(*noted),
    )


_KEPT_WITNESSES = 100
"""How many noted witnesses are kept at least: the earlier ones tell how much is left of a source with a loss.

Twice as many are deleted down to that, so that rows go in batches.
"""


def note_witness(conn: psycopg.Connection[Any], group: str, witness: Witness) -> None:
    """Note a witness of snapshots that the group stores from now on."""
    # Counted, not told by the number, which all groups share.
    ((count,),) = conn.execute(
        """
        with others as (select from relay.noted_witnesses where group_id = %(group)s limit %(most)s)
        insert into relay.noted_witnesses (group_id, witness, snapshot, lsn)
        values (%(group)s, %(witness)s, %(snapshot)s::pg_snapshot, %(lsn)s)
        returning (select count(*) from others)
        """,
        {
            "group": group,
            "witness": witness.id,
            "snapshot": str(witness.snapshot),
            "lsn": str(witness.lsn),
            "most": 2 * _KEPT_WITNESSES,
        },
    )
    if count >= 2 * _KEPT_WITNESSES - 1:
        conn.execute(
            """
            delete from relay.noted_witnesses
             where group_id = %(group)s
               and number <= (select number from relay.noted_witnesses
                               where group_id = %(group)s order by number desc offset %(kept)s limit 1)
            """,
            {"group": group, "kept": _KEPT_WITNESSES},
        )


@dataclass(frozen=True, slots=True)
class NotedWitness:
    """A witness that covers what a group had applied when it was noted, `noted_at` by the clock of the target."""

    witness: Witness
    noted_at: datetime


def witnesses(conn: psycopg.Connection[Any], group: str) -> list[NotedWitness]:
    """List the witnesses that are noted for a group, the one that covers most first."""
    rows = conn.execute(
        """
        select witness, snapshot::text, lsn::text, noted_at from relay.noted_witnesses
         where group_id = %s order by pg_snapshot_xmax(snapshot) desc
        """,
        (group,),
    )
    return [NotedWitness(Witness.parse(*noted), at) for *noted, at in rows]


def forget_origin(conn: psycopg.Connection[Any], group: str) -> None:
    """Forget the source of the group's LSNs, since the group has a new position; the next run stores it again."""
    conn.execute(
        """
        update relay.groups
           set system_identifier = null, timeline = null, timeline_history = null, confirmed_lsn = null
         where group_id = %s
        """,
        (group,),
    )
    forget_witnesses(conn, group)


def forget_witnesses(conn: psycopg.Connection[Any], group: str) -> None:
    """Forget the witnesses of a group's positions; the next position that is stored has another one."""
    conn.execute("delete from relay.noted_witnesses where group_id = %s", (group,))


def note_confirmed(conn: psycopg.Connection[Any], group: str, confirmed: Lsn) -> None:
    """Store how far the slot is confirmed, which no instance reads now; 0/0 if it may lack commits."""
    conn.execute(
        """
        insert into relay.groups (group_id, confirmed_lsn) values (%s, %s)
        on conflict (group_id) do update set confirmed_lsn = excluded.confirmed_lsn
        """,
        (group, str(confirmed)),
    )


def note_reading(
    conn: psycopg.Connection[Any], group: str, reading: UUID, incomplete: bool
) -> None:
    """Store that the slot is read from now on, by the process `reading`; `incomplete`: it may lack commits."""
    conn.execute(
        """
        insert into relay.groups (group_id, reading, confirmed_lsn) values (%s, %s, %s)
        on conflict (group_id) do update
           set reading = excluded.reading, confirmed_lsn = excluded.confirmed_lsn
        """,
        (group, reading, "0/0" if incomplete else None),
    )


def note_left(
    conn: psycopg.Connection[Any], group: str, reading: UUID, confirmed: Lsn | None
) -> None:
    """Store how far the slot is confirmed when a stream leaves it, None while it is read, unless another has begun."""
    conn.execute(
        "update relay.groups set confirmed_lsn = %s where group_id = %s and reading = %s",
        (None if confirmed is None else str(confirmed), group, reading),
    )


def follow(
    conn: psycopg.Connection[Any],
    group: str,
    identifier: str,
    timeline: int,
    history: str,
    reset: bool,
) -> int:
    """Store that the group's LSNs belong to this server and timeline from now on; returns the new epoch.

    `reset` discards earlier LSNs, which are not valid there: the snapshots decide what is new. Running sinks continue
    from their stored positions, which the new server was compared with.
    """
    if reset:
        offsets.discard_lsns(conn, group)
        snapshots.discard_lsns(conn, group)
    conn.execute(
        """
        update relay.sink_claims set epoch = epoch + 1
         where group_id = %(group)s
           and exists (select from relay.groups where group_id = %(group)s and system_identifier is not null)
        """,
        {"group": group},
    )
    # A batch that Spark writes has the same rows on the new server, so it continues, unlike after a move of the sink.
    conn.execute(
        """
        update relay.spark_batches as b
           set epoch = case when b.epoch = s.epoch - 1 then s.epoch else b.epoch end,
               last_epoch = case when b.last_epoch = s.epoch - 1 then s.epoch else b.last_epoch end
          from relay.sink_claims as s
         where b.group_id = %s and (s.group_id, s.sink) = (b.group_id, b.sink)
           and s.epoch - 1 in (b.epoch, b.last_epoch)
        """,
        (group,),
    )
    with conn.cursor(row_factory=scalar_row) as cursor:
        cursor.execute(
            """
            update relay.groups
               set system_identifier = %s, timeline = %s, timeline_history = %s, source_epoch = source_epoch + 1
             where group_id = %s
            returning source_epoch
            """,
            (identifier, timeline, history, group),
        )
        return int(next(cursor))
