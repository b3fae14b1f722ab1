"""Threads that inherit the context of their creator, so that their log lines have the group.

Source: Python documentation, "contextvars — Context Variables": a thread starts with an empty context.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextvars import Context, copy_context
from typing import Any


class Thread(threading.Thread):
    """A thread that runs in the context of its creator."""

    def __init__(
        self,
        target: Callable[..., object],
        name: str | None = None,
        args: Iterable[Any] = (),
        daemon: bool | None = None,
    ) -> None:
        super().__init__(target=copy_context().run, name=name, args=(target, *args), daemon=daemon)


def pool(workers: int, prefix: str) -> ThreadPoolExecutor:
    """Return a pool whose threads run in the context of its creator."""
    return ThreadPoolExecutor(
        workers, thread_name_prefix=prefix, initializer=_enter, initargs=(copy_context(),)
    )


def _enter(context: Context) -> None:
    for variable, value in context.items():
        variable.set(value)
