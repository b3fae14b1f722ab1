"""`relay keys`: the keys of a type of handlers. No logic of its own."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from relay.cli.options import JsonOption
from relay.cli.terminal import print_table
from relay.faults import ConfigurationError


def keys(
    kind: Annotated[
        str | None,
        typer.Argument(metavar="[TYPE]", help="The type; without it, the types are listed."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show the keys of a type of handlers, relay's own or one that an installed package brings."""
    from relay.config import description
    from relay.config.handlers import settings_of

    if kind is None:
        _list_types(as_json)
        return
    try:
        settings = settings_of(kind)
    except ConfigurationError as error:
        raise ConfigurationError(f"type {kind}: {error}") from None
    found = [
        {name: _plain(text) for name, text in key._asdict().items()}
        for key in description.keys(settings)
        if key.name != "type"
    ]
    if as_json:
        print(json.dumps(found, indent=2))
        return
    print_table(("key", "type", "default", "meaning"), (list(each.values()) for each in found))


def _list_types(as_json: bool) -> None:
    from relay.config import sink_types
    from relay.config.description import first_paragraph
    from relay.config.handlers import KINDS, settings_of

    found = []
    for kind, package in {**sink_types.packages(), **dict.fromkeys(KINDS, "relay-outbox")}.items():
        try:
            meaning = first_paragraph(settings_of(kind))
        except ConfigurationError as error:
            meaning = f"cannot be used: {error}"
        found.append({"type": kind, "package": package, "meaning": _plain(meaning)})
    found.sort(key=lambda each: each["type"])
    if as_json:
        print(json.dumps(found, indent=2))
        return
    print_table(("type", "package", "meaning"), (list(each.values()) for each in found))


def _plain(text: str) -> str:
    """One line, without the marks of the reference's pages."""
    return " ".join(text.replace("`", "").split())
