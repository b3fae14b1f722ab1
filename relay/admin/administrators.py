"""Opens an administrator's connections to source and target, for commands that change the schema."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from relay.admin.connections import reach
from relay.config.settings import Settings
from relay.store import migrations
from relay.store.connections import Connection

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
        for conn in sorted({source, target}, key=lambda each: str(database_identity(each))):
            on_wait = (
                f"waiting for another `relay init` or `relay uninstall` of {conn.info.dbname!r}"
            )
            stack.enter_context(migrations.alone(conn, partial(warn, on_wait)))
        yield source, target


def database_identity(conn: Connection) -> tuple[Any, ...] | None:
    """Return the system identifier and the name of a database, which identify it at any address."""
    return conn.execute(
        "select system_identifier, current_database() from pg_control_system()"
    ).fetchone()


def on_one_server(one: Connection, other: Connection) -> bool:
    """Return whether two databases belong to one server, and so share its roles."""
    servers = {each and each[0] for each in map(database_identity, (one, other))}
    return len(servers) == 1
