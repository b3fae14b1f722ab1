"""Waits for the outbox's notification, on a connection of its own."""

from __future__ import annotations

import logging
import selectors
from typing import Any

import psycopg

from relay.faults import describe
from relay.source.bell import Bell
from relay.store.connections import connect

log = logging.getLogger(__name__)

CHANNEL = "event_channel"


class Listener:
    """Wakes a waiting thread when something is published, or when another thread rings.

    Without a connection it only waits: a notification is a hint, the wait's end is what counts.
    """

    def __init__(self, dsn: str) -> None:
        self._dsn = dsn
        self._conn: psycopg.Connection[Any] | None = None
        self._bell = Bell()

    def ring(self) -> None:
        """End the wait that is under way, or else the next one. Safe in any thread."""
        self._bell.ring()

    def wait(self, timeout: float) -> None:
        """Wait at most `timeout` seconds. Returns at once after connecting: what came before was not heard."""
        if self._conn is None and self._connected():
            return
        with selectors.DefaultSelector() as selector:
            selector.register(self._bell, selectors.EVENT_READ)
            if self._conn is not None:
                selector.register(self._conn.pgconn.socket, selectors.EVENT_READ)
            ready = {key.fileobj for key, _ in selector.select(timeout)}
        if self._bell in ready:
            self._bell.hush()
        if ready - {self._bell}:
            self._take()

    def close(self) -> None:
        """Close the connection."""
        self._drop()
        self._bell.close()

    def _connected(self) -> bool:
        try:
            self._conn = connect(self._dsn)
            self._conn.execute(f"listen {CHANNEL}".encode())
        except psycopg.Error as error:
            log.debug("cannot listen", extra={"fault": describe(error)})
            self._drop()
        return self._conn is not None

    def _take(self) -> None:
        if self._conn is None:
            return
        try:
            for _ in self._conn.notifies(timeout=0):
                pass
        except psycopg.Error as error:
            log.debug("the listening connection was lost", extra={"fault": describe(error)})
            self._drop()

    def _drop(self) -> None:
        conn, self._conn = self._conn, None
        if conn is not None:
            conn.close()
