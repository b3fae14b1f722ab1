"""The commands on event types. No logic of their own."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from relay.cli.options import ConfigOption, JsonOption, warn
from relay.cli.tables import print_table
from relay.config.files import load

schema = typer.Typer(help="The event types of the configuration.", no_args_is_help=True)


@schema.callback()
def root() -> None:
    """The event types of the configuration."""


@schema.command("export")
def schema_export(
    config: ConfigOption = None,
    folder: Annotated[
        Path | None,
        typer.Option(
            "--dir",
            metavar="DIR",
            help="The folder for the files, one for each type; default schemas, with --json none.",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Write the JSON Schema of each event type's current version."""
    from relay.admin.schemas import schemas, write

    described, without = schemas(load(config).events)
    for name in without:
        warn(f"events.{name} has no model, so there is no schema of it")
    if as_json:
        if folder is not None:
            write(described, folder)
        print(json.dumps({each.event_type: each.document for each in described}, indent=2))
        return
    if not described:
        print("no event type has a model", file=sys.stderr)
        return
    paths = write(described, folder or Path("schemas"))
    rows = [
        (each.event_type, each.version, path) for each, path in zip(described, paths, strict=True)
    ]
    print_table(("event type", "version", "file"), rows)
