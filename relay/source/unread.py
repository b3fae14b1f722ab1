"""Counts the rows of the outbox that are not applied, and those that a move of the offsets would change.

Each row is read; `backlog` counts at a bounded cost.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

import numpy as np
from psycopg import sql

from relay.model.events import INSERTED_BY
from relay.model.snapshots import BEGINNING, Xids
from relay.source.applied import AppliedPosition
from relay.source.outbox.differences import Difference, array, condition
from relay.source.outbox.table import OutboxTable
from relay.source.server import current_position
from relay.store.connections import Connection
from relay.store.positions.sinks import Position

UNMARKED = "2"
"""The xid of rows that have no c_xid: FrozenTransactionId, which every snapshot sees."""

# Times outside this range are not valid in Python.
_OLDEST = sql.SQL(
    "case when min(happened) is not null then least(greatest(min(happened), '0001-01-02'), '9999-12-30') end"
)


class UnreadRows(OutboxTable):
    """Counts rows of the outbox that are not applied. Raises psycopg.Error."""

    def unread(
        self, conn: Connection, applied: Sequence[AppliedPosition], noted: Xids
    ) -> dict[int, tuple[int, datetime | None]]:
        """Count the unread rows and find their least event_ts, for each partition that has any.

        `noted` are full xids (int64, any order) that are applied after the positions.
        """
        rows = conn.execute(
            sql.SQL(
                """
                select partition, count(*),
                       {oldest}
                  from ({states}) as r where not applied group by partition
                """
            ).format(oldest=_OLDEST, states=self._states(conn, applied, noted, _oldest(applied))),
            prepare=False,
        )
        return {partition: (count, oldest) for partition, count, oldest in rows}

    def unread_after(
        self, conn: Connection, position: Position, done: Xids
    ) -> tuple[int, datetime | None]:
        """Count the rows after a sink's position, without the transactions `done`, and find their least event_ts."""
        assert position.snapshot is not None  # noqa: S101
        now = current_position(conn).snapshot
        xid = sql.Identifier(INSERTED_BY)
        if not now.covers(position.snapshot):
            return 0, None
        (row,) = conn.execute(
            sql.SQL(
                """
                select count(*), {oldest} from (
                    select {happened} as happened, coalesce({xid}, {unmarked}::xid8) as xid,
                           case when {xid} is null then {place}
                                else max({place}) over (partition by {xid}) end as position
                      from {table} where {between}) as row
                 where xid <> all({done}) and not (position <= {polled} and {following})
                """
            ).format(
                oldest=_OLDEST,
                happened=self._or_null(conn, "event_ts", "null::timestamptz"),
                xid=xid,
                unmarked=UNMARKED,
                place=self._place,
                table=self._table,
                between=condition(Difference(position.snapshot, now)),
                done=array(done.tolist(), "xid8"),
                polled=position.polled_offset,
                following=sql.SQL("false")
                if position.following is None
                else sql.SQL("pg_visible_in_snapshot(xid, {}::pg_snapshot)").format(
                    str(position.following)
                ),
            ),
            prepare=False,
        )
        count, oldest = row
        return int(count), oldest

    def moved(
        self,
        conn: Connection,
        before: Sequence[AppliedPosition],
        noted: Xids,
        after: Sequence[AppliedPosition],
    ) -> tuple[int, int]:
        """Count the applied rows that a move makes unread, and the unread rows that it makes applied."""
        nothing = np.zeros(0, np.int64)
        oldest = _oldest([*before, *after])
        (row,) = conn.execute(
            sql.SQL(
                """
                select count(*) filter (where b.applied and not a.applied),
                       count(*) filter (where a.applied and not b.applied)
                  from ({before}) as b join ({after}) as a using (id)
                """
            ).format(
                before=self._states(conn, before, noted, oldest),
                after=self._states(conn, after, nothing, oldest),
            ),
            prepare=False,
        )
        return row[0], row[1]

    def _states(
        self, conn: Connection, applied: Sequence[AppliedPosition], noted: Xids, oldest: int
    ) -> sql.Composed:
        """Rows of transactions from `oldest` on, each with its partition and whether it is applied."""
        return sql.SQL(
            """
            select row.id, row.partition, row.happened,
                   pg_visible_in_snapshot(row.xid, a.snapshot) or row.xid = any({noted})
                   or row.position <= a.polled and pg_visible_in_snapshot(row.xid, a.after) as applied
              from (select tableoid::text || ctid::text as id, {partition} as partition, {happened} as happened,
                           coalesce({xid}, {unmarked}::xid8) as xid,
                           case when {xid} is null then {place}
                                else max({place}) over (partition by {xid}) end as position
                      from {table} where {xid} >= {oldest}::xid8 or {xid} is null and {old}) as row
              join unnest({partitions}::int[], {snapshots}::pg_snapshot[], {afters}::pg_snapshot[], {polled}::bigint[])
                   as a (partition, snapshot, after, polled) using (partition)
            """
        ).format(
            noted=array(noted.tolist(), "xid8"),
            partition=self._partition,
            happened=self._or_null(conn, "event_ts", "null::timestamptz"),
            xid=sql.Identifier(INSERTED_BY),
            unmarked=UNMARKED,
            place=self._place,
            table=self._table,
            oldest=str(oldest),
            old=sql.Literal(oldest <= BEGINNING.xmax),
            partitions=array(each.partition for each in applied),
            snapshots=sql.Literal([str(each.snapshot) for each in applied]),
            afters=sql.Literal([str(each.after) for each in applied]),
            polled=array(each.polled_offset for each in applied),
        )


def _oldest(applied: Sequence[AppliedPosition]) -> int:
    """The least xid that may be unread."""
    return min(each.snapshot.xmin for each in applied)
