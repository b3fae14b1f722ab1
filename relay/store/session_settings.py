"""The settings of relay's sessions by kind of session, whatever server, database, role and connection string say.

Whoever opens a session of relay applies its kind's settings in the first round trip: `connections.connect` and the
pools there, and `walsender.open_replication`. They are set in the session, since poolers refuse startup parameters
(PgBouncer's `ignore_startup_parameters`), and those would compete with `options` of the connection string.

Each setting that changes what relay reads, what it does, or how long its session lives is decided here:

====================================  ==========================  ================================================
setting                               relay's own, the walsender  handlers
====================================  ==========================  ================================================
search_path                           pg_catalog, pg_temp         the user's in a handler, and at the commit
`TEXT_FORM`, row_security,            pinned                      the user's
standard_conforming_strings,
transform_null_equals,
default_table_access_method,
plpgsql.extra_errors
statement_timeout                     off                         the user's
lock_timeout                          off, in pools LOCK_TIMEOUT  the user's, or LOCK_TIMEOUT
idle_in_transaction_session_timeout   off                         the user's; of executors, or `IDLE_LIMIT`
transaction_timeout, tcp_user_timeout off                         off
idle_session_timeout
tcp_keepalives_*                      pinned                      pinned
default_transaction_isolation         read committed              read committed
session_replication_role              origin                      origin
array_nulls                           on                          on
synchronous_commit                    on, or remote_apply         the same, unless target.synchronous_commit is off
====================================  ==========================  ================================================

Left as they are: `default_transaction_read_only`, with which operators fence a database, and providers one whose disk
is full (relay waits until it is reset); `role`, by which a login acts as another role; `wal_sender_timeout`, which the
receiver reads; the planner's settings, `jit`, memory, `temp_tablespaces` and `default_tablespace`, which decide cost
and place only; logging and `client_min_messages`. `client_encoding` is a startup parameter that poolers know, and goes
before what role and database have set.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from functools import lru_cache
from types import MappingProxyType
from typing import Any

import psycopg
from psycopg import sql
from psycopg.pq import ExecStatus

from relay.faults import ConfigurationError, server_error
from relay.runtime.adapters import own_adapters
from relay.store.trips import BoundStatement, run_each

SEARCH_PATH = "pg_catalog, pg_temp"
"""Names without a schema mean PostgreSQL's own objects: others could run code of whoever may create objects.

Source: PostgreSQL documentation, "Schemas" (Usage Patterns), "Writing SECURITY DEFINER Functions Safely".
"""

TEXT_FORM: Mapping[str, str] = {
    "datestyle": "ISO, YMD",
    "timezone": "UTC",
    "intervalstyle": "postgres",
    "bytea_output": "hex",
    "extra_float_digits": "1",
    "lc_monetary": "C",
    "xmlbinary": "base64",
    "quote_all_identifiers": "off",
}
"""Every setting that decides how PostgreSQL prints a value, with the value that relay reads.

Source: PostgreSQL documentation, "Client Connection Defaults"; pg_dump and postgres_fdw pin theirs for the same reason.
"""

LOCK_TIMEOUT = "30s"
"""How long a statement waits for a lock before its task is retried. In handlers' sessions the user may set another."""

_EVERY: Mapping[str, str] = {
    # After a minute without an answer the server ends the session and releases its locks.
    "tcp_keepalives_idle": "30",
    "tcp_keepalives_interval": "10",
    "tcp_keepalives_count": "3",
    # It would end the session of a client that reads slowly, as relay does when its memory is used up.
    "tcp_user_timeout": "0",
    # A session that waits is not forgotten: it has a claim, shows that relay runs, or listens.
    "idle_session_timeout": "0",
    # relay decides how many business transactions a database transaction has.
    "transaction_timeout": "0",
    # Each statement sees what was committed while the one before waited for a lock.
    "default_transaction_isolation": "read committed",
    # The triggers and foreign keys of relay's tables.
    "session_replication_role": "origin",
    # Without it, a null in an array is the text NULL.
    "array_nulls": "on",
}
_OWN: Mapping[str, str] = {
    **_EVERY,
    **TEXT_FORM,
    # An error where a policy would hide rows, as in pg_dump. Source: PostgreSQL documentation, "Row Security Policies".
    "row_security": "off",
    "statement_timeout": "0",
    "lock_timeout": "0",
    "idle_in_transaction_session_timeout": "0",
    "standard_conforming_strings": "on",
    "transform_null_equals": "off",
    "default_table_access_method": "heap",
    # They make errors of what relay's functions do, such as a variable that is called found.
    "plpgsql.extra_errors": "none",
}
_NONE: Mapping[str, str] = MappingProxyType({})
_Pairs = tuple[tuple[str, str], ...]


class SessionKind(Enum):
    """What a session is for."""

    OWN = "own"
    """Statements of relay only: it reads the outbox, keeps positions, and does the work of commands."""
    HANDLER = "handler"
    """Statements of the user too."""


PINNED: Mapping[SessionKind, Mapping[str, str]] = {
    SessionKind.OWN: _OWN,
    SessionKind.HANDLER: _EVERY,
}
"""The settings of each kind that nobody else decides."""

