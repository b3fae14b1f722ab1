"""Lets the server check statements of the user before a run."""

from __future__ import annotations

import psycopg

from relay.faults import ConfigurationError, is_transient, server_error
from relay.store.connections import Connection
from relay.store.session_settings import USERS_PATH_LOCALLY


def parse(conn: Connection, key: str, statement: str, parameters: int) -> list[str]:
    """Let the server parse and analyse a statement, that of a key, without running it; returns its result's columns.

    Raises ConfigurationError if it refuses the statement, or finds fewer parameters, since inside quotes there are
    none, or more of them.
    """
    with conn.transaction(force_rollback=True):
        conn.execute(USERS_PATH_LOCALLY)
        result = conn.pgconn.prepare(b"", statement.encode())
        if result.error_message:
            error = server_error(result)
            if is_transient(error):
                raise error
            message = (error.diag.message_primary or str(error)).strip()
            raise ConfigurationError(
                f"{key}: {message}: correct the statement, or create and grant what it names"
            )
        described = conn.pgconn.describe_prepared(b"")
        if described.nparams < parameters:
            raise ConfigurationError(
                f"{key}: a placeholder is inside quotes, such as those of `do`, where the server "
                "accepts no parameters: write %(field)s without quotes, or call a procedure with it"
            )
        if described.nparams > parameters:
            raise ConfigurationError(
                f"{key}: relay fills no parameter such as ${described.nparams}: write %(field)s"
            )
        return [(described.fname(index) or b"").decode() for index in range(described.nfields)]


def explain(
    conn: Connection, key: str, statement: bytes, parameters: dict[str, None] | None
) -> None:
    """Raise ConfigurationError if the role lacks a privilege, which the server checks only when execution starts."""
    try:
        with conn.transaction(force_rollback=True):
            conn.execute(USERS_PATH_LOCALLY)
            conn.execute(b"explain " + statement, parameters)
    except psycopg.errors.InsufficientPrivilege as error:
        raise ConfigurationError(
            f"{key}: {error.diag.message_primary}: grant it to the role of target.dsn"
        ) from None
    except psycopg.Error as error:
        if is_transient(error):
            raise
        # Some statements cannot be explained (CALL), or not with null parameters; `parse` has checked the rest.


def require_read_only(
    conn: Connection, key: str, statement: bytes, parameters: dict[str, None]
) -> None:
    """Raise ConfigurationError for a statement that a read-only transaction refuses, or that is no query."""
    try:
        with conn.transaction(force_rollback=True):
            conn.execute(b"set transaction read only; " + USERS_PATH_LOCALLY)
            # Opened and not read: EXPLAIN accepts what writes.
            conn.execute(b"declare relay_check cursor for " + statement, parameters)
    except (
        psycopg.errors.ReadOnlySqlTransaction,
        psycopg.errors.SyntaxError,
        psycopg.errors.FeatureNotSupported,
    ) as error:
        raise ConfigurationError(
            f"{key}: {error.diag.message_primary}: it has to be a query that neither writes nor locks rows"
        ) from None
    except psycopg.Error as error:
        if is_transient(error):
            raise
        # Null parameters may be at fault.
