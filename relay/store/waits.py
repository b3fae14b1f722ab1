"""Reads what relay's sessions of a database wait for: locks of other sessions."""

from __future__ import annotations

from dataclasses import dataclass

from psycopg.rows import class_row

from relay.store.connections import Connection


@dataclass(frozen=True, slots=True)
class Wait:
    """A session of relay that waits for a lock: for how many seconds, for which, and which sessions hold it."""

    pid: int
    seconds: float
    waits_for: str
    blocked_by: str | None

    def __str__(self) -> str:
        """The wait in words."""
        by = f", held by {self.blocked_by}" if self.blocked_by else ""
        return f"session {self.pid} for {self.seconds:.0f} s for a lock ({self.waits_for}){by}"


def lock_waits(conn: Connection) -> list[Wait]:
    """List relay's sessions that wait for a lock of the database, the longest wait first. Raises psycopg.Error.

    Advisory locks are left out: an instance that stands by waits for them.
    """
    with conn.cursor(row_factory=class_row(Wait)) as cursor:
        return cursor.execute(
            """
            select a.pid, extract(epoch from clock_timestamp() - a.query_start)::float8 as seconds,
                   a.wait_event || coalesce(' on ' || (
                       select l.relation::regclass::text from pg_locks as l
                        where l.pid = a.pid and not l.granted and l.relation is not null limit 1), '') as waits_for,
                   (select string_agg(b.pid || ' (' || coalesce(nullif(b.application_name, ''), b.usename) || ')', ', ')
                      from pg_stat_activity as b where b.pid = any (pg_blocking_pids(a.pid))) as blocked_by
              from pg_stat_activity as a
             where a.datname = current_database() and a.application_name like 'relay%' and a.wait_event_type = 'Lock'
               and a.wait_event <> 'advisory' and a.pid <> pg_backend_pid()
             order by 2 desc
            """
        ).fetchall()
