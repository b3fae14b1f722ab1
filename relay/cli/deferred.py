"""The commands on deferred transactions. No logic of their own."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, NamedTuple

import psycopg
import typer

from relay.cli.options import ConfigOption, JsonOption, ReasonOption, YesOption, warn
from relay.cli.tables import print_table, printable
from relay.config.files import load
from relay.faults import ConfigurationError
from relay.store import deferred_selection
from relay.store.deferred_selection import KINDS, Deferred, DeferredSelection, FoundDeferred

deferred = typer.Typer(
    help="Deferred transactions: those that wait for a time, for another attempt, or for an earlier one of their key.",
    no_args_is_help=True,
)

IdOption = Annotated[list[int] | None, typer.Option("--id", help="The transaction; repeatable.")]
SinkOption = Annotated[
    str | None, typer.Option("--sink", help="The sink that it goes to; '' for the target.")
]
HandlerOption = Annotated[str | None, typer.Option("--handler", help="The one that failed last.")]
KindOption = Annotated[str | None, typer.Option("--kind", help=f"One of {', '.join(KINDS)}.")]
KeyOption = Annotated[str | None, typer.Option("--key", help="One of its ordering keys.")]
HostOption = Annotated[str | None, typer.Option("--host", help="One of its host_ids.")]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Only say what would be done.")]
AllOption = Annotated[bool, typer.Option("--all", help="All of them, where no filter is given.")]

DRY_RUN_SHOWS = 1_000
"""How many transactions `--dry-run` prints at most."""
_KEYS_SHOWN = 3


class _Opened(NamedTuple):
    conn: psycopg.Connection[Any]
    group: str
    deferrals: Any


@contextmanager
def _opened(config: ConfigOption) -> Iterator[_Opened]:
    from relay.admin.check import reach_target
    from relay.admin.deferred import DeferredTransactions

    settings = load(config)
    with reach_target(settings) as conn:
        yield _Opened(conn, settings.group, DeferredTransactions(settings, conn))


def _filter(
    ids: list[int] | None,
    sink: str | None,
    handler: str | None,
    kind: str | None,
    key: str | None,
    host: str | None,
) -> DeferredSelection:
    if kind is not None and kind not in KINDS:
        raise ConfigurationError(f"--kind: {kind!r} is none of {', '.join(KINDS)}")
    return DeferredSelection(tuple(ids or ()), sink, handler, kind, key, host)


def _found(opened: _Opened, wanted: DeferredSelection, everything: bool) -> FoundDeferred:
    """What a command acts on. Refuses to act on everything because somebody forgot a filter."""
    if wanted == DeferredSelection() and not everything:
        raise ConfigurationError(
            "say which deferred transactions: with a filter such as --id or --sink, or --all"
        )
    found: FoundDeferred = opened.deferrals.find(wanted)
    if found.holding:
        warn(
            f"{found.holding} more are dead letters that hold their keys: `relay dlq replay` or `relay dlq discard` "
            "them"
        )
    if not found.transactions:
        _print_none(wanted, opened.group)
    return found


def _approved(opened: _Opened, found: FoundDeferred, what: str, dry_run: bool, yes: bool) -> bool:
    """Show what will be done; returns whether it may be."""
    if not found.transactions:
        return False
    print(f"{found.transactions} transactions with {found.events} events {what}")
    if dry_run:
        shown = deferred_selection.listed(opened.conn, opened.group, found.wanted, DRY_RUN_SHOWS)
        _print([each for each in shown if each.kind != "holding"])
        if found.transactions > DRY_RUN_SHOWS:
            print(f"these are the oldest {DRY_RUN_SHOWS} of them")
        return False
    if not yes:
        typer.confirm("Go on?", abort=True)
    return True


def _warn_of_idle(opened: _Opened, due: dict[str, int]) -> None:
    """Warn of transactions that are due, by sink, and that nobody tries now."""
    missing = opened.deferrals.missing_sinks(due)
    paused = [name for name in opened.deferrals.paused_sinks() if name in due]
    for name in missing:
        warn(
            f"{due[name]} of them go to sink {printable(name)}, which is not configured any more: put it back, or give "
            f"them up with `relay deferred cancel --sink {printable(name)}`"
        )
    for name in paused:
        warn(
            f"{due[name]} of them go to sink {name}, which is paused: they are tried when `relay sink resume {name}` "
            "lets it go on"
        )
    if due.keys() - {*missing, *paused} and not opened.deferrals.instances():
        warn(f"no instance of group {opened.group!r} is running: they are tried when one starts")


def _print_none(wanted: DeferredSelection, group: str) -> None:
    """Say on standard error that there is nothing, and whether filters are the reason."""
    narrowed = "" if wanted == DeferredSelection() else " that matches the filters"
    print(f"there is no deferred transaction in group {group!r}{narrowed}", file=sys.stderr)


def _print(found: Sequence[Deferred]) -> None:
    print_table(
        (
            *("id", "sink", "transaction", "keys", "events", "kind", "handler", "reason"),
            *("attempts", "since", "next"),
        ),
        (
            (
                item.id,
                item.sink or "-",
                item.transaction_id or "-",
                _few(item.keys) or "-",
                item.events,
                item.kind,
                item.handler or "-",
                item.reason or "-",
                item.attempts,
                item.since.isoformat(" ", "seconds"),
                item.next.isoformat(" ", "seconds") if item.next else "-",
            )
            for item in found
        ),
    )


def _few(keys: Sequence[str]) -> str:
    more = len(keys) - _KEYS_SHOWN
    return ", ".join(keys[:_KEYS_SHOWN]) + (f" and {more} more" if more > 0 else "")


@deferred.command("list")
def deferred_list(
    config: ConfigOption = None,
    id_: IdOption = None,
    sink: SinkOption = None,
    handler: HandlerOption = None,
    kind: KindOption = None,
    key: KeyOption = None,
    host: HostOption = None,
    limit: Annotated[int, typer.Option(min=1, help="At most so many, oldest first.")] = 100,
    as_json: JsonOption = False,
) -> None:
    """List deferred transactions, oldest first."""
    wanted = _filter(id_, sink, handler, kind, key, host)
    with _opened(config) as opened:
        found = deferred_selection.listed(opened.conn, opened.group, wanted, limit)
    if as_json:
        print(json.dumps([deferred_selection.as_json(item) for item in found], indent=2))
    elif found:
        _print(found)
    else:
        _print_none(wanted, opened.group)


@deferred.command("run")
def deferred_run(
    config: ConfigOption = None,
    id_: IdOption = None,
    sink: SinkOption = None,
    handler: HandlerOption = None,
    kind: KindOption = None,
    key: KeyOption = None,
    host: HostOption = None,
    everything: AllOption = False,
    reason: ReasonOption = None,
    dry_run: DryRunOption = False,
    yes: YesOption = False,
) -> None:
    """Have deferred transactions tried now instead of at their time; attempts and order stay what they are."""
    wanted = _filter(id_, sink, handler, kind, key, host)
    with _opened(config) as opened:
        found = _found(opened, wanted, everything)
        if not _approved(opened, found, "will be tried now", dry_run, yes):
            return
        due: dict[str, int] = opened.deferrals.run(found, reason)
        print(f"{sum(due.values())} transactions are due")
        _warn_of_idle(opened, due)


@deferred.command("cancel")
def deferred_cancel(
    config: ConfigOption = None,
    id_: IdOption = None,
    sink: SinkOption = None,
    handler: HandlerOption = None,
    kind: KindOption = None,
    key: KeyOption = None,
    host: HostOption = None,
    everything: AllOption = False,
    reason: ReasonOption = None,
    dry_run: DryRunOption = False,
    yes: YesOption = False,
) -> None:
    """Give deferred transactions up: they become dead letters, which `relay dlq replay` brings back."""
    wanted = _filter(id_, sink, handler, kind, key, host)
    with _opened(config) as opened:
        found = _found(opened, wanted, everything)
        if _approved(opened, found, "will be dead letters", dry_run, yes):
            print(f"{opened.deferrals.cancel(found, reason)} transactions are dead letters")
