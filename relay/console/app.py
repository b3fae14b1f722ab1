"""The console as an ASGI application: its gate, its errors, and the routes of pages and API."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
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

from relay import __version__
from relay.config.observe import ConsoleSettings
from relay.config.settings import Settings
from relay.console import api, pages
from relay.console.group import READ_SECONDS, GroupView, Missing
from relay.console.models import Problem, described
from relay.console.security import Guard, TooManyFailures, is_from_here
from relay.console.views import Views
from relay.faults import ConfigurationError, TransientFault, Unreachable, first_line, kind_of

log = logging.getLogger(__name__)

BODY_BYTES = 1_500_000
"""The largest request that is read."""
LOGIN_BYTES = 10_000
"""The largest one of somebody who is not known yet."""
BODY_SECONDS = 30.0
"""How long the body of a request may take to come."""
_SAFE = frozenset({"GET", "HEAD"})
_OPEN = ("/static/", "/login")
"""What a browser needs before it has logged in."""
_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "form-action 'self'; frame-ancestors 'none'; base-uri 'none'"
    ),
    "x-content-type-options": "nosniff",
    # Not no-referrer, with which a browser sends `Origin: null` with the console's own forms.
    "referrer-policy": "same-origin",
    "cache-control": "no-store",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}


def create_app(groups: Sequence[Settings], console: ConsoleSettings) -> FastAPI:
    """The console of some groups, which `console` guards.

    Raises ConfigurationError for a group whose name cannot be part of an address, or is that of another one.
    """
    names = [each.group for each in groups]
    for each in groups:
        if names.count(each.group) > 1:
            raise ConfigurationError(
                f"group: the console has two of the name {each.group!r}: give one another name"
            )
        if "/" in each.group:
            raise ConfigurationError(
                f"group: {each.group!r} has a /, which no address of the console can have: name it without"
            )
    app = FastAPI(
        title="relay",
        version=__version__,
        summary="What an operator sees of relay, and does.",
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
        app.add_exception_handler(fault, _refused)
    app.add_middleware(Gate)
    return app


class Gate:
    """Lets nobody in but those who may, from pages of its own only, with requests of a bounded size.

    Adds the headers that keep a browser from running or loading anything else.
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
                await self._app(scope, _bounded(receive, _most_bytes(request)), guarded)
            else:
                await refusal(scope, receive, guarded)
        except Exception as error:
            # Never its text, which may hold a payload.
            log.error("the console failed", extra={"error": kind_of(error), "at": _where(error)})
            if not started:
                failed = _answer(request, 500, "relay failed here: its log says where")
                await failed(scope, receive, guarded)


def _refusal(request: Request) -> Response | None:
    """Why a request is refused before anything looks at it; None if it is not."""
    changes = request.method not in _SAFE
    most = _most_bytes(request)
    if int(request.headers.get("content-length") or 0) > most:
        return _answer(request, 413, f"the request has more than {most} bytes")
    if changes and not is_from_here(request):
        return _answer(request, 403, "another site has sent this request: it is refused")
    if _is_open(request):
        return None
    guard: Guard = request.app.state.guard
    try:
        caller = guard.caller(request)
    except TooManyFailures as error:
        return _answered(request, error)
    if caller is None:
        return _unknown(request, guard)
    if _is_api(request) and changes:
        if caller.browser:
            return _answer(request, 401, "a login is for pages: send Authorization: Bearer TOKEN")
        if request.headers.get("content-type", "").partition(";")[0] != "application/json":
            return _answer(request, 415, "the body must be application/json")
    request.state.caller = caller
    return None


def _unknown(request: Request, guard: Guard) -> Response:
    if _is_api(request):
        return _answer(
            request, 401, "send Authorization: Bearer TOKEN, with the token of observe.console"
        )
    if not guard.has_login:
        return _answer(request, 401, "the reverse proxy has not said who you are: go through it")
    asked = quote(_path(request)) + (f"?{request.url.query}" if request.url.query else "")
    return RedirectResponse(pages.login_url(asked), 303)


def _bounded(receive: Receive, most: int) -> Receive:
    """The request's body, which ends in an error where it is too large, or takes too long."""
    read, whole, ends = 0, False, time.monotonic() + BODY_SECONDS

    async def receiving() -> Message:
        nonlocal read, whole
        if whole:
            return await receive()
        try:
            message = await asyncio.wait_for(receive(), max(0.0, ends - time.monotonic()))
        except TimeoutError:
            raise HTTPException(408, "the request has taken too long to come") from None
        read += len(message.get("body", b""))
        whole = not message.get("more_body", False)
        if read > most:
            raise HTTPException(413, f"the request has more than {most} bytes")
        return message

    return receiving


async def _refused(request: Request, error: Exception) -> Response:
    return _answered(request, error)


def _answered(request: Request, error: Exception) -> Response:
    """What a fault is answered with."""
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
            # Operational errors too, of what was asked: as JSON that is nested too deep.
            return _answer(request, 409, f"the database refuses: {first_line(error)}")
        case psycopg.OperationalError():
            return _answer(request, 503, f"the database is away: {first_line(error)}")
        case psycopg.Error():
            return _answer(request, 409, f"the database refuses: {first_line(error)}")
        case RequestValidationError():
            first: dict[str, Any] = error.errors()[0]
            return _answer(request, 422, described(first["loc"], first["msg"]))
        case HTTPException():
            return _answer(request, error.status_code, str(error.detail))
        case _:
            raise error


_TITLES = {
    401: "Not known",
    403: "Refused",
    404: "Not there",
    405: "Not allowed",
    408: "Too slow",
    409: "Cannot be done",
    413: "Too large",
    415: "Not JSON",
    422: "Not valid",
    429: "Too many attempts",
    500: "relay failed",
    503: "Not available now",
}


def _answer(request: Request, status: int, detail: str) -> Response:
    """A problem: as JSON from the API, as a page elsewhere."""
    title = _TITLES.get(status, "Refused")
    if not _is_api(request):
        views: Views = request.app.state.views
        return views.error(request, status, title, detail)
    problem = Problem(title=title, status=status, detail=detail)
    headers = {"www-authenticate": "Bearer"} if status == 401 else None
    return JSONResponse(
        problem.model_dump(), status, headers, media_type="application/problem+json"
    )


def _path(request: Request) -> str:
    """The path that routes are found by; that of the request's URL could begin with the header `Host`."""
    return str(request.scope["path"])


def _is_open(request: Request) -> bool:
    return _path(request).startswith(_OPEN)


def _most_bytes(request: Request) -> int:
    return LOGIN_BYTES if _is_open(request) else BODY_BYTES


def _is_api(request: Request) -> bool:
    return _path(request).startswith("/api/")


def _where(error: BaseException) -> str:
    frames = error.__traceback__
    while frames and frames.tb_next:
        frames = frames.tb_next
    return f"{frames.tb_frame.f_code.co_filename}:{frames.tb_lineno}" if frames else "?"
