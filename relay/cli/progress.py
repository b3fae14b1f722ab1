"""Shows a bar with rate and remaining time on standard error while a command works, if that is a terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from relay.runtime.reporting import ProgressReport, silent

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


@contextmanager
def progress() -> Iterator[ProgressReport]:
    """Show reported progress until the end of the block, which must not ask: the bar would overwrite the answer."""
    if not sys.stderr.isatty():
        yield silent
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        Progress,
        ProgressColumn,
        SpinnerColumn,
        Task,
        TextColumn,
        TimeRemainingColumn,
    )
    from rich.text import Text

    class Count(ProgressColumn):
        """The column for counts: how many of how many, and how many a second; empty if nothing is counted."""

        def render(self, task: Task) -> Text:
            if not task.completed and task.total is None:
                return Text()
            of = "" if task.total is None else f" of {task.total:,.0f}"
            rate = "" if task.speed is None else f", {task.speed:,.0f}/s"
            return Text(f"{task.completed:,.0f}{of}{rate}")

    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        Count(),
        TimeRemainingColumn(),
    )
    # Standard output has the command's output, which may go to a file.
    with Progress(
        *columns, console=Console(stderr=True), transient=True, redirect_stdout=False
    ) as shown:
        yield _Steps(shown)


class _Steps:
    """Shows one bar, for the step that was reported last."""

    def __init__(self, shown: Progress) -> None:
        self._shown = shown
        self._what = ""
        self._task: TaskID | None = None

    def __call__(self, what: str, done: int = 0, total: int | None = None) -> None:
        if self._task is None or what != self._what:
            if self._task is not None:
                self._shown.remove_task(self._task)
            self._what = what
            self._task = self._shown.add_task(what, total=total)
        self._shown.update(self._task, completed=done, total=total)
