"""Counts the rows of the outbox that a reader has not read: all of them, or at a bounded cost for `relay top`.

Also counts the rows that a move of the offsets would change, by what each partition has applied.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, LiteralString

import numpy as np
from psycopg import sql

from relay.model.events import INSERTED_BY
from relay.source.outbox.applied import AppliedPosition, ReadPosition
from relay.source.outbox.differences import array
from relay.source.outbox.table import OutboxTable, partition_of
from relay.store.connections import Connection

MOST_ROWS = 10_000
"""How many rows each of the two scans of `estimate` reads at most: that of the newest rows, and that of the oldest."""
UNMARKED = "2"
"""The xid of rows that have no c_xid: FrozenTransactionId, which every snapshot sees."""
_XID = sql.Identifier(INSERTED_BY)
# Times outside this range are not valid in Python.
_OLDEST = sql.SQL(
    "case when min(happened) is not null then least(greatest(min(happened), '0001-01-02'), '9999-12-30') end"
)
_AGE = sql.SQL("extract(epoch from clock_timestamp() - {})::float8").format(_OLDEST)


@dataclass(frozen=True, slots=True)
class Backlog:
    """Unread rows of the outbox: how many, whether there are `more`, and the event_ts and the age of the oldest.

    The age is in seconds, by the clock of the source; where there are more rows, it is a lower bound. Both are None
    without rows, and where the outbox has no event_ts. `partitions` has the number of rows of each partition that has
    any.
    """

    events: int = 0
    more: bool = False
    oldest_seconds: float | None = None
    partitions: Mapping[int, int] = field(default_factory=dict)
    oldest: datetime | None = None


class UnreadRows(OutboxTable):
    """Counts rows of the outbox that are not read. Raises psycopg.Error."""

    def by_partition(self, conn: Connection, read: ReadPosition) -> dict[int, Backlog]:
        """Count all unread rows of each partition that has any."""
        if not read.positions:
            return {}
        rows = conn.execute(
            sql.SQL(
                "select partition, count(*), {oldest}, {age} from ({states}) as r where not applied group by partition"
            ).format(
                oldest=_OLDEST,
                age=_AGE,
                states=self._states(conn, read, len(read.positions), read.positions),
            ),
            prepare=False,
        )
        return {
            partition: Backlog(count, False, seconds, {partition: count}, oldest)
            for partition, count, oldest, seconds in rows
        }

    def count(self, conn: Connection, read: ReadPosition) -> Backlog:
        """Count all unread rows."""
        return _joined(self.by_partition(conn, read).values())

    def has_read(self, conn: Connection, read: ReadPosition, event_id: str) -> bool | None:
        """Whether a reader has read the row of an event; None if there is no row, or only the WAL is read."""
        if not read.positions:
            return None
        row = conn.execute(
            sql.SQL(
                """
                select {applied}
                  from (select {partition} as partition, coalesce({xid}, {unmarked}::xid8) as xid,
                               case when {xid} is null then {row_position}
                                    else (select max({row_position}) from {table} where {xid} = event.{xid})
                                    end as position
                          from {table} as event where {id} = %s limit 1) as row
                  join {positions} using (partition)
                """
            ).format(
                applied=_applied(read),
                partition=self._partition_among(len(read.positions)),
                xid=_XID,
                unmarked=UNMARKED,
                row_position=self._row_position,
                table=self._table,
                id=sql.Identifier(self._mapping["id"]),
                positions=_table_of(read.positions),
            ),
            (event_id,),
            prepare=False,
        ).fetchone()
        return None if row is None else bool(row[0])

    def estimate(self, conn: Connection, read: ReadPosition) -> Backlog:
        """Count the unread rows up to a limit: reads at most 2 × MOST_ROWS of them, along the index on c_xid."""
        newest, full = self._scanned(conn, read, "desc")
        if not newest:
            return Backlog()
        # Where the newest rows are not all of them, the oldest one is looked for from the other end.
        ends = [*newest, *(self._scanned(conn, read, "asc")[0] if full else ())]
        oldest = _joined(ends)
        counted = _joined(newest)
        return Backlog(
            counted.events, full, oldest.oldest_seconds, counted.partitions, oldest.oldest
        )

    def moved(
        self, conn: Connection, before: ReadPosition, after: Sequence[AppliedPosition]
    ) -> tuple[int, int]:
        """Count the applied rows that a move makes unread, and the unread rows that it makes applied."""
        both, partitions = [*before.positions, *after], self._settings.partitions
        then = ReadPosition(after, np.zeros(0, np.int64))
        (row,) = conn.execute(
            sql.SQL(
                """
                select count(*) filter (where b.applied and not a.applied),
                       count(*) filter (where a.applied and not b.applied)
                  from ({before}) as b join ({after}) as a using (id)
                """
            ).format(
                before=self._states(conn, before, partitions, both),
                after=self._states(conn, then, partitions, both),
            ),
            prepare=False,
        )
        return row[0], row[1]

    def _states(
        self,
        conn: Connection,
        read: ReadPosition,
        partitions: int,
        bounds: Sequence[AppliedPosition],
    ) -> sql.Composed:
        """Rows that some position of `bounds` may not have read, each with its partition and whether it is applied."""
        return sql.SQL(
            """
            select row.id, row.partition, row.happened, {applied} as applied
              from (select tableoid::text || ctid::text as id, {partition} as partition, {happened} as happened,
                           coalesce({xid}, {unmarked}::xid8) as xid,
                           case when {xid} is null then {row_position}
                                else max({row_position}) over (partition by {xid}) end as position
                      from {table} where {candidates}) as row
              join {positions} using (partition)
            """
        ).format(
            applied=_applied(read),
            partition=self._partition_among(partitions),
            happened=self._or_null(conn, "event_ts", "null::timestamptz"),
            xid=_XID,
            unmarked=UNMARKED,
            row_position=self._row_position,
            table=self._table,
            candidates=sql.SQL(" or ").join(_candidates(bounds)),
            positions=_table_of(read.positions),
        )

    def _scanned(
        self, conn: Connection, read: ReadPosition, order: LiteralString
    ) -> tuple[list[Backlog], bool]:
        """Count the unread rows among MOST_ROWS of each kind; returns them, and whether a scan was full."""
        newer, *others = _candidates(read.positions)
        kinds = [sql.SQL("{} order by {} {}").format(newer, _XID, sql.SQL(order)), *others]
        scan = sql.SQL(
            """
            (select coalesce({xid}, {unmarked}::xid8) as xid, {row_position} as position,
                    {happened} as happened, {partition} as partition
               from {table} where {kind} limit {most})
            """
        )
        scans = (
            scan.format(
                xid=_XID,
                unmarked=UNMARKED,
                row_position=self._row_position,
                happened=self._or_null(conn, "event_ts", "null::timestamptz"),
                partition=self._partition_among(len(read.positions)),
                table=self._table,
                kind=kind,
                most=MOST_ROWS,
            )
            for kind in kinds
        )
        rows: list[tuple[Any, ...]] = conn.execute(
            sql.SQL(
                """
                with scanned as ({scans}),
                     unread as (select partition, happened from scanned as row join {positions} using (partition)
                                 where not {applied})
                select partition, count(*), {oldest}, {age}, (select count(*) from scanned)
                  from unread group by partition
                """
            ).format(
                scans=sql.SQL(" union all ").join(scans),
                positions=_table_of(read.positions),
                applied=_applied(read),
                oldest=_OLDEST,
                age=_AGE,
            ),
            prepare=False,
        ).fetchall()
        found = [
            Backlog(count, False, seconds, {partition: count}, oldest)
            for partition, count, oldest, seconds, _ in rows
        ]
        return found, any(scanned >= MOST_ROWS for *_, scanned in rows)

    def _partition_among(self, partitions: int) -> sql.Composable:
        # Without the hash of the host, a scan for a sink is faster.
        if partitions == 1:
            return sql.SQL("0")
        return partition_of(self._mapping["host_id"], partitions)


def _joined(parts: Iterable[Backlog]) -> Backlog:
    """Return the sum of exact counts of different rows."""
    parts = list(parts)
    return Backlog(
        sum(each.events for each in parts),
        False,
        max(
            (each.oldest_seconds for each in parts if each.oldest_seconds is not None), default=None
        ),
        {number: rows for each in parts for number, rows in each.partitions.items()},
        min((each.oldest for each in parts if each.oldest is not None), default=None),
    )


def _candidates(positions: Sequence[AppliedPosition]) -> list[sql.Composed]:
    """The conditions on rows that may be unread: later xids, xids then in progress, and rows without c_xid.

    In this form, each can use the index on c_xid.
    """
    first = min(each.snapshot.xmax for each in positions)
    late = sorted({xid for each in positions for xid in each.snapshot.in_progress if xid < first})
    conditions = [sql.SQL("{} >= {}::xid8").format(_XID, str(first))]
    if late:
        conditions.append(sql.SQL("{} = any({})").format(_XID, array(late, "xid8")))
    if any(each.snapshot.is_beginning for each in positions):
        conditions.append(sql.SQL("{} is null").format(_XID))
    return conditions


def _table_of(positions: Sequence[AppliedPosition]) -> sql.Composed:
    """The positions as a table `a`; a single one as constants, so that the server joins nothing."""
    if len(positions) == 1:
        (only,) = positions
        # As text: a number would be negated after its cast, and the least one is out of range before.
        return sql.SQL(
            "(select {}::int as partition, {}::pg_snapshot as snapshot, {}::pg_snapshot as after, {}::bigint as polled)"
            " as a"
        ).format(only.partition, str(only.snapshot), str(only.after), str(only.polled_offset))
    return sql.SQL(
        "unnest({}::int[], {}::pg_snapshot[], {}::pg_snapshot[], {}::bigint[])"
        " as a (partition, snapshot, after, polled)"
    ).format(
        array(each.partition for each in positions),
        sql.Literal([str(each.snapshot) for each in positions]),
        sql.Literal([str(each.after) for each in positions]),
        array(each.polled_offset for each in positions),
    )


def _applied(read: ReadPosition) -> sql.Composed:
    """Whether `row`, with its xid and position, is applied at the position `a` of its partition.

    A part that no row meets is left out: each is computed for every row, and `position` for every transaction.
    """
    last = max(each.snapshot.xmax for each in read.positions)
    # The comparison is cheaper than the function, and rules out most rows.
    applied = sql.SQL("row.xid < {}::xid8 and pg_visible_in_snapshot(row.xid, a.snapshot)").format(
        str(last)
    )
    if len(read.done):
        applied += sql.SQL(" or row.xid = any({})").format(array(read.done.tolist(), "xid8"))
    if any(each.after != each.snapshot for each in read.positions):
        applied += sql.SQL(
            " or row.position <= a.polled and pg_visible_in_snapshot(row.xid, a.after)"
        )
    return sql.SQL("({})").format(applied)
