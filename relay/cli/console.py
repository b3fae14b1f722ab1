"""The command that serves the console alone. No logic of its own."""

from __future__ import annotations

import signal
from threading import Event
from typing import Annotated

import typer

from relay.cli.options import ConfigOption
from relay.config.files import load_all, observed, require_apart
from relay.faults import ConfigurationError
from relay.logs import LogFormat, configure


def console(
    config: ConfigOption = None,
    log_format: Annotated[
        LogFormat, typer.Option(help="How log lines are written.")
    ] = LogFormat.TEXT,
) -> None:
    """Serve the console of `observe.console` in the foreground, whether relay runs or not, until SIGTERM or SIGINT."""
    stop = Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    configure(log_format, "info")
    configurations = load_all(config)
    require_apart(configurations)
    listen = observed(configurations).console
    if listen is None:
        raise ConfigurationError(
            "observe.console: is not configured: set listen and token, see docs/how-to/console.md"
        )
    from relay.console.server import Server

    with Server([each.settings for each in configurations], listen):
        # Without a timeout, a signal that another thread received would go unseen.
        while not stop.wait(1.0):
            pass
