"""The ASGI application of the HTTP API: what its gate asks of a request, and the routes."""

from __future__ import annotations

import logging
from http import HTTPStatus

from fastapi import Depends, FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

from relay import __version__
from relay.api import events, publishing
from relay.api.callers import Callers, TokenCaller
from relay.api.database import ApiDatabase
from relay.api.positions import LogHistory
from relay.api.publishing import Intake
from relay.api.streams import Streams
from relay.api.turns import Turns
from relay.config.fields import nearest
from relay.config.settings import ApiSettings, Settings
from relay.web.gate import Gate
from relay.web.problems import (
    FAULTS,
    HttpRefusal,
    described_problems,
    problem,
    public_refusal_of,
)
from relay.web.requests import Failures, bearer

log = logging.getLogger(__name__)

BODY_BYTES = 16 * 1024 * 1024
"""Largest body of a request."""
OPENAPI = "/v1/openapi.json"
"""The path of the description, the only one that needs no token."""
STREAM = "/v1/events/stream"
RETRY_SECONDS = 5
"""After how many seconds a client asks again when a database is away."""
_SHOWN_CHARACTERS = 50
_NO_ROUTE = {404: "there is no such path", 405: "the path has no such method"}
_HEADERS = {"x-content-type-options": "nosniff", "cache-control": "no-store"}
_DESCRIPTION = """
Reads and publishes the events of an outbox, with a token of `relay token create`.
Errors are problems (RFC 9457), whose `detail` is one line.
"""
RESPONSES = described_problems(
    {
        400: "a position is none that this API has returned",
        401: "the token is missing or wrong, was revoked, or has expired",
        403: "the token gives no right to that",
        408: "the body took too long",
        413: "the body is too large",
        422: "a parameter is not valid, or none that the route has",
        429: "the address has sent too many wrong tokens, or the token has too many requests or streams",
        500: "the API failed, and its log says where",
        503: "the database cannot be reached or took too long, or too much is in flight; see `Retry-After`",
    }
)
"""The errors of every route, for its description."""


def create_app(settings: Settings, api: ApiSettings) -> FastAPI:
    """Create the HTTP API of a group's outbox. `app.state.database` and `app.state.callers` are what its routes use."""
    app = FastAPI(
        title="relay",
        version=__version__,
        summary="Read and publish events.",
        description=_DESCRIPTION,
        openapi_url=OPENAPI,
        docs_url=None,
        redoc_url=None,
        # A redirect names the scheme of this server, behind a proxy http:// instead of https://.
        redirect_slashes=False,
        responses=RESPONSES,
        dependencies=[Depends(_require_known_parameters)],
    )
    app.state.settings = settings
    app.state.database = ApiDatabase(settings)
    app.state.callers = Callers(app.state.database)
    app.state.failures = Failures()
    app.state.turns = Turns()
    app.state.history = LogHistory(settings)
    app.state.streams = Streams(
        settings,
        api,
        app.state.database,
        app.state.callers,
        app.state.history,
        app.state.turns,
    )
    app.state.intake = Intake(settings)
    app.state.responses = dict.fromkeys(("2xx", "3xx", "4xx", "5xx"), 0)

    def count(status: int) -> None:
        app.state.responses[f"{status // 100}xx"] += 1

    app.include_router(events.router)
    app.include_router(publishing.router)
    for fault in FAULTS:
        app.add_exception_handler(fault, _handle)
    app.add_middleware(
        Gate,
        name="API",
        headers=_HEADERS,
        limit=lambda request: BODY_BYTES,
        answer=lambda request, status, detail: problem(HttpRefusal(status, detail)),
        refusal=_refusal,
        count=count,
    )
    if api.origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=api.origins,
            allow_methods=["GET", "POST"],
            allow_headers=["authorization", "content-type", "idempotency-key", "last-event-id"],
            expose_headers=["location", "retry-after"],
        )
    return app


async def _require_known_parameters(request: Request) -> None:
    """Raise HTTPException for a parameter that the route does not have: a filter with a typo would be none."""
    route = request.app.openapi()["paths"][request.scope["route"].path][request.method.lower()]
    known = {each["name"] for each in route.get("parameters", ()) if each["in"] == "query"}
    for name in request.query_params:
        if name not in known:
            meant = nearest(name, known)
            hint = f"did you mean {meant}?" if meant else f"see {OPENAPI}"
            raise HTTPException(422, f"{name[:_SHOWN_CHARACTERS]}: unknown parameter; {hint}")


async def _refusal(request: Request) -> Response | None:
    """Return the response that refuses a request for want of a valid token, or None. Cookies mean nothing."""
    path = request.scope["path"]
    if path == OPENAPI:
        return None
    token = bearer(request.headers)
    if token is None and path == STREAM:
        # EventSource of browsers sends no header.
        token = request.query_params.get("access_token")
    if token is None:
        return _unauthenticated(
            "send Authorization: Bearer TOKEN, with a token of `relay token create`"
        )
    try:
        caller = await _caller(request, token)
    except FAULTS as error:
        return await _handle(request, error)
    if caller is None:
        return _unauthenticated("the token is wrong, was revoked, or has expired")
    request.state.caller = caller
    return None


def _unauthenticated(detail: str) -> Response:
    return problem(HttpRefusal(401, detail))


async def _caller(request: Request, token: str) -> TokenCaller | None:
    callers: Callers = request.app.state.callers
    caller = await callers.find(token)
    if caller is None:
        failures: Failures = request.app.state.failures
        address = request.client.host if request.client else ""
        failures.require_few(address)
        failures.note(address, token)
    return caller


async def _handle(request: Request, error: Exception) -> Response:
    refusal = public_refusal_of(error)
    if refusal.status in _NO_ROUTE and refusal.detail == HTTPStatus(refusal.status).phrase:
        refusal = refusal._replace(detail=f"{_NO_ROUTE[refusal.status]}: see {OPENAPI}")
    if refusal.status == 405:
        # Starlette names the methods of one of the routes of a path.
        paths = request.app.openapi()["paths"]
        described = paths.get(request.scope["path"]) or paths["/v1/events/{event_id}"]
        allowed = ", ".join(sorted(map(str.upper, described)))
        refusal = refusal._replace(headers={"allow": allowed})
    return problem(_unavailable(refusal))


def _unavailable(refusal: HttpRefusal) -> HttpRefusal:
    """Add the time after which to ask again to a refusal because of a database."""
    if refusal.status != 503 or "retry-after" in refusal.headers:
        return refusal
    return refusal._replace(headers={**refusal.headers, "retry-after": str(RETRY_SECONDS)})
