"""The ASGI application of the console: the gate that every request passes, error responses, pages and API."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from http import HTTPStatus
from importlib.resources import files
from typing import Any
from urllib.parse import quote

import psycopg
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from relay import __version__
from relay.config.settings import ConsoleSettings, Settings
from relay.console import (
    api,
    pages,
)
from relay.console.group import READ_SECONDS, GroupView, Missing
from relay.console.models import Problem, described
from relay.console.security import Guard, TooManyFailures, is_same_origin
from relay.console.views import Views
from relay.faults import ConfigurationError, TransientFault, Unreachable, first_line, kind_of

log = logging.getLogger(__name__)

BODY_BYTES = 1_500_000
"""Largest body of a request."""
LOGIN_BYTES = 10_000
"""Largest body of a request that is not authenticated."""
BODY_SECONDS = 30.0
"""Longest time until the body of a request is complete."""
_SAFE = frozenset({"GET", "HEAD"})
_OPEN = ("/static/", "/login")
"""Paths that a browser needs before it has logged in."""
_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "form-action 'self'; frame-ancestors 'none'; base-uri 'none'"
    ),
    "x-content-type-options": "nosniff",
    # With no-referrer a browser would send `Origin: null` with the console's own forms.
    "referrer-policy": "same-origin",
    "cache-control": "no-store",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}


def create_app(groups: Sequence[Settings], console: ConsoleSettings) -> FastAPI:
    """Create the console of some groups, guarded as `console` says.

    Raises ConfigurationError if the name of a group cannot be part of a URL, or two groups have the same.
    """
    names = [each.group for each in groups]
    for each in groups:
        if names.count(each.group) > 1:
            raise ConfigurationError(
                f"group: the console has two groups named {each.group!r}: rename one"
            )
        if "/" in each.group:
            raise ConfigurationError(
                f"group: {each.group!r} contains a /, which no URL of the console can have: rename the group"
            )
    app = FastAPI(
        title="relay",
        version=__version__,
        summary="Watch and operate relay.",
        description=api.DESCRIPTION,
        openapi_url="/api/openapi.json",
        docs_url=None,
        redoc_url=None,
    )
    app.state.groups = {each.group: GroupView(each) for each in groups}
    app.state.guard = Guard(console)
    app.state.views = Views(app.state.guard, list(app.state.groups))
    app.mount("/static", StaticFiles(directory=str(files("relay.console") / "static")))
    app.include_router(api.router)
    app.include_router(pages.router)
    for fault in (
        ConfigurationError,
        TransientFault,
        psycopg.Error,
        HTTPException,
        RequestValidationError,
        TooManyFailures,
    ):
        app.add_exception_handler(fault, _handle)
    app.add_middleware(Gate)
    return app


class Gate:
    """Middleware that authenticates requests, refuses those of other sites, and bounds their size and time.

    It adds the headers by which a browser runs and loads nothing but the console's own files.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

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
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        try:
            refusal = _refusal(request)
            if refusal is None:
                await self._app(scope, _bounded(receive, _body_limit(request)), guarded)
            else:
                await refusal(scope, receive, guarded)
        except Exception as error:
            # Without the error's text, which may hold a payload.
            log.error("the console failed", extra={"error": kind_of(error), "at": _where(error)})
            if not started:
                failed = _answer(request, 500, "the console failed: see relay's log")
                await failed(scope, receive, guarded)


def _refusal(request: Request) -> Response | None:
    """Return the response that refuses a request; None if it may pass."""
    changes = request.method not in _SAFE
    limit = _body_limit(request)
    if int(request.headers.get("content-length") or 0) > limit:
        return _answer(request, 413, f"the request has more than {limit} bytes")
    if changes and not is_same_origin(request):
        return _answer(
            request, 403, "the request comes from another site: use the console's own pages"
        )
    if _is_open(request):
        return None
    guard: Guard = request.app.state.guard
    try:
        caller = guard.caller(request)
    except TooManyFailures as error:
        return _answer_fault(request, error)
    if caller is None:
        return _unauthenticated(request, guard)
    if _is_api(request) and changes:
        if caller.browser:
            return _answer(
                request,
                401,
                "the API does not accept the cookie of a login: send Authorization: Bearer TOKEN",
            )
        if request.headers.get("content-type", "").partition(";")[0] != "application/json":
            return _answer(request, 415, "the body must be application/json")
    request.state.caller = caller
    return None


