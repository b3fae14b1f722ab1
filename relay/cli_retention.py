"""The commands on how long events stay. No logic of their own."""

from __future__ import annotations

from typing import Annotated

import typer

from relay.cli_options import AdminFileOption, AdminOption, ConfigOption
from relay.config import load
from relay.dsn import administrator_dsn

EveryOption = Annotated[
    str | None,
    typer.Option(
        "--partition",
        metavar="INTERVAL",
        help="Partition a new outbox by time: 1d, 6h. Default: not.",
    ),
]


def partition(
    every: Annotated[
        str,
        typer.Option(
            "--every", metavar="INTERVAL", help="How long a partition's range is: 1d, 6h."
        ),
    ],
    config: ConfigOption = None,
    admin_dsn: AdminOption = None,
    admin_dsn_file: AdminFileOption = None,
) -> None:
    """Partition the outbox by time beside its publishers, or change the interval of its next partitions."""
    from relay.admin.partitioning import partition as run

    done = run(load(config), every, administrator_dsn(admin_dsn, admin_dsn_file, "--admin-dsn"))
    for line in done:
        print(f"created {line}")
    if not done:
        print("everything is there already")
