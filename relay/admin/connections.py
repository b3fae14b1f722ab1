"""Opens connections to source and target, for commands and administrators. Errors name the configuration key."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial

import psycopg

from relay.config.settings import Settings
from relay.faults import ConfigurationError, Unreachable, first_line, refused_for_good
from relay.store import migrations
from relay.store.connections import (
    Connection,
    Dsn,
    connect,
    connect_pooled,
    database_identity,
    with_settings,
)
from relay.store.session_settings import SessionKind

LOCK_TIMEOUT = "10s"
"""How long a command waits for a lock: it must not hang without a word. In handlers' sessions the user's goes first."""
_BOUNDED = f"""
    select set_config('lock_timeout', '{LOCK_TIMEOUT}', false) where current_setting('lock_timeout') = '0'
""".encode()


class TableLocked(Unreachable):
    """A statement did not get its lock in time: another session has locked a table."""


@contextmanager
def reach(
    dsn: Dsn,
    key: str,
    kind: SessionKind = SessionKind.OWN,
    bounded: bool = False,
    pooled: bool = False,
) -> Iterator[Connection]:
    """Open a connection. Raises ConfigurationError with the server's message and the configuration key.

    Raises Unreachable where waiting may help, also if the connection is lost later, and TableLocked; ConfigurationError
    too where a pooler does not keep one session of the server for it. Statements of handlers are checked in a session
    of the `kind` in which they run. `bounded` statements wait for a lock for LOCK_TIMEOUT. With `pooled` the block is
    one database transaction, for which any pooler will do.
    """
    try:
        conn = connect_pooled(dsn) if pooled else connect(dsn, kind)
        if bounded and not pooled:
            conn.execute(_BOUNDED)
    except psycopg.OperationalError as error:
        first = first_line(error).removeprefix("connection failed: ").removeprefix(f"{key}: ")
        if refused_for_good(error):
            raise ConfigurationError(
                f"{key}: cannot connect: {first}: correct the address or the credentials"
            ) from None
        raise Unreachable(
            f"{key}: cannot connect: {first}: start the server, or correct the address"
        ) from None
    with conn:
        try:
            with with_settings(conn, {"lock_timeout": LOCK_TIMEOUT}) if pooled else nullcontext():
                yield conn
        except psycopg.errors.LockNotAvailable as error:
            raise TableLocked(
                f"{key}: a table is locked by another session ({first_line(error)}): end that session, which `relay "
                "status` names if relay waits for it too, or try again later"
            ) from None
        except psycopg.OperationalError as error:
            if not conn.broken:
                raise
            raise Unreachable(
                f"{key}: the connection was lost: {first_line(error)}: start the server"
            ) from None


def source_sides(settings: Settings) -> tuple[migrations.Side, ...]:
    """Return the parts of the schema that the source must have."""
    return ("source", "outbox") if settings.source.owns_table else ("source",)


@contextmanager
def reach_source(settings: Settings, pooled: bool = False) -> Iterator[Connection]:
    """Open a connection to the source. Raises ConfigurationError unless it has this program's schema."""
    with reach(settings.source_dsn, "source.dsn", bounded=True, pooled=pooled) as conn:
        require_schema(conn, settings)
        yield conn


def require_schema(source: Connection, settings: Settings) -> None:
    """Raise ConfigurationError unless the source has this program's schema."""
    for side in source_sides(settings):
        migrations.require(source, side, "source.dsn")


@contextmanager
def reach_target(settings: Settings, pooled: bool = False) -> Iterator[Connection]:
    """Open a connection to the target. Raises ConfigurationError unless it has this program's schema."""
    with reach(settings.target_dsn, "target.dsn", bounded=True, pooled=pooled) as conn:
        migrations.require(conn, "target", "target.dsn")
        yield conn


log = logging.getLogger(__name__)


@contextmanager
def administrators(
    settings: Settings,
    source_dsn: str | None,
    target_dsn: str | None,
    warn: Callable[[str], None] = log.warning,
) -> Iterator[tuple[Connection, Connection]]:
    """Open connections to source and target to change the schema; one connection for both if they are one database.

    A lock keeps other sessions from installing or uninstalling meanwhile; `warn` receives a line if this one waits for
    another. Raises ConfigurationError if a database cannot be reached.
    """
    with reach(source_dsn or settings.source_dsn, "source.dsn") as source, ExitStack() as stack:
        target = source
        if target_dsn is not None or not settings.one_database:
            other = stack.enter_context(reach(target_dsn or settings.target_dsn, "target.dsn"))
            # Two database transactions that install in one database deadlock.
            target = source if database_identity(source) == database_identity(other) else other
        # Every command locks the databases in this order, so that no two deadlock.
        for conn in sorted({source, target}, key=database_identity):
            on_wait = (
                f"waiting for another `relay init` or `relay uninstall` of {conn.info.dbname!r}"
            )
            stack.enter_context(migrations.alone(conn, partial(warn, on_wait)))
        yield source, target


def on_one_server(one: Connection, other: Connection) -> bool:
    """Return whether two databases belong to one server, and so share its roles."""
    servers = {database_identity(each).partition("/")[0] for each in (one, other)}
    return len(servers) == 1
