"""Shares one connection of any client library among concurrent deliveries."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

Link = TypeVar("Link")


class Shared(Generic[Link]):
    """A connection that is opened on demand, and again after it was lost.

    Concurrent callers share one attempt to open it, and its outcome.
    """

    def __init__(
        self, open_link: Callable[[], Coroutine[Any, Any, Link]], is_usable: Callable[[Link], bool]
    ) -> None:
        self._open = open_link
        self._is_usable = is_usable
        self._opening: asyncio.Task[Link] | None = None

    async def get(self) -> Link:
        """Return the connection. Raises the errors of opening it, and ConnectionAbortedError if `close` is called."""
        task = self._opening
        if task is None or (task.done() and not self._holds(task)):
            task = self._opening = asyncio.create_task(self._open())
        try:
            # A cancelled delivery must not cancel the attempt, which others wait for.
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if task.cancelled() and current is not None and not current.cancelling():
                raise ConnectionAbortedError("the sink is closed") from None
            raise

    async def close(self) -> Link | None:
        """Cancel an attempt to open it. Returns the open connection, for the caller to close, or None."""
        task, self._opening = self._opening, None
        if task is None:
            return None
        task.cancel()
        await asyncio.wait([task])
        return task.result() if _succeeded(task) else None

    def _holds(self, task: asyncio.Task[Link]) -> bool:
        return _succeeded(task) and self._is_usable(task.result())


def _succeeded(task: asyncio.Task[Any]) -> bool:
    return not task.cancelled() and task.exception() is None
