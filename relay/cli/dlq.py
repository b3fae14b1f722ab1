"""`relay dlq`: the commands on dead letters. No logic of their own."""

from __future__ import annotations

import json
import os
import stat
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TextIO

import psycopg
import typer

from relay.admin.phrases import (
    counted,
    dead,
    dead_are,
    destination,
    moment,
    printable,
    printable_json,
    replayed_to,
)
from relay.cli.options import (
    AllOption,
    ConfigOption,
    DryRunOption,
    JsonOption,
    ReasonOption,
    Without,
    YesOption,
    out,
    warn,
    with_groups,
)
from relay.cli.terminal import (
    DRY_RUN_SHOWS,
    ActionOptions,
    approved,
    print_facts,
    print_table,
    progress,
)
from relay.config.files import load
from relay.faults import ConfigurationError
from relay.runtime.reporting import silent
from relay.store import states
from relay.store.dead_letters import of_queue, queue_of
from relay.store.dead_letters import selection as dead_letter_selection
from relay.store.dead_letters.selection import (
    DeadLetterSelection,
    FoundDeadLetters,
    WholeDeadTransaction,
)

dlq = typer.Typer(
    help="Dead letters: transactions that could not be applied or delivered, on which each command acts as a whole, "
    "and messages of work queues that their workers have given up.",
    no_args_is_help=True,
)


IdOption = Annotated[
    list[str] | None,
    typer.Option(
        "--id",
        metavar="ID|QUEUE/ID",
        help="The dead letter; repeatable. That of a work queue has the queue in it, unless --queue says it.",
    ),
]
QueueOption = Annotated[
    str | None, typer.Option("--queue", help="The work queue to which it belongs.")
]


def _named(text: str, queue: str | None) -> tuple[str | None, int]:
    """Return the queue and the number of an id that `relay dlq list` prints. Raises ConfigurationError."""
    before, separator, number = text.rpartition("/")
    of = before if separator else queue
    if not number.isdecimal() or len(number) > 18 or queue not in (None, of):
        raise ConfigurationError(
            f"{text!r} is no id of a dead letter{f' of queue {queue!r}' if queue else ''}: see `relay dlq list`"
        )
    return of, int(number)


@dataclass(frozen=True)
class SelectionOptions:
    """The configuration, and the filter of a command on the dead transactions of its group."""

    config: ConfigOption = None
    id_: IdOption = None
    conditions: Annotated[DeadLetterSelection, Without(["ids", "status"])] = field(
        default_factory=DeadLetterSelection
    )
    queue: QueueOption = None

    def selection(self) -> DeadLetterSelection:
        """Return the filter. Raises ConfigurationError for options that contradict each other."""
        sink = self.conditions.sink
        if self.queue is not None and sink is not None:
            raise ConfigurationError("--sink: cannot be given with --queue")
        queue = self.queue if sink is None else queue_of(sink)
        given = sink if queue is None else of_queue(queue)
        named = [_named(each, queue) for each in self.id_ or ()]
        consumers = {given if of is None else of_queue(of) for of, _ in named} or {given}
        if len(consumers) > 1 or sink not in (None, *consumers):
            raise ConfigurationError("--id: name dead letters of one queue, or of none, at a time")
        ids = [number for _, number in named]
        return self.conditions.model_copy(update={"ids": ids, "sink": consumers.pop()})


@dataclass(frozen=True)
class StatusSelectionOptions(SelectionOptions):
    """The same for a command that only reads: it selects dead transactions of any status."""

    conditions: Annotated[DeadLetterSelection, Without(["ids"])] = field(
        default_factory=DeadLetterSelection
    )


class _Opened(NamedTuple):
    conn: psycopg.Connection[Any]
    group: str
    dead_letters: Any
    wanted: DeadLetterSelection

    @property
    def is_filtered(self) -> bool:
        """Whether there is a condition beside the queue, of which it may be meant to select all."""
        queue = self.wanted.queue
        return self.wanted != DeadLetterSelection(sink=queue and of_queue(queue))


@contextmanager
def _opened(options: SelectionOptions) -> Iterator[_Opened]:
    from relay.admin.connections import reach_target
    from relay.admin.dead_letters import DeadLetters, printed

    settings = load(options.config)
    with reach_target(settings) as conn:
        wanted = printed(settings, conn, options.selection(), "--")
        yield _Opened(conn, settings.group, DeadLetters(settings, conn), wanted)


