"""`relay token`: the commands on tokens of the HTTP API. No logic of their own."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer

from relay.admin.phrases import moment
from relay.cli.acts import ActsGroup
from relay.cli.options import ConfigOption, JsonOption, ReasonOption
from relay.cli.terminal import print_table
from relay.config.files import load
from relay.model.json_fields import json_fields

token = typer.Typer(
    cls=ActsGroup,
    help="Tokens of the HTTP API: who may read and publish events there.",
    no_args_is_help=True,
)

TokenArgument = Annotated[str, typer.Argument(metavar="NAME", help="The name of the token.")]


@token.command("list")
def token_list(config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """List the tokens, also those that are revoked or have expired."""
    from relay.admin.tokens import listed

    found = listed(load(config))
    if as_json:
        print(json.dumps([json_fields(each) for each in found], indent=2))
        return
    if not found:
        print("there is no token", file=sys.stderr)
        return
    print_table(
        ("token", "rights", "hosts", "event types", "created", "expires", "last used", "revoked"),
        (
            (
                each.name,
                ", ".join(each.rights),
                ", ".join(each.hosts),
                ", ".join(each.types),
                moment(each.created_at),
                moment(each.expires_at),
                moment(each.last_used_at),
                moment(each.revoked_at),
            )
            for each in found
        ),
    )


@token.command("create")
def token_create(
    name: TokenArgument,
    right: Annotated[
        list[str] | None, typer.Option(help="read or publish; may be repeated. Default: read.")
    ] = None,
    host: Annotated[
        list[str] | None,
        typer.Option(help="A host whose events it is for; may be repeated. Default: every host."),
    ] = None,
    event_type: Annotated[
        list[str] | None,
        typer.Option(
            "--type",
            help="A type, or a glob such as order.*; may be repeated. Default: every type.",
        ),
    ] = None,
    expires: Annotated[
        str | None,
        typer.Option(metavar="DURATION", help="After how long it is refused, such as 90d."),
    ] = None,
    config: ConfigOption = None,
    reason: ReasonOption = None,
) -> None:
    """Create a token, and print it once: relay stores only its hash."""
    from relay.admin.tokens import create
    from relay.config.types import duration
    from relay.faults import ConfigurationError

    settings = load(config)
    try:
        length = None if expires is None else duration(expires)
    except ValueError as error:
        raise ConfigurationError(f"--expires: {error}") from None
    print(
        create(
            settings, name, right or ["read"], host or ["*"], event_type or ["*"], length, reason
        )
    )
