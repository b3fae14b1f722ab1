"""`api.origins`: the pages of which sites may use the HTTP API in a browser."""

from __future__ import annotations

import asyncio

import httpx
import pytest
from fastapi import FastAPI

from relay.api.app import create_app
from relay.config.settings import Settings

ALLOWED = "https://app.example"
PREFLIGHT = {
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type",
}


def _app(*origins: str) -> FastAPI:
    api = {"listen": "127.0.0.1:0", "origins": origins}
    settings = Settings(source={"dsn": "postgresql://u@h/x"}, api=api)
    assert settings.api is not None
    return create_app(settings, settings.api)


def _ask(app: FastAPI, method: str, path: str, origin: str, **headers: str) -> httpx.Response:
    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://api") as client:
            return await client.request(method, path, headers={"origin": origin, **headers})

    return asyncio.run(ask())


@pytest.mark.parametrize("path", ["/v1/openapi.json", "/v1/events"])
def test_an_answer_is_for_the_pages_of_the_origins(path: str) -> None:
    """Also a refusal, which a page could not read otherwise."""
    app = _app(ALLOWED)
    allowed = _ask(app, "GET", path, ALLOWED)
    assert allowed.headers["access-control-allow-origin"] == ALLOWED
    assert "access-control-allow-credentials" not in allowed.headers
    for other in ("https://evil.example", f"{ALLOWED}.evil.example", "http://app.example", "null"):
        refused = _ask(app, "GET", path, other)
        assert refused.status_code == allowed.status_code
        assert "access-control-allow-origin" not in refused.headers, other


def test_a_page_of_an_origin_may_send_a_token() -> None:
    """The question before such a request has no token: the answer comes before the gate."""
    app = _app(ALLOWED)
    allowed = _ask(app, "OPTIONS", "/v1/events", ALLOWED, **PREFLIGHT)
    assert allowed.status_code == 200
    assert allowed.headers["access-control-allow-origin"] == ALLOWED
    assert "authorization" in allowed.headers["access-control-allow-headers"]
    refused = _ask(app, "OPTIONS", "/v1/events", "https://evil.example", **PREFLIGHT)
    assert refused.status_code == 400
    assert "access-control-allow-origin" not in refused.headers


def test_without_origins_no_other_site_may() -> None:
    app = _app()
    answers = (
        _ask(app, "GET", "/v1/events", ALLOWED),
        _ask(app, "OPTIONS", "/v1/events", ALLOWED, **PREFLIGHT),
    )
    for each in answers:
        assert each.status_code == 401
        assert "access-control-allow-origin" not in each.headers
