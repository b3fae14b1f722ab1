"""`relay reader`: the commands on readers of the log. No logic of their own."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer

from relay.cli.options import ConfigOption, JsonOption, ReasonOption, YesOption
from relay.cli.terminal import approve, print_facts, print_table
from relay.config.files import load
from relay.model.json_fields import json_fields
from relay.observe.phrases import moment

reader = typer.Typer(
    help="Readers of the log: programs with a position of their own in relay's outbox.",
    no_args_is_help=True,
)

ReaderArgument = Annotated[str, typer.Argument(metavar="READER", help="Its name.")]


@reader.command("list")
def reader_list(config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """List the readers of the outbox."""
    from relay.admin.readers import listed

    found = listed(load(config))
    if as_json:
        print(json.dumps([json_fields(each) for each in found], indent=2))
        return
    if not found:
        print("no reader is declared", file=sys.stderr)
        return
    print_table(
        ("reader", "owner", "lag seconds", "moved", "claimed by", "given up"),
        (
            (
                each.name,
                each.owner,
                f"{each.lag_seconds:,.0f}",
                moment(each.moved_at),
                "-" if each.pid is None else f"pid {each.pid}",
                moment(each.given_up_at),
            )
            for each in found
        ),
    )


@reader.command("show")
def reader_show(
    name: ReaderArgument, config: ConfigOption = None, as_json: JsonOption = False
) -> None:
    """Show a reader: what it gets, where it is, and how long retention keeps events for it."""
    from relay.admin.readers import shown

    found = shown(load(config), name)
    if as_json:
        print(json.dumps(json_fields(found), indent=2))
        return
    print_facts(
        [
            ("reader", found.name),
            ("owner", found.owner),
            ("match", json.dumps(found.match)),
            ("declared", moment(found.created_at)),
            ("position", found.position),
            ("moved", moment(found.moved_at)),
            ("lag", f"{found.lag_seconds:,.0f} s"),
            ("claimed by", "nobody" if found.pid is None else f"pid {found.pid}"),
            ("expires", "never" if found.expires is None else f"after {found.expires}"),
            ("max_lag", "retention.max_lag" if found.max_lag is None else str(found.max_lag)),
            ("given up", moment(found.given_up_at)),
        ]
    )


@reader.command("seek")
def reader_seek(
    name: ReaderArgument,
    to: Annotated[str, typer.Option(help="now, beginning, or a position.")],
    config: ConfigOption = None,
    reason: ReasonOption = None,
    yes: YesOption = False,
) -> None:
    """Move a reader; one that retention has given up goes on from there. What is in flight cannot be done any more."""
    from relay.admin.readers import seek

    settings = load(config)
    approve(yes, f"Move the reader {name} to {to}?")
    seek(settings, name, to, reason)
    print(f"reader {name} is moved to {to}")


@reader.command("drop")
def reader_drop(
    name: ReaderArgument,
    config: ConfigOption = None,
    reason: ReasonOption = None,
    yes: YesOption = False,
) -> None:
    """Drop a reader: retention no longer keeps events for it. A program that declares it makes another one."""
    from relay.admin.readers import drop

    settings = load(config)
    approve(yes, f"Drop the reader {name}?")
    drop(settings, name, reason)
    print(f"reader {name} is dropped")
