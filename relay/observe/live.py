"""A view of a group that renews itself: a thread looks, whoever has the terminal renders."""

from __future__ import annotations

from threading import Event, Thread
from types import TracebackType
from typing import Self

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from relay.config.settings import Settings
from relay.observe.frame import Size, lines
from relay.observe.rates import Observations
from relay.observe.watch import Picture, Watch

CLOSE_SECONDS = 1.0


class View:
    """A renderable of Rich's that shows the last poll; as a context manager it polls every `interval` seconds.

    `height` is how many lines it takes at most; None: those of the terminal.
    """

    def __init__(self, settings: Settings, interval: float, height: int | None = None) -> None:
        self._watch = Watch(settings)
        self._interval = interval
        self._height = height
        self._observations = Observations()
        self._picture: Picture | None = None
        self._closing = Event()
        # A server that answers no more must not keep the terminal.
        self._thread = Thread(target=self._run, name="view", daemon=True)
        self.refreshed = Event()
        """Set by each poll; the renderer clears it."""

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._closing.set()
        self._thread.join(CLOSE_SECONDS)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if self._picture is None:
            yield Text("looking at the databases", style="dim")
            return
        height = self._height or console.size.height
        # The last column stays free: some terminals wrap there.
        size = Size(console.size.width - 1, height, console.options.ascii_only)
        yield Text("\n").join(lines(self._picture, self._observations, size))

    def _run(self) -> None:
        try:
            while True:
                picture = self._watch.read()
                self._observations.note(picture)
                self._picture = picture
                self.refreshed.set()
                if self._closing.wait(self._interval):
                    return
        finally:
            self._watch.close()
