"""What is done with events: one module for each kind of handler, behind one small protocol."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import psycopg

from relay.config import PythonHandler, SqlHandler
from relay.transactions import Routed

Connection = psycopg.Connection[Any]


class Handler(Protocol):
    """Applies transactions inside the target's database transaction. Stateless, so that tasks may share it."""

    name: str

    def configure(self, conn: Connection) -> None:
        """Prepare a new connection."""

    def check(self, conn: Connection) -> None:
        """Raise ConfigurationError if the handler cannot work on this database at all."""

    def apply(self, conn: Connection, routed: Routed) -> None:
        """Apply transactions, in order. What it raises is judged by `relay.faults`."""


def build(configured: Mapping[str, SqlHandler | PythonHandler]) -> dict[str, Handler]:
    """The handlers by name, in the configuration's order. Raises ConfigurationError for one that cannot be built."""
    from relay.handlers.python import Python
    from relay.handlers.sql import SqlBatch, SqlEvent

    handlers: dict[str, Handler] = {}
    for name, settings in configured.items():
        if isinstance(settings, PythonHandler):
            handlers[name] = Python(name, settings)
        elif settings.each == "event":
            handlers[name] = SqlEvent(name, settings)
        else:
            handlers[name] = SqlBatch(name, settings)
    return handlers
