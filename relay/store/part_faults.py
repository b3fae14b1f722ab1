"""Stores which background parts of each instance do not do their work, for `relay status`: `relay.part_faults`."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime

from psycopg.rows import class_row

from relay.runtime.parts import PartFault
from relay.store.connections import Connection
from relay.store.groups import INSTANCE


@dataclass(frozen=True, slots=True)
class StoredPartFault:
    """A part of a running instance that does not do its work, since when (by that machine's clock) and why."""

    instance: str
    part: str
    fault: str
    since: datetime


def store(conn: Connection, group: str, faults: Sequence[PartFault]) -> None:
    """Replace the faults of this instance. Raises psycopg.Error."""
    with conn.transaction(), conn.cursor() as cursor:
        cursor.execute(
            "delete from relay.part_faults where group_id = %s and instance = %s", (group, INSTANCE)
        )
        cursor.executemany(
            "insert into relay.part_faults (group_id, instance, part, fault, since) values (%s, %s, %s, %s, %s)",
            [(group, INSTANCE, each.part, each.fault, each.since) for each in faults],
        )


def read(conn: Connection, group: str, running: Collection[str]) -> list[StoredPartFault]:
    """List the faults of the instances that run, by instance and part. Raises psycopg.Error."""
    with conn.cursor(row_factory=class_row(StoredPartFault)) as cursor:
        return cursor.execute(
            """
            select instance, part, fault, since from relay.part_faults
             where group_id = %s and instance = any (%s) order by 1, 2
            """,
            (group, list(running)),
        ).fetchall()
