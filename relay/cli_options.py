"""Options that several commands have, and the terminal that they print to."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

out = Console()

ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config",
        "-c",
        metavar="FILE",
        help="The configuration; default $RELAY_CONFIG, else relay.yaml.",
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
YesOption = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
