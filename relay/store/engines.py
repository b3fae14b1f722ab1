"""Counts the batches that each engine applied, and why it was chosen: `relay.engines`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from psycopg.rows import class_row

from relay.store.connections import Connection


@dataclass(frozen=True, slots=True)
class EngineTotals:
    """The batches, events and transactions that an engine has applied for one reason, since a time."""

    engine: str
    reason: str
    batches: int
    events: int
    transactions: int
    since: datetime


def add(
    conn: Connection, group: str, counts: Mapping[tuple[str, str], tuple[int, int, int]]
) -> None:
    """Add counts (batches, events, transactions) by engine and reason."""
    # Sorted, so that two instances do not deadlock.
    rows = [(group, *key, *counts[key]) for key in sorted(counts)]
    with conn.cursor() as cursor:
        cursor.executemany(
            """
            insert into relay.engines as e (group_id, engine, reason, batches, events, transactions)
            values (%s, %s, %s, %s, %s, %s)
            on conflict (group_id, engine, reason) do update
               set batches = e.batches + excluded.batches, events = e.events + excluded.events,
                   transactions = e.transactions + excluded.transactions, updated_at = now()
            """,
            rows,
        )


def read(conn: Connection, group: str) -> list[EngineTotals]:
    """List the totals of a group, by engine and reason."""
    with conn.cursor(row_factory=class_row(EngineTotals)) as cursor:
        return cursor.execute(
            "select engine, reason, batches, events, transactions, since from relay.engines"
            " where group_id = %s order by 1, 2",
            (group,),
        ).fetchall()
