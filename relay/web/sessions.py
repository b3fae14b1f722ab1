"""The sessions that requests open in the databases: bounded in number, and in the time of each statement."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from threading import BoundedSemaphore

from relay.faults import NotNow
from relay.store.connections import sessions_with

READ_SECONDS = 8.0
"""Longest time of a statement that only reads."""
ACT_SECONDS = 60.0
"""Longest time of a statement that changes something."""
CONCURRENT_REQUESTS = 20
"""How many requests use the databases at once; the server has more threads, for requests that need none."""
_LOCK_SECONDS = 10.0
_TURN_SECONDS = 1.0

_turns = BoundedSemaphore(CONCURRENT_REQUESTS)


@contextmanager
def reading(seconds: float = READ_SECONDS) -> Iterator[None]:
    """Set `statement_timeout` in sessions that the block opens, for statements that only read.

    Raises TransientFault if too many requests use the databases.
    """
    with _sessions({"statement_timeout": f"{seconds * 1000:.0f}"}):
        yield


@contextmanager
def acting(operator: str) -> Iterator[None]:
    """Set the timeouts of an action, and the operator that is stored with it, in sessions that the block opens.

    Raises TransientFault if too many requests use the databases.
    """
    settings = {
        "statement_timeout": f"{ACT_SECONDS * 1000:.0f}",
        "lock_timeout": f"{_LOCK_SECONDS * 1000:.0f}",
        "relay.operator": operator,
    }
    with _sessions(settings):
        yield


@contextmanager
def _sessions(settings: Mapping[str, str]) -> Iterator[None]:
    if not _turns.acquire(timeout=_TURN_SECONDS):
        raise NotNow(
            f"the databases do not answer: {CONCURRENT_REQUESTS} requests wait for them: try again later"
        )
    try:
        with sessions_with(settings):
            yield
    finally:
        _turns.release()
