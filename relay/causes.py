"""What causes the events that users' code publishes: the event that it handles.

An event that causes itself, at once or through other services, would go round for ever. So what is published while an
event is handled has a `hop_count`, one more than that of the event, and is refused beyond a limit. `correlation_id` and
`causation_id` say where it comes from. relay notes what it calls a function with, and the client reads it. In SQL,
`relay.caused_by` and `relay.publish` do the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

CORRELATION, CAUSATION, HOPS = "correlation_id", "causation_id", "hop_count"
"""The keys in an event's metadata."""
MAX_HOPS = 32
_MOST_HOPS = 10**9
"""More are not counted: somebody else wrote the number."""


def hops_of(metadata: Any) -> int:
    """Return the hop count in an event's metadata; 0 without one, and for what is no count."""
    count = metadata.get(HOPS) if isinstance(metadata, Mapping) else None
    if isinstance(count, bool) or not isinstance(count, int | float):
        return 0
    if math.isnan(count) or count < 0:
        return 0
    return int(min(count, _MOST_HOPS))


def caused_by(event: Any) -> dict[str, Any]:
    """Return what the metadata of an event say that `event`, of a handler or of a message, causes."""
    given = getattr(event, "event_id", None) or event.id
    event_id, metadata = None if given is None else str(given), metadata_of(event)
    known = metadata if isinstance(metadata, Mapping) else {}
    correlation = known.get(CORRELATION)
    return {
        CORRELATION: event_id if correlation is None else correlation,
        CAUSATION: event_id,
        HOPS: hops_of(metadata) + 1,
    }


def metadata_of(event: Any) -> Any:
    """Return an event's metadata; None where they are no JSON."""
    try:
        return event.metadata
    except ValueError:
        return None  # a column of text has no JSON


class Causing:
    """What users' code is called with: `events`, or None if they are many, so that each published one says which."""

    __slots__ = ("_found", "events", "max_hops")

    def __init__(self, events: Iterable[Any] | None, max_hops: int) -> None:
        self.events = events
        self.max_hops = max_hops
        self._found: Mapping[str, Any] | None = None

    def begin(self, events: Iterable[Any]) -> None:
        """Note what the code is called with next."""
        self.events, self._found = events, None

    @property
    def metadata(self) -> Mapping[str, Any] | None:
        """What the metadata of a published event say; None where that is for the event to say.

        The cause is the event with the most hops, the first of these, so that no loop is missed. The events are read
        when something is published, so that others pay nothing.
        """
        if self.events is not None and self._found is None:
            cause = max(self.events, key=lambda each: hops_of(metadata_of(each)), default=None)
            self._found = None if cause is None else caused_by(cause)
        return self._found


_CURRENT: ContextVar[Causing | None] = ContextVar("relay_causing", default=None)


def current() -> Causing | None:
    """Return what the running code is called with; None outside of handlers, functions and workers."""
    return _CURRENT.get()


def begin(causing: Causing) -> None:
    """Note what the code of the current context is called with, for as long as that context lasts."""
    _CURRENT.set(causing)


@contextmanager
def handling(causing: Causing) -> Iterator[Causing]:
    """Note what the code in the block is called with; yields it."""
    token = _CURRENT.set(causing)
    try:
        yield causing
    finally:
        _CURRENT.reset(token)
