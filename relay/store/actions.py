"""Records what operators did to a group, and why: `relay.actions`. The server adds who acted, and when."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import psycopg
from psycopg.rows import class_row
from psycopg.types.json import Jsonb

WHO = """
    coalesce(nullif(current_setting('relay.operator', true), '') || ' (as ' || relay.acting_role() || ')',
             relay.acting_role())
"""
"""SQL: who acts, as `Acted.who` has it. Anybody may set the operator: the role is what the server knows."""


@dataclass(frozen=True, slots=True)
class Acted:
    """An action of an operator, and its reason.

    `acted_by` is the role that acted, `operator` who used the console, as it says; None for a command.
    """

    action: str
    reason: str | None
    acted_by: str
    operator: str | None
    acted_at: datetime

    @property
    def who(self) -> str:
        """Who acted, and as which role, as text."""
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
    """Record an action in the database transaction that performs it. `detail` has JSON values."""
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
    """List the last actions on the group, or on one of its sinks, newest first, from before the id `before`."""
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
