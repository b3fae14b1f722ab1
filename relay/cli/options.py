"""The options that several commands share, and the messages of commands on standard error."""

from __future__ import annotations

import logging
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass, is_dataclass
from datetime import UTC, datetime
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from pydantic import TypeAdapter, ValidationError
from rich.console import Console

from relay.admin.phrases import printable
from relay.config.dsn import administrator_dsn
from relay.faults import ConfigurationError
from relay.logs import is_json

log = logging.getLogger(__name__)

out = Console()

ConfigOption = Annotated[
    list[Path] | None,
    typer.Option(
        "--config",
        "-c",
        metavar="FILE",
        help="The configuration, a file or a folder of *.yaml; default $RELAY_CONFIG, else relay.yaml. init, check, "
        "run, status, console and api take several.",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON for a program.")]
AdminOption = Annotated[
    str | None,
    typer.Option(
        "--admin-dsn",
        metavar="DSN",
        envvar="RELAY_ADMIN_DSN",
        help="Connect to the source as an administrator. `ps` shows a password given here.",
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
ReasonOption = Annotated[str | None, typer.Option("--reason", help="Stored with the action.")]
YesOption = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]

DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Only print what would be done.")]
AllOption = Annotated[bool, typer.Option("--all", help="Act on all of them, without a filter.")]


@dataclass(frozen=True, repr=False)
class SourceAdministratorOptions:
    """The configuration, and an administrator's connection string for the source."""

    config: ConfigOption = None
    admin_dsn: AdminOption = None
    admin_dsn_file: AdminFileOption = None

    def source_dsn(self) -> str | None:
        """Return the administrator's DSN; None if there is none. Raises ConfigurationError."""
        return administrator_dsn(self.admin_dsn, self.admin_dsn_file, "--admin-dsn")


@dataclass(frozen=True, repr=False)
class AdministratorOptions(SourceAdministratorOptions):
    """The same, with a connection string for a target of its own."""

    target_admin_dsn: TargetAdminOption = None
    target_admin_dsn_file: TargetAdminFileOption = None

    def target_dsn(self) -> str | None:
        """Return the administrator's DSN; None if there is none. Raises ConfigurationError."""
        return administrator_dsn(
            self.target_admin_dsn, self.target_admin_dsn_file, "--target-admin-dsn"
        )


def with_groups(command: Callable[..., None]) -> Callable[..., None]:
    """Make a Typer command of a function with parameters that are dataclasses: each of their fields is an option.

    The options replace the parameter, at its position. Typer reads options from the signature and has no groups of
    options; without this, every command repeats the options that it shares with others.
    """
    own = signature(command, eval_str=True).parameters.values()
    groups: dict[str, Any] = {p.name: p.annotation for p in own if is_dataclass(p.annotation)}
    fields = {
        name: list(signature(group, eval_str=True).parameters.values())
        for name, group in groups.items()
    }

    @wraps(command)
    def run(**given: Any) -> None:
        for name, group in groups.items():
            given[name] = group(**{each.name: given.pop(each.name) for each in fields[name]})
        command(**given)

    options: list[Parameter] = [each for p in own for each in fields.get(p.name, [p])]
    run.__signature__ = Signature(options)  # type: ignore[attr-defined]
    run.__annotations__ = {each.name: each.annotation for each in options}
    return run


def time_of(text: str) -> datetime:
    """Return the time that an option gives, in UTC unless it has an offset.

    Raises typer.BadParameter with an example.
    """
    try:
        moment = TypeAdapter(datetime).validate_python(text)
    except ValidationError:
        raise typer.BadParameter(f"{text!r} is not a time such as 2026-03-01T12:00") from None
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


def say(text: str, *, error: bool = False) -> None:
    """Print a line that has texts of others, such as names and faults: no terminal does what is in them."""
    print(printable(text), file=sys.stderr if error else sys.stdout)


def fail(text: str, status: int) -> NoReturn:
    """Print each line of a text as an error, or log it where logs are JSON, and end the process with an exit status."""
    for line in text.splitlines():
        if is_json():
            log.error("ended by an error", extra={"fault": line})
        else:
            say(f"relay: {line}", error=True)
    sys.exit(status)


def warn(text: str) -> None:
    """Print a warning of a command that goes on."""
    say(f"relay: warning: {text}", error=True)


def with_options(error: ConfigurationError, context: typer.Context) -> ConfigurationError:
    """Return the error with the given options added to the command, where it says to run the command again."""
    command = f"relay {context.info_name}"
    again = command
    for parameter in context.command.params:
        value = context.params.get(str(parameter.name))
        # An option that may be repeated is an empty tuple where it was not given.
        if value is not None and value != () and value != parameter.default:
            # A connection string may hold a password.
            values = value if isinstance(value, list | tuple) else [value]
            for each in values:
                shown = "…" if str(parameter.name).endswith("_dsn") else shlex.quote(str(each))
                again += f" {parameter.opts[0]} {shown}"
    return type(error)(str(error).replace(f"`{command}`", f"`{again}`"))
