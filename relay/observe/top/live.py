"""A live view of a group for `relay top` and `relay demo`: a thread polls the group, and the caller renders."""

from __future__ import annotations

from threading import Event, Thread
from typing import Self

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from relay.admin.status import Status, Watch
from relay.config.settings import Settings
from relay.observe.top.frame import Size, lines
from relay.observe.top.rates import Trends

CLOSE_SECONDS = 1.0


class View:
    """A Rich renderable of the last poll of a group. As a context manager it polls every `interval` seconds.

    It has `height` lines at most, by default those of the terminal.
    """

    def __init__(self, settings: Settings, interval: float, height: int | None = None) -> None:
        self._watch = Watch(settings)
        self._interval = interval
        self._height = height
        self._trends = Trends()
        self._status: Status | None = None
        self._closing = Event()
        # A daemon, so that a server that does not answer does not keep the process alive.
        self._thread = Thread(target=self._run, name="view", daemon=True)
        self.refreshed = Event()
        """Set by each poll; the renderer clears it."""

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        self._thread.join(CLOSE_SECONDS)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if self._status is None:
            yield Text("querying the databases", style="dim")
            return
        height = self._height or console.size.height
        # Some terminals wrap at the last column.
        size = Size(console.size.width - 1, height, console.options.ascii_only)
        yield Text("\n").join(lines(self._status, self._trends, size))

    def _run(self) -> None:
        try:
            while True:
                status = self._watch.read()
                self._trends.note(status)
                self._status = status
                self.refreshed.set()
                if self._closing.wait(self._interval):
                    return
        finally:
            self._watch.close()
