"""A thread that writes out what others have added up, at intervals and only while there is something."""

from __future__ import annotations

from collections.abc import Callable
from threading import Event

from relay.threads import Thread


class FlushThread:
    """Calls `flush` at most every `interval` seconds, once for all that is noted meanwhile.

    `flush` begins with `taken` where it takes the sums, under the lock under which they are added; it must not raise.
    """

    def __init__(self, flush: Callable[[], None], name: str, interval: float) -> None:
        self._flush = flush
        self._interval = interval
        self._noted = Event()
        self._closing = Event()
        self._thread = Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def note(self) -> None:
        """There is something to write out."""
        self._noted.set()

    def taken(self) -> None:
        """All that was noted is about to be written out."""
        self._noted.clear()

    def close(self) -> None:
        """End the thread and write out what is left."""
        self._closing.set()
        self._noted.set()
        if self._thread.is_alive():
            self._thread.join()
        self._flush()

    def _run(self) -> None:
        while not self._closing.is_set():
            self._noted.wait()
            if not self._closing.wait(self._interval):
                self._flush()
