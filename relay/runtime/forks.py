"""Lets a process that users' code forks keep none of relay's connections, and none of its listening sockets.

A worker of a pool of processes outlives relay after a kill -9. The server would see relay's sessions go on, with their
locks, and no other instance could take over; an address would stay in use.

Sources: Python documentation, "os.register_at_fork"; Linux manual page dup2(2).
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Protocol
from weakref import WeakSet


class HasDescriptor(Protocol):
    """A connection or a socket."""

    def fileno(self) -> int:
        """The descriptor. Raises an error of its library once it is closed."""


_kept: WeakSet[HasDescriptor] = WeakSet()


def keep(connection: HasDescriptor) -> None:
    """Keep a connection for this process: a child that is forked has /dev/null instead."""
    _kept.add(connection)


def kept() -> list[HasDescriptor]:
    """List what this process keeps."""
    return list(_kept)


def _let_go() -> None:
    # Not closed: the object in the child would close the next file with the same number.
    nothing = os.open(os.devnull, os.O_RDWR)
    for each in list(_kept):
        with suppress(Exception):
            number = each.fileno()
            if number >= 0:
                os.dup2(nothing, number, inheritable=False)
    os.close(nothing)


os.register_at_fork(after_in_child=_let_go)
