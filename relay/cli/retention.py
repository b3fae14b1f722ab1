"""The commands on retention: partitions, the archive, erasure. No logic of their own."""

from __future__ import annotations

from typing import Annotated

import typer

from relay.admin.phrases import counted
from relay.cli.options import (
    AdministratorOptions,
    SourceAdministratorOptions,
    YesOption,
    with_groups,
)
from relay.cli.terminal import approve, progress
from relay.config.files import load

EveryOption = Annotated[
    str | None,
    typer.Option(
        "--partition",
        metavar="INTERVAL",
        help="Partition a new outbox by time: 1d, 6h. Default: no partitions.",
    ),
]


@with_groups
def partition(
    every: Annotated[
        str,
        typer.Option("--every", metavar="INTERVAL", help="The range of a partition: 1d, 6h."),
    ],
    administrator: SourceAdministratorOptions,
) -> None:
    """Partition the outbox by time while publishers insert, or change the interval of its next partitions."""
    from relay.admin.retention import partition as run

    settings, admin_dsn = load(administrator.config), administrator.source_dsn()
    with progress() as report:
        done = run(settings, every, admin_dsn, report=report)
    for line in done:
        print(f"created {line}")
    if not done:
        print("everything exists already")


@with_groups
def restore(
    from_: Annotated[
        str, typer.Option("--from", metavar="TIME", help="The first event_ts, such as 2026-11-24.")
    ],
    to: Annotated[
        str, typer.Option("--to", metavar="TIME", help="The event_ts before which the range ends.")
    ],
    administrator: SourceAdministratorOptions,
) -> None:
    """Restore events from the archive (`retention.archive`) into the outbox, for a new group or sink."""
    from relay.admin.retention import restore as run

    settings, admin_dsn = load(administrator.config), administrator.source_dsn()
    with progress() as report:
        done = run(settings, from_, to, admin_dsn, report)
    print(f"restored {counted(done.events, 'event', 'events')} into {done.partition}")


@with_groups
def erase(
    host: Annotated[
        str, typer.Option("--host", metavar="ID", help="The host whose events are removed.")
    ],
    administrator: AdministratorOptions,
    force: Annotated[
        bool,
        typer.Option(
            "--force",
            help="Remove events that are not applied yet, too, but for those that the slot still brings.",
        ),
    ] = False,
    yes: YesOption = False,
) -> None:
    """Remove the events of a host wherever relay stores them, and list the copies that it cannot reach."""
    from relay.admin.retention import erase as run

    settings = load(administrator.config)
    approve(yes, f"Remove all events of host {host}, for good?")
    source_dsn, target_dsn = administrator.source_dsn(), administrator.target_dsn()
    with progress() as report:
        done = run(settings, host, force, source_dsn, target_dsn, report)
    for where, rows in done.removed.items():
        print(f"removed: {rows} {where if where != 'outbox' else 'events in the outbox'}")
    for what in done.left:
        print(f"not removed: {what}")
