"""`relay reader`: the commands on readers of the log. No logic of their own."""

from __future__ import annotations

import json
import sys
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from relay.cli.options import ConfigOption, JsonOption, ReasonOption, YesOption
from relay.cli.terminal import approve, print_facts, print_table
from relay.config.files import load
from relay.model import exact_json
from relay.model.json_fields import json_fields
from relay.observe.phrases import moment

if TYPE_CHECKING:
    from relay.admin.readers import ReaderSummary
    from relay.store.log_readers import ReaderRow

reader = typer.Typer(
    help="Readers of the log: programs with a position of their own in relay's outbox.",
    no_args_is_help=True,
)

ReaderArgument = Annotated[str, typer.Argument(metavar="READER", help="Its name.")]


@reader.command("list")
def reader_list(config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """List the readers of the outbox."""
    from relay.admin.readers import listed, summed

    found = listed(load(config))
    if as_json:
        print(json.dumps([json_fields(each) for each in found], indent=2))
        return
    if not found:
        print("no reader is declared", file=sys.stderr)
        return
    print_table(
        ("reader", "lanes", "owner", "lag seconds", "moved", "claimed by", "given up", "history"),
        (
            (
                each.name,
                "-" if each.lanes is None else f"{each.claims} of {each.lanes} claimed",
                each.owner,
                f"{each.lag_seconds:,.0f}",
                moment(each.moved_at),
                "-" if each.lanes is not None or each.pid is None else f"pid {each.pid}",
                moment(each.given_up_at),
                _history(each),
            )
            for each in summed(found)
        ),
    )


@reader.command("show")
def reader_show(
    name: ReaderArgument, config: ConfigOption = None, as_json: JsonOption = False
) -> None:
    """Show a reader, or each lane of a name: what it gets, where it is, how long retention keeps events for it."""
    from relay.admin.readers import shown

    found = shown(load(config), name)
    if as_json:
        fields = [json_fields(each) for each in found]
        print(json.dumps(fields if found[0].lane_of == name else fields[0], indent=2))
        return
    for each in found:
        print_facts(
            [
                ("reader", each.name),
                *(
                    [("lane", f"{each.lane} of {each.lanes}, by {each.lane_key}")]
                    if each.lanes is not None
                    else []
                ),
                ("owner", each.owner),
                ("match", exact_json.dumps(each.match, "match")),
                ("where", each.where or "-"),
                ("params", "-" if each.params is None else exact_json.dumps(each.params, "params")),
                ("declared", moment(each.created_at)),
                ("position", each.position),
                ("moved", moment(each.moved_at)),
                ("lag", f"{each.lag_seconds:,.0f} s"),
                ("claimed by", "nobody" if each.pid is None else f"pid {each.pid}"),
                ("expires", "never" if each.expires is None else f"after {each.expires}"),
                ("max_lag", "retention.max_lag" if each.max_lag is None else str(each.max_lag)),
                ("given up", moment(each.given_up_at)),
                ("history", _history(each)),
            ]
        )


def _history(each: ReaderRow | ReaderSummary) -> str:
    return "another: seek" if each.other_history else "this"


@reader.command("seek")
def reader_seek(
    name: ReaderArgument,
    to: Annotated[str, typer.Option(help="now, beginning, or a position.")],
    config: ConfigOption = None,
    reason: ReasonOption = None,
    yes: YesOption = False,
) -> None:
    """Move a reader; one that retention has given up goes on from there. What is in flight cannot be done any more."""
    from relay.admin.readers import seek, shown

    settings = load(config)
    approve(yes, f"Move the reader {name} to {to}?", partial(shown, settings, name))
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
    from relay.admin.readers import drop, shown

    settings = load(config)
    approve(yes, f"Drop the reader {name}?", partial(shown, settings, name))
    drop(settings, name, reason)
    print(f"reader {name} is dropped")
