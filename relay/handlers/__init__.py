"""Transactional handlers: their protocol, and one module for each type."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import LiteralString, Protocol

from relay.causes import MAX_HOPS
from relay.config.handlers import (
    HandlerSettings,
    PythonHandler,
    SqlHandler,
)
from relay.event_types.current_version import routed_as_current
from relay.event_types.upcasting import Upcasting
from relay.model.transactions import Routed
from relay.store.connections import Connection
from relay.store.trips import BoundStatement


class Handler(Protocol):
    """A transactional handler: it runs in the target's database transaction. Stateless: tasks share it."""

    name: str

    def configure(self, conn: Connection) -> None:
        """Prepare a new connection of the target, once."""

    def check(self, conn: Connection) -> None:
        """Raise ConfigurationError if the handler cannot work on this database."""

    def statements(self, routed: Routed) -> Sequence[BoundStatement] | None:
        """What `apply` would run for few events, if that is known beforehand; otherwise None."""

    def apply(self, conn: Connection, routed: Routed) -> None:
        """Apply transactions, in order. May raise any error: `relay.faults` decides what it means."""


class Typed:
    """A transactional handler that gets events in the current version of their type."""

    def __init__(self, handler: Handler, upcaster: Upcasting) -> None:
        self.name = handler.name
        self._handler = handler
        self._upcaster = upcaster

    def configure(self, conn: Connection) -> None:
        """Prepare a new connection of the target, once."""
        self._handler.configure(conn)

    def check(self, conn: Connection) -> None:
        """Raise ConfigurationError if the handler cannot work on this database."""
        self._handler.check(conn)

    def statements(self, routed: Routed) -> Sequence[BoundStatement] | None:
        """What `apply` would run. Raises InvalidEvent, and the errors of upcasters."""
        return self._handler.statements(routed_as_current(routed, self._upcaster))

    def apply(self, conn: Connection, routed: Routed) -> None:
        """Apply transactions, in order. Raises InvalidEvent, and the errors of the handler and of upcasters."""
        self._handler.apply(conn, routed_as_current(routed, self._upcaster))


def build(
    configured: Mapping[str, HandlerSettings],
    types: Mapping[str, LiteralString],
    upcaster: Upcasting | None = None,
    max_hops: int = MAX_HOPS,
) -> dict[str, Handler]:
    """Build the transactional handlers; returns them by name, in the configuration's order.

    `types` are the PostgreSQL types that the fields have in statements. With an upcaster, handlers get events in the
    current version of their type. `max_hops` is `source.max_hops`. Raises ConfigurationError for a handler that cannot
    be built.
    """
    from relay.handlers.python import Python
    from relay.handlers.sql import SqlBatch, SqlEvent

    handlers: dict[str, Handler] = {}
    for name, settings in configured.items():
        match settings:
            case PythonHandler():
                handlers[name] = Python(name, settings, max_hops)
            case SqlHandler(each="event"):
                handlers[name] = SqlEvent(name, settings, types, max_hops)
            case SqlHandler():
                handlers[name] = SqlBatch(name, settings, types, max_hops)
    if upcaster:
        return {name: Typed(handler, upcaster) for name, handler in handlers.items()}
    return handlers
