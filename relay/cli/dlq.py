"""`relay dlq`: the commands on dead letters. No logic of their own."""

from __future__ import annotations

import json
import os
import stat
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TextIO

import psycopg
import typer

from relay.cli.options import (
    AllOption,
    ConfigOption,
    DryRunOption,
    JsonOption,
    ReasonOption,
    YesOption,
    out,
    time_of,
    warn,
    with_groups,
)
from relay.cli.terminal import (
    DRY_RUN_SHOWS,
    ActionOptions,
    approve,
    approved,
    print_facts,
    print_table,
    progress,
)
from relay.config.files import load
from relay.faults import ConfigurationError
from relay.model.json_fields import json_fields
from relay.observe.phrases import counted, moment, printable, printable_json
from relay.runtime.reporting import silent
from relay.store.dead_letters import selection as dead_letter_selection
from relay.store.dead_letters.selection import (
    DeadLetterSelection,
    FoundDeadLetters,
    WholeDeadTransaction,
)

if TYPE_CHECKING:
    from relay.config.settings import Settings
    from relay.store.queues import DeadMessage

dlq = typer.Typer(
    help="Dead letters: transactions that could not be applied, on which each command acts as a whole; with --queue, "
    "messages of a work queue that its workers have given up.",
    no_args_is_help=True,
)


IdOption = Annotated[list[int] | None, typer.Option("--id", help="The dead letter; repeatable.")]
TransactionOption = Annotated[str | None, typer.Option("--transaction", help="Its transaction_id.")]
HostOption = Annotated[str | None, typer.Option("--host", help="Its host_id.")]
SinkOption = Annotated[
    str | None, typer.Option("--sink", help="The sink to which it belongs; '' for the target.")
]
HandlerOption = Annotated[str | None, typer.Option("--handler", help="The handler that failed.")]
QueueOption = Annotated[
    str | None, typer.Option("--queue", help="The work queue whose messages are meant.")
]
TypeOption = Annotated[str | None, typer.Option("--type", help="Its event_type.")]
SinceOption = Annotated[
    datetime | None,
    typer.Option(
        "--since", parser=time_of, metavar="TIME", help="Dead-lettered at this time (UTC) or later."
    ),
]
UntilOption = Annotated[
    datetime | None,
    typer.Option(
        "--until", parser=time_of, metavar="TIME", help="Dead-lettered before this time (UTC)."
    ),
]
ExceptionOption = Annotated[
    str | None, typer.Option("--exception", metavar="TEXT", help="A part of the exception.")
]
_STATUSES = ("dead", "replaying", "replayed", "discarded")
StatusOption = Annotated[
    str | None, typer.Option("--status", help="dead, replaying, replayed or discarded.")
]


@dataclass(frozen=True)
class SelectionOptions:
    """The configuration, and the filter of a command on the dead transactions of its group."""

    config: ConfigOption = None
    id_: IdOption = None
    transaction: TransactionOption = None
    host: HostOption = None
    sink: SinkOption = None
    handler: HandlerOption = None
    type_: TypeOption = None
    since: SinceOption = None
    until: UntilOption = None
    exception: ExceptionOption = None
    queue: QueueOption = None

    def selection(self) -> DeadLetterSelection:
        """Return the filter."""
        return DeadLetterSelection(
            ids=self.id_ or (),
            transaction_id=self.transaction,
            host_id=self.host,
            handler=self.handler,
            event_type=self.type_,
            since=self.since,
            until=self.until,
            exception=self.exception,
            sink=self.sink,
        )


@dataclass(frozen=True)
class StatusSelectionOptions(SelectionOptions):
    """The same for a command that only reads: it selects dead transactions of any status."""

    status: StatusOption = None

    def selection(self) -> DeadLetterSelection:
        if self.status is not None and self.status not in _STATUSES:
            raise ConfigurationError(
                f"--status: {self.status!r} is not dead, replaying, replayed or discarded"
            )
        return replace(super().selection(), status=self.status)


class _Opened(NamedTuple):
    conn: psycopg.Connection[Any]
    group: str
    dead_letters: Any
    wanted: DeadLetterSelection


@contextmanager
def _opened(options: SelectionOptions) -> Iterator[_Opened]:
    from relay.admin.connections import reach_target
    from relay.admin.dead_letters import DeadLetters, printed

    settings = load(options.config)
    with reach_target(settings) as conn:
        wanted = printed(settings, options.selection(), "--")
        yield _Opened(conn, settings.group, DeadLetters(settings, conn), wanted)


