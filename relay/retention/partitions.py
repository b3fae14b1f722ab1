"""Creates partitions by time ahead, drops those that all readers are past, and deletes rows where there are none.

No lock blocks publishers longer than SHORT_LOCK_TIMEOUT: a statement that does not get its lock is retried later.

Source: PostgreSQL documentation, "Table Partitioning" and "ALTER TABLE".
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, LiteralString, Protocol, TypeVar

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
"""How many rows are deleted in one statement."""
LARGEST_PORTION = 160_000
"""How many rows of one transaction of the source are deleted in one statement."""
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
    pauses = Backoff(PAUSE_SECONDS, math.inf)
    for attempt in range(attempts):
        try:
            with source.transaction():
                source.execute("select set_config('lock_timeout', %s, true)", (SHORT_LOCK_TIMEOUT,))
                return act()
        except (psycopg.errors.LockNotAvailable, psycopg.errors.DeadlockDetected):
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


def repair_default(
    source: Connection, table: str, every: timedelta, present: datetime, ahead: timedelta
) -> str | None:
    """Make a default partition that has rows a partition with a range; returns its name. Raises psycopg.Error.

    The range ends where the partitions that are created ahead end. Until the exchange, rows after its end are refused.
    """
    upto = aligned(present + ahead, every) + every
    if not with_short_lock(
        source, lambda: _value(source, "select relay.enclose_default(%s, %s)", table, upto)
    ):
        return None
    source.execute("select relay.validate_default(%s)", (table,))
    name = with_short_lock(
        source, lambda: _value(source, "select relay.exchange_default(%s, %s)", table, upto)
    )
    return str(name)


class Step(Protocol):
    """Encloses a step of retention, so that a fault of it does not keep the others from being done."""

    def __call__(self, what: str, conn: Connection) -> AbstractContextManager[None]:
        """Return a context that records a fault of the step `what`; it raises psycopg.Error if `conn` is lost."""


def drop_read(source: Connection, table: str, older_than: datetime, step: Step) -> list[str]:
    """Drop the partitions that end before a time and that all readers are past; returns their names.

    A partition that stays locked is left for the next call, and so is one that cannot be read. Raises psycopg.Error.
    """
    dropped: list[str] = []
    for each in partitions(source, table):
        if each.is_default or each.upper is None or each.upper > older_than:
            continue
        with step(f"partition {each.name}", source):
            if _drop(source, table, each.name, older_than):
                dropped.append(each.name)
    return dropped


def _drop(source: Connection, table: str, name: str, older_than: datetime) -> bool:
    """Drop a partition if all readers are past it; returns whether it is gone. Raises psycopg.Error."""
    try:
        return bool(
            with_short_lock(
                source,
                lambda: _value(
                    source, "select relay.drop_partition(%s, %s, %s)", table, name, older_than
                ),
            )
        )
    except psycopg.errors.LockNotAvailable:
        log.info("a partition is in use: it is dropped later", extra={"partition": name})
        return False


class ReadRows:
    """Deletes rows of an outbox that all readers are past, in portions.

    It remembers from which transaction on rows are left, and begins there: while somebody holds a snapshot, rows that
    were deleted before are still there, dead, and each portion would walk through all of them.
    """

    def __init__(self) -> None:
        self._since = 0
        self._turns = 0

    def delete(
        self, source: Connection, table: str, older_than: datetime, stopping: Callable[[], bool]
    ) -> int:
        """Delete the rows that are older than a time; returns how many. Raises psycopg.Error."""
        if self._turns % TURNS_FROM_THE_BEGINNING == 0:
            # Rows of an earlier transaction may have come in: restored ones, or those of a partition that was detached.
            self._since = 0
        self._turns += 1
        since, first_kept = self._since, None
        total, portion = 0, PORTION
        while not stopping():
            deleted, reached, kept = self._portion(source, table, older_than, portion, since)
            total += deleted
            first_kept = kept if first_kept is None else first_kept
            if deleted < portion // 2:
                break
            # The rows of one transaction, and those without one, have no other order in which to pass over dead rows.
            portion = PORTION if reached > since else min(2 * portion, LARGEST_PORTION)
            since = reached
        # What was kept may be old, or replayed, next time.
        self._since = since if first_kept is None else first_kept
        return total

    def _portion(
        self, source: Connection, table: str, older_than: datetime, portion: int, since: int
    ) -> tuple[int, int, int | None]:
        """Delete one portion; returns how many rows, where the next begins, and the first transaction of a kept one."""
        row = source.execute(
            """
            select deleted, reached::text::bigint, kept::text::bigint
              from relay.delete_portion(%s, %s, %s, %s::text::xid8)
            """,
            (table, older_than, portion, since),
        ).fetchone()
        assert row is not None  # noqa: S101
        return row[0], row[1], row[2]


def _quoted(source: Connection, table: str) -> str:
    """Return a qualified name, quoted for SQL."""
    return sql.Identifier(*table.split(".")).as_string(source)


def _value(source: Connection, query: LiteralString, *parameters: object) -> Any:
    row = source.execute(query, parameters).fetchone()
    return None if row is None else row[0]
