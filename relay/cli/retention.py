"""The commands on retention: partitions, the archive, erasure. No logic of their own."""

from __future__ import annotations

from typing import Annotated

import typer

from relay.cli.approval import approve
from relay.cli.options import (
    AdminFileOption,
    AdminOption,
    ConfigOption,
    TargetAdminFileOption,
    TargetAdminOption,
    YesOption,
)
from relay.cli.progress import progress
from relay.config.dsn import administrator_dsn
from relay.config.files import load

EveryOption = Annotated[
    str | None,
    typer.Option(
        "--partition",
        metavar="INTERVAL",
        help="Partition a new outbox by time: 1d, 6h. Default: no partitions.",
    ),
]


def partition(
    every: Annotated[
        str,
        typer.Option("--every", metavar="INTERVAL", help="The range of a partition: 1d, 6h."),
    ],
    config: ConfigOption = None,
    admin_dsn: AdminOption = None,
    admin_dsn_file: AdminFileOption = None,
) -> None:
    """Partition the outbox by time while publishers insert, or change the interval of its next partitions."""
    from relay.admin.partitioning import partition as run

    settings, admin = load(config), administrator_dsn(admin_dsn, admin_dsn_file, "--admin-dsn")
    with progress() as report:
        done = run(settings, every, admin, report=report)
    for line in done:
        print(f"created {line}")
    if not done:
        print("everything exists already")


def restore(
    from_: Annotated[
        str, typer.Option("--from", metavar="TIME", help="The first event_ts, such as 2026-11-24.")
    ],
    to: Annotated[
        str, typer.Option("--to", metavar="TIME", help="The event_ts before which the range ends.")
    ],
    config: ConfigOption = None,
    admin_dsn: AdminOption = None,
    admin_dsn_file: AdminFileOption = None,
) -> None:
    """Restore events from the archive (`retention.archive`) into the outbox, for a new group or sink."""
    from relay.admin.restoration import restore as run

    settings, admin = load(config), administrator_dsn(admin_dsn, admin_dsn_file, "--admin-dsn")
    with progress() as report:
        done = run(settings, from_, to, admin, report)
    print(f"restored {done.events} events into {done.partition}")


def erase(
    host: Annotated[
        str, typer.Option("--host", metavar="ID", help="The host whose events are removed.")
    ],
    config: ConfigOption = None,
    force: Annotated[
        bool,
        typer.Option(
            "--force", help="Remove events that are not applied yet, too; they are never applied."
        ),
    ] = False,
    yes: YesOption = False,
    admin_dsn: AdminOption = None,
    admin_dsn_file: AdminFileOption = None,
    target_admin_dsn: TargetAdminOption = None,
    target_admin_dsn_file: TargetAdminFileOption = None,
) -> None:
    """Remove the events of a host wherever relay stores them, and list the copies that it cannot reach."""
    from relay.admin.erasure import erase as run

    settings = load(config)
    approve(yes, f"Remove all events of host {host}, for good?")
    source_admin = administrator_dsn(admin_dsn, admin_dsn_file, "--admin-dsn")
    target_admin = administrator_dsn(target_admin_dsn, target_admin_dsn_file, "--target-admin-dsn")
    with progress() as report:
        done = run(settings, host, force, source_admin, target_admin, report)
    for where, rows in done.removed.items():
        print(f"removed: {rows} {where if where != 'outbox' else 'events in the outbox'}")
    for what in done.left:
        print(f"not removed: {what}")
