"""The gate of an application: every request passes it, is authenticated there, and is bounded."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping

from fastapi import Request
from starlette.datastructures import MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from relay.faults import kind_of
from relay.web import requests
from relay.web.requests import Bodies, bounded, where

log = logging.getLogger(__name__)


class Gate:
    """Middleware that refuses requests, bounds their bodies, each and together, and adds headers to responses.

    It logs what the application has not handled, and answers with status 500.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        name: str,
        headers: Mapping[str, str],
        limit: Callable[[Request], int],
        answer: Callable[[Request, int, str], Response],
        refusal: Callable[[Request], Awaitable[Response | None]],
        count: Callable[[int], None] = lambda status: None,
    ) -> None:
        """`name` is that of the log lines, and `limit` the largest body of a request, in bytes.

        `answer` returns the response with a status and a detail, `refusal` the one that refuses a request, or None.
        `count` gets the status of each response.
        """
        self._app = app
        self._name = name
        self._headers = headers
        self._limit = limit
        self._answer = answer
        self._refusal = refusal
        self._count = count
        self._bodies = Bodies(requests.BODIES_BYTES)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = Request(scope, receive)
        started = False

        async def guarded(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                self._count(message["status"])
                headers = MutableHeaders(scope=message)
                for name, value in self._headers.items():
                    headers.setdefault(name, value)
            await send(message)

        try:
            limit = self._limit(request)
            refusal = await self._refused(request, limit)
            if refusal is None:
                with self._bodies.share() as count:
                    await self._app(scope, bounded(receive, limit, count), guarded)
            else:
                await refusal(scope, receive, guarded)
        except ClientDisconnect:
            # Any client can go in the middle of its request, and nobody is left to be answered.
            return
        except Exception as error:
            # Without the error's text, which may hold a payload.
            log.error(
                f"the {self._name} failed", extra={"error": kind_of(error), "at": where(error)}
            )
            if not started:
                failed = self._answer(request, 500, f"the {self._name} failed: see relay's log")
                await failed(scope, receive, guarded)

    async def _refused(self, request: Request, limit: int) -> Response | None:
        if int(request.headers.get("content-length") or 0) > limit:
            return self._answer(request, 413, f"the request has more than {limit} bytes")
        return await self._refusal(request)