def _find(
    opened: _Opened, everything: bool, none: str, statuses: Sequence[str] = ("dead",)
) -> FoundDeadLetters:
    """Find the transactions that a command acts on; prints `none` if there are none.

    Raises ConfigurationError without a filter and `--all`: a forgotten filter must not select all.
    """
    if opened.wanted == DeadLetterSelection() and not everything:
        raise ConfigurationError(
            "name the dead letters by a filter such as --id or --handler, or give --all"
        )
    selected: FoundDeadLetters = opened.dead_letters.find(opened.wanted, statuses)
    if not selected.transactions:
        _print_none(opened, none)
    return selected


def _approved(
    opened: _Opened, selected: FoundDeadLetters, what: str, dry_run: bool, yes: bool
) -> bool:
    """Print what will be done; returns whether there are transactions, and it may be done."""
    if not selected.transactions:
        return False

    def show() -> None:
        _print(
            dead_letter_selection.listed(
                *(opened.conn, opened.group, selected.wanted, DRY_RUN_SHOWS),
                *(WholeDeadTransaction, selected.statuses),
            )
        )

    return approved(selected, what, show, "newest", dry_run, yes)


def _print(transactions: Sequence[WholeDeadTransaction]) -> None:
    headings = (
        *("id", "transaction", "host", "events", "event type", "sink", "handler"),
        *("exception", "status", "since"),
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
                item.sink or "-",
                item.handler or "-",
                _first_line(item.exception),
                item.status,
                moment(item.since),
            )
            for item in transactions
        ),
    )


def _first_line(exception: str) -> str:
    """Return the first line of an exception; at a terminal at most 80 characters of it."""
    first = exception.partition("\n")[0]
    return f"{first[:79]}…" if out.is_terminal and len(first) > 80 else first


def _print_none(opened: _Opened, what: str = "dead letter") -> None:
    """Print on standard error that nothing was found, and whether there were filters."""
    narrowed = "" if opened.wanted == DeadLetterSelection() else " that matches the filters"
    print(f"there is no {what} in group {opened.group!r}{narrowed}", file=sys.stderr)


@dlq.command("list")
@with_groups
def dlq_list(
    options: StatusSelectionOptions,
    limit: Annotated[int, typer.Option(min=1, help="The largest number of transactions.")] = 100,
    as_json: JsonOption = False,
) -> None:
    """List dead transactions, or with --queue dead messages, newest first."""
    if options.queue is not None:
        _list_messages(options, options.queue, limit, as_json)
        return
    with _opened(options) as opened:
        transactions = dead_letter_selection.listed(
            opened.conn, opened.group, opened.wanted, limit, WholeDeadTransaction
        )
    if as_json:
        print(json.dumps([dead_letter_selection.as_json(item) for item in transactions], indent=2))
    elif transactions:
        _print(transactions)
    else:
        _print_none(opened)
    from relay.admin.queues import with_dead

    for name in with_dead(load(options.config)):
        print(
            f"queue {name} has dead letters: relay dlq list --queue {quote(name)}", file=sys.stderr
        )


def _chosen(options: SelectionOptions) -> tuple[Settings, DeadLetterSelection]:
    """Return the configuration, and the filter on the dead letters of a queue. Raises ConfigurationError."""
    from relay.admin.dead_letters import printed

    for name in ("sink", "handler", "status"):
        if getattr(options, name, None) is not None:
            raise ConfigurationError(f"--{name}: cannot be given with --queue")
    settings = load(options.config)
    return settings, printed(settings, options.selection(), "--")


def _list_messages(options: SelectionOptions, name: str, limit: int, as_json: bool) -> None:
    from relay.admin import queues

    settings, wanted = _chosen(options)
    found = queues.dead(settings, name, wanted, limit)
    if as_json:
        print(json.dumps([json_fields(each) for each in found], indent=2))
    elif found:
        _print_messages(found)
    else:
        print(f"there is no such dead letter in queue {name!r}", file=sys.stderr)


def _print_messages(found: Sequence[DeadMessage]) -> None:
    print_table(
        (
            "id",
            "transaction",
            "host",
            "event",
            "event type",
            "key",
            "attempts",
            "exception",
            "since",
        ),
        (
            (
                str(each.id),
                each.transaction_id or "-",
                each.host_id or "-",
                each.event_id,
                each.event_type,
                each.key or "-",
                each.attempts,
                _first_line(each.error or "-"),
                moment(each.dead_at),
            )
            for each in found
        ),
    )


