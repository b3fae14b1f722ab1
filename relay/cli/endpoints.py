"""`relay endpoint`: the commands on endpoints that data choose. No logic of their own."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer

from relay.admin.phrases import moment
from relay.cli.acts import ActsGroup
from relay.cli.options import ConfigOption, JsonOption
from relay.cli.terminal import print_table
from relay.config.files import load
from relay.faults import ConfigurationError

endpoint = typer.Typer(
    cls=ActsGroup,
    help="Endpoints that data choose (type: http): those that fail, are disabled, or are paused.",
    no_args_is_help=True,
)

SinkArgument = Annotated[str, typer.Argument(help="The sink: a handler's name.")]


@endpoint.command("list")
def endpoint_list(
    sink: Annotated[str | None, typer.Argument(help="Only those of this sink.")] = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """List the endpoints that have failed for a minute or longer, are disabled or paused; at most 1,000."""
    from relay.admin.endpoints import listed

    found = listed(load(config), sink)
    if as_json:
        print(json.dumps([each.as_json() for each in found], indent=2))
        return
    if not found:
        print("no endpoint has failed for a minute, is disabled or paused", file=sys.stderr)
        return
    print_table(
        ("sink", "endpoint", "state", "address", "host", "failing since", "disabled since", "why"),
        (
            (
                each.sink,
                each.endpoint,
                each.state,
                each.address,
                each.host_id or "-",
                moment(each.failing_since),
                moment(each.disabled_at),
                each.why or "-",
            )
            for each in found
        ),
    )


@endpoint.command("test")
def endpoint_test(
    sink: SinkArgument,
    host: Annotated[str, typer.Option("--host", help="The host whose endpoints are tested.")],
    config: ConfigOption = None,
    only: Annotated[
        str | None, typer.Option("--endpoint", help="Only this one, by its id.")
    ] = None,
    event_type: Annotated[
        str, typer.Option("--type", help="The type of the event, which an endpoint may not take.")
    ] = "relay.test",
    payload: Annotated[str, typer.Option(help="Its payload, JSON.")] = '{"test": true}',
) -> None:
    """Post an event, which is in no outbox, to the endpoints of a host, and say what each has answered."""
    from relay.admin.endpoints import test

    try:
        content = json.loads(payload)
    except ValueError as error:
        raise ConfigurationError(f"--payload: is not JSON: {error}") from None
    found = test(load(config), sink, host, event_type, content, only)
    print_table(
        ("endpoint", "answer"),
        ((each or "-", fault or "accepted") for each, fault in found.items()),
    )
    if any(found.values()):
        raise typer.Exit(1)
