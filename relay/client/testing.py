"""Collects published events without a database, for the tests of services."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from relay.client.event import Event
from relay.client.outbox import Outbox, Published

__all__ = ["Published", "collect", "events"]


@contextmanager
def collect(outbox: Outbox) -> Iterator[list[Published]]:
    """Collect the calls of `publish`, with any session, instead of inserting their events.

    Events are checked as usual: one that cannot be stored raises EventInvalid.
    """
    previous = outbox.recorded
    collected: list[Published] = []
    outbox.recorded = collected
    try:
        yield collected
    finally:
        outbox.recorded = previous


def events(published: list[Published], event_type: str | None = None) -> list[Event]:
    """Return the events of all calls in order, or those of one type."""
    return [
        event
        for each in published
        for event in each.events
        if event_type is None or event.event_type == event_type
    ]
