"""Prints what a command is about to do, and asks for approval."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import typer

from relay.cli.options import AllOption, DryRunOption, ReasonOption, YesOption
from relay.observe.phrases import with_events

if TYPE_CHECKING:
    from relay.store.dead_letters.selection import FoundDeadLetters
    from relay.store.deferred.selection import FoundDeferred
    from relay.store.positions.rewind import GivenUp

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
    what: str,
    show: Callable[[], None],
    order: str,
    dry_run: bool,
    yes: bool,
) -> bool:
    """Print what will be done to the selected transactions; returns whether it may be done.

    A dry run calls `show`, which prints DRY_RUN_SHOWS of them at most, the `order` ("newest", "oldest") ones. Raises
    typer.Abort if the answer is no.
    """
    print(with_events(selected.transactions, selected.events), what)
    if not dry_run:
        approve(yes)
        return True
    show()
    if selected.transactions > DRY_RUN_SHOWS:
        print(f"these are the {order} {DRY_RUN_SHOWS} of them")
    return False


def print_given_up(given_up: GivenUp) -> None:
    """Print how many dead and deferred transactions a seek discards, if any."""
    if any(given_up):
        print(
            f"of the transactions that are delivered again, {given_up.dead} dead ones are discarded and "
            f"{given_up.deferred} deferred ones are forgotten"
        )
