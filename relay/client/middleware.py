"""What the calls of a worker's handlers run in: context managers, which see what a handler raises.

`Worker(…, around=[timing(), limit(3)])`: the first is the outermost. One of your own is a function of a message that
returns a context manager, such as one made with `contextlib.contextmanager`; a worker whose handlers are coroutines
takes asynchronous ones too.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from relay.client.messages import Message
from relay.outcomes import Drop, Fail, RetryLater

__all__ = ["backoff", "limit", "timing"]

Around = Callable[[Message], AbstractContextManager[None]]


def limit(attempts: int) -> Around:
    """Make what fails in its `attempts`-th attempt, or a later one, a dead letter, whatever the queue's limit is."""

    @contextmanager
    def limited(message: Message) -> Iterator[None]:
        try:
            yield
        except (Drop, Fail):
            raise
        except Exception as error:
            if message.attempt < attempts:
                raise
            raise Fail() from error

    return limited


def backoff(*seconds: float) -> Around:
    """Wait `seconds[0]` after the first failed attempt, `seconds[1]` after the second, and the last after all others.

    A handler's own RetryLater keeps its time. Raises ValueError without any.
    """
    if not seconds:
        raise ValueError("backoff: give the seconds to wait after each attempt")

    @contextmanager
    def retried(message: Message) -> Iterator[None]:
        try:
            yield
        except (Drop, Fail, RetryLater):
            raise
        except Exception as error:
            after = seconds[min(message.attempt, len(seconds)) - 1]
            raise RetryLater(after=after) from error

    return retried


def timing(log: logging.Logger | None = None) -> Around:
    """Log how long each call took, at the level of information."""
    chosen = log or logging.getLogger("relay.worker")

    @contextmanager
    def timed(message: Message) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            seconds = time.monotonic() - began
            fields = {"queue": message.queue, "id": message.id, "event_type": message.event_type}
            chosen.info("a message was handled", extra={**fields, "seconds": round(seconds, 6)})

    return timed
