"""What commands print: tables and facts, progress, and what they are about to do, for which they ask approval.

Tables and bars are for people at a terminal; everything else gets tab-separated lines and no bar.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import typer
from rich.table import Table
from rich.text import Text

from relay.admin.phrases import printable
from relay.cli.options import AllOption, DryRunOption, ReasonOption, YesOption, out
from relay.runtime.reporting import ProgressReport, silent

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from relay.store.dead_letters.selection import FoundDeadLetters
    from relay.store.deferred.selection import FoundDeferred


def print_table(headings: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print rows below their headings. At a terminal long cells are folded; piped, each row is one whole line."""
    if not out.is_terminal:
        for row in (headings, *rows):
            print("\t".join(printable(cell) for cell in row))
        return
    table = Table()
    for heading in headings:
        table.add_column(heading, overflow="fold")
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))
    out.print(table)


def print_facts(facts: Iterable[tuple[str, object]]) -> None:
    """Print names with their values, one below the other. Piped, each pair is one whole line."""
    if not out.is_terminal:
        for name, value in facts:
            print(f"{printable(name)}\t{printable(value)}")
        return
    table = Table(show_header=False, box=None)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in facts:
        table.add_row(Text(printable(name)), Text(printable(value, kept="\n")))
    out.print(table)


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


DRY_RUN_SHOWS = 1_000
"""How many transactions `--dry-run` prints at most."""


@dataclass(frozen=True)
class ActionOptions:
    """The options of a command that acts on the transactions that a filter selects."""

    everything: AllOption = False
    reason: ReasonOption = None
    dry_run: DryRunOption = False
    yes: YesOption = False


def approve(yes: bool, question: str = "Go on?") -> None:
    """Ask a question unless `--yes` answers it. Raises typer.Abort if the answer is no."""
    if not yes:
        typer.confirm(question, abort=True)


def approved(
    selected: FoundDeadLetters | FoundDeferred,
    counts: str,
    what: str,
    show: Callable[[], None],
    order: str,
    dry_run: bool,
    yes: bool,
) -> bool:
    """Print what will be done to the selected transactions, which `counts` are; returns whether it may be done.

    A dry run calls `show`, which prints DRY_RUN_SHOWS of them at most, the `order` ("newest", "oldest") ones. Raises
    typer.Abort if the answer is no.
    """
    print(counts, what)
    if not dry_run:
        approve(yes)
        return True
    show()
    if selected.transactions > DRY_RUN_SHOWS:
        print(f"these are the {order} {DRY_RUN_SHOWS} of them")
    return False
