"""Wakes a thread that waits in a selector."""

from __future__ import annotations

import logging
import select
import socket

log = logging.getLogger(__name__)


class Bell:
    """Register it with a selector; it is readable from a ring until it is hushed. Safe in any thread."""

    def __init__(self) -> None:
        self._clapper, self._sound = socket.socketpair()
        self._clapper.setblocking(False)
        self._sound.setblocking(False)
        self._ear = select.poll()
        self._ear.register(self._sound, select.POLLIN)

    def fileno(self) -> int:
        """What a selector watches."""
        return self._sound.fileno()

    def ring(self) -> None:
        """End the wait that is under way, or else the next one."""
        try:
            self._clapper.send(b"!")
        except BlockingIOError:
            pass  # it is ringing already
        except OSError:
            log.debug("nobody waits any more")

    def wait(self, timeout: float) -> bool:
        """Until it has rung, or some seconds have passed; returns whether it has rung."""
        return bool(self._ear.poll(timeout * 1000))

    def hush(self) -> None:
        """However often it rang, it was heard."""
        self._sound.recv(4096)

    def close(self) -> None:
        """Nobody waits any more."""
        self._clapper.close()
        self._sound.close()
