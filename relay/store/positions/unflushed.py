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
from threading import Condition, Event
from typing import Any

import psycopg

from relay.conditions import Condition as PartCondition
from relay.faults import RelayError, TaskFault, TransientFault
from relay.model.events import Lsn
from relay.retry import RetryUntilSuccess
from relay.store.connections import Dsn, connect
from relay.store.positions import offsets
from relay.threads import Thread

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


class Unflushed:
    """Keeps the commits of this process that are not confirmed to the source yet, oldest first.

    `confirm` is called with a position once everything up to it is durable, `failed` once when the target has lost
    commits; both from a thread of its own.
    """

    def __init__(
        self, dsn: Dsn, group: str, confirm: Callable[[Lsn], None], failed: Callable[[], None]
    ) -> None:
        self._dsn = dsn
        self._group = group
        self._confirm = confirm
        self._failed = failed
        self._conn: psycopg.Connection[Any] | None = None
        self._pending: deque[tuple[Lsn, Mapping[int, Lsn]]] = deque()
        self._changed = Condition()
        self._stopping = Event()
        self._thread = Thread(target=self._run, name="flushed", daemon=True)
        self.error: RelayError | None = None
        self.condition = PartCondition(
            "flushed",
            log,
            "cannot read yet what the target has flushed",
            "what the target has flushed is read again",
        )

    def start(self) -> None:
        """Start the thread that checks."""
        self._thread.start()

    def close(self) -> None:
        """Wait up to CLOSE_SECONDS for the last commits, then end the thread."""
        with self._changed:
            self._changed.wait_for(lambda: not self._pending or self.error, CLOSE_SECONDS)
            self._stopping.set()
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join(CLOSE_SECONDS)

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

    def _run(self) -> None:
        retrying = RetryUntilSuccess(self._stopping, self.condition)
        try:
            while self._wait_for_work():
                retrying(self._check)
        except Exception as error:
            if isinstance(error, RelayError) or not self._stopping.is_set():
                self._fail(error)
        finally:
            self._disconnect()

    def _fail(self, error: Exception) -> None:
        with self._changed:
            self.error = TaskFault.of(error).as_error()
            self._changed.notify_all()
        self._failed()

    def _wait_for_work(self) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._pending or self._stopping.is_set())
        return not self._stopping.is_set()

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
                if self._stopping.wait(CHECK_SECONDS):
                    raise TransientFault("stopping")
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
