"""The options that several commands share, and the messages of commands on standard error."""

from __future__ import annotations

import logging
import shlex
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, is_dataclass
from datetime import UTC, datetime
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, get_args, get_origin

import typer
from pydantic import TypeAdapter, ValidationError
from pydantic.fields import FieldInfo
from rich.console import Console

from relay.admin.phrases import printable
from relay.config.dsn import administrator_dsn
from relay.faults import ConfigurationError
from relay.logs import is_json
from relay.store.filters import Filter

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


@dataclass(frozen=True)
class Without:
    """The conditions of a filter that are no options of a command."""

    names: Sequence[str]


_OPTIONS = {
    "ids": "id",
    "event_id": "event",
    "event_type": "type",
    "host_id": "host",
    "states": "state",
}
"""The options of conditions that are not called like these."""
_METAVARS = {"exception": "TEXT", "error": "TEXT", "event_id": "ID"}


def with_groups(command: Callable[..., None]) -> Callable[..., None]:
    """Make a Typer command of a function with parameters that are dataclasses or filters: their fields are options.

    The options replace the parameter, at its position. Typer reads options from the signature and has no groups of
    options; without this, every command repeats the options that it shares with others.
    """
    own = signature(command, eval_str=True).parameters.values()

    @wraps(command)
    def run(**given: Any) -> None:
        command(**{each.name: _made(each, given) for each in own})

    options = [option for each in own for option in _options(each)]
    run.__signature__ = Signature(options)  # type: ignore[attr-defined]
    run.__annotations__ = {each.name: each.annotation for each in options}
    return run


def _options(parameter: Parameter) -> list[Parameter]:
    """Return the options for which a parameter stands: those of a group, of a filter, or itself."""
    kind, without = _group(parameter)
    if is_dataclass(kind):
        return [option for each in _fields(kind) for option in _options(each)]
    if kind is None:
        return [parameter]
    return [
        Parameter(
            name, Parameter.POSITIONAL_OR_KEYWORD, default=None, annotation=_condition(name, field)
        )
        for name, field in kind.model_fields.items()
        if name not in without
    ]


def _made(parameter: Parameter, given: dict[str, Any]) -> Any:
    """Make the value of a parameter of the options that are given."""
    kind, without = _group(parameter)
    if is_dataclass(kind):
        made: Any = kind
        return made(**{each.name: _made(each, given) for each in _fields(kind)})
    if kind is None:
        return given[parameter.name]
    values = {name: given[name] for name in kind.model_fields if name not in without}
    try:
        return kind(**{name: value for name, value in values.items() if value not in (None, [])})
    except ValidationError as error:
        raise ConfigurationError(_invalid(error)) from None


def _fields(group: Any) -> Collection[Parameter]:
    return signature(group, eval_str=True).parameters.values()


def _group(parameter: Parameter) -> tuple[Any, Sequence[str]]:
    """Return the dataclass or the filter that a parameter is, None for an option, and what is left out of it."""
    kind, *marks = get_args(parameter.annotation) or [parameter.annotation]
    without = [name for each in marks if isinstance(each, Without) for name in each.names]
    is_group = isinstance(kind, type) and (is_dataclass(kind) or issubclass(kind, Filter))
    return (kind if is_group else None), without


def _condition(name: str, field: FieldInfo) -> Any:
    """Return the annotation of the option of a condition."""
    kind = _plain(field.annotation)
    more: dict[str, Any] = {"parser": time_of, "metavar": "TIME"} if kind is datetime else {}
    if name in _METAVARS:
        more["metavar"] = _METAVARS[name]
    option = typer.Option(f"--{option_of(name)}", help=field.description, **more)
    return Annotated[kind | None, option]


def option_of(condition: str) -> str:
    """Return the option of a condition."""
    return _OPTIONS.get(condition, condition.replace("_", "-"))


def _plain(annotation: Any) -> Any:
    """Return the type that Typer reads for that of a condition."""
    inner = [each for each in get_args(annotation) if each is not type(None)]
    origin = get_origin(annotation)
    if origin is Literal:
        return str
    if origin in (list, Sequence):
        return list[_plain(inner[0])]  # type: ignore[misc]
    return _plain(inner[0]) if inner else annotation


def _invalid(error: ValidationError) -> str:
    """Return what is wrong with the first of the options that make no filter."""
    fault = error.errors(include_url=False)[0]
    option, words = option_of(str(fault["loc"][0])), fault.get("ctx", {}).get("expected")
    if words is None:
        return f"--{option}: {fault['msg']}"
    return f"--{option}: {fault['input']!r} is not {words.replace(chr(39), '')}"


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
