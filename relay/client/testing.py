"""For the tests of services: what was published, without a database."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from relay.client.event import Event
from relay.client.outbox import Outbox, Published

__all__ = ["Published", "collect", "events"]


@contextmanager
def collect(outbox: Outbox) -> Iterator[list[Published]]:
    """Collect what the outbox is given, in any session, instead of inserting it.

    Events are checked as otherwise: what cannot be stored raises EventInvalid here, too.
    """
    former = outbox.recorded
    found: list[Published] = []
    outbox.recorded = found
    try:
        yield found
    finally:
        outbox.recorded = former


def events(published: list[Published], event_type: str | None = None) -> list[Event]:
    """The events of all calls in their order, or those of one type."""
    return [
        event
        for each in published
        for event in each.events
        if event_type is None or event.event_type == event_type
    ]
