"""The difference between two snapshots of the source: which rows are in it, and how it is cut into smaller ones.

A part of a difference is a difference too. Of the transactions that `after` sees, `at` leaves out those from an xid on,
which makes another snapshot: a reader that stops there stands at a snapshot like any other.

Source: PgQ (Skype Tools), whose consumers read between two snapshots.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import LiteralString

from psycopg import sql

from relay.model.events import INSERTED_BY
from relay.model.snapshots import Snapshot
from relay.store import arrays
from relay.store.connections import Connection

XID = sql.Identifier(INSERTED_BY)


@dataclass(frozen=True, slots=True)
class Difference:
    """The transactions that one snapshot sees and an older one does not: the same for ever."""

    before: Snapshot
    after: Snapshot

    @property
    def is_empty(self) -> bool:
        """Whether no transaction can be in it."""
        return self.before.covers(self.after)


def array(numbers: Iterable[int], type_: LiteralString = "bigint") -> sql.Composed:
    """An array of integers as an expression."""
    return sql.SQL("{}::{}[]").format(sql.Literal(arrays.of_numbers(numbers)), sql.SQL(type_))


def condition(difference: Difference) -> sql.Composed:
    """The condition on rows of a difference. The index on c_xid serves it, however old a transaction is open.

    Rows without c_xid are from before relay, and visible in every snapshot.
    """
    before, after = difference.before, difference.after
    found = sql.SQL("{} >= {}::xid8").format(XID, str(before.xmax))
    if before.in_progress:
        found = sql.SQL("({} or {} = any({}))").format(
            found, XID, array(before.in_progress, "xid8")
        )
    found += sql.SQL(" and {} < {}::xid8").format(XID, str(after.xmax))
    if after.in_progress:
        found += sql.SQL(" and pg_visible_in_snapshot({}, {}::pg_snapshot)").format(XID, str(after))
    if before.is_beginning:
        found = sql.SQL("({} or {} is null)").format(found, XID)
    return found


def cut(
    conn: Connection, table: sql.Composable, between: Difference, max_rows: int
) -> tuple[Snapshot, int]:
    """The snapshot at which a reader stops that takes whole transactions until it has `max_rows` rows.

    Also returns how many rows were counted, at most `max_rows`. Without so many rows the snapshot is `between.after`.
    The rows are counted along the index on c_xid, so this costs no more than reading them. Transactions that were open
    in `between.before`, and rows from before there was c_xid, are not cut: they all come first. Raises psycopg.Error.
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
    # The first transaction of a cluster is 3: rows without c_xid are read only once.
    end = max(int(last or 0) + 1, between.before.xmax, 2)
    return up_to(between.after, end), int(count)


def up_to(snapshot: Snapshot, xid: int) -> Snapshot:
    """What a snapshot sees of the transactions below an xid."""
    if xid >= snapshot.xmax:
        return snapshot
    in_progress = tuple(each for each in snapshot.in_progress if each < xid)
    return Snapshot(min(snapshot.xmin, xid), xid, in_progress)
