"""Handlers that call a Python function: `module:function(transaction, cursor)`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import psycopg
from psycopg.pq import TransactionStatus

from relay.causes import Causing, handling
from relay.config.handlers import PythonHandler
from relay.config.imports import load
from relay.faults import TransactionAborted, transaction_ended
from relay.handlers import causes
from relay.model.events import Transaction
from relay.model.transactions import Routed
from relay.runtime.timed import step
from relay.store.connections import Connection, with_users_adapters
from relay.store.handler_sessions import is_open

_SIGN_ENDS_SECONDS = 10.0
"""How long a sign of life is waited for (relay/store/handler_sessions.py): the time of an empty query."""


class Python:
    """Calls its function once for each transaction; changes through the cursor commit with the task."""

    def __init__(self, name: str, settings: PythonHandler, max_hops: int) -> None:
        self.name = name
        self._max_hops = max_hops
        self._publishes = settings.publishes
        self._function = load(
            f"handlers.{name}.callable", settings.callable, "transaction", "cursor"
        )

    def configure(self, conn: Connection) -> None:
        """Do nothing: the function needs no preparation."""

    def check(self, conn: Connection) -> None:
        """Do nothing: the callable was imported when the handler was built."""

    def statements(self, routed: Routed) -> None:
        """None: the function runs what it likes."""

    def apply(self, conn: Connection, routed: Routed) -> None:
        """Call the function for each transaction, in order.

        Raises the errors of the function, TransactionAborted if it continued after a database error, and
        ConfigurationError if it ended the database transaction. If it then began another one, the commit detects it.
        """
        factories = conn.row_factory, conn.cursor_factory
        cursor = _cursor(conn)
        try:
            with handling(Causing((), self._max_hops)) as causing:
                for transaction in routed:
                    if cursor.closed:
                        cursor = _cursor(conn)
                    step()
                    causing.begin(transaction.events)
                    if self._publishes:
                        causes.begin(conn, causing)
                    call(self.name, self._function, conn, transaction, cursor)
            if self._publishes:
                causes.end(conn)
        finally:
            cursor.close()
            # relay runs its own statements on the same connection.
            conn.row_factory, conn.cursor_factory = factories


def _cursor(conn: Connection) -> psycopg.Cursor[Any]:
    with with_users_adapters(conn):
        return conn.cursor()


def call(
    name: str,
    function: Callable[[Transaction, psycopg.Cursor[Any]], Any],
    conn: Connection,
    transaction: Transaction,
    cursor: psycopg.Cursor[Any],
) -> None:
    """Call the function of the handler `name` once, in an open database transaction.

    Raises what it raises, TransactionAborted if it continued after a database error, and ConfigurationError if it ended
    the transaction.
    """
    try:
        with with_users_adapters(conn):
            function(transaction, cursor)
    except Exception as error:
        if _is_ended(conn) or _is_another(conn):
            raise transaction_ended([name]) from error
        raise
    if conn.pgconn.transaction_status == TransactionStatus.INTRANS:
        return
    if _is_ended(conn):
        raise transaction_ended([name])
    if _status(conn) == TransactionStatus.INERROR:
        raise TransactionAborted(
            "the function caught a database error and continued, but the error aborted the transaction: do not "
            "catch it, or run what may fail inside `with cursor.connection.transaction():`"
        )


def _is_ended(conn: Connection) -> bool:
    """Whether no database transaction is open although the connection is alive."""
    status = _status(conn)
    return not conn.broken and status not in (TransactionStatus.INTRANS, TransactionStatus.INERROR)


def _is_another(conn: Connection) -> bool:
    """Whether a database transaction is open that relay did not begin."""
    open_now = _status(conn) == TransactionStatus.INTRANS
    return open_now and not is_open(conn)


def _status(conn: Connection) -> TransactionStatus:
    """The status when no sign of life is in flight, during which it is ACTIVE.

    A function that left `cursor.stream` unfinished holds the lock for good.
    """
    locked = conn.lock.acquire(timeout=_SIGN_ENDS_SECONDS)
    try:
        return conn.info.transaction_status
    finally:
        if locked:
            conn.lock.release()
