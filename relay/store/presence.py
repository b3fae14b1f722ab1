"""Shows which instances of a group run, admits new ones by their configuration, and stores which of their parts fail.

Each holds advisory locks in the target until it ends. The tables are `relay.groups` and `relay.part_faults`.

Source: PostgreSQL documentation, "Advisory Locks".
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime

import psycopg
from psycopg.rows import class_row
from psycopg.types.json import Jsonb

from relay.config.effects import Effects, handlers_of
from relay.faults import ConfigurationError, describe
from relay.runtime.parts import SOON_SECONDS, Condition, PartFault, Recurring
from relay.store import groups, locks
from relay.store.connections import Connection, Dsn, connect, require_writable
from relay.store.groups import APPLICATION_NAME, INSTANCE, PREFIX

log = logging.getLogger(__name__)


ENDING_SECONDS = 0.5
"""How long the server may take to release the locks of an instance that has just ended."""
CHECK_SECONDS = 5.0
"""How often the connection that holds the locks is checked."""


class Presence(Recurring):
    """Holds this instance's shared locks on its group and its configuration, on a connection of its own.

    `accept` lets its configuration replace that of running instances. `changed` is called as `admit` does,
    and may raise RelayError. `replaced` is called from a thread once another instance's configuration has replaced this
    one's; `error` is set then. It stores what `faults` returns, for `relay status`.
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
        self._stored: Sequence[PartFault] = ()
        condition = Condition(
            "presence",
            log,
            "the target cannot be used",
            "the target can be used again",
            SOON_SECONDS,
        )
        super().__init__(
            condition, replaced, longest_pause=CHECK_SECONDS, close_seconds=CHECK_SECONDS
        )

    def start(self) -> None:
        """Take the locks, again whenever the connection was lost.

        Raises ConfigurationError if instances run with another configuration.
        """
        try:
            self._ensure()
        except psycopg.Error as error:
            # Not raised: the task that applies a batch handles an outage of the target.
            self.condition.fails(describe(error))
        super().start()

    def close(self) -> None:
        """Release the locks."""
        super().close()
        self._drop()

    def turn(self) -> float:
        """Check the connection that holds the locks, and store the faults of the parts."""
        self._ensure()
        self._store_faults()
        return CHECK_SECONDS

    def _ensure(self) -> None:
        try:
            if self._conn is None:
                self._conn = connect(self._dsn, application_name=APPLICATION_NAME)
                require_writable(self._conn)
                self._lock_instance(self._conn)
                # Before the stored configuration is read: of two that start at once, the second sees the first.
                hold(self._conn, self._group, self._effects)
            if self._admitted:
                require_current(self._conn, self._group, self._effects)
            else:
                admit(self._conn, self._group, self._effects, self._accept, self._changed)
                self._admitted = True
        except psycopg.Error:
            self._drop()
            raise
        self.condition.works()

    def _store_faults(self) -> None:
        """Store the faults of this instance's parts if they have changed."""
        faults = self._faults()
        if self._conn is None or [each.key for each in faults] == [
            each.key for each in self._stored
        ]:
            return
        try:
            store_faults(self._conn, self._group, faults)
        except psycopg.Error:
            self._drop()
            raise
        self._stored = faults

    def _lock_instance(self, conn: Connection) -> None:
        key = locks.instance(self._group)
        if locks.try_lock_shared(conn, key):
            return
        log.warning(
            "waiting for a session of the target that holds the group's advisory lock, usually `relay offsets`",
            extra={"group": self._group},
        )
        locks.lock_shared(conn, key)

    def _drop(self) -> None:
        conn, self._conn = self._conn, None
        if conn is not None:
            conn.close()


def instances(conn: Connection, group: str) -> list[str]:
    """List the running instances as host:pid, oldest first."""
    names = locks.sharing(conn, locks.instance(group))
    return [name.removeprefix(PREFIX) for name in names]


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


def hold(conn: Connection, group: str, effects: Effects) -> None:
    """Lock the configuration that this instance runs with, shared, until the connection ends."""
    locks.lock_shared(conn, locks.configuration(group, effects.digest))


def admit(
    conn: Connection,
    group: str,
    effects: Effects,
    accept: bool,
    changed: Callable[[Connection, Mapping[str, str]], None],
) -> None:
    """Admit an instance with this configuration to the group.

    A configuration that differs from the stored one replaces it if no instance runs with that, or if `accept` is true
    and no handler orders by another key. `changed` is then called with the stored values, in the database transaction
    that replaces them. Otherwise raises ConfigurationError, which names the difference.
    """
    with conn.transaction():
        groups.lock(conn, group)
        digest, values = _stored(conn, group)
        if digest == effects.digest:
            return
        if digest is not None:
            running = _runs(conn, group, digest)
            if running:
                _require_replaceable(group, effects, values, accept)
            changed(conn, values)
            log.log(
                logging.WARNING if running else logging.INFO,
                "the group's configuration has changed",
                extra={"group": group, "difference": effects.difference(values)},
            )
        conn.execute(
            "update relay.groups set configuration_digest = %s, configuration = %s where group_id = %s",
            (effects.digest, Jsonb(dict(effects.values)), group),
        )


def require_current(conn: Connection, group: str, effects: Effects) -> None:
    """Raise ConfigurationError if another configuration has replaced this one."""
    digest, values = _stored(conn, group)
    if digest not in (None, effects.digest):
        raise ConfigurationError(
            f"group: another instance has replaced the configuration of {group!r}: {effects.difference(values)}: "
            "start this instance with the same configuration, or with --accept-configuration"
        )


def require_admissible(conn: Connection, group: str, effects: Effects, accept: bool) -> None:
    """Raise ConfigurationError if `admit` would. Changes nothing."""
    digest, values = _stored(conn, group)
    if digest != effects.digest and _runs(conn, group, digest):
        _require_replaceable(group, effects, values, accept)


def _require_replaceable(
    group: str, effects: Effects, running: Mapping[str, str], accept: bool
) -> None:
    """Raise ConfigurationError unless this configuration may replace that of a running instance."""
    difference = effects.difference(running)
    if keys := effects.reordered_handlers(running):
        raise ConfigurationError(
            f"{', '.join(keys)}: has changed, and an instance of {group!r} defers transactions by the former one: stop "
            f"the others first; --accept-configuration cannot replace it (differences: {difference})"
        )
    if not accept:
        raise ConfigurationError(
            f"group: an instance of {group!r} runs with another configuration: {difference}: give all instances the "
            "same one, or stop the others first; --accept-configuration replaces theirs"
        )


def running_handlers(conn: Connection, group: str) -> set[str]:
    """Return the names of the handlers of the stored configuration; empty if no instance runs with it."""
    digest, values = _stored(conn, group)
    return handlers_of(values) if _runs(conn, group, digest) else set()


def _stored(conn: Connection, group: str) -> tuple[str | None, dict[str, str]]:
    """Return digest and values of the stored configuration; None and no values before an instance has run."""
    stored = conn.execute(
        "select configuration_digest, coalesce(configuration, '{}') from relay.groups where group_id = %s",
        (group,),
    ).fetchone()
    return stored or (None, {})


def _runs(conn: Connection, group: str, digest: str | None) -> bool:
    """Whether an instance runs with a configuration."""
    return digest is not None and bool(locks.sharing(conn, locks.configuration(group, digest)))


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
