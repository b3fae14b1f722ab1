"""The connection of a reader: a session of the server with settings of its own, in which the reader also waits.

The server ends a session that says nothing for as long as the lease, so that what a frozen process has is free again.
"""

from __future__ import annotations

import select
import socket
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from relay.client.errors import ReaderError, reader_error
from relay.runtime.adapters import own_adapters
from relay.runtime.notifications import take_notifications

if TYPE_CHECKING:
    import psycopg

_LONGEST_STATEMENT_SECONDS = 60
"""How long a page may take, which holds a snapshot: a condition may be costly."""


class ReaderSession:
    """A connection that is opened, used and closed again and again, by one thread at a time; `wake` by any.

    `lease` is in seconds. Every method but `wake` raises psycopg.Error or OSError when the connection is lost, and
    ReaderError for what no retry repairs.
    """

    def __init__(self, dsn: str, name: str, lease: float) -> None:
        self._dsn = dsn
        self._name = name
        self._lease = lease
        self._conn: psycopg.Connection[Any] | None = None
        self.used_at = 0.0
        """When it asked the server for something last, by the monotonic clock."""
        self._waker, self._wakeup = socket.socketpair()
        self._waker.setblocking(False)

    @property
    def is_open(self) -> bool:
        """Whether there is a connection, which may have been lost meanwhile."""
        return self._conn is not None

    def open(self) -> None:
        """Connect, and set what the session needs."""
        import psycopg
        from psycopg.conninfo import conninfo_to_dict

        try:
            given = conninfo_to_dict(self._dsn)
        except psycopg.ProgrammingError:
            # Its text may have a password.
            raise ReaderError(
                f"reader {self._name}: the connection string is not valid: write it as "
                "postgresql://user@host/database or host=… dbname=… user=…"
            ) from None
        options: dict[str, Any] = {
            "application_name": f"relay reader {self._name}"[:63],
            "connect_timeout": 10,
            "keepalives_idle": 10,
            "keepalives_interval": 5,
            "keepalives_count": 3,
        }
        self._conn = psycopg.connect(
            self._dsn,
            autocommit=True,
            client_encoding="UTF8",
            context=own_adapters(),
            **{each: value for each, value in options.items() if each not in given},
        )
        milliseconds = str(round(self._lease * 1000))
        settings = {
            "DateStyle": "ISO",
            "TimeZone": "UTC",
            "IntervalStyle": "postgres",
            "bytea_output": "hex",
            "default_transaction_isolation": "read committed",
            "idle_session_timeout": milliseconds,
            "lock_timeout": milliseconds,
            "statement_timeout": str(_LONGEST_STATEMENT_SECONDS * 1000),
            "tcp_user_timeout": milliseconds,
        }
        self.execute(
            "select pg_catalog.set_config(s.name, s.value, false) "
            "from unnest(%s::text[], %s::text[]) as s (name, value)",
            (list(settings), list(settings.values())),
        )
        if (
            int(self.value("select pg_catalog.pg_backend_pid()") or 0)
            != self._conn.info.backend_pid
        ):
            raise ReaderError(
                f"reader {self._name}: a pooler is between this process and the server, and a reader needs a session: "
                "give the address of the server"
            )

    def close(self) -> None:
        """Close the connection, if there is one; raises nothing."""
        conn, self._conn = self._conn, None
        if conn is not None:
            with suppress(Exception):
                conn.close()

    def dispose(self) -> None:
        """Close what `open` does not open again; raises nothing."""
        self.close()
        self._waker.close()
        self._wakeup.close()

    def execute(self, statement: str, parameters: tuple[Any, ...] = ()) -> Any:
        """Run a statement with `%s` for its parameters; return its result as libpq has it."""
        import psycopg

        assert self._conn is not None  # noqa: S101
        self.used_at = time.monotonic()
        try:
            return self._conn.execute(statement.encode(), parameters).pgresult
        except psycopg.Error as error:
            self._raise_known(error)
            raise

    def value(self, statement: str, parameters: tuple[Any, ...] = ()) -> str | None:
        """Run a statement; return its only value as text."""
        value: bytes | None = self.execute(statement, parameters).get_value(0, 0)
        return None if value is None else value.decode()

    def send(self, statement: str, parameters: tuple[str, ...]) -> None:
        """Send a statement with `$1` for its parameters. `received` has to come before anything else is run."""
        assert self._conn is not None  # noqa: S101
        self.used_at = time.monotonic()
        pgconn = self._conn.pgconn
        pgconn.send_query_params(statement.encode(), [each.encode() for each in parameters])
        while pgconn.flush():
            _await(pgconn.socket, select.POLLOUT)

    def received(self) -> Any:
        """Wait for the result of the statement that was sent."""
        import psycopg
        from psycopg.pq import ExecStatus

        assert self._conn is not None  # noqa: S101
        pgconn = self._conn.pgconn
        while pgconn.is_busy():
            _await(pgconn.socket, select.POLLIN)
            pgconn.consume_input()
        found: Any = None
        while (result := pgconn.get_result()) is not None:
            found = result
        if found is None:
            raise psycopg.OperationalError("the connection was lost")
        if found.status != ExecStatus.TUPLES_OK:
            error = psycopg.errors.error_from_result(found, "utf-8")
            self._raise_known(error)
            raise error
        return found

    def wait(self, seconds: float, notified: bool) -> bool:
        """Wait until `wake` is called or, if asked for, the session is notified; return whether it was notified."""
        # A wait of psycopg would wake the process ten times a second.
        pgconn = None if self._conn is None else self._conn.pgconn
        poll = select.poll()
        if pgconn is not None:
            poll.register(pgconn.socket, select.POLLIN)
        poll.register(self._wakeup, select.POLLIN)
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            readable = [number for number, _ in poll.poll(left * 1000)]
            if self._wakeup.fileno() in readable:
                return False
            if readable and pgconn is not None and take_notifications(pgconn) and notified:
                return True
        return False

    def wake(self) -> None:
        """End each `wait` from now on, in any thread and in a signal handler."""
        with suppress(OSError):
            self._waker.send(b"!")

    @property
    def descriptor(self) -> int | None:
        """What becomes readable when the session is notified, or its connection lost; None without a connection."""
        conn = self._conn
        return None if conn is None or conn.closed else int(conn.pgconn.socket)

    def _raise_known(self, error: Exception) -> None:
        """Raise ReaderError for an error that no retry repairs."""
        known = reader_error(error, self._name)
        if known is not None:
            raise known from error


class LaneSession(ReaderSession):
    """The session of one of several readers in a thread: `wait` notes until when, and returns at once."""

    def __init__(self, dsn: str, name: str, lease: float) -> None:
        super().__init__(dsn, name, lease)
        self.waits_until = 0.0
        """By the monotonic clock."""

    def wait(self, seconds: float, notified: bool) -> bool:
        """Note until when the reader waits, unless `notice` ends that; returns False."""
        self.waits_until = time.monotonic() + seconds
        return False

    def notice(self) -> None:
        """Read what has come, and end the wait for a notification, or a lost connection."""
        import psycopg

        if self._conn is None:
            self.waits_until = 0.0
            return
        try:
            if take_notifications(self._conn.pgconn):
                self.waits_until = 0.0
        except psycopg.Error:
            self.waits_until = 0.0


def _await(descriptor: int, event: int) -> None:
    poll = select.poll()
    poll.register(descriptor, event)
    poll.poll()
