"""Admits instances to a group by configuration: `relay.groups`, and a shared advisory lock of each instance.

An instance with another configuration is refused, or replaces those that run; then these end.

Source: PostgreSQL documentation, "Advisory Locks".
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from psycopg.types.json import Jsonb

from relay.config.effects import Effects, handlers_of
from relay.faults import ConfigurationError
from relay.store import groups, locks
from relay.store.connections import Connection

log = logging.getLogger(__name__)


def hold(conn: Connection, group: str, effects: Effects) -> None:
    """Lock the configuration that this instance runs with, shared, until the connection ends."""
    locks.lock_shared(conn, locks.configuration(group, effects.digest))


def admit(
    conn: Connection,
    group: str,
    effects: Effects,
    accept: bool,
    changed: Callable[[Connection, Mapping[str, str]], None],
) -> None:
    """Admit an instance with this configuration to the group.

    A configuration that differs from the stored one replaces it if no instance runs with that, or if `accept` is true
    and no handler orders by another key. `changed` is then called with the stored values, in the database transaction
    that replaces them. Otherwise raises ConfigurationError, which names the difference.
    """
    with conn.transaction():
        groups.lock(conn, group)
        digest, values = _stored(conn, group)
        if digest == effects.digest:
            return
        if digest is not None:
            running = _runs(conn, group, digest)
            if running:
                _require_replaceable(group, effects, values, accept)
            changed(conn, values)
            log.log(
                logging.WARNING if running else logging.INFO,
                "the group's configuration has changed",
                extra={"group": group, "difference": effects.difference(values)},
            )
        conn.execute(
            "update relay.groups set configuration_digest = %s, configuration = %s where group_id = %s",
            (effects.digest, Jsonb(dict(effects.values)), group),
        )


def require_current(conn: Connection, group: str, effects: Effects) -> None:
    """Raise ConfigurationError if another configuration has replaced this one."""
    digest, values = _stored(conn, group)
    if digest not in (None, effects.digest):
        raise ConfigurationError(
            f"group: another instance has replaced the configuration of {group!r}: {effects.difference(values)}: "
            "start this instance with the same configuration, or with --accept-configuration"
        )


def require_admissible(conn: Connection, group: str, effects: Effects, accept: bool) -> None:
    """Raise ConfigurationError if `admit` would. Changes nothing."""
    digest, values = _stored(conn, group)
    if digest != effects.digest and _runs(conn, group, digest):
        _require_replaceable(group, effects, values, accept)


def _require_replaceable(
    group: str, effects: Effects, running: Mapping[str, str], accept: bool
) -> None:
    """Raise ConfigurationError unless this configuration may replace that of a running instance."""
    difference = effects.difference(running)
    if keys := effects.reordered_handlers(running):
        raise ConfigurationError(
            f"{', '.join(keys)}: has changed, and an instance of {group!r} defers transactions by the former one: stop "
            f"the others first; --accept-configuration cannot replace it (differences: {difference})"
        )
    if not accept:
        raise ConfigurationError(
            f"group: an instance of {group!r} runs with another configuration: {difference}: give all instances the "
            "same one, or stop the others first; --accept-configuration replaces theirs"
        )


def running_handlers(conn: Connection, group: str) -> set[str]:
    """Return the names of the handlers of the stored configuration; empty if no instance runs with it."""
    digest, values = _stored(conn, group)
    return handlers_of(values) if _runs(conn, group, digest) else set()


def _stored(conn: Connection, group: str) -> tuple[str | None, dict[str, str]]:
    """Return digest and values of the stored configuration; None and no values before an instance has run."""
    stored = conn.execute(
        "select configuration_digest, coalesce(configuration, '{}') from relay.groups where group_id = %s",
        (group,),
    ).fetchone()
    return stored or (None, {})


def _runs(conn: Connection, group: str, digest: str | None) -> bool:
    """Whether an instance runs with a configuration."""
    return digest is not None and bool(locks.sharing(conn, locks.configuration(group, digest)))
