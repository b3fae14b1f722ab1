"""Wakes a thread that waits in a selector."""

from __future__ import annotations

import logging
import select
import socket

log = logging.getLogger(__name__)


class Wakeup:
    """Wakes a thread that waits: register it with a selector; it is readable from `wake` until `clear`. Thread-safe."""

    def __init__(self) -> None:
        self._sender, self._receiver = socket.socketpair()
        self._sender.setblocking(False)
        self._receiver.setblocking(False)
        self._poll = select.poll()
        self._poll.register(self._receiver, select.POLLIN)

    def fileno(self) -> int:
        """What a selector watches."""
        return self._receiver.fileno()

    def wake(self) -> None:
        """End the wait that is under way, or else the next one."""
        try:
            self._sender.send(b"!")
        except BlockingIOError:
            pass  # the thread is being woken already
        except OSError:
            log.debug("nobody waits any more")

    def wait(self, timeout: float) -> bool:
        """Wait for `wake`, or some seconds; returns whether `wake` was called."""
        return bool(self._poll.poll(timeout * 1000))

    def clear(self) -> None:
        """Forget all calls of `wake`."""
        self._receiver.recv(4096)

    def close(self) -> None:
        """Nobody waits any more."""
        self._sender.close()
        self._receiver.close()
