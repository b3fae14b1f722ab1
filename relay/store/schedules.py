"""The rows of `relay.schedules`, and the functions that change them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID
from zoneinfo import ZoneInfo

import psycopg
from psycopg.rows import class_row
from psycopg.types.json import Jsonb

from relay.model.cron import Timing, timing, zone_of


@dataclass(frozen=True, slots=True)
class ScheduleRow:
    """A schedule, and how far it is. `present` is the database's time when the row was read; times are in UTC."""

    name: str
    id: UUID
    cron: str | None
    every: timedelta | None
    at: datetime | None
    timezone: str
    missed: str
    jitter: timedelta
    configured_by: str | None
    since: datetime
    paused_at: datetime | None
    next_at: datetime | None
    passed_at: datetime | None
    last: list[datetime]
    last_event_id: UUID | None
    published: int
    missed_ticks: int
    fault: str | None
    version: int
    present: datetime

    @property
    def timing(self) -> Timing:
        """When it is due. Raises ValueError for what SQL declared and relay does not understand."""
        return timing(self.cron, self.every, self.at, self.timezone)

    @property
    def begins(self) -> datetime:
        """The time after which its next time is."""
        return max(self.since, self.passed_at or self.since)

    @property
    def state(self) -> str:
        """`stands still`, `paused`, `over` or `active`."""
        if self.fault is not None:
            return "stands still"
        if self.paused_at is not None:
            return "paused"
        return "over" if self.at is not None and self.at <= self.begins else "active"

    @property
    def zone(self) -> ZoneInfo:
        """Its time zone; UTC for one that relay does not know."""
        try:
            return zone_of(self.timezone)
        except ValueError:
            return zone_of("UTC")

    @property
    def when(self) -> str:
        """Its times as text."""
        if self.cron is not None:
            return self.cron if self.timezone == "UTC" else f"{self.cron} {self.timezone}"
        if self.every is not None:
            return f"every {self.every}"
        return f"at {self.at}"


@dataclass(frozen=True, slots=True)
class ScheduleFigures:
    """How a schedule does. `overdue_seconds` is 0 while it is paused or nothing is due; `fault`: why it has no time."""

    name: str
    published: int
    missed_ticks: int
    overdue_seconds: float
    is_paused: bool
    fault: str | None

    @property
    def stands_still(self) -> bool:
        """Whether relay does not understand it."""
        return self.fault is not None


_FIGURES = """
    select name, published, missed_ticks, paused_at is not null as is_paused, fault,
           case when paused_at is null and due_at < clock_timestamp()
                then extract(epoch from clock_timestamp() - due_at)::float8 else 0 end as overdue_seconds
      from relay.schedules order by name
"""
_READ = """
    select name, id, cron, every, at, timezone, missed, jitter, configured_by, since, paused_at, next_at, passed_at,
           last, last_event_id, published, missed_ticks, fault, version, clock_timestamp() as present
      from relay.schedules
"""
# Both read an index on due_at: statement_timestamp() has one value for the statement, clock_timestamp() has not.
_WAITS = """
    select exists (select from relay.schedules where paused_at is null and due_at is null),
           extract(epoch from (select min(due_at) from relay.schedules where paused_at is null and due_at < 'infinity')
                              - statement_timestamp())::float8
"""
# Owners take turns: the schedules of one, however many and large, do not delay those of another for long.
_TURNS = """
    with due as materialized (
        select name as chosen, due_at as waits_from, owner, configured_by from relay.schedules
         where paused_at is null and due_at is null
        union all
        select name, due_at, owner, configured_by from relay.schedules
         where paused_at is null and due_at <= statement_timestamp()),
    turns as (
        select chosen, waits_from,
               row_number() over (partition by owner, configured_by order by waits_from nulls first) as turn
          from due)
"""
_DUE = (
    _TURNS
    + _READ
    + " join turns on chosen = name order by turn, waits_from nulls first limit %(limit)s"
)
_TICK = """
    select t.id, relay.tick(t.name, t.id, t.version, t.times::timestamptz[], t.ids::uuid[], t.passed_at, t.next_at,
                            coalesce(t.due_at, 'infinity'), t.missed, t.fault)
      from unnest(%s::text[], %s::uuid[], %s::bigint[], %s::text[], %s::text[], %s::timestamptz[], %s::timestamptz[],
                  %s::timestamptz[], %s::bigint[], %s::text[])
           as t (name, id, version, times, ids, passed_at, next_at, due_at, missed, fault)
"""
_DECLARE = """
    select relay.declare_schedule(
        name => %(name)s, publish => %(publish)s, cron => %(cron)s, every => %(every)s, at => %(at)s,
        timezone => %(timezone)s, missed => %(missed)s, jitter => make_interval(secs => %(jitter)s),
        configured_by => %(group)s)
"""


