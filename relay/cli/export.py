"""The commands that write files: `relay schema export` and `relay spark package`. No logic of their own."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer
import yaml

from relay.cli.options import ConfigOption, JsonOption, warn
from relay.cli.terminal import print_table, progress
from relay.config.files import load
from relay.faults import ConfigurationError

schema = typer.Typer(help="The event types of the configuration.", no_args_is_help=True)


@schema.callback()
def schema_root() -> None:
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


spark = typer.Typer(help="Packages for Spark's executors.", no_args_is_help=True)


@spark.callback()
def spark_root() -> None:
    """Packages for Spark's executors."""


@spark.command("package")
def spark_package(
    config: ConfigOption = None,
    file: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="The archive to write.")
    ] = Path("relay-executors.tar.gz"),
    as_json: JsonOption = False,
) -> None:
    """Pack relay, the modules of handlers and what they import, for executors that have only Python and PySpark."""
    from relay.spark.package import build

    settings = load(config)
    try:
        with progress() as report:
            built = build(settings, file, report)
    except OSError as error:
        raise ConfigurationError(
            f"--output: {file} cannot be written: {error.strerror or error}: name another file"
        ) from None
    if as_json:
        shown = {
            "file": str(built.file),
            "modules": built.modules,
            "distributions": built.distributions,
        }
        print(json.dumps({**shown, "conf": built.conf}, indent=2))
        return
    size = built.file.stat().st_size / 1e6
    print(f"{built.file}: {size:.0f} MB", file=sys.stderr)
    print(f"modules: {', '.join(built.modules)}", file=sys.stderr)
    print(f"distributions: {', '.join(built.distributions)}", file=sys.stderr)
    print(yaml.safe_dump({"spark": {"conf": built.conf}}, sort_keys=False), end="")
