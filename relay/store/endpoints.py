"""The endpoints of a sink that have failed for a while, or are disabled or paused: `relay.endpoints`.

The process that works the sink writes a row after a minute of failures, when it disables the endpoint, and deletes it
when the endpoint works again; operators disable and enable. Rows are few, and seldom written.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import psycopg
from psycopg.rows import class_row

from relay.model.json_fields import json_fields
from relay.store import actions
from relay.store.connections import Connection

_COLUMNS = "sink, endpoint, address, host_id, failing_since, fault, disabled_at, disabled_by, reason, waits"
_OVERLAP = timedelta(minutes=1)
"""How long a transaction that changes a row may take to commit: changes are read again for so long."""


@dataclass(frozen=True, slots=True)
class StoredEndpoint:
    """An endpoint that fails, or is disabled: by `disabled_by`, or by relay where that is None.

    What is for it then becomes dead letters, unless it `waits`.
    """

    sink: str
    endpoint: str
    address: str
    host_id: str | None
    failing_since: datetime | None
    fault: str | None
    disabled_at: datetime | None = None
    disabled_by: str | None = None
    reason: str | None = None
    waits: bool = False

    @property
    def state(self) -> str:
        """`disabled`, `paused`, `failing`, or `enabled` by an operator and not tried since."""
        if self.disabled_at is not None:
            return "paused" if self.waits else "disabled"
        return "enabled" if self.failing_since is None else "failing"

    @property
    def why(self) -> str | None:
        """Why it is disabled, or fails."""
        if self.disabled_by is None:
            return self.fault
        return f"by {self.disabled_by}: {self.reason}" if self.reason else f"by {self.disabled_by}"

    def as_json(self) -> dict[str, str | None]:
        """The fields and the two properties, times in ISO 8601."""
        return {**json_fields(self), "state": self.state, "why": self.why}


@dataclass(frozen=True, slots=True)
class EndpointCounts:
    """How many endpoints of a sink fail, and how many are disabled."""

    sink: str
    failing: int
    disabled: int


def listed(
    conn: psycopg.Connection[Any], group: str, sink: str | None, limit: int
) -> list[StoredEndpoint]:
    """List at most `limit` endpoints of a sink, or of all, that fail or are disabled: the disabled ones first."""
    with conn.cursor(row_factory=class_row(StoredEndpoint)) as cursor:
        return cursor.execute(
            f"select {_COLUMNS} from relay.endpoints where group_id = %s and (%s::text is null or sink = %s)"  # noqa: S608
            " order by disabled_at is null, sink, coalesce(disabled_at, failing_since) desc nulls last, endpoint"
            " limit %s",
            (group, sink, sink, limit),
        ).fetchall()


def find(
    conn: psycopg.Connection[Any], group: str, sink: str, endpoint: str
) -> StoredEndpoint | None:
    """Read an endpoint that fails or is disabled; None if there is no such row."""
    with conn.cursor(row_factory=class_row(StoredEndpoint)) as cursor:
        return cursor.execute(
            f"select {_COLUMNS} from relay.endpoints where group_id = %s and sink = %s and endpoint = %s",  # noqa: S608
            (group, sink, endpoint),
        ).fetchone()


def counts(conn: psycopg.Connection[Any], group: str) -> list[EndpointCounts]:
    """Count the endpoints of each sink that has any which fail or are disabled."""
    with conn.cursor(row_factory=class_row(EndpointCounts)) as cursor:
        return cursor.execute(
            """
            select sink, count(*) filter (where disabled_at is null and failing_since is not null) as failing,
                   count(*) filter (where disabled_at is not null and not waits) as disabled
              from relay.endpoints where group_id = %s group by sink order by sink
            """,
            (group,),
        ).fetchall()


def changed(
    conn: Connection, group: str, sink: str, after: datetime | None
) -> tuple[list[StoredEndpoint], datetime]:
    """Read the rows that were changed after a time, all without one; returns them, and the time for the next call."""
    ((now,),) = conn.execute("select clock_timestamp()").fetchall()
    with conn.cursor(row_factory=class_row(StoredEndpoint)) as cursor:
        rows = cursor.execute(
            f"select {_COLUMNS} from relay.endpoints where group_id = %s and sink = %s"  # noqa: S608
            " and (%s::timestamptz is null or changed_at > %s)",
            (group, sink, after, after),
        ).fetchall()
    return rows, now - _OVERLAP


def store(
    conn: Connection,
    group: str,
    failing: Sequence[StoredEndpoint],
    works: Collection[tuple[str, str]],
) -> None:
    """Write endpoints of a sink that fail or that relay disables; `works` are pairs of sink and endpoint that answer.

    What an operator has disabled stays so.
    """
    with conn.transaction(), conn.cursor() as cursor:
        if failing:
            cursor.executemany(
                """
                insert into relay.endpoints as e
                       (group_id, sink, endpoint, address, host_id, failing_since, fault, disabled_at)
                values (%s, %s, %s, %s, %s, %s, %s, %s)
                on conflict (group_id, sink, endpoint) do update
                   set failing_since = excluded.failing_since, fault = excluded.fault,
                       host_id = excluded.host_id, disabled_at = excluded.disabled_at, changed_at = clock_timestamp()
                 where e.disabled_at is null
                """,
                [
                    (
                        *(group, each.sink, each.endpoint, each.address, each.host_id),
                        *(each.failing_since, each.fault, each.disabled_at),
                    )
                    for each in failing
                ],
            )
        if works:
            cursor.executemany(
                "delete from relay.endpoints where group_id = %s and sink = %s and endpoint = %s"
                " and disabled_at is null",
                [(group, *each) for each in works],
            )


def disable(
    conn: psycopg.Connection[Any],
    group: str,
    sink: str,
    endpoint: str,
    address: str,
    reason: str | None,
    waits: bool,
) -> bool:
    """Disable an endpoint for an operator, or pause it if it `waits`; returns whether it was not so already."""
    cursor = conn.execute(
        f"""
        insert into relay.endpoints as e (group_id, sink, endpoint, address, disabled_at, disabled_by, reason, waits)
        values (%s, %s, %s, %s, now(), {actions.WHO}, %s, %s)
        on conflict (group_id, sink, endpoint) do update
           set disabled_at = now(), disabled_by = excluded.disabled_by, reason = excluded.reason,
               waits = excluded.waits, changed_at = clock_timestamp()
         where e.disabled_at is null or e.waits <> excluded.waits
        """,  # noqa: S608
        (group, sink, endpoint, address, reason, waits),
    )
    return cursor.rowcount > 0


def enable(conn: psycopg.Connection[Any], group: str, sink: str, endpoint: str) -> bool:
    """Enable an endpoint for an operator; returns whether it was disabled or paused."""
    cursor = conn.execute(
        """
        update relay.endpoints
           set disabled_at = null, disabled_by = null, reason = null, failing_since = null, fault = null, waits = false,
               changed_at = clock_timestamp()
         where group_id = %s and sink = %s and endpoint = %s and disabled_at is not null
        """,
        (group, sink, endpoint),
    )
    return cursor.rowcount > 0


def forget(conn: Connection, group: str, sinks: Collection[str]) -> None:
    """Delete the endpoints of sinks that are dropped."""
    conn.execute(
        "delete from relay.endpoints where group_id = %s and sink = any(%s)", (group, list(sinks))
    )
