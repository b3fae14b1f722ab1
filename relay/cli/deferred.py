"""`relay deferred`: the commands on deferred transactions. No logic of their own."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import psycopg
import typer

from relay.admin.phrases import counted, destination, due, moment, with_events
from relay.cli.options import ConfigOption, JsonOption, time_of, warn, with_groups
from relay.cli.terminal import DRY_RUN_SHOWS, ActionOptions, approved, print_table
from relay.config.files import load
from relay.faults import ConfigurationError
from relay.store.filters import DeferredSelection

if TYPE_CHECKING:
    from relay.store.deferred.selection import Deferred, FoundDeferred

deferred = typer.Typer(
    help="Deferred transactions: scheduled, to be retried, or blocked by an earlier one of their key.",
    no_args_is_help=True,
)

EventOption = Annotated[
    str | None,
    typer.Option("--event", metavar="ID", help="The id of one of its events."),
]
_KEYS_SHOWN = 3


@dataclass(frozen=True)
class DeferredSelectionOptions:
    """The configuration, and the filter of a command on the deferred transactions of its group."""

    config: ConfigOption = None
    wanted: DeferredSelection = field(default_factory=DeferredSelection)
    event: EventOption = None


class _OpenedDeferred(NamedTuple):
    conn: psycopg.Connection[Any]
    group: str
    deferrals: Any
    wanted: DeferredSelection

    @property
    def is_filtered(self) -> bool:
        return bool(self.wanted.given())

    def listed(self, limit: int) -> list[Deferred]:
        from relay.store.deferred import selection as deferred_selection

        return deferred_selection.listed(self.conn, self.group, self.wanted, limit)


@contextmanager
def _opened(options: DeferredSelectionOptions) -> Iterator[_OpenedDeferred]:
    from relay.admin.connections import reach_target
    from relay.admin.deferred import DeferredTransactions

    wanted, settings = options.wanted, load(options.config)
    with reach_target(settings) as conn:
        deferrals = DeferredTransactions(settings, conn)
        if options.event is not None:
            wanted = deferrals.with_event(wanted, options.event)
        yield _OpenedDeferred(conn, settings.group, deferrals, wanted)


def _approved(opened: _OpenedDeferred, what: str, action: ActionOptions) -> FoundDeferred | None:
    """Find the transactions that a command acts on, and print what will be done; None if it must not be done.

    Raises ConfigurationError without a filter and `--all`: a forgotten filter must not select all.
    """
    if not opened.is_filtered and not action.everything:
        raise ConfigurationError(
            "name the deferred transactions by a filter such as --id or --sink, or give --all"
        )
    selected: FoundDeferred = opened.deferrals.find(opened.wanted)
    if selected.holding:
        warn(
            f"{selected.holding} more are dead letters that hold their keys: `relay dlq replay` or `relay dlq discard` "
            "them"
        )
    if not selected.transactions:
        _print_none(opened)
        return None

    def show() -> None:
        _print([each for each in opened.listed(DRY_RUN_SHOWS) if each.kind != "holding"])

    counts = with_events(selected.transactions, selected.events)
    may = approved(selected, counts, what, show, "oldest", action.dry_run, action.yes)
    return selected if may else None


def _print_none(opened: _OpenedDeferred) -> None:
    """Print on standard error that no transaction was found, and whether there were filters."""
    narrowed = " that matches the filters" if opened.is_filtered else ""
    print(f"there is no deferred transaction in group {opened.group!r}{narrowed}", file=sys.stderr)


def _report_gone(selected: FoundDeferred, done: int) -> None:
    """Warn about the found transactions on which the command did not act."""
    if (gone := selected.transactions - done) > 0:
        warn(
            f"{counted(gone, 'transaction was', 'transactions were')} delivered, tried or given up meanwhile: nothing "
            "has been done to them"
        )


def _print(transactions: Sequence[Deferred]) -> None:
    print_table(
        (
            *("id", "sink", "transaction", "keys", "events", "kind", "handler", "reason"),
            *("attempts", "since", "next"),
        ),
        (
            (
                item.id,
                destination(item.sink, item.endpoint),
                item.transaction_id or "-",
                _shortened(item.keys) or "-",
                item.events,
                item.kind,
                item.handler or "-",
                item.reason or "-",
                item.attempts,
                moment(item.since),
                due(item.next),
            )
            for item in transactions
        ),
    )


def _shortened(keys: Sequence[str]) -> str:
    more = len(keys) - _KEYS_SHOWN
    return ", ".join(keys[:_KEYS_SHOWN]) + (f" and {more} more" if more > 0 else "")


@deferred.command("list")
@with_groups
def deferred_list(
    options: DeferredSelectionOptions,
    limit: Annotated[int, typer.Option(min=1, help="The largest number of transactions.")] = 100,
    as_json: JsonOption = False,
) -> None:
    """List deferred transactions, oldest first."""
    from relay.model.json_fields import json_fields

    with _opened(options) as opened:
        transactions = opened.listed(limit)
    if as_json:
        print(json.dumps([json_fields(item) for item in transactions], indent=2))
    elif transactions:
        _print(transactions)
    else:
        _print_none(opened)


@deferred.command("run")
@with_groups
def deferred_run(options: DeferredSelectionOptions, action: ActionOptions) -> None:
    """Retry deferred transactions now instead of at their time; their attempts and their order stay the same."""
    with _opened(options) as opened:
        selected = _approved(opened, "will be tried now", action)
        if selected is None:
            return
        due: dict[str, int] = opened.deferrals.run(selected, action.reason)
        print(counted(sum(due.values()), "transaction is", "transactions are"), "due")
        for line in opened.deferrals.idle(due):
            warn(line)


@deferred.command("move")
@with_groups
def deferred_move(
    to: Annotated[
        datetime,
        typer.Option("--to", parser=time_of, metavar="TIME", help="The new time (UTC)."),
    ],
    options: DeferredSelectionOptions,
    action: ActionOptions,
) -> None:
    """Move scheduled transactions to another time: all of their events, whatever `deliver_at` says."""
    if options.wanted.kind not in (None, "scheduled"):
        raise ConfigurationError("--kind: only scheduled transactions can be moved")
    with _opened(options) as opened:
        scheduled = opened
        if opened.is_filtered or action.everything:
            scheduled = opened._replace(
                wanted=opened.wanted.model_copy(update={"kind": "scheduled"})
            )
        selected = _approved(scheduled, f"will be moved to {moment(to)}", action)
        if selected is None:
            return
        moved: dict[str, int] = opened.deferrals.move(selected, to, action.reason)
        print(counted(sum(moved.values()), "transaction is moved", "transactions are moved"))
        _report_gone(selected, sum(moved.values()))
        for line in opened.deferrals.idle(moved):
            warn(line)


@deferred.command("cancel")
@with_groups
def deferred_cancel(options: DeferredSelectionOptions, action: ActionOptions) -> None:
    """Give deferred transactions up: they become dead letters, which `relay dlq replay` replays."""
    with _opened(options) as opened:
        selected = _approved(opened, "will be dead letters", action)
        if selected is not None:
            cancelled = opened.deferrals.cancel(selected, action.reason)
            print(
                counted(cancelled, "transaction is a dead letter", "transactions are dead letters")
            )
            _report_gone(selected, cancelled)
