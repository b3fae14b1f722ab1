"""Waits for what goes on without whoever waits for it."""

from __future__ import annotations

import asyncio
from typing import Any, TypeVar

Result = TypeVar("Result")


async def shielded(running: asyncio.Future[Result]) -> Result:
    """Wait for a future or task that others wait for too, or that has to end: a cancellation does not concern it.

    Of `asyncio.shield`, asyncio logs the error of a future that fails after the last caller was cancelled.
    """
    running.add_done_callback(_note_error)
    return await asyncio.shield(running)


def _note_error(ended: asyncio.Future[Any]) -> None:
    if not ended.cancelled():
        ended.exception()