@dataclass(frozen=True, slots=True)
class DueTicks:
    """What a schedule publishes now, by time, and where it goes on; `due` is None where nothing follows."""

    times: Sequence[datetime]
    ids: Sequence[UUID]
    passed: datetime | None
    next: datetime | None
    due: datetime | None
    missed: int = 0
    fault: str | None = None


def listed(
    conn: psycopg.Connection[Any], after: str = "", limit: int | None = None
) -> list[ScheduleRow]:
    """Read the schedules in the order of their names, or some after a name. Raises psycopg.Error."""
    return _rows(conn, _READ + " where name > %s order by name limit %s", (after, limit))


def figures(conn: psycopg.Connection[Any]) -> list[ScheduleFigures]:
    """Read how each schedule does, in the order of their names. Raises psycopg.Error."""
    with conn.cursor(row_factory=class_row(ScheduleFigures)) as cursor:
        return cursor.execute(_FIGURES.encode()).fetchall()


def named(conn: psycopg.Connection[Any], name: str) -> ScheduleRow | None:
    """Read a schedule; None if there is none of this name. Raises psycopg.Error."""
    return next(iter(_rows(conn, _READ + " where name = %s", (name,))), None)


def due(conn: psycopg.Connection[Any], limit: int) -> list[ScheduleRow]:
    """Read at most `limit` schedules whose next time is not known or has come: the earliest of each owner first.

    Raises psycopg.Error.
    """
    return _rows(conn, _DUE, {"limit": limit})


def _rows(
    conn: psycopg.Connection[Any],
    query: str,
    parameters: tuple[object, ...] | Mapping[str, object] = (),
) -> list[ScheduleRow]:
    with conn.cursor(row_factory=class_row(ScheduleRow)) as cursor:
        return cursor.execute(query.encode(), parameters).fetchall()


def wait(conn: psycopg.Connection[Any]) -> float | None:
    """Return in how many seconds a schedule is due, 0 if one is; None if none will be. Raises psycopg.Error."""
    ((is_unknown, seconds),) = conn.execute(_WAITS.encode())
    return 0.0 if is_unknown or (seconds is not None and seconds <= 0) else seconds


def tick(conn: psycopg.Connection[Any], steps: Sequence[tuple[ScheduleRow, DueTicks]]) -> set[UUID]:
    """Publish and move on in one statement; returns the ids of the schedules for which nobody else has done it.

    Raises psycopg.Error, and has done nothing then.
    """
    rows = [
        (
            *(schedule.name, schedule.id, schedule.version),
            *(_array(each.isoformat() for each in step.times), _array(map(str, step.ids))),
            *(step.passed, step.next, step.due, step.missed, step.fault),
        )
        for schedule, step in steps
    ]
    found = conn.execute(_TICK, [list(column) for column in zip(*rows, strict=True)])
    return {number for number, has_moved in found if has_moved}


def _array(values: Iterable[str]) -> str:
    """An array as text: one of arrays would need as many elements in each."""
    return "{" + ",".join(values) + "}"


def declare(
    conn: psycopg.Connection[Any], group: str | None, name: str, values: Mapping[str, Any]
) -> bool:
    """Declare a schedule; returns whether that changed anything. Raises psycopg.Error."""
    given = {**values, "publish": Jsonb(values["publish"]), "name": name, "group": group}
    return conn.execute(_DECLARE, given).fetchone() == (True,)


def drop_others(conn: psycopg.Connection[Any], group: str, names: Collection[str]) -> list[str]:
    """Drop the schedules that a group's configuration had, but for some; returns their names. Raises psycopg.Error."""
    rows = conn.execute(
        "select name from relay.schedules where configured_by = %s and name <> all (%s) "
        "and relay.drop_schedule(name, configured_by)",
        (group, list(names)),
    )
    return sorted(name for (name,) in rows)


def pause(conn: psycopg.Connection[Any], name: str, paused: bool) -> bool:
    """Pause a schedule or let it go on; returns whether that changed anything. Raises psycopg.Error."""
    return conn.execute("select relay.pause_schedule(%s, %s)", (name, paused)).fetchone() == (True,)


def run_now(conn: psycopg.Connection[Any], name: str) -> UUID | None:
    """Publish a schedule's event beside its times; returns its id, None without the schedule. Raises psycopg.Error."""
    row = conn.execute("select relay.run_schedule(%s)", (name,)).fetchone()
    return row[0] if row else None
