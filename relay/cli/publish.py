"""`relay publish`: business transactions from a file, standard input or a generator. No logic of its own."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from relay.admin.phrases import with_events
from relay.cli.options import ConfigOption, JsonOption
from relay.cli.terminal import progress
from relay.config.files import load
from relay.faults import ConfigurationError


def publish(
    file: Annotated[
        Path | None,
        typer.Argument(metavar="[FILE]", help="JSON; standard input if it is missing or '-'."),
    ] = None,
    config: ConfigOption = None,
    generate: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Generate N business transactions instead."),
    ] = None,
    hosts: Annotated[int, typer.Option(min=1, help="With --generate: the number of hosts.")] = 8,
    seed: Annotated[
        int | None,
        typer.Option(help="With --generate: the same seed generates the same transactions."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Publish business transactions: {host_id, user_id, events: [...]}, an array of them, or one on each line."""
    from relay.admin.connections import reach_source
    from relay.admin.publish import business_transactions, parse, require_own_outbox
    from relay.admin.publish import publish as publish_all

    settings = load(config)
    transactions = (
        business_transactions(generate, hosts, seed) if generate else iter(parse(*_input(file)))
    )
    require_own_outbox(settings)
    with reach_source(settings) as conn, progress() as report:
        count, events = publish_all(conn, transactions, report, generate)
    if as_json:
        print(json.dumps({"transactions": count, "events": events}))
    else:
        print("published", with_events(count, events))


def _input(file: Path | None) -> tuple[str, str]:
    if file is None or str(file) == "-":
        return sys.stdin.read(), "standard input"
    try:
        return file.read_text(encoding="utf-8"), str(file)
    except OSError as error:
        raise ConfigurationError(f"{file}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise ConfigurationError(f"{file}: is not UTF-8 text") from None
