"""The server of the HTTP API."""

from __future__ import annotations

from typing import TYPE_CHECKING

from relay.config.settings import ApiSettings, Settings
from relay.web.server import Server

if TYPE_CHECKING:
    from fastapi import FastAPI

_REQUESTS = 100
"""Largest number of concurrent requests beside the streams."""


def api_server(settings: Settings, api: ApiSettings) -> Server:
    """Return the server of the HTTP API of a group's outbox. Raises ConfigurationError."""
    created: list[FastAPI] = []

    def create() -> FastAPI:
        from relay.api.app import create_app

        created.append(create_app(settings, api))
        return created[0]

    def stop() -> None:
        for app in created:
            app.state.streams.close()
            app.state.intake.close()
            app.state.database.close()

    return Server(
        create, api.listen, key="api", name="API", requests=api.streams + _REQUESTS, stop=stop
    )
