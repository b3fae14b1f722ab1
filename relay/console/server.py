"""The server of the console."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from relay.config.settings import ConsoleSettings, Settings
from relay.web.server import Server

if TYPE_CHECKING:
    from fastapi import FastAPI

_REQUESTS = 64


def console_server(groups: Sequence[Settings], console: ConsoleSettings) -> Server:
    """Return the server of a console for some groups. Raises ConfigurationError."""

    def create() -> FastAPI:
        from relay.console.app import create_app

        return create_app(groups, console)

    return Server(create, console.listen, key="observe.console", name="console", requests=_REQUESTS)
