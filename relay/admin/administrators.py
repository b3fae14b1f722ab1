"""Connections of administrators to source and target, for commands that change the schema."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from relay.admin.adoption import pin_search_path
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
    """Connections to source and target for changing the schema: the same one where both are one database.

    Nobody else installs or uninstalls there meanwhile; `warn` is told if somebody has to be waited for. Raises
    ConfigurationError if one cannot be reached.
    """
    with reach(source_dsn or settings.source_dsn, "source.dsn") as source, ExitStack() as stack:
        pin_search_path(source)
        target = source
        if target_dsn is not None or not settings.one_database:
            other = stack.enter_context(reach(target_dsn or settings.target_dsn, "target.dsn"))
            pin_search_path(other)
            # Two transactions that install in one database would wait for each other.
            target = source if database_identity(source) == database_identity(other) else other
        # In the same order everywhere, so that no two wait for each other.
        for conn in sorted({source, target}, key=lambda each: str(database_identity(each))):
            on_wait = (
                f"waiting for another `relay init` or `relay uninstall` of {conn.info.dbname!r}"
            )
            stack.enter_context(migrations.alone(conn, partial(warn, on_wait)))
        yield source, target


def database_identity(conn: Connection) -> tuple[Any, ...] | None:
    """What tells a database from all others, whichever address it was reached by."""
    return conn.execute(
        "select system_identifier, current_database() from pg_control_system()"
    ).fetchone()


def on_one_server(one: Connection, other: Connection) -> bool:
    """Whether two databases belong to one server, whose roles they share."""
    servers = {found and found[0] for found in map(database_identity, (one, other))}
    return len(servers) == 1