_PIN_PATH = f"set search_path = {SEARCH_PATH}"
USERS_PATH_LOCALLY = b"set local search_path to default"
"""Begins the user's search_path, which is that of connection string, role, database or server, for this transaction."""
PIN_PATH_LOCALLY = f"set local search_path = {SEARCH_PATH}".encode()
"""Ends it."""
_RELAYS_AGAIN = (
    PIN_PATH_LOCALLY,
    b"reset session authorization",
    b"reset role",
    b"select set_config('session_replication_role', 'origin', true)"
    b" where current_setting('session_replication_role') <> 'origin'",
)
"""End it, and what code of the user may have set for the policies and triggers of its tables."""

_DURABLE = (
    "case when current_setting('synchronous_commit') not in ('on', 'remote_apply') then {} end"
)


def statements(
    kind: SessionKind,
    more: Mapping[str, str] = _NONE,
    defaults: Mapping[str, str] = _NONE,
    durable: bool = True,
    local: bool = False,
) -> bytes:
    """Return the statements, for one round trip, that give a session its settings.

    `more` are pinned too; `defaults` are set where the user has set nothing (0). Without `durable`, a crash of the
    server may lose what the session commits. `local` ones end with the open transaction.
    """
    return _statements(kind, tuple(more.items()), tuple(defaults.items()), durable, local)


# Composing them costs more than the rest of a connection's preparation, and most sessions have the same ones.
@lru_cache(maxsize=64)
def _statements(
    kind: SessionKind, more: _Pairs, defaults: _Pairs, durable: bool, local: bool
) -> bytes:
    calls = [_pin(*each, local) for each in PINNED[kind].items()]
    calls += [_set(*each, local) for each in more]
    calls += [_default(*each, local) for each in defaults]
    if durable:
        calls.append(sql.SQL(_DURABLE).format(_set("synchronous_commit", "on", local)))
    else:
        calls.append(_set("synchronous_commit", "off", local))
    scope = "local " if local else ""
    # The first ones decide whose functions and operators the last one calls, and how long it may take.
    first = f"set {scope}search_path = {SEARCH_PATH}; "
    if kind is SessionKind.OWN:
        first += f"set {scope}statement_timeout = 0; "
    return (sql.SQL(first + "select {}").format(sql.SQL(", ").join(calls))).as_bytes(own_adapters())


def apply(conn: psycopg.Connection[Any], settings: bytes) -> None:
    """Run the `statements` of a session's kind. Raises psycopg.Error.

    Raises ConfigurationError where the session would need a right to change what its role or database has set.
    """
    try:
        conn.execute(settings)
    except psycopg.errors.InsufficientPrivilege as error:
        role, database = conn.info.user, conn.info.dbname
        raise ConfigurationError(
            f"{error.diag.message_primary} to the value that relay needs: reset it for the role or the database "
            f"(`alter role {role} reset …`, `alter database {database} reset …`)"
        ) from None


def _set(name: str, value: str, local: bool) -> sql.Composed:
    return sql.SQL("set_config({}, {}, {})").format(name, value, local)


def _pin(name: str, value: str, local: bool) -> sql.Composed:
    """Set one that differs: older servers lack some, and to set one may need rights even where it changes nothing."""
    return sql.SQL("case when current_setting({}, true) <> {} then {} end").format(
        name, value, _set(name, value, local)
    )


def _default(name: str, value: str, local: bool) -> sql.Composed:
    return sql.SQL("case when current_setting({}) = '0' then {} end").format(
        name, _set(name, value, local)
    )


def restoring(conn: psycopg.Connection[Any]) -> bytes:
    """Return the statements that give a session, after RESET ALL, what it has set so far. Raises psycopg.Error.

    They have literals, since a query would double what they cost.
    """
    settings = conn.execute(
        "select name, current_setting(name) from pg_settings where source = 'session' and name <> 'search_path'"
    )
    each = [
        sql.SQL("set {} = {}; ").format(sql.Identifier(name), sql.Literal(value))
        for name, value in settings
    ]
    return sql.SQL("").join([*each, sql.SQL(_PIN_PATH)]).as_bytes(conn)


@contextmanager
def users_path(
    conn: psycopg.Connection[Any], code: bool = False, then: BoundStatement | None = None
) -> Iterator[None]:
    """Let names mean what they mean to the user, in the block and in the open transaction.

    With `code` the block runs code of the user, which may set a role: relay's own statements after it run as relay
    again, and `then` in the same round trip. If the block raises, its caller rolls back, at least to a savepoint, which
    ends path and role too. Raises psycopg.Error.
    """
    _run(conn, USERS_PATH_LOCALLY)
    yield
    ending = [BoundStatement(each) for each in (_RELAYS_AGAIN if code else _RELAYS_AGAIN[:1])]
    run_each(conn, [*ending, then] if then else ending)


def _run(conn: psycopg.Connection[Any], command: bytes) -> None:
    """Run a command without a cursor, which would cost as much again: each task runs two."""
    with conn.lock:
        result = conn.pgconn.exec_(command)
    if result.status not in (ExecStatus.COMMAND_OK, ExecStatus.TUPLES_OK):
        raise server_error(result)


def users_schemas(conn: psycopg.Connection[Any]) -> list[str]:
    """The schemas of the user's search_path that exist, besides PostgreSQL's own. Raises psycopg.Error."""
    with conn.transaction():
        conn.execute(USERS_PATH_LOCALLY)
        row = conn.execute("select pg_catalog.current_schemas(false)").fetchone()
        conn.execute(PIN_PATH_LOCALLY)
    return list(row[0]) if row else []
