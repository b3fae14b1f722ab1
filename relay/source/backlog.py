"""Counts how much of the outbox is not read yet, at a bounded cost, for `relay top`. `unread` counts exactly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import LiteralString

from psycopg import sql

from relay.config.settings import Settings
from relay.model.events import INSERTED_BY
from relay.model.snapshots import Xids
from relay.source.applied import AppliedPosition
from relay.source.differences import array
from relay.store.connections import Connection

MOST = 10_000
"""How many rows are read, of the newest and of the oldest each."""


@dataclass(frozen=True, slots=True)
class Backlog:
    """Rows of the outbox that are not read: how many, or that there are `more`, and the age of the oldest in seconds.

    Where there are more, the age is the least that it can be. It is None without rows, and where the outbox has no
    event_ts. `partitions` has the rows of each partition that has any.
    """

    events: int = 0
    more: bool = False
    oldest_seconds: float | None = None
    partitions: Mapping[int, int] = field(default_factory=dict)


class Backlogs:
    """Counts what is not read of a configuration's outbox. Raises psycopg.Error.

    Each count reads at most 2 × MOST rows beyond what is read, along the index on c_xid.
    """

    def __init__(self, settings: Settings) -> None:
        mapping = settings.source.mapping
        self._schema, self._name = settings.source.table_name
        self._table = sql.Identifier(self._schema, self._name)
        self._offset = sql.Identifier(mapping["c_offset"])
        self._host = sql.Identifier(mapping["host_id"])
        self._happened = mapping["event_ts"]
        self._has_time: bool | None = None

    def count(self, conn: Connection, applied: Sequence[AppliedPosition], done: Xids) -> Backlog:
        """Count what is not applied at the partitions' positions, or at a sink's, which is a single `applied`.

        `done` are transactions that are applied beyond that.
        """
        newest = self._counted(conn, applied, done, "desc")
        rows = sum(count for _, count, _, _ in newest)
        if not rows:
            return Backlog()
        ages = [age for *_, age, _ in newest if age is not None]
        full = any(scanned >= MOST for *_, scanned in newest)
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
        """Partition, rows, the age of the oldest, and how many rows were scanned."""
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
        """The rows that may not be read, each kind by the index: later ones, late commits, those without c_xid."""
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
            (select coalesce({xid}, '2'::xid8) as xid, {offset} as number, {happened} as happened,
                    {partition} as partition
               from {table} where {kind} limit {most})
            """
        )
        return sql.SQL(" union all ").join(
            scan.format(
                xid=xid,
                offset=self._offset,
                happened=self._time(conn),
                partition=self._partition(len(applied)),
                table=self._table,
                kind=kind,
                most=MOST,
            )
            for kind in kinds
        )

    def _partition(self, partitions: int) -> sql.Composed:
        return sql.SQL("mod(abs(hashtext(coalesce({}::text, ''))::bigint), {})::int").format(
            self._host, sql.Literal(partitions)
        )

    def _time(self, conn: Connection) -> sql.Composable:
        if self._has_time is None:
            self._has_time = bool(
                conn.execute(
                    "select from pg_attribute where attrelid = to_regclass(%s) and attname = %s and not attisdropped",
                    (self._table.as_string(conn), self._happened),
                ).rowcount
            )
        return sql.Identifier(self._happened) if self._has_time else sql.SQL("null::timestamptz")
