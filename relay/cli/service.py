"""The commands that run in the foreground until a signal: relay, its servers alone, the demo. No logic of their own."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from threading import Event
from typing import Annotated

import typer

from relay.cli.options import ConfigOption, out
from relay.config.files import Configuration, load_all, observed, require_apart
from relay.faults import ConfigurationError
from relay.logs import LogFormat, configure

FormatOption = Annotated[LogFormat, typer.Option(help="The format of log lines.")]


def run(
    config: ConfigOption = None,
    log_format: FormatOption = LogFormat.TEXT,
    log_level: Annotated[
        str, typer.Option(metavar="LEVEL", help="debug, info, warning or error.")
    ] = "info",
    accept_configuration: Annotated[
        bool,
        typer.Option(
            "--accept-configuration",
            help="Replace the configuration of running instances of the group; they end.",
        ),
    ] = False,
) -> None:
    """Run relay in the foreground until SIGTERM or SIGINT."""
    _exit_on_signals()
    from relay.supervisor import Services

    if log_level.lower() not in ("debug", "info", "warning", "error"):
        raise ConfigurationError(f"--log-level: {log_level!r} is not debug, info, warning or error")
    configure(log_format, log_level)
    configurations = load_all(config)
    with _console_of(configurations), _apis_of(configurations):
        Services(configurations, accept_configuration).run_in_foreground()


def _exit_on_signals() -> None:
    """Let SIGTERM and SIGINT end the process at once until the service handles them: nothing is in flight yet."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: sys.exit(0))


def _console_of(configurations: Sequence[Configuration]) -> AbstractContextManager[object]:
    """Return the server of the console; without one in the configuration, a context that does nothing."""
    listen = observed(configurations).console
    if listen is None:
        return nullcontext()
    from relay.console.server import console_server

    return console_server([each.settings for each in configurations], listen)


@contextmanager
def _apis_of(configurations: Sequence[Configuration]) -> Iterator[None]:
    """Serve the HTTP API of each configuration that has one, until the end of the block."""
    with ExitStack() as servers:
        for each in configurations:
            if each.settings.api is not None:
                from relay.api.server import api_server

                servers.enter_context(api_server(each.settings, each.settings.api))
        yield


def console(
    config: ConfigOption = None,
    log_format: FormatOption = LogFormat.TEXT,
) -> None:
    """Serve the console of `observe.console` in the foreground, whether relay runs or not, until SIGTERM or SIGINT."""
    stop, configurations = _before_serving(config, log_format)
    if observed(configurations).console is None:
        raise ConfigurationError(
            "observe.console: is not configured: set listen and token, see docs/how-to/console.md"
        )
    with _console_of(configurations):
        _wait(stop)


def api(
    config: ConfigOption = None,
    log_format: FormatOption = LogFormat.TEXT,
) -> None:
    """Serve the HTTP API of `api` in the foreground, whether relay runs or not, until SIGTERM or SIGINT."""
    stop, configurations = _before_serving(config, log_format)
    if not any(each.settings.api for each in configurations):
        raise ConfigurationError("api: is not configured: set listen, see docs/how-to/http-api.md")
    with _apis_of(configurations):
        _wait(stop)


def _before_serving(
    config: list[Path] | None, log_format: LogFormat
) -> tuple[Event, list[Configuration]]:
    """Return what a signal sets, and the configurations. Raises ConfigurationError."""
    stop = Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    configure(log_format, "info")
    configurations = load_all(config)
    require_apart(configurations)
    return stop, configurations


def _wait(stop: Event) -> None:
    # Without a timeout, a signal that another thread receives is not handled.
    while not stop.wait(1.0):
        pass


def demo(
    directory: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="The working folder; default: a temporary one, removed at the end."
        ),
    ] = None,
) -> None:
    """Show relay at work on an embedded PostgreSQL and a local Spark, and verify the result from the database."""
    from relay.demo import run_demo

    if not run_demo(out, directory):
        raise typer.Exit(1)