def _find(
    opened: _Opened, everything: bool, none: str, statuses: Sequence[str] = ("dead",)
) -> FoundDeadLetters:
    """Find the transactions that a command acts on; prints `none` if there are none.

    Raises ConfigurationError without a filter and `--all`: a forgotten filter must not select all.
    """
    if not opened.is_filtered and not everything:
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

    return approved(selected, dead(selected), what, show, "newest", dry_run, yes)


def _print(transactions: Sequence[WholeDeadTransaction]) -> None:
    headings = (
        *("id", "transaction", "host", "events", "event type", "sink", "handler"),
        *("exception", "status", "since"),
    )
    print_table(
        headings,
        (
            (
                item.name,
                item.transaction_id or "-",
                item.host_id or "-",
                item.events,
                item.event_type or "-",
                destination(item.sink, item.endpoint),
                item.handler or "-",
                _first_line(item.exception) or "-",
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
    queue = opened.wanted.queue
    where = f"group {opened.group!r}" if queue is None else f"queue {queue!r}"
    narrowed = " that matches the filters" if opened.is_filtered else ""
    print(f"there is no {what} in {where}{narrowed}", file=sys.stderr)


@dlq.command("list")
@with_groups
def dlq_list(
    options: StatusSelectionOptions,
    limit: Annotated[int, typer.Option(min=1, help="The largest number of transactions.")] = 100,
    as_json: JsonOption = False,
) -> None:
    """List dead transactions, and dead messages of work queues, newest first."""
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


@dlq.command("show")
def dlq_show(
    dead_letter_id: Annotated[str, typer.Argument(metavar="ID|QUEUE/ID")],
    config: ConfigOption = None,
    queue: QueueOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show every event of the dead transaction to which dead letter ID belongs, and the actions on it.

    That of a work queue is named by QUEUE/ID, or by ID and --queue.
    """
    from relay.store import dead_letters

    with _opened(SelectionOptions(config, [dead_letter_id], queue=queue)) as opened:
        number = dead_letter_selection.transaction_of(opened.conn, opened.group, opened.wanted)
        if number is None:
            of = opened.wanted.queue
            where = f"group {opened.group!r}" if of is None else f"queue {of!r}"
            raise ConfigurationError(
                f"there is no dead letter {dead_letter_id} in {where}: see `relay dlq list`"
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

    Dead messages of work queues are put into their queue again, after those that are there.
    """
    with _opened(options) as opened:
        selected = _find(opened, everything, "dead letter to be replayed")
        if not selected.transactions:
            return
        if wait and selected.messages:
            raise ConfigurationError(
                f"--wait: cannot be given with messages of queues, of which {selected.messages} are selected: their "
                "workers end them; --sink selects others"
            )
        for line in opened.dead_letters.warnings(selected):
            warn(line)
        verb = opened.dead_letters.verb(selected)
        if not _approved(opened, selected, f"will be {verb} again", dry_run, yes):
            return
        with progress() as report:
            queued = opened.dead_letters.replay(selected, reason, edit, report)
        print(dead_are(len(queued), selected), replayed_to(selected))
        for line in opened.dead_letters.idle(selected) if queued else ():
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

    Dead messages of work queues are deleted.
    """
    with _opened(options) as opened:
        selected = _find(opened, action.everything, "dead letter to be given up")
        if _approved(opened, selected, "will be given up", action.dry_run, action.yes):
            with progress() as report:
                discarded = opened.dead_letters.discard(selected, action.reason, report)
            print(dead_are(discarded, selected), "discarded")


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
    with _opened(options) as opened:
        exported = dead_letter_selection.exported(opened.conn, opened.group, opened.wanted)
        written = 0
        shown = progress() if file or not sys.stdout.isatty() else nullcontext(silent)
        total = _events(opened, options.conditions.status) if sys.stderr.isatty() else None
        with shown as report, _private(file) if file else nullcontext(sys.stdout) as stream:
            for written, line in enumerate(exported, start=1):
                print(line if file else printable_json(line), file=stream)
                report("writing dead letters", written, total)
        if not written:
            _print_none(opened)


def _events(opened: _Opened, status: str | None) -> int:
    """Count the dead letters that the filter selects, of one status or of any."""
    statuses = (status,) if status else states.DEAD
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
    """Delete the dead letters of transactions that were replayed or discarded; the record of actions stays.

    A message of a work queue that was replayed or discarded leaves no dead letter.
    """
    with _opened(options) as opened:
        none = "replayed or discarded dead letter"
        selected = _find(opened, action.everything, none, ("replayed", "discarded"))
        if _approved(opened, selected, "will be deleted", action.dry_run, action.yes):
            with progress() as report:
                purged = opened.dead_letters.purge(selected, action.reason, report)
            print(counted(purged, "dead letter is", "dead letters are"), "deleted")
