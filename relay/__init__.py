"""relay carries committed outbox events from PostgreSQL's WAL to handlers, in order and effectively once.

Your own handlers and event types use the names of `__all__`; each is imported on first access. A service that
publishes imports `relay.client`, a Spark job that reads the outbox `relay.spark`. Everything else is private.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from relay.event_types.registry import EventTypes
    from relay.model.events import Event, Events, Lsn, Transaction
    from relay.outcomes import Drop, Fail, RetryLater
    from relay.sinks.function import Delivery
    from relay.sinks.function_batches import Deliveries
    from relay.spark.writers import BatchId

__all__ = [
    "BatchId",
    "Deliveries",
    "Delivery",
    "Drop",
    "Event",
    "EventTypes",
    "Events",
    "Fail",
    "Lsn",
    "RetryLater",
    "Transaction",
]

__version__ = "0.1.0"

# Names, not imports: all other modules import this one, so it must import none of them.
_PUBLIC = {
    "BatchId": ("relay.spark.writers", "BatchId"),
    "Deliveries": ("relay.sinks.function_batches", "Deliveries"),
    "Delivery": ("relay.sinks.function", "Delivery"),
    "Drop": ("relay.outcomes", "Drop"),
    "Event": ("relay.model.events", "Event"),
    "EventTypes": ("relay.event_types.registry", "EventTypes"),
    "Events": ("relay.model.events", "Events"),
    "Fail": ("relay.outcomes", "Fail"),
    "Lsn": ("relay.model.events", "Lsn"),
    "RetryLater": ("relay.outcomes", "RetryLater"),
    "Transaction": ("relay.model.events", "Transaction"),
}


if not TYPE_CHECKING:
    # With a `__getattr__`, type checkers accept any attribute of the module.
    def __getattr__(name: str) -> Any:
        """Import a public name. Raises AttributeError for any other, and ImportError if it needs an extra."""
        if name not in _PUBLIC:
            raise AttributeError(f"module 'relay' has no attribute {name!r}")
        module, attribute = _PUBLIC[name]
        try:
            return getattr(import_module(module), attribute)
        except ModuleNotFoundError as error:
            if error.name is None or error.name.partition(".")[0] == "relay":
                raise
            needed = f"relay.{name} needs {error.name}: pip install 'relay-outbox[service]'"
            raise ModuleNotFoundError(needed, name=error.name) from error


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC})
