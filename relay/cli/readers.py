"""`relay reader`: the commands on readers of the log. No logic of their own."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from relay.admin.phrases import moment
from relay.cli.acts import ActsGroup
from relay.cli.options import ConfigOption, JsonOption
from relay.cli.terminal import print_facts, print_table
from relay.config.files import load
from relay.model import exact_json
from relay.model.json_fields import json_fields

if TYPE_CHECKING:
    from relay.admin.readers import ReaderSummary
    from relay.store.log_readers import ReaderRow

reader = typer.Typer(
    cls=ActsGroup,
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
