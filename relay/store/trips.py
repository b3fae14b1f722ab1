"""Runs several statements in one round trip, by libpq itself.

For what each live batch runs: psycopg's cursors take several times as much CPU as its statements. Parameters and
results are PostgreSQL's text. A statement is prepared where it first runs in a session, in the same round trip.

Source: PostgreSQL documentation, "Pipeline Mode".
"""

from __future__ import annotations

import select
from collections.abc import Sequence
from secrets import token_hex
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import psycopg
from psycopg.pq import ExecStatus, TransactionStatus
from psycopg.pq.abc import PGconn, PGresult

from relay.faults import server_error

_BEGIN = b"begin"
_DONE = (ExecStatus.COMMAND_OK, ExecStatus.TUPLES_OK)


class BoundStatement(NamedTuple):
    """A statement with parameters `$1`, `$2`, …, and their values."""

    text: bytes
    values: Sequence[bytes | None] = ()

    @classmethod
    def of(cls, text: bytes, *values: str | int | None) -> BoundStatement:
        """A statement with values of its own, as PostgreSQL reads them."""
        return cls(text, [None if each is None else str(each).encode() for each in values])


class _Sessions:
    """The names of the statements that are prepared in each session.

    Once the server has lost one, as by a handler's DEALLOCATE ALL, nothing is prepared any more.
    """

    def __init__(self) -> None:
        self._names: WeakKeyDictionary[psycopg.Connection[Any], dict[bytes, bytes]] = (
            WeakKeyDictionary()
        )
        self._prepares = True

    def prepared_in(self, conn: psycopg.Connection[Any]) -> dict[bytes, bytes] | None:
        if not self._prepares:
            return None
        names = self._names.get(conn)
        if names is None:
            names = self._names[conn] = {}
        return names

    def note_loss(self) -> None:
        self._prepares = False


_sessions = _Sessions()


class TripFailed(Exception):
    """The statement at `index` failed, with `error`; those after it did not run."""

    def __init__(self, index: int, error: psycopg.Error) -> None:
        super().__init__(index)
        self.index = index
        self.error = error


def run(conn: psycopg.Connection[Any], statement: BoundStatement) -> list[tuple[str | None, ...]]:
    """Run one statement, as `run_all` does; returns the rows of its result. Raises psycopg.Error."""
    try:
        (result,) = run_all(conn, [statement])
    except TripFailed as failed:
        raise failed.error from None
    fields = range(result.nfields)
    return [
        tuple(
            None if (value := result.get_value(row, field)) is None else value.decode()
            for field in fields
        )
        for row in range(result.ntuples)
    ]


def run_each(conn: psycopg.Connection[Any], statements: Sequence[BoundStatement]) -> None:
    """Run statements whose results nobody reads, as `run_all` does. Raises psycopg.Error."""
    try:
        run_all(conn, statements)
    except TripFailed as failed:
        raise failed.error from None


def run_all(conn: psycopg.Connection[Any], statements: Sequence[BoundStatement]) -> list[PGresult]:
    """Run statements in order, in the open database transaction or, unless `conn.autocommit`, in a new one.

    Returns their results. Raises TripFailed, and psycopg.Error where the connection is lost.
    """
    with conn.lock:
        pgconn = conn.pgconn
        idle = pgconn.transaction_status == TransactionStatus.IDLE
        first = [BoundStatement(_BEGIN)] if idle and not conn.autocommit else []
        pgconn.enter_pipeline_mode()
        try:
            results = _exchange(conn, pgconn, [*first, *statements])
        finally:
            try:
                pgconn.exit_pipeline_mode()
            except psycopg.Error:
                # Results are still to come: the connection is lost, or is to be.
                pgconn.finish()
    for index, result in enumerate(results):
        if result.status not in _DONE:
            error = server_error(result)
            if isinstance(error, psycopg.errors.InvalidSqlStatementName):
                _sessions.note_loss()
            raise TripFailed(index - len(first), error)
    return results[len(first) :]


def _exchange(
    conn: psycopg.Connection[Any], pgconn: PGconn, statements: Sequence[BoundStatement]
) -> list[PGresult]:
    """Send statements and read their results; of one that could not be prepared, that of its preparation."""
    names = _sessions.prepared_in(conn)
    new: dict[bytes, bytes] = {}
    prepares: list[bool] = []
    for text, values in statements:
        if names is None:
            pgconn.send_query_params(text, values)
            prepares.append(False)
            continue
        name = names.get(text) or new.get(text)
        prepares.append(name is None)
        if name is None:
            # Random, since a pooler may give a session with such statements to the next client.
            name = new[text] = b"relay_" + token_hex(8).encode()
            pgconn.send_prepare(name, text)
        pgconn.send_query_prepared(name, values)
    pgconn.pipeline_sync()
    poll = select.poll()
    _flush(pgconn, poll)
    poll.register(pgconn.socket, select.POLLIN)
    results: list[PGresult] = []
    try:
        for (text, _), prepared_now in zip(statements, prepares, strict=True):
            failure = None
            if prepared_now:
                result = _result(pgconn, poll)
                if result.status == ExecStatus.COMMAND_OK and names is not None:
                    names[text] = new[text]
                else:
                    failure = result
            result = _result(pgconn, poll)
            results.append(failure or result)
        # The answer to the Sync.
        _next(pgconn, poll)
    except psycopg.OperationalError:
        # The server may have said why it ends the session.
        if all(each.status in _DONE for each in results):
            raise
    return results


def _result(pgconn: PGconn, poll: select.poll) -> PGresult:
    """The result of a statement, and past its end."""
    result = _next(pgconn, poll)
    if result is None:
        raise psycopg.OperationalError("the connection is lost")
    _next(pgconn, poll)
    return result


def _next(pgconn: PGconn, poll: select.poll) -> PGresult | None:
    while pgconn.is_busy():
        poll.poll()
        pgconn.consume_input()
    return pgconn.get_result()


def _flush(pgconn: PGconn, poll: select.poll) -> None:
    """Send what is buffered; reads meanwhile, since the server may wait for that."""
    while pgconn.flush():
        poll.register(pgconn.socket, select.POLLIN | select.POLLOUT)
        for _, events in poll.poll():
            if events & ~select.POLLOUT:
                pgconn.consume_input()
