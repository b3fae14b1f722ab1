"""Renews what a framework of users keeps open from one call of their code to the next, as it does itself for requests.

Django keeps a connection for each thread, and opens a lost one again between two requests only. Here nobody sends its
signals: relay says before each call of a worker's handler, a function or a callable that another request begins.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

_renewing: set[asyncio.Task[None]] = set()
"""Held here, since asyncio does not hold tasks."""


def renew_sessions() -> None:
    """Close Django's connections of this thread that are lost or too old, but for those in a transaction."""
    if not _has_django():
        return
    for conn in sys.modules["django.db"].connections.all(initialized_only=True):
        # Django's `close_old_connections` closes these too, since they are not in autocommit mode.
        if not conn.in_atomic_block:
            conn.close_if_unusable_or_obsolete()


async def renew_sessions_async() -> None:
    """Let the same be done where the ORM runs for coroutine functions, the thread of `sync_to_async`.

    Before what the caller calls there next, and not awaited: other calls may keep that one thread busy for long, and
    the caller may not need it.
    """
    if not _has_django():
        return
    from asgiref.sync import sync_to_async

    task = asyncio.create_task(sync_to_async(renew_sessions)())
    _renewing.add(task)
    task.add_done_callback(_renewing.discard)
    # The task begins meanwhile: its turn in the thread is before the caller's.
    await asyncio.sleep(0)


def _has_django() -> bool:
    # Users' code that has Django has imported this module. It may import Django and never configure it.
    conf: Any = sys.modules.get("django.conf")
    return "django.db" in sys.modules and conf is not None and bool(conf.settings.configured)
