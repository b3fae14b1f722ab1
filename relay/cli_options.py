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
    typer.Option("--admin-dsn", metavar="DSN", help="Connect to the source as an administrator."),
]
YesOption = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
