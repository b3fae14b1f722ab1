"""`relay schedule`: the commands on schedules. No logic of their own."""

from __future__ import annotations

import json
import signal
import sys
from datetime import datetime
from threading import Event
from typing import Annotated

import typer

from relay.admin.phrases import moment
from relay.cli.acts import ActsGroup
from relay.cli.options import ConfigOption, JsonOption, say
from relay.cli.service import FormatOption
from relay.cli.terminal import print_table
from relay.config.files import load
from relay.logs import LogFormat, configure
from relay.model.json_fields import json_fields

schedule = typer.Typer(
    cls=ActsGroup,
    help="Schedules: events that relay publishes at given times.",
    no_args_is_help=True,
)

ScheduleArgument = Annotated[str, typer.Argument(metavar="SCHEDULE", help="Its name.")]


@schedule.command("list")
def schedule_list(config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """List the schedules of the outbox, their last and their next time."""
    from relay.admin.schedules import listed

    settings = load(config)
    found = listed(settings)
    if as_json:
        print(json.dumps([json_fields(each) for each in found], indent=2, default=str))
        return
    if not found:
        hint = "; relay declares those of the configuration when it starts"
        print(f"there is no schedule{hint if settings.schedules else ''}", file=sys.stderr)
        return
    print_table(
        ("schedule", "when", "next", "last", "published", "missed", "of group", "state"),
        (
            (
                each.name,
                each.when,
                moment(each.next_at),
                moment(each.last[-1] if each.last else None),
                f"{each.published:,}",
                f"{each.missed_ticks:,}",
                each.configured_by or "-",
                each.fault
                or f"{each.state} {moment(each.paused_at) if each.paused_at else ''}".strip(),
            )
            for each in found
        ),
    )


@schedule.command("next")
def schedule_next(
    name: ScheduleArgument,
    config: ConfigOption = None,
    count: Annotated[int, typer.Option(min=1, max=1000, help="So many.")] = 5,
    as_json: JsonOption = False,
) -> None:
    """Print the next times of a schedule, in its time zone and in UTC."""
    from relay.admin.schedules import upcoming

    found, times = upcoming(load(config), name, count)
    if as_json:
        print(json.dumps(times, indent=2, default=datetime.isoformat))
        return
    if not times:
        say(found.fault or "there is no next time", error=True)
        return
    print_table(
        (found.timezone, "UTC"),
        ((moment(each.astimezone(found.zone)), moment(each)) for each in times),
    )


@schedule.command("run")
def schedule_run(
    config: ConfigOption = None,
    log_format: FormatOption = LogFormat.TEXT,
) -> None:
    """Publish what is due in the foreground, without the rest of relay, until SIGTERM or SIGINT."""
    from relay.admin.schedules import run

    stop = Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    configure(log_format, "info")
    run(load(config), stop)
