"""Makes commands of the acts that are declared in `relay.admin`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from inspect import Parameter, Signature
from typing import Annotated, Any, get_args

import typer
from typer.core import TyperGroup

from relay.admin import acts
from relay.admin.acts import Act, Done, option
from relay.cli.options import ConfigOption, ReasonOption, YesOption, say
from relay.cli.terminal import approve
from relay.config.files import load
from relay.faults import ConfigurationError


class ActsGroup(TyperGroup):
    """A group with the commands of the acts on what it is named after, which are imported when it is asked for one."""

    @property
    def commands(self) -> MutableMapping[str, Any]:
        for act in acts.of(str(self.name)):
            if act.name not in self._commands:
                alone = typer.Typer(add_completion=False, rich_markup_mode=None)
                alone.command(act.name)(_command(act))
                self._commands[act.name] = typer.main.get_command(alone)
        return self._commands

    @commands.setter
    def commands(self, own: MutableMapping[str, Any]) -> None:
        self._commands = own


def _command(act: Act) -> Callable[..., None]:
    """Return a function with the parameters of an act, of which Typer makes its command."""

    def run(
        name: str,
        config: ConfigOption = None,
        reason: ReasonOption = None,
        yes: YesOption = not act.asks,
        **given: Any,
    ) -> None:
        settings = load(config)
        with _options(act):
            if not yes:
                _say(act.rehearse(settings, name, **given))
                approve(yes, act.question(name))
            _say(act(settings, name, reason, **given))

    named = Annotated[str, typer.Argument(metavar=act.subject.metavar, help=act.subject.help)]
    parameters = [
        _parameter("name", named),
        *map(_given, act.parameters),
        _parameter("config", ConfigOption, None),
        _parameter("reason", ReasonOption, None),
        *([_parameter("yes", YesOption, False)] if act.asks else []),
    ]
    run.__doc__ = act.does
    run.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {each.name: each.annotation for each in parameters}
    return run


def _say(done: Done) -> None:
    for line in done.said.splitlines():
        say(line)


@contextmanager
def _options(act: Act) -> Iterator[None]:
    """Let an error that begins with the name of a parameter name its option."""
    try:
        yield
    except ConfigurationError as error:
        if str(error).partition(":")[0] in map(option, act.parameters):
            raise ConfigurationError(f"--{error}") from None
        raise


def _given(each: Parameter) -> Parameter:
    """Return a parameter of an act as Typer reads it."""
    kind, given = get_args(each.annotation)
    shown = {"help": given.help, "metavar": given.metavar}
    declared: Any = (
        typer.Argument(**shown) if given.is_argument else typer.Option(f"--{option(each)}", **shown)
    )
    return _parameter(each.name, Annotated[kind, declared], each.default)


def _parameter(name: str, annotation: Any, default: Any = Parameter.empty) -> Parameter:
    return Parameter(name, Parameter.KEYWORD_ONLY, annotation=annotation, default=default)
