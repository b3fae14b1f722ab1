"""The command line: registers the commands, puts them in the order of `relay --help`, and prints errors.

A command imports the modules that it needs when it is called, so that `relay --help` answers at once.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated, Any

import psycopg
import typer
from typer.core import TyperGroup
from typer.models import CommandInfo

from relay import __version__
from relay.cli.deferred import deferred
from relay.cli.dlq import dlq
from relay.cli.endpoints import endpoint
from relay.cli.events import event
from relay.cli.export import schema, spark
from relay.cli.install import check, init, uninstall
from relay.cli.keys import keys
from relay.cli.offsets import offsets
from relay.cli.options import fail, out
from relay.cli.publish import publish
from relay.cli.queues import queue
from relay.cli.readers import reader
from relay.cli.retention import erase, partition, restore
from relay.cli.schedules import schedule
from relay.cli.service import api, console, demo, run
from relay.cli.sinks import sink
from relay.cli.status import status, top
from relay.cli.tokens import token
from relay.cli.verify import verify
from relay.cli.work import work
from relay.faults import RelayError, first_line

_ORDER = (
    *(
        "init",
        "check",
        "run",
        "status",
        "top",
        "publish",
        "event",
        "work",
        "dlq",
        "deferred",
        "sink",
        "endpoint",
        "queue",
        "reader",
        "schedule",
        "verify",
        "offsets",
        "console",
        "api",
        "token",
    ),
    *("partition", "erase", "restore", "schema", "keys", "spark", "demo", "uninstall"),
)


class _InOrder(TyperGroup):
    """Typer lists the groups of commands after all commands."""

    def list_commands(self, ctx: Any) -> list[str]:
        return sorted(super().list_commands(ctx), key=_ORDER.index)


app = typer.Typer(
    cls=_InOrder,
    help="Carries committed outbox events from PostgreSQL's WAL to handlers, in order and effectively once.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(dlq, name="dlq")
app.add_typer(deferred, name="deferred")
app.add_typer(sink, name="sink")
app.add_typer(endpoint, name="endpoint")
app.add_typer(queue, name="queue")
app.add_typer(reader, name="reader")
app.add_typer(schedule, name="schedule")
app.add_typer(token, name="token")
app.add_typer(schema, name="schema")
app.add_typer(spark, name="spark")
app.add_typer(offsets, name="offsets")
for command in (
    init,
    check,
    run,
    status,
    top,
    publish,
    event,
    work,
    verify,
    console,
    api,
    partition,
    erase,
    restore,
    keys,
    demo,
    uninstall,
):
    app.command()(command)


def main() -> None:
    """Run the command line. An error is printed as lines on standard error, never as a traceback."""
    _leave_out_others(sys.argv[1:2])
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


def _leave_out_others(first: Sequence[str]) -> None:
    """Keep the command that the first argument names, if it names one: to build them all takes a tenth of a second."""
    if first and first[0] in _ORDER:
        kept = [each for each in app.registered_commands if _name(each) in first]
        app.registered_groups = [each for each in app.registered_groups if each.name in first]
        app.registered_commands = kept


def _name(command: CommandInfo) -> str | None:
    return command.name or (command.callback and command.callback.__name__)


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
