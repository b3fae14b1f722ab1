"""The ASGI application of the console: what its gate asks of a request, error responses, pages and API."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from http import HTTPStatus
from importlib.resources import files
from urllib.parse import quote

from fastapi import FastAPI, Request
from starlette.responses import RedirectResponse, Response
from starlette.staticfiles import StaticFiles

from relay import __version__
from relay.admin.acts import Missing
from relay.config.settings import ConsoleSettings, Settings
from relay.console import (
    api,
    pages,
)
from relay.console.group import GroupView
from relay.console.security import Guard, is_same_origin
from relay.console.views import Views
from relay.faults import ConfigurationError
from relay.web.gate import Gate
from relay.web.problems import FAULTS, HttpRefusal, problem, refusal_of
from relay.web.requests import TooManyFailures, is_json

log = logging.getLogger(__name__)

BODY_BYTES = 1_500_000
"""Largest body of a request."""
LOGIN_BYTES = 10_000
"""Largest body of a request that is not authenticated."""
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
    for fault in FAULTS:
        app.add_exception_handler(fault, _handle)
    app.add_middleware(
        Gate,
        name="console",
        headers=_HEADERS,
        limit=_body_limit,
        answer=_answer,
        refusal=_refusal,
    )
    return app


async def _refusal(request: Request) -> Response | None:
    """Return the response that refuses a request; None if it may pass."""
    changes = request.method not in _SAFE
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
        if not is_json(request.headers):
            return _answer(request, 415, "send the body with Content-Type: application/json")
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


async def _handle(request: Request, error: Exception) -> Response:
    return _answer_fault(request, error)


def _answer_fault(request: Request, error: Exception) -> Response:
    """Return the response for a fault."""
    if isinstance(error, Missing):
        return _answer(request, 404, str(error))
    return _refused(request, refusal_of(error))


def _answer(request: Request, status: int, detail: str) -> Response:
    return _refused(request, HttpRefusal(status, detail))


def _refused(request: Request, refusal: HttpRefusal) -> Response:
    """Return a problem: as JSON from the API, as a page elsewhere."""
    if _is_api(request):
        return problem(refusal)
    views: Views = request.app.state.views
    title = HTTPStatus(refusal.status).phrase
    page = views.error(request, refusal.status, title, refusal.detail)
    page.headers.update(refusal.headers)
    return page


def _path(request: Request) -> str:
    """Return the path by which routes are matched; `request.url` is built from the header `Host` as well."""
    return str(request.scope["path"])


def _is_open(request: Request) -> bool:
    return _path(request).startswith(_OPEN)


def _body_limit(request: Request) -> int:
    return LOGIN_BYTES if _is_open(request) else BODY_BYTES


def _is_api(request: Request) -> bool:
    return _path(request).startswith("/api/")
