"""Renews what a framework of users keeps open from one call of their code to the next, as it does itself for requests.

Django keeps a connection for each thread, and opens a lost one again between two requests only. Here nobody sends its
signals: relay says before each call of a worker's handler, a function or a callable that another request begins.
"""

from __future__ import annotations

import sys
from typing import Any


def renew_sessions() -> None:
    """Close Django's connections of this thread that are lost or too old, but for those in a transaction."""
    # Users' code that has Django has imported this module.
    database: Any = sys.modules.get("django.db")
    # An instance of relay may have users' code that imports Django and never configures it.
    if database is None or not sys.modules["django.conf"].settings.configured:
        return
    for conn in database.connections.all(initialized_only=True):
        # Django's `close_old_connections` closes these too, since they are not in autocommit mode.
        if not conn.in_atomic_block:
            conn.close_if_unusable_or_obsolete()


async def renew_sessions_async() -> None:
    """Do the same where the ORM runs for coroutine functions, the thread of `sync_to_async`."""
    if "django.db" in sys.modules:
        from asgiref.sync import sync_to_async

        await sync_to_async(renew_sessions)()
