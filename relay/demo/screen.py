"""Prints the steps, the progress and the summary of the demo."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Self

from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, TextColumn

from relay.config.settings import Settings
from relay.observe.top import View

LINE_SECONDS = 2.0
"""Interval of progress lines without a terminal."""
NAME_WIDTH = 38
INDENT = 9 * " "
VIEW_SECONDS = 1.0
VIEW_LINES = 14
"""Lines of the view below the bar, so few that the steps stay visible."""


class _ProgressWithView(Progress):
    """Progress bars, with a view of the group below them while `view` is set."""

    view: View | None = None

    def get_renderables(self) -> Iterable[RenderableType]:
        yield from super().get_renderables()
        if self.view is not None:
            yield self.view


@dataclass(frozen=True, slots=True)
class Check:
    """A promise and whether it was kept; `counts` has the counted violations."""

    promise: str
    kept: bool
    counts: str


class Screen:
    """Prints a line for each step; during a step, a progress bar on a terminal, or a line every two seconds."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._started = self._since = self._last_logged = time.monotonic()
        self._first: int | None = None
        self._progress = _ProgressWithView(
            TextColumn("{task.description}"),
            BarColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._bar = self._progress.add_task(INDENT, total=None)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    @contextmanager
    def watching(self, settings: Settings) -> Iterator[None]:
        """Show the view of `relay top` below the bar during the block, on a terminal."""
        if not self._console.is_terminal:
            yield
            return
        with View(settings, VIEW_SECONDS, VIEW_LINES) as view:
            self._progress.view = view
            try:
                yield
            finally:
                self._progress.view = None

    def step(self, text: str) -> None:
        """Begin a step."""
        self._last_logged = self._since = time.monotonic()
        self._first = None
        self._print(f"{self._since - self._started:5.1f} s  {text}")
        self._progress.remove_task(self._bar)
        self._bar = self._progress.add_task(INDENT, total=None)

    def show(self, what: str, done: int, total: int) -> None:
        """Show the progress and the rate of the step, in events."""
        now = time.monotonic()
        if self._first is None:
            self._first, self._since = done, now
        rate = (done - self._first) / (now - self._since) if done > self._first else 0
        text = f"{INDENT}{what} {done:,} of {total:,} events, {rate:,.0f}/s"
        self._progress.update(self._bar, description=text, completed=done, total=total)
        if not self._console.is_terminal and now - self._last_logged >= LINE_SECONDS:
            self._last_logged = now
            self._print(text)

    def summary(self, facts: Sequence[tuple[str, str]], checks: Sequence[Check]) -> None:
        """Print the figures, and for each promise whether it was kept, with its counts."""
        kept, broken = ("ok", "FAILED") if self._console.options.ascii_only else ("✓", "✗")
        self._print("")
        for name, text in facts:
            self._row("", name, text)
        self._print("")
        for check in checks:
            style = "green" if check.kept else "bold red"
            self._row(kept if check.kept else broken, check.promise, check.counts, style)

    def lines(self, title: str, lines: Sequence[str]) -> None:
        """Print a title and lines, if there are any."""
        if lines:
            self._print("\n".join([title, *lines]))

    def _row(self, mark: str, name: str, text: str, style: str = "") -> None:
        # Not a table of Rich, which breaks long lines if there is no terminal.
        self._print(f"{mark:2} {name:{NAME_WIDTH}} {text}", style)

    def _print(self, text: str, style: str = "") -> None:
        self._console.print(text, style=style, highlight=False, markup=False, soft_wrap=True)
