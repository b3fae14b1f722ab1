"""relay carries committed outbox events from PostgreSQL's WAL to handlers, in order and effectively once.

The names of `__all__` are for your own handlers and event types; each is imported when it is asked for. A service that
publishes imports `relay.client`, a Spark job that reads the outbox `relay.spark`. Everything else is private.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from relay.event_types.registry import EventTypes
    from relay.faults import TransientFault as RetryLater
    from relay.model.events import Event, Events, Lsn, Transaction
    from relay.spark.writers import BatchId

__all__ = ["BatchId", "Event", "EventTypes", "Events", "Lsn", "RetryLater", "Transaction"]

__version__ = "0.1.0"

# As texts: this module is imported by all others, and must import none of them.
_PUBLIC = {
    "BatchId": ("relay.spark.writers", "BatchId"),
    "Event": ("relay.model.events", "Event"),
    "EventTypes": ("relay.event_types.registry", "EventTypes"),
    "Events": ("relay.model.events", "Events"),
    "Lsn": ("relay.model.events", "Lsn"),
    "RetryLater": ("relay.faults", "TransientFault"),
    "Transaction": ("relay.model.events", "Transaction"),
}


if not TYPE_CHECKING:
    # Type checkers would take any name for one of relay's.
    def __getattr__(name: str) -> Any:
        """Import a public name. Raises AttributeError for any other."""
        if name not in _PUBLIC:
            raise AttributeError(f"module 'relay' has no attribute {name!r}")
        module, attribute = _PUBLIC[name]
        return getattr(import_module(module), attribute)


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC})
