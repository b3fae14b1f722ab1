"""The commands on dead letters. No logic of their own."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, NamedTuple
from uuid import UUID

import psycopg
import typer

from relay.cli_options import ConfigOption, JsonOption, YesOption, out
from relay.cli_tables import print_facts, print_table
from relay.config import load
from relay.faults import ConfigurationError
from relay.store import dead_letters
from relay.store.dead_letters import DeadTransaction, Filter

dlq = typer.Typer(
    help="Dead letters: transactions that could not be applied. Each command takes whole transactions.",
    no_args_is_help=True,
)

IdOption = Annotated[list[int] | None, typer.Option("--id", help="The letter; repeatable.")]
TransactionOption = Annotated[
    UUID | None, typer.Option("--transaction", help="Its transaction_id.")
]
HostOption = Annotated[UUID | None, typer.Option("--host", help="Its host_id.")]
HandlerOption = Annotated[str | None, typer.Option("--handler", help="The one that failed.")]
TypeOption = Annotated[str | None, typer.Option("--type", help="Its event_type.")]
SinceOption = Annotated[
    datetime | None, typer.Option("--since", help="Dead-lettered then or later.")
]
UntilOption = Annotated[datetime | None, typer.Option("--until", help="Dead-lettered before.")]
ExceptionOption = Annotated[
    str | None, typer.Option("--exception", metavar="TEXT", help="A part of the exception.")
]
StatusOption = Annotated[
    str | None, typer.Option("--status", help="dead, replaying, replayed or discarded.")
]
ReasonOption = Annotated[str | None, typer.Option("--reason", help="Is kept with the action.")]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Only say what would be done.")]
AllOption = Annotated[bool, typer.Option("--all", help="All of them, where no filter is given.")]


_JSON_FIELDS = ("payload", "original_payload", "metadata")


class _Opened(NamedTuple):
    conn: psycopg.Connection[Any]
    group: str
    letters: Any


@contextmanager
def _opened(config: Path | None) -> Iterator[_Opened]:
    from relay.preflight import reach_target
    from relay.replay import DeadLetters

    settings = load(config)
    with reach_target(settings) as conn:
        yield _Opened(conn, settings.group, DeadLetters(settings, conn))


def _asked(wanted: Filter, everything: bool) -> Filter:
    """Refuse to act on all dead letters because somebody forgot a filter."""
    if wanted == Filter() and not everything:
        raise ConfigurationError(
            "say which dead letters: with a filter such as --id or --handler, or --all"
        )
    return wanted


def _approved(found: Sequence[DeadTransaction], what: str, dry_run: bool, yes: bool) -> bool:
    """Show what will be done; returns whether it may be."""
    events = sum(each.events for each in found)
    print(f"{len(found)} transactions with {events} events {what}")
    if dry_run:
        _print(found)
        return False
    if not yes:
        typer.confirm("Go on?", abort=True)
    return True


def _print(found: Sequence[DeadTransaction]) -> None:
    headings = (
        *("id", "transaction", "host", "events", "event type", "handler", "exception"),
        *("status", "since"),
    )
    print_table(
        headings,
        (
            (
                item.id,
                item.transaction_id or "-",
                item.host_id or "-",
                item.events,
                item.event_type or "-",
                item.handler or "-",
                item.exception.splitlines()[0][:80],
                item.status,
                item.created_dt.isoformat(" ", "seconds"),
            )
            for item in found
        ),
    )


def _say_none(wanted: Filter, group: str, what: str = "dead letter") -> None:
    """Say on standard error that there is nothing, and whether filters are the reason."""
    narrowed = "" if wanted == Filter() else " that matches the filters"
    print(f"there is no {what} in group {group!r}{narrowed}", file=sys.stderr)


@dlq.command("list")
def dlq_list(
    config: ConfigOption = None,
    id_: IdOption = None,
    transaction: TransactionOption = None,
    host: HostOption = None,
    handler: HandlerOption = None,
    type_: TypeOption = None,
    since: SinceOption = None,
    until: UntilOption = None,
    exception: ExceptionOption = None,
    status: StatusOption = None,
    limit: Annotated[int, typer.Option(min=1, help="At most so many, newest first.")] = 100,
    as_json: JsonOption = False,
) -> None:
    """List dead transactions, newest first."""
    wanted = Filter(id_ or (), transaction, host, handler, type_, since, until, exception, status)
    with _opened(config) as opened:
        found = dead_letters.transactions(opened.conn, opened.group, limit, wanted)
    if as_json:
        print(json.dumps([dead_letters.as_json(item) for item in found], indent=2))
    elif found:
        _print(found)
    else:
        _say_none(wanted, opened.group)


@dlq.command("show")
def dlq_show(
    letter_id: Annotated[int, typer.Argument(metavar="ID")],
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show every event of the dead transaction that holds letter ID, and what was done about it."""
    with _opened(config) as opened:
        found = [
            dead_letters.as_json(letter)
            for letter in dead_letters.letters(opened.conn, opened.group, [letter_id])
        ]
        ids = [letter["id"] for letter in found]
        done = dead_letters.actions(opened.conn, opened.group, ids)
    if not found:
        raise ConfigurationError(
            f"there is no dead letter {letter_id} in group {opened.group!r}: see `relay dlq list`"
        )
    if as_json:
        print(json.dumps(found, indent=2))
        return
    indent = 2 if out.is_terminal else None
    for letter in found:
        print(f"dead letter {letter['id']}")
        print_facts(
            (key, json.dumps(value, indent=indent) if key in _JSON_FIELDS else value)
            for key, value in letter.items()
        )
    for action in done:
        at = action.acted_at.isoformat(" ", "seconds")
        print(f"{at} {action.action} by {action.acted_by}: {action.reason or 'no reason given'}")


