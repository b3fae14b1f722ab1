"""Gives the metrics of a group what the group's HTTP API counts in the same process.

The API is served before its group relays, and longer: it tells where its counts are read, and each scrape reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ApiCounts:
    """What an API has counted since it started, and its streams of now."""

    streams: int
    """The streams that are open."""
    waiting: int
    """The requests that wait for an answer."""
    sent: int
    """Events that were put into streams."""
    cut: Mapping[str, int]
    """Streams that relay has ended, by reason."""
    published: int
    """Events that requests have published, without repetitions."""
    waits: Mapping[str, int]
    """Requests that have waited for an answer, by result."""
    requests: Mapping[str, int]
    """Responses, by the class of their status."""
    failing: Mapping[str, bool]
    """Whether each part fails again and again."""


_readers: dict[str, Callable[[], ApiCounts]] = {}


def register(group: str, read: Callable[[], ApiCounts]) -> None:
    """Let the group's metrics have what `read` returns, in any thread and without waiting, until `forget`."""
    _readers[group] = read


def forget(group: str) -> None:
    """Let the group's metrics have no counts of an API any more."""
    _readers.pop(group, None)


def of(group: str) -> ApiCounts | None:
    """Return the counts of the group's API; None unless this process serves it."""
    read = _readers.get(group)
    return None if read is None else read()
