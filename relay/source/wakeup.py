"""Wakes a thread that waits in a selector."""

from __future__ import annotations

import logging
import select
import socket

log = logging.getLogger(__name__)


class Wakeup:
    """Wakes a thread that waits in a selector or in `wait`: it is readable from `wake` until `clear`. Thread-safe."""

    def __init__(self) -> None:
        self._sender, self._receiver = socket.socketpair()
        self._sender.setblocking(False)
        self._receiver.setblocking(False)
        self._poll = select.poll()
        self._poll.register(self._receiver, select.POLLIN)

    def fileno(self) -> int:
        """The file descriptor that a selector watches."""
        return self._receiver.fileno()

    def wake(self) -> None:
        """End the current wait, or else the next one."""
        try:
            self._sender.send(b"!")
        except BlockingIOError:
            pass  # the thread is being woken already
        except OSError:
            log.debug("a closed wakeup was called")

    def wait(self, timeout: float) -> bool:
        """Wait for `wake`, at most `timeout` seconds; returns whether it was called."""
        return bool(self._poll.poll(timeout * 1000))

    def clear(self) -> None:
        """Forget all calls of `wake`."""
        self._receiver.recv(4096)

    def close(self) -> None:
        """Close the sockets. No thread may wait any more."""
        self._sender.close()
        self._receiver.close()