@dlq.command("replay")
def dlq_replay(
    config: ConfigOption = None,
    id_: IdOption = None,
    transaction: TransactionOption = None,
    host: HostOption = None,
    handler: HandlerOption = None,
    type_: TypeOption = None,
    since: SinceOption = None,
    until: UntilOption = None,
    exception: ExceptionOption = None,
    everything: AllOption = False,
    edit: Annotated[
        Path | None,
        typer.Option(
            "--edit", metavar="FILE", help="First take over payloads that were edited in an export."
        ),
    ] = None,
    reason: ReasonOption = None,
    dry_run: DryRunOption = False,
    yes: YesOption = False,
) -> None:
    """Let the running relay apply dead transactions again, in their order; live events of their keys wait behind."""
    from relay.replay import read_edits

    wanted = Filter(id_ or (), transaction, host, handler, type_, since, until, exception)
    edits = read_edits(edit) if edit else None
    with _opened(config) as opened:
        found = opened.letters.find(_asked(wanted, everything))
        if not found:
            _say_none(wanted, opened.group, "transaction to be applied again")
        elif _approved(found, "will be applied again", dry_run, yes):
            print(f"{opened.letters.replay(found, reason, edits)} transactions are replayed")


@dlq.command("discard")
def dlq_discard(
    config: ConfigOption = None,
    id_: IdOption = None,
    transaction: TransactionOption = None,
    host: HostOption = None,
    handler: HandlerOption = None,
    type_: TypeOption = None,
    since: SinceOption = None,
    until: UntilOption = None,
    exception: ExceptionOption = None,
    everything: AllOption = False,
    reason: ReasonOption = None,
    dry_run: DryRunOption = False,
    yes: YesOption = False,
) -> None:
    """Give dead transactions up; the keys that they hold are released, the letters stay."""
    wanted = Filter(id_ or (), transaction, host, handler, type_, since, until, exception)
    with _opened(config) as opened:
        found = opened.letters.find(_asked(wanted, everything))
        if not found:
            _say_none(wanted, opened.group, "transaction to be given up")
        elif _approved(found, "will be given up", dry_run, yes):
            print(f"{opened.letters.discard(found, reason)} transactions are discarded")


@dlq.command("export")
def dlq_export(
    config: ConfigOption = None,
    id_: IdOption = None,
    transaction: TransactionOption = None,
    host: HostOption = None,
    handler: HandlerOption = None,
    type_: TypeOption = None,
    since: SinceOption = None,
    until: UntilOption = None,
    exception: ExceptionOption = None,
    status: StatusOption = None,
    file: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Default: print them.")
    ] = None,
) -> None:
    """Write letters with their payloads, a JSON object on each line, in the order of publishing."""
    wanted = Filter(id_ or (), transaction, host, handler, type_, since, until, exception, status)
    with _opened(config) as opened:
        found = dead_letters.transactions(
            opened.conn, opened.group, wanted=wanted, newest_first=False
        )
        if not found:
            _say_none(wanted, opened.group)
        with file.open("w", encoding="utf-8") if file else _standard_output() as stream:
            for each in found:
                for letter in dead_letters.letters(opened.conn, opened.group, each.letters):
                    print(json.dumps(dead_letters.as_json(letter), ensure_ascii=False), file=stream)


@contextmanager
def _standard_output() -> Iterator[Any]:
    yield sys.stdout


@dlq.command("purge")
def dlq_purge(
    config: ConfigOption = None,
    id_: IdOption = None,
    transaction: TransactionOption = None,
    host: HostOption = None,
    handler: HandlerOption = None,
    type_: TypeOption = None,
    since: SinceOption = None,
    until: UntilOption = None,
    exception: ExceptionOption = None,
    everything: AllOption = False,
    reason: ReasonOption = None,
    dry_run: DryRunOption = False,
    yes: YesOption = False,
) -> None:
    """Delete the letters of transactions that were replayed or discarded; what was done stays noted."""
    wanted = Filter(id_ or (), transaction, host, handler, type_, since, until, exception)
    with _opened(config) as opened:
        found = opened.letters.find(_asked(wanted, everything), ("replayed", "discarded"))
        if not found:
            _say_none(wanted, opened.group, "replayed or discarded dead letter")
        elif _approved(found, "will be deleted", dry_run, yes):
            print(f"{opened.letters.purge(found, reason)} letters are deleted")
