"""Shows which instances of a group run: each holds advisory locks in the target until it ends.

Source: PostgreSQL documentation, "Advisory Locks".
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import psycopg

from relay.config.effects import Effects
from relay.faults import describe
from relay.runtime.parts import SOON_SECONDS, Condition, PartFault, Recurring
from relay.store import admission, advisory_locks, part_faults
from relay.store.connections import Connection, Dsn, connect, require_writable
from relay.store.groups import APPLICATION_NAME, PREFIX

log = logging.getLogger(__name__)


ENDING_SECONDS = 0.5
"""How long the server may take to release the locks of an instance that has just ended."""
CHECK_SECONDS = 5.0
"""How often the connection that holds the locks is checked."""


class Presence(Recurring):
    """Holds this instance's shared locks on its group and its configuration, on a connection of its own.

    `accept` lets its configuration replace that of running instances. `changed` is called as `admission.admit` does,
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
                admission.hold(self._conn, self._group, self._effects)
            if self._admitted:
                admission.require_current(self._conn, self._group, self._effects)
            else:
                admission.admit(self._conn, self._group, self._effects, self._accept, self._changed)
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
            part_faults.store(self._conn, self._group, faults)
        except psycopg.Error:
            self._drop()
            raise
        self._stored = faults

    def _lock_instance(self, conn: Connection) -> None:
        key = advisory_locks.instance(self._group)
        if advisory_locks.try_lock_shared(conn, key):
            return
        log.warning(
            "waiting for a session of the target that holds the group's advisory lock, usually `relay offsets`",
            extra={"group": self._group},
        )
        advisory_locks.lock_shared(conn, key)

    def _drop(self) -> None:
        conn, self._conn = self._conn, None
        if conn is not None:
            conn.close()


def instances(conn: Connection, group: str) -> list[str]:
    """List the running instances as host:pid, oldest first."""
    names = advisory_locks.sharing(conn, advisory_locks.instance(group))
    return [name.removeprefix(PREFIX) for name in names]


@contextmanager
def stopped(conn: Connection, group: str) -> Iterator[bool]:
    """Yield whether no instance runs; if so, none can start until the end of the block."""
    key = advisory_locks.instance(group)
    ends = time.monotonic() + ENDING_SECONDS
    while not (free := advisory_locks.try_lock(conn, key)) and time.monotonic() < ends:
        time.sleep(0.05)
    try:
        yield free
    finally:
        if free:
            advisory_locks.unlock(conn, key)
