"""relay carries committed outbox events from PostgreSQL's WAL to handlers, in order and effectively once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from relay.event_types.registry import EventTypes as EventTypes

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """`EventTypes`, which needs pydantic, is imported when it is asked for."""
    if name == "EventTypes":
        from relay.event_types.registry import EventTypes

        return EventTypes
    raise AttributeError(f"module 'relay' has no attribute {name!r}")
