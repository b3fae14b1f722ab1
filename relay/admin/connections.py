"""Opens connections to source and target for commands. Errors name the configuration key."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import psycopg

from relay.config.settings import Settings
from relay.faults import ConfigurationError, Unreachable, first_line, refused_for_good
from relay.store import migrations
from relay.store.connections import Connection, Dsn, connect
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
    dsn: Dsn, key: str, kind: SessionKind = SessionKind.OWN, bounded: bool = False
) -> Iterator[Connection]:
    """Open a connection. Raises ConfigurationError with the server's message and the configuration key.

    Raises Unreachable where waiting may help, also if the connection is lost later, and TableLocked; ConfigurationError
    too where a pooler does not keep one session of the server for it. Statements of handlers are checked in a session
    of the `kind` in which they run. `bounded` statements wait for a lock for LOCK_TIMEOUT.
    """
    try:
        conn = connect(dsn, kind)
        if bounded:
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
def reach_source(settings: Settings) -> Iterator[Connection]:
    """Open a connection to the source. Raises ConfigurationError unless it has this program's schema."""
    with reach(settings.source_dsn, "source.dsn", bounded=True) as conn:
        for side in source_sides(settings):
            migrations.require(conn, side, "source.dsn")
        yield conn


@contextmanager
def reach_target(settings: Settings) -> Iterator[Connection]:
    """Open a connection to the target. Raises ConfigurationError unless it has this program's schema."""
    with reach(settings.target_dsn, "target.dsn", bounded=True) as conn:
        migrations.require(conn, "target", "target.dsn")
        yield conn
