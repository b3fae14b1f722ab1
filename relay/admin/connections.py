"""Opens connections to source and target for commands. Errors name the configuration key."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import psycopg

from relay.config.settings import Settings
from relay.faults import ConfigurationError, Unreachable, first_line, refused_for_good
from relay.store import migrations
from relay.store.connections import Connection, Dsn, connect, connect_as_user, pin_reading


@contextmanager
def reach(dsn: Dsn, key: str, pinned: bool = True) -> Iterator[Connection]:
    """Open a connection. Raises ConfigurationError with the server's message and the configuration key.

    Raises Unreachable where waiting may help, also if the connection is lost later. `pinned` fixes how the session
    prints values and finds names; statements of handlers are checked without it, since they run without it.
    """
    try:
        conn = (connect if pinned else connect_as_user)(dsn)
        if pinned:
            pin_reading(conn)
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
    with reach(settings.source_dsn, "source.dsn") as conn:
        for side in source_sides(settings):
            migrations.require(conn, side, "source.dsn")
        yield conn


@contextmanager
def reach_target(settings: Settings) -> Iterator[Connection]:
    """Open a connection to the target. Raises ConfigurationError unless it has this program's schema."""
    with reach(settings.target_dsn, "target.dsn") as conn:
        migrations.require(conn, "target", "target.dsn")
        yield conn
