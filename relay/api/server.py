"""The server of the HTTP API."""

from __future__ import annotations

from typing import TYPE_CHECKING

from relay.config.settings import ApiSettings, Settings
from relay.observe import api_counts
from relay.observe.api_counts import ApiCounts
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
        api_counts.register(settings.group, counts)
        return created[0]

    def counts() -> ApiCounts:
        state = created[0].state
        streams, writer = state.streams, state.intake.writer
        return ApiCounts(
            streams=streams.connected,
            waiting=len(streams.waiters),
            sent=streams.sent,
            cut=streams.cut,
            published=writer.published,
            waits=streams.waiters.waits,
            requests=state.responses,
            failing={
                "tokens": state.callers.is_failing,
                "streams": streams.is_failing,
                "publishing": writer.condition.fault is not None,
            },
        )

    def stop() -> None:
        api_counts.forget(settings.group)
        for app in created:
            app.state.streams.close()
            app.state.intake.close()
            app.state.database.close()

    return Server(
        create, api.listen, key="api", name="API", requests=api.streams + _REQUESTS, stop=stop
    )
