"""The commands on a group's offsets. No logic of their own."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from relay.admin.phrases import counted, given_up
from relay.cli.options import ConfigOption, JsonOption, ReasonOption, YesOption
from relay.cli.terminal import approve, print_table, progress
from relay.config.files import load

offsets = typer.Typer(
    help="The positions of a group: show them, and move a stopped group.", no_args_is_help=True
)


@offsets.command("show")
def offsets_show(config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """Show the position of each partition."""
    from dataclasses import asdict

    from relay.admin.offsets import positions

    partitions = positions(load(config))
    if as_json:
        print(json.dumps([asdict(position) for position in partitions], indent=2))
        return
    print_table(
        ("partition", "next offset", "unread", "applied LSN", "snapshot"),
        (
            (p.partition_id, p.next_offset, _or_dash(p.unread), p.applied_lsn, _or_dash(p.snapshot))
            for p in partitions
        ),
    )


def _or_dash(value: object) -> object:
    return "-" if value is None else value


@offsets.command("seek")
def offsets_seek(
    to: Annotated[
        str, typer.Option("--to", metavar="OFFSET|LSN|TIME|beginning|end", help="The new position.")
    ],
    config: ConfigOption = None,
    partition: Annotated[
        int | None,
        typer.Option(
            help="Move only this partition; transactions that span others are then delivered in part."
        ),
    ] = None,
    reason: ReasonOption = None,
    yes: YesOption = False,
) -> None:
    """Move a stopped group to another position: events after it are delivered, some of them again."""
    from relay.admin.offsets import plan_seek, seek

    settings = load(config)
    with progress() as report:
        report("counting what this affects")
        move = plan_seek(settings, to, partition)
    effect = (
        "nothing shows how many events this affects"
        if move.again is None
        else f"{counted(move.again, 'event', 'events')} will be delivered again, {move.skipped} will be skipped"
    )
    print(f"group {settings.group} goes on {move.goal.text}: {effect}")
    if move.sinks:
        print(f"so do its sinks {', '.join(move.sinks)}")
    for line in given_up(move.given_up):
        print(line)
    approve(yes)
    with progress() as report:
        report("moving the group")
        seek(settings, move, partition, reason)


@offsets.command("repartition")
def offsets_repartition(
    partitions: Annotated[int, typer.Option(min=1, max=1024, help="The new number of partitions.")],
    config: ConfigOption = None,
) -> None:
    """Split a stopped group into another number of partitions, without losing or repeating an event."""
    from relay.admin.offsets import repartition

    settings = load(config)
    with progress() as report:
        repartition(settings, partitions, report)
    print(
        f"group {settings.group} has {partitions} partitions: set partitions: {partitions} in the configuration"
    )
