"""`relay queue`: the commands on work queues. No logic of their own."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Annotated

import typer

from relay.admin.phrases import counted, moment
from relay.cli.acts import ActsGroup
from relay.cli.events import print_attempts
from relay.cli.options import (
    ConfigOption,
    JsonOption,
    ReasonOption,
    fail,
    say,
    time_of,
    with_groups,
)
from relay.cli.terminal import print_table
from relay.config.files import load
from relay.model.json_fields import json_fields
from relay.store.queues import MessageSelection

if TYPE_CHECKING:
    from relay.store.queues import QueueFigures

queue = typer.Typer(
    cls=ActsGroup,
    help="Work queues: what is in them, and who works it.",
    no_args_is_help=True,
)

QueueArgument = Annotated[str, typer.Argument(metavar="QUEUE", help="Its name.")]


@queue.command("list")
def queue_list(config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """List the queues of the group; each figure counts to 100,001 at most."""
    from relay.admin.queues import listed

    found = listed(load(config))
    if as_json:
        print(json.dumps([json_fields(each) for each in found], indent=2))
        return
    if not found:
        print("no queue is declared", file=sys.stderr)
        return
    print_table(
        (
            "queue",
            "ready",
            "waiting",
            "leased",
            "dead",
            "oldest seconds",
            "workers",
            "paused since",
        ),
        (
            (
                each.queue,
                f"{each.ready:,}",
                f"{each.waiting:,}",
                f"{each.leased:,}",
                f"{each.dead:,}",
                f"{each.oldest_seconds:,.0f}",
                str(each.workers),
                moment(each.paused_at),
            )
            for each in found
        ),
    )
    for each in found:
        _print_state(each)


def _print_state(queue: QueueFigures) -> None:
    """Say that a queue is being filled from the log, or is stopped."""
    if queue.stopped_at is not None:
        say(
            f"queue {queue.queue} is stopped since {moment(queue.stopped_at)}: {queue.fault}; declare it otherwise, or "
            f"run `relay queue rebuild {queue.queue}`, which brings what it has missed, too"
        )
    if queue.filled is None:
        return
    fails = f"; it cannot go on: {queue.fill_error}" if queue.fill_error else ""
    so_far = counted(queue.filled, "message", "messages")
    say(f"queue {queue.queue} is being filled from the log, with {so_far} so far{fails}")


@dataclass(frozen=True)
class MessageSelectionOptions:
    """The configuration, and the filter of a command on messages of a queue."""

    config: ConfigOption = None
    wanted: MessageSelection = field(default_factory=MessageSelection)


@queue.command("show")
@with_groups
def queue_show(
    name: QueueArgument,
    options: MessageSelectionOptions,
    limit: Annotated[int, typer.Option(min=1, help="At most so many.")] = 20,
    as_json: JsonOption = False,
) -> None:
    """Show the messages of a queue, the oldest first; done ones, which `keep_done` keeps, with --state done only.

    With --id, the attempts that are kept of it, too.
    """
    from relay.admin.queues import attempts_of, shown

    settings = load(options.config)
    figures, found = shown(settings, name, options.wanted, limit)
    kept = (
        []
        if options.wanted.id is None
        else [a for each in found for a in attempts_of(settings, each)]
    )
    if as_json:
        lists = {
            "items": list(map(json_fields, found)),
            "attempts": list(map(json_fields, kept)),
        }
        print(json.dumps({**json_fields(figures), **lists}, indent=2))
        return
    _print_state(figures)
    if not found:
        print("no such message", file=sys.stderr)
        return
    print_table(
        (
            "id",
            "state",
            "event",
            "event type",
            "key",
            "attempts",
            "enqueued",
            "available",
            "error",
            "note",
        ),
        (
            (
                str(each.id),
                each.state,
                each.event_id,
                each.event_type,
                each.key or "-",
                str(each.attempts),
                moment(each.enqueued_at),
                moment(each.available_at),
                each.error or "-",
                "-" if each.note is None else json.dumps(each.note),
            )
            for each in found
        ),
    )
    print_attempts(kept)


@queue.command("cancel")
@with_groups
def queue_cancel(
    name: QueueArgument, options: MessageSelectionOptions, reason: ReasonOption = None
) -> None:
    """Delete the messages that the filter selects; those that workers have are left to them."""
    from relay.admin.queues import cancel

    cancelled = cancel(load(options.config), name, options.wanted, reason)
    if not cancelled:
        fail("no such message, or a worker has it: `relay queue show` lists what there is", 1)
    print(counted(cancelled, "message", "messages"), "cancelled")


@queue.command("move")
@with_groups
def queue_move(
    name: QueueArgument,
    to: Annotated[
        datetime,
        typer.Option("--to", parser=time_of, metavar="TIME", help="The new time (UTC)."),
    ],
    options: MessageSelectionOptions,
    reason: ReasonOption = None,
) -> None:
    """Give messages that wait for their time, or for their next attempt, another one; a past one is now."""
    print(_moved(name, options, to, reason), f"moved to {moment(to)}")


@queue.command("run")
@with_groups
def queue_run(
    name: QueueArgument, options: MessageSelectionOptions, reason: ReasonOption = None
) -> None:
    """Let messages that wait for their time, or for their next attempt, be taken now.

    Dead ones are brought back by `relay dlq replay --queue`.
    """
    print(_moved(name, options, None, reason), "can be taken now")


def _moved(
    name: str, options: MessageSelectionOptions, to: datetime | None, reason: str | None
) -> str:
    from relay.admin.queues import move

    moved = move(load(options.config), name, options.wanted, to, reason)
    if not moved:
        fail("no such message waits for its time: `relay queue show` lists what there is", 1)
    return counted(moved, "message", "messages")


@queue.command("edit")
def queue_edit(
    name: QueueArgument,
    id_: Annotated[int, typer.Option("--id", help="The id of the message, or of a dead letter.")],
    payload: Annotated[str, typer.Option("--payload", metavar="JSON", help="The new payload.")],
    config: ConfigOption = None,
    reason: ReasonOption = None,
) -> None:
    """Give a message that no worker has, or a dead letter of the queue, another payload."""
    from relay.admin.queues import edit

    if not edit(load(config), name, id_, payload, reason):
        fail("no such message, or a worker has it: `relay queue show` lists what there is", 1)
    print(f"message {id_} has the new payload")
