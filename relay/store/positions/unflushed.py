"""Confirms commits of a target with `synchronous_commit: off` once they are flushed to its disk.

Until then a commit must not be confirmed to the source. A thread checks in one session: the positions that it reads are
durable once the WAL of that moment is flushed, since a crash would have ended the session. Until then each task checks,
under the lock of its partitions, that no position is older than the one that this process stored last.

Source: PostgreSQL documentation, "Asynchronous Commit" and "Subscription" (`synchronous_commit`).
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from threading import Condition
from typing import Any

import psycopg

from relay.faults import NotNow, RelayError, is_transient
from relay.model.events import Lsn
from relay.runtime.parts import Condition as PartCondition
from relay.runtime.parts import Recurring
from relay.runtime.retry import FIRST_WAIT_SECONDS, LONGEST_WAIT_SECONDS
from relay.store.connections import Dsn, connect
from relay.store.positions import offsets

log = logging.getLogger(__name__)

CHECK_SECONDS = 0.05
"""How often the flushed position is queried; PostgreSQL's WAL writer flushes every 0.2 s by default."""
CLOSE_SECONDS = 2.0
"""How long `close` waits for the last commits; unconfirmed ones are delivered again and recognised."""


def require_kept(
    lower_bounds: Mapping[int, Lsn], positions: Mapping[int, offsets.PartitionPosition]
) -> None:
    """Raise RelayError if a partition has an older position than this process stored last."""
    for partition, lower_bound in lower_bounds.items():
        position = positions.get(partition)
        if position is None or position.applied_lsn < lower_bound:
            raise RelayError(
                "target.synchronous_commit: off: the target has crashed and lost commits that were not flushed; "
                "none of them was confirmed: restart relay, and the slot sends their events again"
            )


class Unflushed(Recurring):
    """Keeps the commits of this process that are not confirmed to the source yet, oldest first.

    `confirm` is called with a position once everything up to it is durable, `failed` once when the target has lost
    commits; both from a thread of its own.
    """

    def __init__(
        self, dsn: Dsn, group: str, confirm: Callable[[Lsn], None], failed: Callable[[], None]
    ) -> None:
        condition = PartCondition(
            "flushed",
            log,
            "cannot read yet what the target has flushed",
            "what the target has flushed is read again",
            first_pause=FIRST_WAIT_SECONDS,
            longest_pause=LONGEST_WAIT_SECONDS,
        )
        super().__init__(
            condition,
            failed,
            is_final=lambda error: not is_transient(error),
            close_seconds=CLOSE_SECONDS,
        )
        self._dsn = dsn
        self._group = group
        self._confirm = confirm
        self._conn: psycopg.Connection[Any] | None = None
        self._pending: deque[tuple[Lsn, Mapping[int, Lsn]]] = deque()
        self._changed = Condition()

    def close(self) -> None:
        """Wait up to CLOSE_SECONDS for the last commits, then end the thread."""
        with self._changed:
            self._changed.wait_for(lambda: not self._pending or self.error, CLOSE_SECONDS)
            self.stopping.set()
            self._changed.notify_all()
        super().close()

    def add(self, end: Lsn, reached: Mapping[int, Lsn]) -> None:
        """Add a commit of everything up to the source position `end`; `reached` has the positions of its partitions."""
        with self._changed:
            self._pending.append((end, reached))
            self._changed.notify_all()

    def lower_bounds(self, partitions: Iterable[int]) -> dict[int, Lsn]:
        """Return the least position that partitions must have, for those that a crash could have set back."""
        with self._changed:
            last: dict[int, Lsn] = {}
            for _, reached in self._pending:
                last.update(reached)
        return {partition: last[partition] for partition in partitions if partition in last}

    def turn(self) -> float:
        """Wait for commits, and confirm those that are pending once they are flushed."""
        with self._changed:
            self._changed.wait_for(lambda: self._pending or self.stopping.is_set())
        if not self.stopping.is_set():
            self._check()
            self.condition.works()
        return 0.0

    def release(self) -> None:
        """Close the connection, and wake `close`.

        What is pending stays: tasks must not go on from positions that the target has lost.
        """
        self._disconnect()
        with self._changed:
            self._changed.notify_all()

    def _check(self) -> None:
        """Wait until the commits that are pending now are flushed, and confirm them."""
        with self._changed:
            pending = list(self._pending)
        try:
            self._conn = self._conn or connect(self._dsn)
            positions, position = offsets.with_wal_position(self._conn, self._group)
            for _, reached in pending:
                require_kept(reached, positions)
            while not offsets.is_flushed(self._conn, position):
                if self.stopping.wait(CHECK_SECONDS):
                    raise NotNow("stopping")
        except psycopg.Error:
            self._disconnect()
            raise
        self._confirm(pending[-1][0])
        with self._changed:
            for _ in pending:
                self._pending.popleft()
            self._changed.notify_all()

    def _disconnect(self) -> None:
        conn, self._conn = self._conn, None
        if conn is not None:
            conn.close()
