"""Reads the end of the log once for all streams of a process: a thread with a connection of its own.

relay wakes it by NOTIFY where it runs; it polls all the same. Without a stream it reads nothing and has no connection.
"""

from __future__ import annotations

import logging
import select
from collections.abc import Callable
from threading import Event

from psycopg import sql

from relay.admin.connections import require_schema
from relay.api.positions import EventsLost, EventsRemoved, LogHistory, present, read_page
from relay.config.settings import Settings
from relay.runtime.notifications import take_notifications
from relay.runtime.parts import Condition, Recurring
from relay.store.connections import SHORT_TIMEOUTS, Connection, connect, sessions_with
from relay.store.log_pages import LogPosition, OutboxPage, PageSize
from relay.waits import Backoff

log = logging.getLogger(__name__)

_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.005, 1.0
"""How long it waits after it has found nothing: the pause doubles each time."""
_STATEMENT_SECONDS = 60.0
_RETRY_SECONDS = 2.0


class Tail(Recurring):
    """Reads the log while it is `wanted`, and passes each page to `deliver`, in the thread of the tail.

    `begin` gets the position from which it reads first, and again after a gap: what was before it was not read.
    """

    def __init__(
        self,
        settings: Settings,
        history: LogHistory,
        begin: Callable[[LogPosition], None],
        deliver: Callable[[OutboxPage], None],
    ) -> None:
        condition = Condition(
            "api",
            log,
            "the streams of the API stand still",
            "the streams of the API go on",
            longest_pause=_RETRY_SECONDS,
        )
        super().__init__(condition, close_seconds=2.0)
        self.wanted = Event()
        self._settings = settings
        self._history = history
        self._begin = begin
        self._deliver = deliver
        self._conn: Connection | None = None
        self._position: LogPosition | None = None
        self._size = PageSize()
        self._pauses = Backoff(_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS)

    def stop(self) -> None:
        """End after the statement in flight."""
        self.stopping.set()
        self.wanted.set()

    def turn(self) -> float:
        """Read a page, or wait until there may be one."""
        if not self.wanted.is_set():
            self.release()
            self.condition.clear()
            self._position = None
            self.wanted.wait()
            return 0.0
        try:
            self._read(self._conn or self._connect())
        except BaseException:
            self.release()
            raise
        self.condition.works()
        return 0.0

    def release(self) -> None:
        """Close the connection."""
        conn, self._conn = self._conn, None
        if conn is not None:
            conn.close()

    def _read(self, conn: Connection) -> None:
        if self._position is None:
            self._position = present(conn, self._history)
            self._begin(self._position)
        position = self._position
        try:
            page = read_page(conn, self._history, position, self._size.events)
        except (EventsLost, EventsRemoved):
            # A failover has lost what was read last, or retention has removed what comes next.
            self._position = None
            return
        if page.transactions or page.end != position:
            self._size.note(page)
            self._deliver(page)
            self._position = page.end
        if page.transactions:
            self._pauses.reset()
        else:
            self._wait(conn)

    def _wait(self, conn: Connection) -> None:
        """Wait for the next poll, or until relay says that there were commits."""
        poll = select.poll()
        poll.register(conn.pgconn.socket, select.POLLIN)
        if not poll.poll(self._pauses.take() * 1000):
            return
        if take_notifications(conn.pgconn):
            # What relay has seen in the WAL may become visible a moment later.
            self._pauses.reset()

    def _connect(self) -> Connection:
        with sessions_with({"statement_timeout": f"{_STATEMENT_SECONDS * 1000:.0f}"}):
            conn = connect(self._settings.source_dsn, **SHORT_TIMEOUTS)
        try:
            require_schema(conn, self._settings)
            ((channel,),) = conn.execute("select relay.watch_log()").fetchall()
            conn.execute(sql.SQL("listen {}").format(sql.Identifier(channel)))
        except BaseException:
            conn.close()
            raise
        self._conn = conn
        return conn
