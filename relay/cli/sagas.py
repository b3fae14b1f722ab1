"""`relay saga`: the commands on sagas. No logic of their own."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer

from relay.admin.phrases import moment
from relay.cli.acts import ActsGroup
from relay.cli.options import ConfigOption, JsonOption, Without, with_groups
from relay.cli.terminal import print_facts, print_table
from relay.config.files import load
from relay.model.json_fields import json_fields
from relay.store.sagas import SagaSelection

saga = typer.Typer(
    cls=ActsGroup,
    help="Sagas: what they wait for, and what to do with one.",
    no_args_is_help=True,
)

IdArgument = Annotated[str, typer.Argument(metavar="ID", help="The id of the saga.")]


@saga.command("list")
@with_groups
def saga_list(
    name: Annotated[str | None, typer.Argument(metavar="SAGA", help="Its name.")] = None,
    *,
    wanted: Annotated[SagaSelection, Without(("saga", "id"))],
    config: ConfigOption = None,
    limit: Annotated[int, typer.Option(min=1, help="At most so many.")] = 20,
    as_json: JsonOption = False,
) -> None:
    """List sagas, the oldest first."""
    from relay.admin.sagas import listed

    found = listed(load(config), wanted.model_copy(update={"saga": name}), limit)
    if as_json:
        print(json.dumps([json_fields(each) for each in found], indent=2))
        return
    if not found:
        print("no such saga", file=sys.stderr)
        return
    print_table(
        ("id", "saga", "key", "version", "state", "since", "step", "until", "error"),
        (
            (
                *(str(each.id), each.saga, each.key, str(each.version), each.state),
                *(moment(each.since), each.step or "-", moment(each.next_at), each.error or "-"),
            )
            for each in found
        ),
    )


@saga.command("show")
def saga_show(id_: IdArgument, config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """Show a saga and what has happened in it: events, steps, waits and acts."""
    from relay.admin.sagas import shown

    found, entries = shown(load(config), id_)
    fields = json_fields(found)
    if as_json:
        print(json.dumps({**fields, "entries": list(map(json_fields, entries))}, indent=2))
        return
    print_facts((name, "-" if value is None else value) for name, value in fields.items())
    print_table(
        ("number", "at", "kind", "step", "result"),
        (
            (str(each.number), moment(each.at), each.kind, each.step, json.dumps(each.result))
            for each in entries
        ),
    )
