"""`relay schedule`: the commands on schedules. No logic of their own."""

from __future__ import annotations

import json
import signal
import sys
from datetime import datetime
from threading import Event
from typing import Annotated

import typer

from relay.cli.options import ConfigOption, JsonOption, ReasonOption, say
from relay.cli.service import FormatOption
from relay.cli.terminal import print_table
from relay.config.files import load
from relay.logs import LogFormat, configure
from relay.model.json_fields import json_fields
from relay.observe.phrases import moment, pausing

schedule = typer.Typer(
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


@schedule.command("pause")
def schedule_pause(
    name: ScheduleArgument, config: ConfigOption = None, reason: ReasonOption = None
) -> None:
    """Let a schedule publish nothing; its times meanwhile are not missed."""
    from relay.admin.schedules import pause

    print(f"schedule {name} {pausing(True, pause(load(config), name, True, reason))}")


@schedule.command("resume")
def schedule_resume(
    name: ScheduleArgument, config: ConfigOption = None, reason: ReasonOption = None
) -> None:
    """Let a paused schedule go on with its next time."""
    from relay.admin.schedules import pause

    print(f"schedule {name} {pausing(False, pause(load(config), name, False, reason))}")


@schedule.command("run-now")
def schedule_run_now(
    name: ScheduleArgument, config: ConfigOption = None, reason: ReasonOption = None
) -> None:
    """Publish a schedule's event now, beside its times."""
    from relay.admin.schedules import run_now

    print(f"published event {run_now(load(config), name, reason)}")


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
