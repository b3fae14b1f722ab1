"""Creates partitions by time ahead, drops those that all readers are past, and deletes rows where there are none.

No lock blocks publishers longer than SHORT_LOCK_TIMEOUT: a statement that does not get its lock is retried later.

Source: PostgreSQL documentation, "Table Partitioning" and "ALTER TABLE".
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, LiteralString, NamedTuple, TypeVar

import psycopg
from psycopg import sql

from relay.store.connections import Connection
from relay.waits import Backoff

T = TypeVar("T")

log = logging.getLogger(__name__)

SHORT_LOCK_TIMEOUT = "40ms"
"""How long a statement waits for a lock; publishers are blocked for as long."""
ATTEMPTS = 8
"""How often a statement that needs a lock is tried."""
PAUSE_SECONDS = 0.1
"""The pause before the second attempt; it doubles for each further one."""
PORTION = 5_000
"""How many rows are deleted in one statement; more of one transaction of the source."""
_LOCK_FAULTS = psycopg.errors.LockNotAvailable, psycopg.errors.DeadlockDetected
TURNS_FROM_THE_BEGINNING = 60
"""After how many turns deletion begins with the oldest transaction again."""
RESTORED = "restored by relay at "
"""The beginning of the comment of a partition that was filled from the archive."""
_ORIGIN = datetime(2000, 1, 3, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class Partition:
    """A partition, its qualified name and its range lower <= c_ts < upper.

    `lower` is None if the range has no lower bound; the default partition has neither bound.
    """

    name: str
    lower: datetime | None
    upper: datetime | None
    is_default: bool


@dataclass(frozen=True, slots=True)
class Retained:
    """An outbox from which relay may remove rows. `every` is None if it is not partitioned."""

    outbox: str
    every: timedelta | None


@dataclass(frozen=True, slots=True)
class Unfinished:
    """A constraint that a killed conversion or repair has left: `partition` refuses rows from `end` on."""

    partition: str
    end: str
    hint: str


def unfinished(source: Connection, table: str) -> list[Unfinished]:
    """Find constraints that killed commands have left on an outbox and its partitions. Raises psycopg.Error."""
    rows = source.execute(
        r"""
        select conrelid::regclass::text, substring(pg_get_constraintdef(oid) from '< ''([^'']+)'),
               case conname when 'relay_before' then 'run `relay partition` again'
                    else 'start relay, which completes the repair' end
          from pg_constraint
         where conname in ('relay_before', 'relay_range')
           and conrelid in (select to_regclass(%(table)s)
                             union select relid from pg_partition_tree(to_regclass(%(table)s)))
        """,
        {"table": _quoted(source, table)},
    )
    return [Unfinished(*row) for row in rows]


def aligned(moment: datetime, every: timedelta) -> datetime:
    """Return the beginning of the range that holds a moment. Ranges count from a Monday, in UTC: days have 24 hours."""
    return moment - (moment - _ORIGIN) % every


def retained(source: Connection, table: str) -> Retained | None:
    """Read what retention may do with an outbox, by its qualified name; None if nothing. Raises psycopg.Error."""
    row = source.execute(
        "select outbox, every from relay.retained where outbox = %s", (table,)
    ).fetchone()
    return None if row is None else Retained(*row)


def partitions(source: Connection, table: str) -> list[Partition]:
    """List the partitions of a table, oldest first, the default one last. Raises psycopg.Error."""
    rows = source.execute(
        """
        select format('%%I.%%I', nspname, relname), nullif(lower, '-infinity'), upper,
               is_default
          from relay.partitions(%s::regclass) join pg_class as c on c.oid = partition
          join pg_namespace as n on n.oid = relnamespace order by upper nulls last
        """,
        (_quoted(source, table),),
    )
    return [Partition(*row) for row in rows]


def with_short_lock(source: Connection, act: Callable[[], T], attempts: int = ATTEMPTS) -> T:
    """Call `act` in a database transaction whose lock_timeout is SHORT_LOCK_TIMEOUT, up to `attempts` times.

    Raises psycopg.errors.LockNotAvailable after the last attempt.
    """
    pauses = _pauses()
    for attempt in range(attempts):
        try:
            with source.transaction():
                source.execute("select set_config('lock_timeout', %s, true)", (SHORT_LOCK_TIMEOUT,))
                return act()
        except _LOCK_FAULTS:
            if attempt + 1 == attempts:
                raise
            time.sleep(pauses.take())
    raise AssertionError


def create_ahead(source: Connection, table: str, present: datetime, ahead: timedelta) -> list[str]:
    """Create the partitions that are missing up to `ahead` from now; returns their names. Raises psycopg.Error."""
    created: list[str] = []
    while True:
        name = with_short_lock(
            source,
            lambda: _value(
                source, "select relay.create_ahead(%s, %s, %s)", table, present, present + ahead
            ),
        )
        if name is None:
            return created
        created.append(name)


class Step(NamedTuple):
    """A step of upkeep: its name, what it has done, and why it could not."""

    name: str
    done: str | None
    fault: str | None


class Upkeep:
    """Creates the partitions of an outbox that are missing, and removes what all readers are past, step by step.

    It remembers from which transaction on rows are left, and begins there: while somebody holds a snapshot, rows that
    were deleted before are still there, dead, and each portion would walk through all of them.
    """

    def __init__(self, table: str) -> None:
        self._table = table
        self._since = 0
        self._turns = 0

    def steps(
        self,
        source: Connection,
        first: str,
        present: datetime,
        keep: timedelta | None,
        ahead: timedelta,
        stopping: Callable[[], bool],
    ) -> Iterator[Step]:
        """Take the steps of `relay.maintain` from one on, and yield them; without `keep` nothing is removed.

        A step that does not get its lock is tried up to ATTEMPTS times. Raises psycopg.Error if the session is lost, or
        the server is a standby.
        """
        if keep is not None:
            if self._turns % TURNS_FROM_THE_BEGINNING == 0:
                # Rows of an earlier transaction may have come in: restored ones, or those of a detached partition.
                self._since = 0
            self._turns += 1
        step: str | None = first
        first_kept: int | None = None
        portion, attempts, pauses = PORTION, 1, _pauses()
        while step is not None and not stopping():
            rows = source.execute(
                """
                select step, since::text::bigint, portion, kept::text::bigint, done, fault, state
                  from relay.maintain_step(%s, %s, %s, %s, %s, %s::text::xid8, %s)
                """,
                (self._table, present, keep, ahead, step, self._since, portion),
            )
            ((following, since, size, kept, done, fault, state),) = rows
            if state == psycopg.errors.ReadOnlySqlTransaction.sqlstate:
                raise psycopg.errors.ReadOnlySqlTransaction(fault)
            if state in _LOCKED and done is None and attempts < ATTEMPTS:
                attempts += 1
                time.sleep(pauses.take())
                continue
            if step == "drop" and state in _LOCKED:
                log.info("a partition is in use: it is dropped later", extra={"fault": fault})
                fault = None
            yield Step(step, done, fault)
            first_kept = kept if first_kept is None else first_kept
            step, self._since, portion, attempts, pauses = following, since, size, 1, _pauses()
        # What was kept may be old, or replayed, next time.
        self._since = self._since if first_kept is None else first_kept


_LOCKED = {each.sqlstate for each in _LOCK_FAULTS}


def _pauses() -> Backoff:
    return Backoff(PAUSE_SECONDS, math.inf)


def _quoted(source: Connection, table: str) -> str:
    """Return a qualified name, quoted for SQL."""
    return sql.Identifier(*table.split(".")).as_string(source)


def _value(source: Connection, query: LiteralString, *parameters: object) -> Any:
    row = source.execute(query, parameters).fetchone()
    return None if row is None else row[0]