def _unauthenticated(request: Request, guard: Guard) -> Response:
    if _is_api(request):
        return _answer(
            request, 401, "send Authorization: Bearer TOKEN, with the token of observe.console"
        )
    if not guard.has_login:
        return _answer(
            request, 401, "the request has no user from the reverse proxy: use its address"
        )
    requested = quote(_path(request)) + (f"?{request.url.query}" if request.url.query else "")
    return RedirectResponse(pages.login_url(requested), 303)


def _bounded(receive: Receive, limit: int) -> Receive:
    """Wrap `receive` so that it raises HTTPException if the body has more than `limit` bytes or takes too long."""
    read, complete, deadline = 0, False, time.monotonic() + BODY_SECONDS

    async def receiving() -> Message:
        nonlocal read, complete
        if complete:
            return await receive()
        try:
            message = await asyncio.wait_for(receive(), max(0.0, deadline - time.monotonic()))
        except TimeoutError:
            raise HTTPException(408, f"the request took longer than {BODY_SECONDS:.0f} s") from None
        read += len(message.get("body", b""))
        complete = not message.get("more_body", False)
        if read > limit:
            raise HTTPException(413, f"the request has more than {limit} bytes")
        return message

    return receiving


async def _handle(request: Request, error: Exception) -> Response:
    return _answer_fault(request, error)


def _answer_fault(request: Request, error: Exception) -> Response:
    """Return the response for a fault."""
    match error:
        case Missing():
            return _answer(request, 404, str(error))
        case Unreachable() | TransientFault():
            return _answer(request, 503, str(error))
        case ConfigurationError():
            return _answer(request, 409, " ".join(str(error).splitlines()))
        case TooManyFailures():
            refused = _answer(
                request, 429, f"too many wrong tokens: try again in {error.seconds:.0f} s"
            )
            refused.headers["retry-after"] = f"{error.seconds:.0f}"
            return refused
        case psycopg.errors.QueryCanceled():
            return _answer(
                request, 503, f"the database took longer than {READ_SECONDS:.0f} s: ask for less"
            )
        case psycopg.errors.StatementTooComplex() | psycopg.errors.ProgramLimitExceeded():
            # Operational errors by class, though the request causes them, such as JSON that is nested too deep.
            return _answer(request, 409, f"the database refuses: {first_line(error)}")
        case psycopg.OperationalError():
            return _answer(request, 503, f"the database cannot be reached: {first_line(error)}")
        case psycopg.Error():
            return _answer(request, 409, f"the database refuses: {first_line(error)}")
        case RequestValidationError():
            first: dict[str, Any] = error.errors()[0]
            return _answer(request, 422, described(first["loc"], first["msg"]))
        case HTTPException():
            return _answer(request, error.status_code, str(error.detail))
        case _:
            raise error


def _answer(request: Request, status: int, detail: str) -> Response:
    """Return a problem: as JSON from the API, as a page elsewhere."""
    title = HTTPStatus(status).phrase
    if not _is_api(request):
        views: Views = request.app.state.views
        return views.error(request, status, title, detail)
    problem = Problem(title=title, status=status, detail=detail)
    headers = {"www-authenticate": "Bearer"} if status == 401 else None
    return JSONResponse(
        problem.model_dump(), status, headers, media_type="application/problem+json"
    )


def _path(request: Request) -> str:
    """Return the path by which routes are matched; `request.url` is built from the header `Host` as well."""
    return str(request.scope["path"])


def _is_open(request: Request) -> bool:
    return _path(request).startswith(_OPEN)


def _body_limit(request: Request) -> int:
    return LOGIN_BYTES if _is_open(request) else BODY_BYTES


def _is_api(request: Request) -> bool:
    return _path(request).startswith("/api/")


def _where(error: BaseException) -> str:
    frames = error.__traceback__
    while frames and frames.tb_next:
        frames = frames.tb_next
    return f"{frames.tb_frame.f_code.co_filename}:{frames.tb_lineno}" if frames else "?"


HEAD_SECONDS = 10.0
"""Longest time from the connection, or from the last response, to the end of the next request's head."""


class IdleTimeoutProtocol(H11Protocol):
    """HTTP/1.1 on a connection that is closed if no request comes for HEAD_SECONDS."""

    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the timeout when a client has connected."""
        super().connection_made(transport)
        self._restart_timer()

    def on_response_complete(self) -> None:
        """Restart the timeout after a response."""
        super().on_response_complete()
        self._restart_timer()

    def _restart_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self.loop.call_later(HEAD_SECONDS, self._close_if_idle)

    def _close_if_idle(self) -> None:
        cycle: RequestResponseCycle | None = self.cycle
        if (cycle is None or cycle.response_complete) and not self.transport.is_closing():
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timeout with the connection."""
        if self._timer is not None:
            self._timer.cancel()
        super().connection_lost(exc)
