"""`relay work`: a worker of queues. No logic of its own."""

from __future__ import annotations

from typing import Annotated

import typer

from relay.cli.service import FormatOption
from relay.config.imports import find
from relay.faults import ConfigurationError
from relay.logs import LogFormat, configure


def work(
    worker: Annotated[
        str,
        typer.Argument(
            metavar="MODULE:NAME", help="A relay.client.worker.Worker, such as shop.mail:worker."
        ),
    ],
    log_format: FormatOption = LogFormat.TEXT,
    log_level: Annotated[
        str, typer.Option(metavar="LEVEL", help="debug, info, warning or error.")
    ] = "info",
) -> None:
    """Work the messages of a queue in the foreground until SIGTERM or SIGINT; run as many of them as you like."""
    from relay.client.worker import Worker, WorkerError

    module, _, name = worker.partition(":")
    if not module or not name:
        raise ConfigurationError(f"{worker}: name a module and a worker in it, as shop.mail:worker")
    configure(log_format, log_level)
    named = find("MODULE:NAME", worker)
    if not isinstance(named, Worker):
        raise ConfigurationError(
            f"{worker}: is a {type(named).__name__}: name a relay.client.worker.Worker"
        )
    try:
        named.run_forever()
    except WorkerError as error:
        raise ConfigurationError(str(error)) from None
