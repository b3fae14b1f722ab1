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
class Acted:
    """That somebody did something, and why.

    `acted_by` is the role of the session, `operator` who acted through the console; None where a command did it.
    """

    action: str
    reason: str | None
    acted_by: str
    operator: str | None
    acted_at: datetime

    @property
    def who(self) -> str:
        """For a person: who acted, and as which role."""
        return f"{self.operator} (as {self.acted_by})" if self.operator else self.acted_by


@dataclass(frozen=True, slots=True)
class Action(Acted):
    """One action on a group; `sink` is empty where it concerns the target."""

    id: int
    sink: str
    detail: dict[str, Any] | None


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
    conn: psycopg.Connection[Any],
    group: str,
    limit: int,
    sink: str | None = None,
    before: int | None = None,
) -> list[Action]:
    """The last actions on the group, or on one of its sinks, newest first; `before` the one of that id."""
    with conn.cursor(row_factory=class_row(Action)) as cursor:
        return cursor.execute(
            """
            select id, sink, action, reason, detail, acted_by, operator, acted_at from relay.actions
             where group_id = %(group)s and (%(sink)s::text is null or sink = %(sink)s)
               and (%(before)s::bigint is null or id < %(before)s)
             order by id desc limit %(limit)s
            """,
            {"group": group, "sink": sink, "limit": limit, "before": before},
        ).fetchall()
