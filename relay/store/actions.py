"""What somebody did to a running group, and why: `relay.actions`. Who it was, and when, is what the server says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import psycopg
from psycopg.rows import class_row
from psycopg.types.json import Jsonb


@dataclass(frozen=True, slots=True)
class Action:
    """One action; `sink` is empty where it concerns the target."""

    sink: str
    action: str
    reason: str | None
    detail: dict[str, Any] | None
    acted_by: str
    acted_at: datetime


def record(
    conn: psycopg.Connection[Any],
    group: str,
    sink: str,
    action: str,
    reason: str | None,
    detail: Mapping[str, Any],
) -> None:
    """Keep that something was done, in the database transaction that does it. `detail` is what JSON can hold."""
    conn.execute(
        "insert into relay.actions (group_id, sink, action, reason, detail) values (%s, %s, %s, %s, %s)",
        (group, sink, action, reason, Jsonb(dict(detail))),
    )


def recent(
    conn: psycopg.Connection[Any], group: str, limit: int, sink: str | None = None
) -> list[Action]:
    """The last actions on the group, or on one of its sinks, newest first."""
    with conn.cursor(row_factory=class_row(Action)) as cursor:
        return cursor.execute(
            """
            select sink, action, reason, detail, acted_by, acted_at from relay.actions
             where group_id = %(group)s and (%(sink)s::text is null or sink = %(sink)s)
             order by id desc limit %(limit)s
            """,
            {"group": group, "sink": sink, "limit": limit},
        ).fetchall()
