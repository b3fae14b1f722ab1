"""The command line: registers the commands, puts them in the order of `relay --help`, and prints errors.

The module of a command is imported when it is called, and imports there what only the command needs: relay answers at
once, and `relay --help` nearly so.
"""

from __future__ import annotations

import sys
from collections import UserDict
from importlib import import_module
from typing import Annotated, Any

import psycopg
import typer
from typer.core import TyperGroup

from relay import __version__
from relay.cli.options import fail, out
from relay.faults import RelayError, first_line
from relay.logs import quiet_libraries

_MODULES = {
    "init": "install",
    "check": "install",
    "run": "service",
    "status": "status",
    "top": "status",
    "publish": "publish",
    "event": "events",
    "work": "work",
    "dlq": "dlq",
    "deferred": "deferred",
    "sink": "sinks",
    "endpoint": "endpoints",
    "queue": "queues",
    "saga": "sagas",
    "reader": "readers",
    "schedule": "schedules",
    "verify": "verify",
    "offsets": "offsets",
    "console": "service",
    "api": "service",
    "token": "tokens",
    "partition": "retention",
    "erase": "retention",
    "restore": "retention",
    "schema": "export",
    "keys": "keys",
    "spark": "export",
    "demo": "service",
    "uninstall": "install",
}
"""The commands in the order of `relay --help`, with the module that has the function or the group of this name."""


class _Commands(UserDict[str, Any]):
    """The commands by name; one is imported and built when it is asked for: all of them take a quarter of a second."""

    def __init__(self) -> None:
        super().__init__(dict.fromkeys(_MODULES))

    def __getitem__(self, name: str) -> Any:
        if self.data[name] is None:
            self.data[name] = _built(name)
        return self.data[name]


def _built(name: str) -> Any:
    command = getattr(import_module(f"relay.cli.{_MODULES[name]}"), name)
    alone = typer.Typer(add_completion=False, rich_markup_mode=None)
    if not isinstance(command, typer.Typer):
        alone.command(name)(command)
        return typer.main.get_command(alone)
    alone.add_typer(command, name=name)
    return typer.main.get_group(alone).commands[name]


class _Root(TyperGroup):
    """Typer's group takes commands that are imported."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.commands = _Commands()

    def list_commands(self, ctx: Any) -> list[str]:
        return list(self.commands)


app = typer.Typer(
    cls=_Root,
    help="Carries committed outbox events from PostgreSQL's WAL to handlers, in order and effectively once.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main() -> None:
    """Run the command line. An error is printed as lines on standard error, never as a traceback."""
    quiet_libraries()
    try:
        app()
    except RelayError as error:
        fail(str(error), error.exit_status)
    except psycopg.Error as error:
        fail(f"the database refuses: {first_line(error)}", 1)
    except BrokenPipeError:
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


def _version(asked: bool) -> None:
    if asked:
        out.print(f"relay {__version__}", highlight=False)
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Carries committed outbox events from PostgreSQL's WAL to handlers, in order and effectively once."""
