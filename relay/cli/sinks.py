"""`relay sink`: the commands on sinks. No logic of their own."""

from __future__ import annotations

import json
import sys
from datetime import datetime
from typing import Annotated

import typer

from relay.admin.phrases import counted, duration, moment, recently
from relay.cli.acts import ActsGroup
from relay.cli.options import ConfigOption, JsonOption, ReasonOption, YesOption, time_of, warn
from relay.cli.terminal import approve, print_table
from relay.config.files import load

sink = typer.Typer(
    cls=ActsGroup,
    help="Sinks: handlers that deliver events to other systems, each at its own pace.",
    no_args_is_help=True,
)

NameArgument = Annotated[str, typer.Argument(help="The sink: a handler's name.")]


@sink.command("list")
def sink_list(config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """List the sinks: state, unread events, deferred transactions, and why nothing is delivered."""
    from relay.admin.sinks import listed
    from relay.store.activity import MINUTES

    settings = load(config)
    statuses = listed(
        settings, away=lambda error: warn(f"what is unread cannot be counted: {error}")
    )
    if as_json:
        print(json.dumps([each.as_json() for each in statuses], indent=2))
        return
    if not statuses:
        print(f"group {settings.group!r} has no sink", file=sys.stderr)
        return
    print_table(
        (
            *("sink", "state", "unread", "oldest", "deferred", "since", "why", "instance"),
            *("left", f"last {MINUTES} min", "to"),
        ),
        (
            (
                each.name,
                each.state,
                "-" if each.unread is None else each.unread,
                moment(each.oldest),
                each.deferred,
                moment(each.since),
                each.why or "-",
                each.instance or "-",
                "-" if each.seconds_left is None else f"about {duration(each.seconds_left)}",
                recently(each.recent),
                each.destination or "-",
            )
            for each in statuses
        ),
    )


@sink.command("resend")
def sink_resend(
    name: NameArgument,
    event: Annotated[
        list[str] | None, typer.Option("--event", metavar="ID", help="An event's id; repeatable.")
    ] = None,
    since: Annotated[
        datetime | None,
        typer.Option("--since", parser=time_of, metavar="TIME", help="Published then or later."),
    ] = None,
    until: Annotated[
        datetime | None,
        typer.Option("--until", parser=time_of, metavar="TIME", help="Published before."),
    ] = None,
    host: Annotated[str | None, typer.Option("--host", help="The host_id.")] = None,
    event_type: Annotated[str | None, typer.Option("--type", help="The event type.")] = None,
    aggregate_type: Annotated[
        str | None, typer.Option("--aggregate-type", help="The aggregate's type.")
    ] = None,
    aggregate: Annotated[
        str | None, typer.Option("--aggregate", help="The aggregate's id.")
    ] = None,
    endpoint: Annotated[
        str | None, typer.Option("--endpoint", help="Only to this one of several endpoints.")
    ] = None,
    config: ConfigOption = None,
    reason: ReasonOption = None,
    yes: YesOption = False,
) -> None:
    """Deliver events to a sink again, marked as a resend; the sink keeps its position."""
    from relay.admin import resend
    from relay.source.outbox.search import EventSearch

    wanted = EventSearch(host, event_type, aggregate_type, aggregate, since, until)
    settings = load(config)
    planned = resend.plan(settings, name, event or (), wanted, endpoint)
    print(f"{counted(len(planned.ids), 'event', 'events')} to be delivered to {name} again")
    if planned.ids:
        approve(yes)
        resent = resend.resend(settings, planned, reason)
        print(f"{counted(resent.deliveries, 'delivery', 'deliveries')} queued")
        if resent.left_out:
            print(
                f"{counted(resent.left_out, 'event', 'events')} left out: for later, or cancelled"
            )
