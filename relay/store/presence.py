"""Shows which instances of a group run, and which of their parts fail (`relay.part_faults`).

Each instance holds advisory locks in the target until it ends.

Source: PostgreSQL documentation, "Advisory Locks".
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from threading import Event

import psycopg
from psycopg.rows import class_row

from relay.config.effects import Effects
from relay.faults import ConfigurationError, describe
from relay.runtime.parts import SOON_SECONDS, Condition, PartFault, Recurring
from relay.store import admission, locks
from relay.store.connections import (
    APPLICATION_NAME,
    INSTANCE,
    INSTANCE_PREFIX,
    Connection,
    Dsn,
    connect,
    require_writable,
)

log = logging.getLogger(__name__)


ENDING_SECONDS = 2.0
"""How long the server may take to release the locks of an instance that has just ended."""
CHECK_SECONDS = 5.0
"""How often the connection that holds the locks is checked."""
LOCK_SECONDS = 0.2
"""How often the group's lock is tried while another session has it."""


class Presence(Recurring):
    """Holds this instance's shared locks on its group and its configuration, on a connection of its own.

    `accept` lets its configuration replace that of running instances. `changed` is called as `admission.admit` does,
    and may raise RelayError. `replaced` is called from a thread once another instance's configuration has replaced
    this one's; `error` is set then. It stores what `faults` returns, for `relay status`.
    """

    def __init__(
        self,
        dsn: Dsn,
        group: str,
        effects: Effects,
        accept: bool,
        changed: Callable[[Connection, Mapping[str, str]], None],
        replaced: Callable[[], None],
        faults: Callable[[], Sequence[PartFault]] = lambda: (),
    ) -> None:
        self._dsn = dsn
        self._group = group
        self._effects = effects
        self._accept = accept
        self._changed = changed
        self._faults = faults
        self._admitted = False
        self._conn: Connection | None = None
        # None: what is stored is not known, as after a lost session, while another instance may have started.
        self._stored: Sequence[PartFault] | None = None
        self._ending = Event()
        condition = Condition(
            "presence",
            log,
            "the target cannot be used",
            "the target can be used again",
            SOON_SECONDS,
            longest_pause=CHECK_SECONDS,
        )
        super().__init__(condition, replaced, close_seconds=CHECK_SECONDS)

    def start(self) -> None:
        """Take the locks, again whenever the connection was lost.

        Raises ConfigurationError if instances run with another configuration.
        """
        try:
            if not self._ensure():
                return
        except psycopg.Error as error:
            # Not raised: the task that applies a batch handles an outage of the target.
            self.condition.fails(describe(error))
        super().start()

    def stop(self) -> None:
        """End a wait for the group's lock; locks that are held are kept until `close`."""
        self._ending.set()

    def close(self) -> None:
        """Release the locks."""
        super().close()
        self._drop()

    def turn(self) -> float:
        """Check the connection that holds the locks, and store the faults of the parts."""
        if self._ensure():
            self._store_faults()
        return CHECK_SECONDS

    def _ensure(self) -> bool:
        """Hold the locks; False if relay ends while another session has that of the group."""
        try:
            if self._conn is None:
                self._conn = connect(self._dsn, application_name=APPLICATION_NAME)
                require_writable(self._conn)
                if not self._lock_instance(self._conn):
                    self._drop()
                    return False
                # Before the stored configuration is read: of two that start at once, the second sees the first.
                admission.hold(self._conn, self._group, self._effects)
            if self._admitted:
                admission.require_current(self._conn, self._group, self._effects)
            else:
                self._admit(self._conn)
                self._admitted = True
        except psycopg.Error:
            self._drop()
            raise
        self.condition.works()
        return True

    def _admit(self, conn: Connection) -> None:
        """Admit this instance, also where the session of one that has just ended is still there for a moment."""
        ends = time.monotonic() + ENDING_SECONDS
        while True:
            try:
                admission.admit(conn, self._group, self._effects, self._accept, self._changed)
                return
            except ConfigurationError:
                if time.monotonic() >= ends or self._ending.wait(0.05):
                    raise

    def _store_faults(self) -> None:
        """Store the faults of this instance's parts if they have changed."""
        faults, stored = self._faults(), self._stored
        if self._conn is None or (
            stored is not None and [each.key for each in faults] == [each.key for each in stored]
        ):
            return
        try:
            store_faults(self._conn, self._group, faults)
        except psycopg.Error:
            self._drop()
            raise
        self._stored = faults

    def _lock_instance(self, conn: Connection) -> bool:
        """Wait for the group's lock; False if relay ends before it is had."""
        key = locks.instance(self._group)
        if locks.try_lock_shared(conn, key):
            return True
        log.warning(
            "waiting for a session of the target that holds the group's advisory lock, usually `relay offsets`",
            extra={"group": self._group},
        )
        while not self._ending.wait(LOCK_SECONDS):
            if locks.try_lock_shared(conn, key):
                return True
        return False

    def _drop(self) -> None:
        self._stored = None
        conn, self._conn = self._conn, None
        if conn is not None:
            conn.close()


def instances(conn: Connection, group: str) -> list[str]:
    """List the running instances as host:pid, oldest first."""
    names = locks.sharing(conn, locks.instance(group))
    return [name.removeprefix(INSTANCE_PREFIX) for name in names]


@contextmanager
def stopped(conn: Connection, group: str) -> Iterator[bool]:
    """Yield whether no instance runs; if so, none can start until the end of the block."""
    key = locks.instance(group)
    ends = time.monotonic() + ENDING_SECONDS
    while not (free := locks.try_lock(conn, key)) and time.monotonic() < ends:
        time.sleep(0.05)
    try:
        yield free
    finally:
        if free:
            locks.unlock(conn, key)


@dataclass(frozen=True, slots=True)
class StoredPartFault:
    """A part of a running instance that does not do its work, since when (by that machine's clock) and why."""

    instance: str
    part: str
    fault: str
    since: datetime


def store_faults(conn: Connection, group: str, faults: Sequence[PartFault]) -> None:
    """Replace the faults of this instance. Raises psycopg.Error."""
    with conn.transaction(), conn.cursor() as cursor:
        cursor.execute(
            "delete from relay.part_faults where group_id = %s and instance = %s", (group, INSTANCE)
        )
        cursor.executemany(
            "insert into relay.part_faults (group_id, instance, part, fault, since) values (%s, %s, %s, %s, %s)",
            [(group, INSTANCE, each.part, each.fault, each.since) for each in faults],
        )


def read_faults(conn: Connection, group: str, running: Collection[str]) -> list[StoredPartFault]:
    """List the faults of the instances that run, by instance and part. Raises psycopg.Error."""
    with conn.cursor(row_factory=class_row(StoredPartFault)) as cursor:
        return cursor.execute(
            """
            select instance, part, fault, since from relay.part_faults
             where group_id = %s and instance = any (%s) order by 1, 2
            """,
            (group, list(running)),
        ).fetchall()
