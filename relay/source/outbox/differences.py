"""Differences between two snapshots of the source: the condition on their rows, and how to cut them.

A part of a difference is a difference too: `up_to` leaves out of a snapshot the transactions from an xid on. The result
is a snapshot like any other, at which a reader can stop.

Source: PgQ (Skype Tools), whose consumers read between two snapshots.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import LiteralString

from psycopg import sql

from relay.model.events import INSERTED_BY
from relay.model.snapshots import Snapshot
from relay.store import literals
from relay.store.connections import Connection

XID = sql.Identifier(INSERTED_BY)


@dataclass(frozen=True, slots=True)
class Difference:
    """The transactions that the snapshot `after` sees and the older one `before` does not. They never change."""

    before: Snapshot
    after: Snapshot

    @property
    def is_empty(self) -> bool:
        """Whether it cannot contain a transaction."""
        return self.before.covers(self.after)


def array(numbers: Iterable[int], type_: LiteralString = "bigint") -> sql.Composed:
    """An array of integers as an expression."""
    return sql.SQL("{}::{}[]").format(sql.Literal(literals.of_numbers(numbers)), sql.SQL(type_))


def condition(difference: Difference) -> sql.Composed:
    """The condition on the rows of a difference. It can use the index on c_xid even while an old transaction is open.

    Rows without c_xid are older than that column, and every snapshot sees them.
    """
    before, after = difference.before, difference.after
    rows = sql.SQL("{} >= {}::xid8").format(XID, str(before.xmax))
    if before.in_progress:
        rows = sql.SQL("({} or {} = any({}))").format(rows, XID, array(before.in_progress, "xid8"))
    rows += sql.SQL(" and {} < {}::xid8").format(XID, str(after.xmax))
    if after.in_progress:
        rows += sql.SQL(" and pg_visible_in_snapshot({}, {}::pg_snapshot)").format(XID, str(after))
    if before.is_beginning:
        rows = sql.SQL("({} or {} is null)").format(rows, XID)
    return rows


def without(xids: Iterable[int]) -> sql.Composed:
    """The condition on rows that are not of some transactions (full xids)."""
    return sql.SQL("({0} is null or {0} <> all ({1}))").format(XID, array(xids, "xid8"))


def has_rows(conn: Connection, table: sql.Composable, where: sql.Composable) -> bool:
    """Whether an outbox has a row of some difference, with conditions of the reader. Raises psycopg.Error."""
    query = sql.SQL("select from {} where {} limit 1").format(table, where)
    return conn.execute(query, prepare=False).rowcount > 0


def cut(
    conn: Connection, table: sql.Composable, between: Difference, max_rows: int
) -> tuple[Snapshot, int]:
    """Find the snapshot at which a reader of whole transactions has `max_rows` rows; returns it and the rows counted.

    With fewer rows the snapshot is `between.after`. The rows are counted along the index on c_xid, so this costs no
    more than to read them. Transactions that were open in `between.before`, and rows without c_xid, are not cut: all of
    them are before the snapshot. Raises psycopg.Error.
    """
    row = conn.execute(
        sql.SQL(
            """
            select count(*), max(x::text::numeric)
              from (select {xid} as x from {table} where {between} order by {xid} nulls first limit {most}) as first
            """
        ).format(xid=XID, table=table, between=condition(between), most=max_rows),
        prepare=False,
    ).fetchone()
    assert row is not None  # noqa: S101
    count, last = row
    if count < max_rows:
        return between.after, int(count)
    # At least 2, since the first xid of a cluster is 3: so the rows without c_xid are read only once.
    end = max(int(last or 0) + 1, between.before.xmax, 2)
    return up_to(between.after, end), int(count)


def up_to(snapshot: Snapshot, xid: int) -> Snapshot:
    """The snapshot that sees what `snapshot` sees of the transactions below an xid."""
    if xid >= snapshot.xmax:
        return snapshot
    in_progress = tuple(each for each in snapshot.in_progress if each < xid)
    return Snapshot(min(snapshot.xmin, xid), xid, in_progress)
