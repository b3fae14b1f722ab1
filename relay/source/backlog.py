"""Counts the unread rows of the outbox at a bounded cost, for `relay top`. `unread` counts exactly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import LiteralString

from psycopg import sql

from relay.config.settings import Settings
from relay.model.events import INSERTED_BY
from relay.model.snapshots import Xids
from relay.source.applied import AppliedPosition
from relay.source.outbox.differences import array
from relay.source.outbox.partition import partition_of
from relay.store.connections import Connection

MOST_ROWS = 10_000
"""How many rows each of the two scans reads at most: that of the newest rows, and that of the oldest."""


@dataclass(frozen=True, slots=True)
class Backlog:
    """Unread rows of the outbox: how many, whether there are `more`, and the age of the oldest in seconds.

    Where there are more, the age is a lower bound. It is None without rows, and where the outbox has no event_ts.
    `partitions` has the number of rows of each partition that has any.
    """

    events: int = 0
    more: bool = False
    oldest_seconds: float | None = None
    partitions: Mapping[int, int] = field(default_factory=dict)


class Backlogs:
    """Counts the unread rows of a configuration's outbox. Raises psycopg.Error.

    Each count reads at most 2 × MOST_ROWS unread rows, along the index on c_xid.
    """

    def __init__(self, settings: Settings) -> None:
        mapping = settings.source.mapping
        self._schema, self._name = settings.source.table_name
        self._table = sql.Identifier(self._schema, self._name)
        self._offset = sql.Identifier(mapping["c_offset"])
        self._host = mapping["host_id"]
        self._event_ts = mapping["event_ts"]
        self._has_time: bool | None = None

    def count(self, conn: Connection, applied: Sequence[AppliedPosition], done: Xids) -> Backlog:
        """Count the rows after the partitions' positions, or after a sink's, which is a single `applied`.

        `done` are transactions after that (full xids, int64) that are applied already.
        """
        newest = self._counted(conn, applied, done, "desc")
        rows = sum(count for _, count, _, _ in newest)
        if not rows:
            return Backlog()
        ages = [age for *_, age, _ in newest if age is not None]
        full = any(scanned >= MOST_ROWS for *_, scanned in newest)
        if full:
            oldest = self._counted(conn, applied, done, "asc")
            ages += [age for *_, age, _ in oldest if age is not None]
        return Backlog(
            rows,
            full,
            max(ages, default=None),
            {partition: count for partition, count, _, _ in newest},
        )

    def _counted(
        self, conn: Connection, applied: Sequence[AppliedPosition], done: Xids, order: LiteralString
    ) -> list[tuple[int, int, float | None, int]]:
        """Count one scan: (partition, rows, age of the oldest in seconds, rows scanned), for partitions with rows."""
        single = len(applied) == 1
        return conn.execute(
            sql.SQL(
                """
                with scanned as ({scans}),
                     unread as (
                        select r.partition, r.happened
                          from scanned as r
                          {join} unnest({partitions}::int[], {snapshots}::pg_snapshot[], {afters}::pg_snapshot[],
                                        {polled}::bigint[]) as a (partition, snapshot, after, polled) {using}
                         where not (pg_visible_in_snapshot(r.xid, a.snapshot)
                                    or coalesce(r.number <= a.polled, false) and pg_visible_in_snapshot(r.xid, a.after))
                           and r.xid <> all({done}))
                select partition, count(*),
                       extract(epoch from clock_timestamp()
                               - case when min(happened) is not null
                                      then least(greatest(min(happened), '0001-01-02'), '9999-12-30') end)::float8,
                       (select count(*) from scanned)
                  from unread group by partition
                """
            ).format(
                scans=self._scans(conn, applied, order),
                join=sql.SQL("cross join" if single else "join"),
                using=sql.SQL("" if single else "using (partition)"),
                partitions=array(each.partition for each in applied),
                snapshots=sql.Literal([str(each.snapshot) for each in applied]),
                afters=sql.Literal([str(each.after) for each in applied]),
                polled=array(each.polled_offset for each in applied),
                done=array(done.tolist(), "xid8"),
            ),
            prepare=False,
        ).fetchall()

    def _scans(
        self, conn: Connection, applied: Sequence[AppliedPosition], order: LiteralString
    ) -> sql.Composed:
        """The rows that may be unread: a scan each for later xids, xids then in progress, and rows without c_xid."""
        first = min(each.snapshot.xmax for each in applied)
        late = sorted({xid for each in applied for xid in each.snapshot.in_progress if xid < first})
        xid = sql.Identifier(INSERTED_BY)
        kinds: list[sql.Composable] = [
            sql.SQL("{} >= {}::xid8 order by {} {}").format(xid, str(first), xid, sql.SQL(order))
        ]
        if late:
            kinds.append(sql.SQL("{} = any({})").format(xid, array(late, "xid8")))
        if any(each.snapshot.is_beginning for each in applied):
            kinds.append(sql.SQL("{} is null").format(xid))
        scan = sql.SQL(
            """
            (select coalesce({xid}, '2'::xid8) as xid, greatest({offset}, -9223372036854775807) as number,
                    {happened} as happened, {partition} as partition
               from {table} where {kind} limit {most})
            """
        )
        return sql.SQL(" union all ").join(
            scan.format(
                xid=xid,
                offset=self._offset,
                happened=self._time(conn),
                partition=partition_of(self._host, len(applied)),
                table=self._table,
                kind=kind,
                most=MOST_ROWS,
            )
            for kind in kinds
        )

    def _time(self, conn: Connection) -> sql.Composable:
        if self._has_time is None:
            self._has_time = bool(
                conn.execute(
                    "select from pg_attribute where attrelid = to_regclass(%s) and attname = %s and not attisdropped",
                    (self._table.as_string(conn), self._event_ts),
                ).rowcount
            )
        return sql.Identifier(self._event_ts) if self._has_time else sql.SQL("null::timestamptz")
