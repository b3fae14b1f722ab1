"""The routes of login and logout."""

from __future__ import annotations

from urllib.parse import quote

from fastapi import APIRouter, Request
from starlette.exceptions import HTTPException
from starlette.responses import RedirectResponse, Response

from relay.console.forms import FormDep, ViewsDep
from relay.console.security import COOKIE, SESSION_SECONDS, Guard

router = APIRouter(include_in_schema=False)


def login_url(path: str) -> str:
    """Return the URL of the login that leads to a page."""
    return f"/login?next={quote(path, safe='')}"


def _local(path: str) -> str:
    """Return a path of this console; / for any other URL, so that a login redirects to no other site."""
    is_local = path.startswith("/") and not path.startswith("//") and "\\" not in path
    return path if is_local and path.isprintable() else "/"


@router.get("/login")
def login_form(request: Request, views: ViewsDep, next: str = "/") -> Response:
    """Show the form of the login."""
    guard: Guard = request.app.state.guard
    if not guard.has_login:
        raise HTTPException(404, "this console has no login: a reverse proxy authenticates you")
    return views.page(request, "login.html", next=_local(next), wrong=False)


@router.post("/login")
async def log_in(request: Request, views: ViewsDep) -> Response:
    """Check the token of a login and set its cookie."""
    guard: Guard = request.app.state.guard
    form = await request.form()
    to = _local(str(form.get("next", "/")))
    name = str(form.get("name", "")).strip()
    cookie = guard.log_in(request, str(form.get("token", "")), name) if name else None
    if cookie is None:
        return views.page(request, "login.html", 401, next=to, wrong=True)
    answer = RedirectResponse(to, 303)
    answer.set_cookie(
        COOKIE,
        cookie,
        max_age=SESSION_SECONDS,
        httponly=True,
        samesite="strict",
        secure=request.url.scheme == "https",
    )
    return answer


@router.post("/logout")
def log_out(form: FormDep) -> Response:
    """Delete the cookie of a login."""
    answer = RedirectResponse("/login", 303)
    answer.delete_cookie(COOKIE, httponly=True, samesite="strict")
    return answer
