"""Handlers that are a Python callable: `module:function(transaction, cursor)`."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg

from relay.events import Transaction
from relay.faults import ConfigurationError
from relay.handler_settings import PythonHandler
from relay.handlers import Connection
from relay.transactions import Routed

Function = Callable[[Transaction, psycopg.Cursor[Any]], object]


class Python:
    """Calls its function once for each transaction; what it does through the cursor commits with the batch."""

    def __init__(self, name: str, settings: PythonHandler) -> None:
        self.name = name
        self._function = _load(name, settings.callable)

    def configure(self, conn: Connection) -> None:
        """Nothing to prepare."""

    def check(self, conn: Connection) -> None:
        """The callable was imported when the handler was built."""

    def apply(self, conn: Connection, routed: Routed) -> None:
        """Call the function for each transaction, in order."""
        with conn.cursor() as cursor:
            for transaction in routed:
                self._function(transaction, cursor)


def _load(name: str, path: str) -> Function:
    module_name, _, attribute = path.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:
        # As with `python -m`: a module beside the configuration is found without installing it.
        sys.path.append(here)
    try:
        found: Any = importlib.import_module(module_name)
    except Exception as error:
        raise ConfigurationError(
            f"handlers.{name}.callable: importing {module_name!r} failed: {type(error).__name__}: {error}"
        ) from None
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise ConfigurationError(
                f"handlers.{name}.callable: {module_name!r} has no {attribute!r}"
            )
        found = getattr(found, part)
    if not callable(found):
        raise ConfigurationError(f"handlers.{name}.callable: {path!r} is not callable")
    if inspect.iscoroutinefunction(found):
        raise ConfigurationError(
            f"handlers.{name}.callable: {path!r} is async; relay calls plain functions"
        )
    return found  # type: ignore[no-any-return]
