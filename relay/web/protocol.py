"""HTTP/1.1 on connections that are bounded in time."""

from __future__ import annotations

import asyncio
import socket
from http import HTTPStatus
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from relay.web.problems import HttpRefusal, problem

HEAD_SECONDS = 10.0
"""Longest time from the connection, or from the last response, to the end of the next request's head."""

_REFUSED = "this is no request of HTTP/1.1, or its head is too large"

USER_TIMEOUT_SECONDS = 60
"""How long a client's host may leave what was sent without an answer, before the connection counts as lost."""


class IdleTimeoutProtocol(H11Protocol):
    """HTTP/1.1 on a connection that is closed if no request comes for HEAD_SECONDS.

    Where a server has as many connections as it may have requests, the one that has waited the longest is closed for a
    new one, unless a whole request of a known caller is being handled: whoever only connects, begins a request or sends
    wrong tokens keeps nobody out.

    The scope of a request has the connection as `relay.transport`, to end that of a client that takes nothing.
    """

    _timer: asyncio.TimerHandle | None = None
    _waits_since = 0.0
    _handling: asyncio.Task[None] | None = None
    _gave_way = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the timeout when a client has connected."""
        self._make_room()
        super().connection_made(transport)
        app = self.app

        async def connected(scope: Any, receive: Any, send: Any) -> None:
            scope["relay.transport"] = transport
            self._handling = asyncio.current_task()
            try:
                await app(scope, receive, send)
            except asyncio.CancelledError:
                if not self._gave_way:
                    raise

        self.app = connected
        option = getattr(socket, "TCP_USER_TIMEOUT", None)  # Linux
        if option is not None:
            accepted = transport.get_extra_info("socket")
            accepted.setsockopt(socket.IPPROTO_TCP, option, USER_TIMEOUT_SECONDS * 1000)
        self._restart_timer()

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no request of HTTP/1.1, or has too long a head, and close the connection."""
        response = problem(HttpRefusal(400, _REFUSED))
        head = h11.Response(
            status_code=400,
            headers=[*response.raw_headers, (b"connection", b"close")],
            reason=HTTPStatus.BAD_REQUEST.phrase.encode(),
        )
        for event in (head, h11.Data(data=bytes(response.body)), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def on_response_complete(self) -> None:
        """Restart the timeout after a response."""
        super().on_response_complete()
        self._restart_timer()

    def _make_room(self) -> None:
        # One more is counted once this one is, and a request is refused at the limit.
        if self.limit_concurrency is None or len(self.connections) + 2 < self.limit_concurrency:
            return
        waiting = [
            each
            for each in self.connections
            if isinstance(each, IdleTimeoutProtocol) and each.gives_way
        ]
        if waiting:
            oldest = min(waiting, key=lambda each: each._waits_since)
            oldest._give_way()

    @property
    def is_idle(self) -> bool:
        """Whether no request is being handled."""
        cycle: RequestResponseCycle | None = self.cycle
        return cycle is None or cycle.response_complete

    @property
    def gives_way(self) -> bool:
        """Whether no request is being handled that has come whole, and from a caller whom the gate knows."""
        return self.is_idle or self.cycle.more_body or "caller" not in self.scope["state"]

    def _give_way(self) -> None:
        self._gave_way = True
        self.connections.discard(self)
        self.transport.abort()
        if self._handling is not None:
            # It counts as a request until it ends.
            self._handling.cancel()

    def _restart_timer(self) -> None:
        self._waits_since = self.loop.time()
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self.loop.call_later(HEAD_SECONDS, self._close_if_idle)

    def _close_if_idle(self) -> None:
        if self.is_idle and not self.transport.is_closing():
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timeout with the connection."""
        if self._timer is not None:
            self._timer.cancel()
        super().connection_lost(exc)
