"""A thread that writes out sums of other threads, at intervals and only if there are any."""

from __future__ import annotations

import logging
from collections.abc import Callable
from threading import Event

from relay.conditions import Condition
from relay.faults import describe
from relay.threads import Thread

log = logging.getLogger(__name__)


class FlushThread:
    """Calls `flush` `interval` seconds after a `note`, once for all notes in between.

    `flush` calls `clear` when it takes the sums, under the lock under which others add to them. If it raises, it is
    called again for the next note.
    """

    def __init__(self, flush: Callable[[], None], name: str, interval: float) -> None:
        self._flush = flush
        self.condition = Condition(
            name, log, f"cannot write {name}", f"{name} are written again", level=logging.DEBUG
        )
        self._interval = interval
        self._noted = Event()
        self._closing = Event()
        self._thread = Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def note(self) -> None:
        """Note that there are sums to write out."""
        self._noted.set()

    def clear(self) -> None:
        """Forget the notes whose sums `flush` has taken."""
        self._noted.clear()

    def close(self) -> None:
        """End the thread and write out the remaining sums."""
        self._closing.set()
        self._noted.set()
        if self._thread.is_alive():
            self._thread.join()
        self._try()

    def _run(self) -> None:
        while not self._closing.is_set():
            self._noted.wait()
            if not self._closing.wait(self._interval):
                self._try()

    def _try(self) -> None:
        try:
            self._flush()
        except Exception as error:
            self.condition.fails(describe(error))
        else:
            self.condition.works()
