"""Lends sessions of the target in which relay runs statements and code of the user.

A transaction guard prevents user code from ending the database transaction in which relay runs it. A cursor WITH HOLD
is open until relay commits. If user code commits, PostgreSQL runs the cursor's query, which raises an error, so that
nothing becomes visible. After a rollback the cursor no longer exists. A transaction with such a cursor cannot be
prepared.

Signs of life keep a session whose transaction waits for this process, so that the server can end others. An empty query
counts as activity for `idle_in_transaction_session_timeout` and in `pg_stat_activity.state_change`. It takes no
snapshot and works in an aborted transaction. A process that is frozen sends none.

Sources: PostgreSQL documentation, "DECLARE" (WITH HOLD), "DISCARD" and "Message Formats" (EmptyQueryResponse); psycopg
documentation, "Concurrent operations".
"""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any

import psycopg
from psycopg import sql
from psycopg.pq import ExecStatus, PipelineStatus, TransactionStatus

from relay.faults import ConfigurationError, made_read_only, server_error, transaction_ended
from relay.store import session_settings
from relay.store.connections import Configure, Dsn, new_pool
from relay.store.session_settings import LOCK_TIMEOUT, SessionKind

log = logging.getLogger(__name__)

_RESET = b"reset session authorization; reset role; reset all; unlisten *; close all"
"""With `pg_advisory_unlock_all`, resets what DISCARD ALL does, except temporary relations and prepared statements.

Source: PostgreSQL documentation, "DISCARD".
"""
_CREATE_LEFT_OVER = r"""
    create or replace function pg_temp.relay_left_over() returns boolean language plpgsql as $$
    begin
        perform pg_advisory_unlock_all();
        return exists (select from pg_prepared_statements where from_sql)
            or exists (select from pg_depend join pg_class on pg_class.oid = objid
                        where classid = 'pg_class'::regclass and refclassid = 'pg_namespace'::regclass
                          and refobjid = pg_my_temp_schema() and relname not like 'relay\_%');
    end $$
"""
"""A function, since planning this query for each reset would cost more than the reset itself."""

_CREATE_GUARD = r"""
    create or replace function pg_temp.relay_refuse_commit() returns void language plpgsql as $$
    begin
        raise exception 'a handler may not commit: relay commits its effects with offsets and dead letters'
              using errcode = 'invalid_transaction_termination';
    end $$
"""
"""Creates the function of the cursor. Run once in each session."""
_GUARD = b"declare relay_transaction cursor with hold for select pg_temp.relay_refuse_commit()"
_GUARDED_BEGIN = b"begin; " + _GUARD
_IS_OPEN = "select from pg_catalog.pg_cursors where name operator(pg_catalog.=) 'relay_transaction'"
"""Asked under the user's search_path."""
_CLOSE_GUARD = b"close relay_transaction"
"""Run before the commit, in its round trip. Raises InvalidCursorName if the open transaction is not relay's."""

SIGN_SECONDS = 5.0
"""Seconds between two signs of life."""
IDLE_LIMIT = "30s"
"""The `idle_in_transaction_session_timeout` of such a session, unless the user has set another one."""

_CANCEL_SECONDS = 1.0
_WAITING = (TransactionStatus.INTRANS, TransactionStatus.INERROR)


