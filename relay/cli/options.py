"""Options that several commands have, and the terminal that they print to."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from relay.faults import ConfigurationError

out = Console()

ConfigOption = Annotated[
    list[Path] | None,
    typer.Option(
        "--config",
        "-c",
        metavar="FILE",
        help="The configuration, a file or a folder of *.yaml; default $RELAY_CONFIG, else relay.yaml. init, check, "
        "run, status and console take several.",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON for a program.")]
AdminOption = Annotated[
    str | None,
    typer.Option(
        "--admin-dsn",
        metavar="DSN",
        envvar="RELAY_ADMIN_DSN",
        help="Connect to the source as an administrator. A password here is seen by `ps`.",
    ),
]
AdminFileOption = Annotated[
    Path | None, typer.Option("--admin-dsn-file", metavar="FILE", help="The same, from a file.")
]
TargetAdminOption = Annotated[
    str | None,
    typer.Option(
        "--target-admin-dsn",
        metavar="DSN",
        envvar="RELAY_TARGET_ADMIN_DSN",
        help="Connect to a target of its own as an administrator.",
    ),
]
TargetAdminFileOption = Annotated[
    Path | None,
    typer.Option("--target-admin-dsn-file", metavar="FILE", help="The same, from a file."),
]
ReasonOption = Annotated[str | None, typer.Option("--reason", help="Is kept with the action.")]
YesOption = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]


def warn(text: str) -> None:
    """Print a warning of a command that goes on."""
    print(f"relay: warning: {text}", file=sys.stderr)


def with_options(error: ConfigurationError, context: typer.Context) -> ConfigurationError:
    """The same error; where it says to run the command again, it names the options that were given."""
    command = f"relay {context.info_name}"
    again = command
    for parameter in context.command.params:
        value = context.params.get(str(parameter.name))
        if value is not None and value != parameter.default:
            # A connection string may hold a password.
            values = value if isinstance(value, list) else [value]
            for each in values:
                shown = "…" if str(parameter.name).endswith("_dsn") else shlex.quote(str(each))
                again += f" {parameter.opts[0]} {shown}"
    return type(error)(str(error).replace(f"`{command}`", f"`{again}`"))
