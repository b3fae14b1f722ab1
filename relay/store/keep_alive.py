"""Gives signs of life in sessions whose transaction waits for this process, so that the server can end others.

An empty query counts as activity for `idle_in_transaction_session_timeout` and in `pg_stat_activity.state_change`. It
takes no snapshot and works in an aborted transaction. A process that is frozen sends none.

Source: PostgreSQL documentation, "Message Formats" (EmptyQueryResponse); psycopg documentation, "Concurrent
operations".
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
from psycopg.pq import PipelineStatus, TransactionStatus

SECONDS = 5.0
"""Seconds between two signs of life."""
LIMIT = "30s"
"""The `idle_in_transaction_session_timeout` of such a session, unless the user has set another one."""

_WAITING = (TransactionStatus.INTRANS, TransactionStatus.INERROR)


class KeepAlive:
    """Gives signs of life in the sessions of `within`, from a thread of its own."""

    def __init__(self) -> None:
        self._conns: set[psycopg.Connection[Any]] = set()
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    @contextmanager
    def within(self, conn: psycopg.Connection[Any]) -> Iterator[None]:
        """Keep the session alive until the context ends.

        In it the connection may be used only in ways that hold psycopg's lock, as cursors do.
        """
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="keep-alive", daemon=True)
            self._thread.start()
        self._conns.add(conn)
        try:
            yield
        finally:
            with conn.lock:
                self._conns.discard(conn)

    def close(self) -> None:
        """End the thread."""
        self._stopped.set()

    def _run(self) -> None:
        while not self._stopped.wait(SECONDS):
            for conn in list(self._conns):
                self._give_sign(conn)

    def _give_sign(self, conn: psycopg.Connection[Any]) -> None:
        if not conn.lock.acquire(blocking=False):
            return  # a statement runs
        try:
            pgconn = conn.pgconn
            if (
                conn in self._conns
                and pgconn.transaction_status in _WAITING
                and pgconn.pipeline_status == PipelineStatus.OFF
            ):
                pgconn.exec_(b"")
        except psycopg.Error:
            return  # the thread that uses the session gets its error
        finally:
            conn.lock.release()
