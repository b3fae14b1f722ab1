"""The commands on Spark. No logic of their own."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer
import yaml

from relay.cli.options import ConfigOption, JsonOption
from relay.cli.progress import progress
from relay.config.files import load

spark = typer.Typer(help="Packages for Spark's executors.", no_args_is_help=True)


@spark.callback()
def root() -> None:
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
    with progress() as report:
        built = build(settings, file, report)
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
