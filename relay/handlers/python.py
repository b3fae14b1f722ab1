"""Handlers that are a Python callable: `module:function(transaction, cursor)`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import psycopg

from relay.events import Transaction
from relay.handler_settings import PythonHandler
from relay.handlers import Connection
from relay.handlers.imports import load
from relay.transactions import Routed

Function = Callable[[Transaction, psycopg.Cursor[Any]], object]


class Python:
    """Calls its function once for each transaction; what it does through the cursor commits with the batch."""

    def __init__(self, name: str, settings: PythonHandler) -> None:
        self.name = name
        self._function = load(name, settings.callable)

    def configure(self, conn: Connection) -> None:
        """Nothing to prepare."""

    def check(self, conn: Connection) -> None:
        """The callable was imported when the handler was built."""

    def apply(self, conn: Connection, routed: Routed) -> None:
        """Call the function for each transaction, in order."""
        with conn.cursor() as cursor:
            for transaction in routed:
                self._function(transaction, cursor)
