"""`relay verify`: compares what a Spark sink has written with the outbox. No logic of its own."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from relay.admin.phrases import counted, printable
from relay.cli.options import ConfigOption, JsonOption
from relay.config.files import load

if TYPE_CHECKING:
    from relay.admin.verification import Verification


def verify(
    sink: Annotated[str, typer.Argument(help="The sink: the name of a handler of type spark.")],
    config: ConfigOption = None,
    since: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="SNAPSHOT",
            help="Compare what this snapshot does not see, or all with `beginning`; default where the sink began.",
        ),
    ] = None,
    to: Annotated[
        str | None,
        typer.Option(
            metavar="SNAPSHOT",
            help="Compare what this snapshot sees; default what the sink has written.",
        ),
    ] = None,
    most_ids: Annotated[
        int, typer.Option("--ids", min=0, metavar="N", help="The most ids of each difference.")
    ] = 20,
    as_json: JsonOption = False,
) -> None:
    """Compare a sink of type spark with the outbox, on Spark; exit status 1 if they differ."""
    from relay.admin.verification import verify as compared

    found = compared(load(config), sink, since, to, most_ids)
    if as_json:
        print(json.dumps(found.as_json(), indent=2))
    else:
        print(_line(found))
        for kind, ids in found.result.ids.items():
            more = found.result.counts[kind] - len(ids)
            shown = ", ".join(printable(each) for each in ids)
            print(f"{kind}: {shown}{f' and {more} more' if more else ''}")
    if not found.result.is_equal:
        raise typer.Exit(1)


def _line(found: Verification) -> str:
    """The result on one line."""
    result = found.result
    where = f"from {found.since} to {found.to}"
    ours, theirs = result.hashes
    events = (
        counted(result.events, "key", "keys")
        if result.is_by_key
        else counted(result.events, "event", "events")
    )
    if result.is_equal:
        said = f"{found.sink} has the outbox's {events} {where}: hash {ours}"
    else:
        differences = ", ".join(f"{number} {kind}" for kind, number in result.counts.items())
        said = (
            f"{found.sink} differs from the outbox, which has {events} {where}: "
            f"{differences}; hash {theirs} instead of {ours}"
        )
    if result.left_out:
        said += f"; left out: {counted(result.left_out, 'dead or deferred one', 'dead or deferred ones')}"
    if result.removed:
        said += f"; {result.removed} more are no longer in the outbox"
    return said