class HandlerPool:
    """A pool of at most `size` sessions of the target that run statements of the user.

    Settings and locks of a session are reset with the commit, in the same round trip. Unless `durable`, a crash of the
    server may lose commits. `code_of` names the Python handlers: their code cannot end a transaction, and a session in
    which it left temporary tables or prepared statements is closed. With `keep_alive`, the server ends a transaction
    that waits for this process when it is frozen; otherwise after `idle_limit`, unless the user has set another one.
    `mark` is the application_name of the next transactions; None: the pool's.
    """

    def __init__(
        self,
        dsn: Dsn,
        size: int,
        configure: Configure,
        durable: bool,
        code_of: Sequence[str],
        keep_alive: KeepAlive | None = None,
        idle_limit: str | None = None,
    ) -> None:
        self._configure = configure
        self._code_of = code_of
        self._reset = b""
        self._keep_alive = keep_alive
        self.mark: str | None = None
        defaults = {"lock_timeout": LOCK_TIMEOUT}
        if keep_alive is not None:
            idle_limit = IDLE_LIMIT
        if idle_limit is not None:
            defaults["idle_in_transaction_session_timeout"] = idle_limit
        session = session_settings.statements(
            SessionKind.HANDLER, defaults=defaults, durable=durable
        )
        self._pool = new_pool(dsn, size, session, self._prepare)

    def connection(self) -> AbstractContextManager[psycopg.Connection[Any]]:
        """Return a session for relay's own statements, committed at the end of the block."""
        return self._pool.connection()

    @contextmanager
    def transaction(self) -> Iterator[psycopg.Connection[Any]]:
        """Run a database transaction; it is committed at the end of the block, or rolled back by an exception.

        Raises ConfigurationError if user code ended it, and psycopg.Error.
        """
        with self._pool.connection() as conn:
            try:
                self._begin(conn)
                with self._keep_alive.within(conn) if self._keep_alive else nullcontext():
                    yield conn
                left_over = self._commit(conn)
            except BaseException as error:
                is_code = bool(self._code_of) and _made_read_only(conn, error)
                self._abandon(conn)
                if is_code:
                    raise made_read_only(self._code_of) from error
                raise
            if left_over and self._code_of:
                _close(conn)

    def _begin(self, conn: psycopg.Connection[Any]) -> None:
        """Begin a transaction that user code must not end; without user code the first statement may begin it."""
        begin = _GUARDED_BEGIN if self._code_of else b"begin"
        if self.mark:
            name = sql.SQL("; set local application_name = {}").format(self.mark)
            begin += name.as_bytes(conn)
        elif not self._code_of:
            return
        result = conn.pgconn.exec_(begin)
        if result.status == ExecStatus.COMMAND_OK:
            return
        error = server_error(result)
        if isinstance(error, psycopg.errors.UndefinedFunction | psycopg.errors.InvalidSchemaName):
            raise ConfigurationError(
                "target.dsn: temporary objects of the session are missing in the next transaction, as with a pooler "
                "in transaction mode: connect to PostgreSQL itself, or set the pooler to session mode"
            )
        raise error

    def _commit(self, conn: psycopg.Connection[Any]) -> bool:
        # Deferred triggers of the user's tables run at the commit.
        end = session_settings.USERS_PATH_LOCALLY + b"; commit; " + self._reset
        if not self._code_of:
            return _run(conn, end)
        try:
            return _run(conn, _CLOSE_GUARD + b"; " + end)
        except psycopg.errors.InvalidCursorName:
            raise transaction_ended(self._code_of) from None

    def close(self) -> None:
        """Close the sessions."""
        self._pool.close()
        if self._keep_alive:
            self._keep_alive.close()

    def _prepare(self, conn: psycopg.Connection[Any]) -> None:
        last = b"pg_temp.relay_left_over()" if self._code_of else b"pg_advisory_unlock_all()"
        if self._code_of:
            conn.execute(_CREATE_LEFT_OVER)
            conn.execute(_CREATE_GUARD)
        self._reset = b"; ".join((_RESET, session_settings.restoring(conn), b"select " + last))
        self._configure(conn)
        conn.autocommit = False

    def _abandon(self, conn: psycopg.Connection[Any]) -> None:
        try:
            conn.rollback()
            if _run(conn, self._reset) and self._code_of:
                _close(conn)
        except psycopg.Error:
            conn.close()


def _made_read_only(conn: psycopg.Connection[Any], error: BaseException) -> bool:
    """Whether a transaction failed since it is read-only, although transactions of this session are not.

    A server that does not report these settings, such as some poolers, counts as one that has become read-only.
    """
    refusals = [
        each
        for each in (error, error.__cause__)
        if isinstance(each, psycopg.errors.ReadOnlySqlTransaction)
    ]
    if not any(each.diag.source_function == "PreventCommandIfReadOnly" for each in refusals):
        return False
    settings = ("default_transaction_read_only", "in_hot_standby")
    return all(conn.info.parameter_status(each) == "off" for each in settings)


def _run(conn: psycopg.Connection[Any], command: bytes) -> bool:
    """Run statements of which the last returns a boolean; returns it. Raises psycopg.Error."""
    result = conn.pgconn.exec_(command)
    if result.status != ExecStatus.TUPLES_OK:
        raise server_error(result)
    return result.get_value(0, 0) == b"t"


def _close(conn: psycopg.Connection[Any]) -> None:
    log.warning(
        "a handler left temporary tables or prepared statements in its session, which was closed: drop them, or create "
        "tables with `on commit drop`"
    )
    conn.close()


def end_session(conn: psycopg.Connection[Any]) -> None:
    """End a session that code of the user still uses in another thread: what it does there from now on fails."""
    with suppress(psycopg.Error, OSError):
        conn.cancel_safe(timeout=_CANCEL_SECONDS)
    with suppress(psycopg.Error, OSError), socket.socket(fileno=os.dup(conn.pgconn.socket)) as sock:
        # Not closed: the other thread may be in libpq, which sees the end of the connection now.
        sock.shutdown(socket.SHUT_RDWR)
    if conn.lock.acquire(timeout=_CANCEL_SECONDS):
        conn.lock.release()
    else:
        # An unfinished `cursor.stream` holds it for good.
        conn.lock = threading.Lock()
    conn.close()


def is_open(conn: psycopg.Connection[Any]) -> bool:
    """Whether the open transaction is still the one that relay began."""
    cursor = conn.execute(_IS_OPEN)
    return cursor.rowcount == 1


@contextmanager
def guarded(conn: psycopg.Connection[Any]) -> Iterator[None]:
    """Guard the open transaction, or savepoint, of a session that is of no pool: user code in the block cannot end it.

    If the block raises, its caller rolls back, which ends the guard too. Raises psycopg.Error.
    """
    conn.execute(_CREATE_GUARD)
    conn.execute(_GUARD)
    yield
    conn.execute(_CLOSE_GUARD)


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
        while not self._stopped.wait(SIGN_SECONDS):
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
