"""Counts the transactions in a row that a handler dead-lettered by one kind of fault: `relay.brakes`.

A row exists only while a handler fails, so that a handler that succeeds costs nothing. Triggers keep what all rows say
in one row of `relay.streaks`, which each task reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from psycopg.rows import class_row

from relay.faults import Braked
from relay.store.connections import Connection
from relay.store.literals import storable


@dataclass(frozen=True, slots=True)
class Streak:
    """How many transactions in a row were dead-lettered by one kind of fault. `braked`: the handler is stopped."""

    fault: str
    deaths: int
    braked: bool


@dataclass(frozen=True, slots=True)
class BrakedHandler:
    """A handler whose progress is stopped: the kind of its fault, after how many dead letters, and since when.

    `failed` transactions failed in the task that the brake stopped and rolled back. The `sample_` fields describe one
    of them; they are None for a sink, which defers them.
    """

    handler: str
    fault: str
    deaths: int
    braked_at: datetime
    failed: int
    sample_transaction: str | None
    sample_hosts: list[str] | None
    sample_exception: str | None

    @property
    def count(self) -> str:
        """After how many transactions in a row, in words."""
        dead = f"{self.deaths} dead letter{'' if self.deaths == 1 else 's'}"
        if not self.failed:
            return f"{dead} in a row"
        return f"{dead} and {self.failed} failure{'' if self.failed == 1 else 's'} in a row"

    @property
    def sample(self) -> str | None:
        """One of the transactions that failed, in words; None if none is known."""
        if self.sample_exception is None:
            return None
        hosts = f" of {', '.join(self.sample_hosts)}" if self.sample_hosts else ""
        return f"{self.sample_transaction or 'a transaction without an id'}{hosts}: {self.sample_exception}"


def streaks_of(values: Mapping[str, tuple[str, int, bool]] | None) -> dict[str, Streak]:
    """Return streaks by handler, from the result of `relay.lock_positions`."""
    return {handler: Streak(*streak) for handler, streak in (values or {}).items()}


def streaks(conn: Connection, group: str) -> dict[str, Streak]:
    """Return the streaks of the group's failing handlers, by handler."""
    rows = conn.execute(
        "select handler, fault, deaths, braked_at is not null from relay.brakes where group_id = %s",
        (group,),
    )
    return {handler: Streak(*values) for handler, *values in rows}


def add(
    conn: Connection, group: str, handler: str, fault: str, deaths: int, begin: bool, braked: bool
) -> int:
    """Count dead transactions, in the commit that writes them; returns how many there are in a row.

    `begin`: the handler succeeded before the first of them. The row stays locked until the database
    transaction ends, so that concurrent tasks count together.
    """
    row = conn.execute(
        """
        insert into relay.brakes as b (group_id, handler, fault, deaths, braked_at)
        values (%(group)s, %(handler)s, %(fault)s, %(deaths)s, case when %(braked)s then now() end)
        on conflict (group_id, handler) do update
           set deaths = excluded.deaths
                      + case when b.fault = excluded.fault and not %(begin)s then b.deaths else 0 end,
               fault = excluded.fault,
               braked_at = case when %(braked)s then coalesce(b.braked_at, now()) end
        returning deaths
        """,
        {
            "group": group,
            "handler": handler,
            "fault": fault,
            "deaths": deaths,
            "begin": begin,
            "braked": braked,
        },
    ).fetchone()
    return int(row[0]) if row else 0


def store(conn: Connection, group: str, handler: str, streak: Streak | None) -> None:
    """Store the streak of a handler that only one worker counts; None deletes it, since the handler has succeeded."""
    if streak is None:
        forget(conn, group, handler)
    else:
        add(conn, group, handler, streak.fault, streak.deaths, begin=True, braked=streak.braked)


def mark(conn: Connection, group: str, braked: Braked) -> bool:
    """Stop the handler: apply its brake, and store one of the transactions that failed, since none is a dead letter.

    Returns whether it was not stopped before.
    """
    row = conn.execute(
        """
        with before as (select braked_at from relay.brakes where group_id = %(group)s and handler = %(handler)s)
        insert into relay.brakes as b (group_id, handler, fault, braked_at, failed, sample_transaction, sample_hosts,
                                       sample_exception)
        values (%(group)s, %(handler)s, %(fault)s, now(), %(failed)s, %(transaction)s, %(hosts)s, %(exception)s)
        on conflict (group_id, handler) do update
           set braked_at = coalesce(b.braked_at, now()), failed = excluded.failed,
               sample_transaction = excluded.sample_transaction, sample_hosts = excluded.sample_hosts,
               sample_exception = excluded.sample_exception
        returning not exists (select from before where braked_at is not null)
        """,
        {
            "group": group,
            "handler": braked.handler,
            "fault": braked.fault,
            "failed": braked.failed,
            "transaction": braked.transaction_id,
            "hosts": list(braked.hosts),
            "exception": storable(conn, braked.exception),
        },
    ).fetchone()
    return bool(row and row[0])


def forget(conn: Connection, group: str, handler: str) -> None:
    """Delete the streak of a handler that has succeeded, or that has no brake any more."""
    conn.execute("delete from relay.brakes where group_id = %s and handler = %s", (group, handler))


def braked(conn: Connection, group: str) -> list[BrakedHandler]:
    """List the handlers whose progress is stopped, by name."""
    with conn.cursor(row_factory=class_row(BrakedHandler)) as cursor:
        return cursor.execute(
            "select handler, fault, deaths, braked_at, failed, sample_transaction, sample_hosts, sample_exception"
            " from relay.brakes where group_id = %s and braked_at is not null order by handler",
            (group,),
        ).fetchall()
