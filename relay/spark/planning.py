"""Divides a difference of the outbox into portions, one for each task."""

from __future__ import annotations

from psycopg import sql

from relay.source.outbox.differences import XID, Difference, condition
from relay.spark.reading import MappedTable, TaskPortion
from relay.store.connections import Connection


def by_host(between: Difference, tasks: int) -> list[TaskPortion]:
    """A portion for each residue of the hosts' hashes, so that the events of one host are in one portion."""
    if tasks == 1:
        return [TaskPortion(between)]
    return [TaskPortion(between, hosts=(tasks, residue)) for residue in range(tasks)]


def by_xid(
    conn: Connection, table: MappedTable, between: Difference, tasks: int
) -> list[TaskPortion]:
    """Portions of adjacent c_xid, so that one task reads each row from the index once.

    Rows without c_xid, inserted before `relay init`, are a portion of their own. Raises psycopg.Error.
    """
    first, last = _ends(conn, table, between)
    portions = [TaskPortion(between, xids=(0, 1))] if between.before.is_beginning else []
    if first is None or last is None:
        return portions
    step = -(-(last + 1 - first) // tasks)
    return portions + [
        TaskPortion(between, xids=(low, min(low + step, last + 1)), unmarked=False)
        for low in range(first, last + 1, step)
    ]


def _ends(
    conn: Connection, table: MappedTable, between: Difference
) -> tuple[int | None, int | None]:
    """The least and the greatest c_xid of a difference; None for both where it has none."""
    end = (
        "(select x::text from (select {xid} as x from {table} where {xid} is not null and {between}"
        " order by {xid} "
    )
    row = conn.execute(
        sql.SQL(f"select {end} limit 1) as first), {end} desc limit 1) as last)").format(
            xid=XID, table=table.identifier, between=condition(between)
        ),
        prepare=False,
    ).fetchone()
    first, last = row or (None, None)
    return (None, None) if first is None or last is None else (int(first), int(last))
