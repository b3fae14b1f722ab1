"""Connections of the console: whoever sends a request slowly, or none, does not keep one from others."""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

HEAD_SECONDS = 10.0
"""How long the head of a request may take to come, since the client has connected, or had its last answer."""


class Impatient(H11Protocol):
    """Closes a connection without a request."""

    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client has connected."""
        super().connection_made(transport)
        self._wait()

    def on_response_complete(self) -> None:
        """A request is answered."""
        super().on_response_complete()
        self._wait()

    def _wait(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self.loop.call_later(HEAD_SECONDS, self._give_up)

    def _give_up(self) -> None:
        cycle: RequestResponseCycle | None = self.cycle
        if (cycle is None or cycle.response_complete) and not self.transport.is_closing():
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection has ended."""
        if self._timer is not None:
            self._timer.cancel()
        super().connection_lost(exc)