def _act_on_messages(
    options: SelectionOptions,
    name: str,
    action: ActionOptions,
    what: str,
    act: Callable[[Settings, str, Sequence[int], str | None], int],
) -> int:
    """Do something with the dead letters of a queue that the options select, once it is approved; returns how many."""
    from relay.admin import queues

    settings, wanted = _chosen(options)
    if wanted == DeadLetterSelection() and not action.everything:
        raise ConfigurationError(
            "name the dead letters by a filter such as --id or --type, or give --all"
        )
    ids = queues.dead_ids(settings, name, wanted)
    if not ids:
        print(f"there is no such dead letter in queue {name!r}", file=sys.stderr)
        return 0
    print(counted(len(ids), "message", "messages"), what)
    if action.dry_run:
        _print_messages(queues.dead(settings, name, wanted, DRY_RUN_SHOWS))
        return 0
    approve(action.yes)
    return act(settings, name, ids, action.reason)


@dlq.command("show")
def dlq_show(
    dead_letter_id: Annotated[int, typer.Argument(metavar="ID")],
    config: ConfigOption = None,
    queue: QueueOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show every event of the dead transaction to which dead letter ID belongs, and the actions on it.

    With --queue, show the dead letter ID of a work queue.
    """
    if queue is not None:
        from relay.admin.queues import whole_dead

        found = whole_dead(load(config), queue, dead_letter_id)
        if as_json:
            print(json.dumps(found, indent=2))
        else:
            print_facts(
                (name, value if value is not None else "-") for name, value in found.items()
            )
        return
    from relay.store import dead_letters

    with _opened(SelectionOptions(config)) as opened:
        number = dead_letters.transaction_of(opened.conn, opened.group, dead_letter_id)
        if number is None:
            raise ConfigurationError(
                f"there is no dead letter {dead_letter_id} in group {opened.group!r}: see `relay dlq list`"
            )
        if as_json:
            _print_json(dead_letter_selection.events_as_json(opened.conn, number))
            return
        for event in dead_letter_selection.events_as_text(
            opened.conn, number, pretty=out.is_terminal
        ):
            print(f"dead letter {event['id']}")
            print_facts(event.items())
        for action in dead_letters.actions(opened.conn, number):
            at = moment(action.acted_at)
            print(
                f"{at} {action.action} by {printable(action.who)}: "
                f"{printable(action.reason or 'no reason given')}"
            )


def _print_json(objects: Iterable[str]) -> None:
    """Print JSON objects, given as text, as an array with one object on each line."""
    before = "["
    for each in objects:
        print(f"{before}\n{printable_json(each)}", end="")
        before = ","
    print("\n]")


@dlq.command("replay")
@with_groups
def dlq_replay(
    options: SelectionOptions,
    everything: AllOption = False,
    edit: Annotated[
        Path | None,
        typer.Option(
            "--edit",
            metavar="FILE",
            help="An edited export; its payloads replace the stored ones first.",
        ),
    ] = None,
    reason: ReasonOption = None,
    dry_run: DryRunOption = False,
    wait: Annotated[
        bool,
        typer.Option(
            "--wait", help="Wait for the outcome. Exit status 1 if a transaction is dead again."
        ),
    ] = False,
    yes: YesOption = False,
) -> None:
    """Queue dead transactions to be applied or delivered again, in order; later events of their keys are blocked.

    With --queue, put dead messages into their queue again, after those that are there.
    """
    if options.queue is not None:
        for given, name in ((edit, "edit"), (wait, "wait")):
            if given:
                raise ConfigurationError(f"--{name}: cannot be given with --queue")
        from relay.admin.queues import replay

        action = ActionOptions(everything, reason, dry_run, yes)
        replayed = _act_on_messages(
            options, options.queue, action, "will be in the queue again", replay
        )
        if replayed:
            print(counted(replayed, "message is", "messages are"), "in the queue again")
        return
    with _opened(options) as opened:
        selected = _find(opened, everything, "transaction to be replayed")
        if not selected.transactions:
            return
        for line in opened.dead_letters.warnings(selected):
            warn(line)
        verb = opened.dead_letters.verb(selected)
        if not _approved(opened, selected, f"will be {verb} again", dry_run, yes):
            return
        with progress() as report:
            queued = opened.dead_letters.replay(selected, reason, edit, report)
        print(counted(len(queued), "transaction is", "transactions are"), "queued")
        for line in opened.dead_letters.idle(verb) if queued else ():
            warn(line)
        if wait:
            _wait_for(opened.dead_letters, queued, verb)


def _wait_for(dead_letters: Any, queued: Sequence[int], verb: str) -> None:
    with progress() as report:
        outcome = dead_letters.outcome(queued, report)
    done = counted(outcome.done, "transaction is", "transactions are")
    dead = counted(outcome.dead, "is", "are")
    discarded = f", {outcome.discarded} discarded" if outcome.discarded else ""
    print(f"{done} {verb}, {dead} dead again{discarded}")
    if outcome.dead:
        raise typer.Exit(1)


@dlq.command("discard")
@with_groups
def dlq_discard(options: SelectionOptions, action: ActionOptions) -> None:
    """Give dead transactions up: the keys that they hold are released; the dead letters stay.

    With --queue, delete dead messages of a work queue.
    """
    if options.queue is not None:
        from relay.admin.queues import discard

        discarded = _act_on_messages(options, options.queue, action, "will be given up", discard)
        if discarded:
            print(counted(discarded, "message is", "messages are"), "discarded")
        return
    with _opened(options) as opened:
        selected = _find(opened, action.everything, "transaction to be given up")
        if _approved(opened, selected, "will be given up", action.dry_run, action.yes):
            with progress() as report:
                discarded = opened.dead_letters.discard(selected, action.reason, report)
            print(counted(discarded, "transaction is", "transactions are"), "discarded")


@dlq.command("export")
@with_groups
def dlq_export(
    options: StatusSelectionOptions,
    file: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="FILE", help="The file to write; default: standard output."
        ),
    ] = None,
) -> None:
    """Write dead letters with their payloads, a JSON object on each line, in the order of publishing."""
    if options.queue is not None:
        from relay.admin.queues import exported_dead

        with _private(file) if file else nullcontext(sys.stdout) as stream:
            settings, wanted = _chosen(options)
            for line in exported_dead(settings, options.queue, wanted):
                print(line if file else printable_json(line), file=stream)
        return
    with _opened(options) as opened:
        exported = dead_letter_selection.exported(opened.conn, opened.group, opened.wanted)
        written = 0
        shown = progress() if file or not sys.stdout.isatty() else nullcontext(silent)
        total = _events(opened, options.status) if sys.stderr.isatty() else None
        with shown as report, _private(file) if file else nullcontext(sys.stdout) as stream:
            for written, line in enumerate(exported, start=1):
                print(line if file else printable_json(line), file=stream)
                report("writing dead letters", written, total)
        if not written:
            _print_none(opened)


def _events(opened: _Opened, status: str | None) -> int:
    """Count the dead letters that the filter selects, of one status or of any."""
    statuses = (status,) if status else ("dead", "replaying", "replayed", "discarded")
    selected: FoundDeadLetters = opened.dead_letters.find(opened.wanted, statuses)
    return selected.events


@contextmanager
def _private(file: Path) -> Iterator[TextIO]:
    """Open a file for writing that only its owner may read, since it gets payloads."""

    def opener(path: str, flags: int) -> int:
        return os.open(path, flags, 0o600)

    try:
        with open(file, "w", encoding="utf-8", newline="\n", opener=opener) as stream:
            # An existing file keeps its mode when it is opened; the mode of a pipe or a device must not change.
            if stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
                os.fchmod(stream.fileno(), 0o600)
            yield stream
    except OSError as error:
        raise ConfigurationError(f"{file}: cannot be written ({error.strerror})") from None


@dlq.command("purge")
@with_groups
def dlq_purge(options: SelectionOptions, action: ActionOptions) -> None:
    """Delete the dead letters of transactions that were replayed or discarded; the record of actions stays."""
    if options.queue is not None:
        raise ConfigurationError("--queue: a replayed or discarded message leaves no dead letter")
    with _opened(options) as opened:
        none = "replayed or discarded dead letter"
        selected = _find(opened, action.everything, none, ("replayed", "discarded"))
        if _approved(opened, selected, "will be deleted", action.dry_run, action.yes):
            with progress() as report:
                purged = opened.dead_letters.purge(selected, action.reason, report)
            print(counted(purged, "dead letter is", "dead letters are"), "deleted")
