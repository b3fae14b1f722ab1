"""The pages: each reads what `GroupView` has and renders it, or does what a form asks and says what came of it."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

from fastapi import APIRouter, Request
from starlette.exceptions import HTTPException
from starlette.responses import RedirectResponse, Response

from relay.console.charts import chart
from relay.console.forms import (
    By,
    InGroup,
    Posted,
    Shown,
    dead_filter_of,
    deferred_filter_of,
    number,
    page_size,
    reason_of,
)
from relay.console.group import HISTORY_HOURS, PAGE, Missing
from relay.console.security import COOKIE, SESSION_SECONDS, Guard
from relay.console.views import address
from relay.faults import ConfigurationError
from relay.store.dead_letter_pages import SHOWN_CHARACTERS
from relay.store.deferred_selection import KINDS

router = APIRouter(include_in_schema=False)

_SINK_ACTIONS = 10
_HOURS = (0.25, 1.0, HISTORY_HOURS)
_OFTEN, _RARELY = 5, 15
"""Seconds after which a page that is watched is read again."""
_STATUSES = ("dead", "replaying", "replayed", "discarded")


def login_url(asked: str) -> str:
    """Where to log in before a page is shown."""
    return f"/login?next={quote(asked, safe='')}"


def _local(path: str) -> str:
    """A path of this console; its beginning for anything that leads elsewhere."""
    is_local = path.startswith("/") and not path.startswith("//") and "\\" not in path
    return path if is_local and path.isprintable() else "/"


@router.get("/login")
def login_form(request: Request, views: Shown, next: str = "/") -> Response:
    """The page that asks for the token."""
    guard: Guard = request.app.state.guard
    if not guard.has_login:
        raise HTTPException(404, "here a reverse proxy says who you are")
    return views.page(request, "login.html", next=_local(next), wrong=False)


@router.post("/login")
async def log_in(request: Request, views: Shown) -> Response:
    """Set the cookie of whoever knows the token."""
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
def log_out(form: Posted) -> Response:
    """Forget the cookie."""
    answer = RedirectResponse("/login", 303)
    answer.delete_cookie(COOKIE, httponly=True, samesite="strict")
    return answer


@router.get("/")
def start(request: Request) -> Response:
    """Go to the first group."""
    return RedirectResponse(address(next(iter(request.app.state.groups))), 303)


@router.get("/groups/{group}/partitions")
def partitions(
    request: Request, views: Shown, shown: InGroup, after: int = -1, limit: int = 100
) -> Response:
    """Where the partitions stand."""
    found = shown.partitions(min(max(limit, 1), 200), after)
    return views.page(
        request, "partitions.html", found=found, after=after, refresh=_RARELY, limit=limit
    )


@router.get("/groups/{group}/partitions/seek")
def partitions_seek(
    request: Request, views: Shown, shown: InGroup, to: str, partition: str = ""
) -> Response:
    """Say what seeking would do, and ask."""
    move = shown.plan_seek(to.strip(), number(partition))
    return views.page(
        request, "confirm_offsets.html", move=move, to=to.strip(), partition=partition
    )


@router.post("/groups/{group}/partitions/seek")
def partitions_moved(
    request: Request, views: Shown, shown: InGroup, by: By, form: Posted
) -> Response:
    """Let the stopped group go on elsewhere."""
    partition = number(form.get("partition", ""))
    text = shown.seek(form.get("to", ""), partition, by.name, reason_of(form))
    return views.done(request, address(shown.name, "partitions"), f"The group goes on {text}.")


@router.get("/groups/{group}/sinks")
def sinks(request: Request, views: Shown, shown: InGroup) -> Response:
    """The sinks."""
    return views.page(request, "sinks.html", sinks=shown.sinks(), refresh=_OFTEN)


@router.get("/groups/{group}/sink")
def sink(
    request: Request, views: Shown, shown: InGroup, name: str, hours: float = HISTORY_HOURS
) -> Response:
    """One sink, and what can be done with it."""
    found = shown.sink(name)
    return views.page(
        request,
        "sink.html",
        sink=found,
        mode=shown.settings.source.mode,
        configured=name in shown.settings.sink_handlers,
        charts=[chart(each) for each in shown.history(hours, name)],
        hours=hours,
        all_hours=_HOURS,
        actions=shown.actions(_SINK_ACTIONS, sink=name).rows,
        refresh=_OFTEN,
    )


@router.get("/groups/{group}/sink/seek")
def sink_seek(
    request: Request, views: Shown, shown: InGroup, name: str, to: str, rebuild: bool = False
) -> Response:
    """Say where a sink would go on, and ask."""
    move = shown.plan_sink_seek(name, to.strip())
    return views.page(
        request, "confirm_seek.html", name=name, move=move, to=to.strip(), rebuild=rebuild
    )


@router.get("/groups/{group}/sink/drop")
def sink_drop(request: Request, views: Shown, shown: InGroup, name: str) -> Response:
    """Ask before a sink is forgotten."""
    return views.page(request, "confirm_drop.html", sink=shown.sink(name))


@router.post("/groups/{group}/sink/{action}")
def sink_action(
    request: Request, views: Shown, shown: InGroup, by: By, form: Posted, action: str
) -> Response:
    """Pause, resume, move or forget a sink."""
    name, reason = form.get("name", ""), reason_of(form)
    to = address(shown.name, "sink", name=name)
    match action:
        case "pause":
            changed = shown.pause(name, by.name, reason)
            text = f"Sink {name} is paused." if changed else f"Sink {name} was paused already."
        case "resume":
            changed = shown.resume(name, by.name, reason)
            text = f"Sink {name} goes on." if changed else f"Sink {name} was not paused."
        case "seek":
            rebuild = form.get("rebuild") == "true"
            where = shown.seek_sink(name, form.get("to", ""), rebuild, by.name, reason)
            text = f"Sink {name} goes on {where}."
        case "drop":
            forgotten = shown.drop_sink(name, by.name, reason)
            text = f"Sink {name} is forgotten, with {forgotten} deferred transactions."
            to = address(shown.name, "sinks")
        case _:
            raise HTTPException(404, "there is no such action")
    return views.done(request, to, text)


@router.get("/groups/{group}/deferred")
def deferred(
    request: Request, views: Shown, shown: InGroup, after: int = 0, limit: int = PAGE
) -> Response:
    """Deferred transactions."""
    given, wanted = deferred_filter_of(request)
    found = shown.deferred(wanted.asked(), page_size(limit), after)
    return views.page(
        request,
        "deferred.html",
        found=found,
        given=given,
        kinds=KINDS,
        handlers=sorted(shown.settings.handlers),
        sinks=sorted(shown.settings.sink_handlers),
        after=after,
        refresh=_RARELY,
    )


@router.get("/groups/{group}/deferred/{action}")
def deferred_ask(request: Request, views: Shown, shown: InGroup, action: str) -> Response:
    """Say what would be tried or given up, and ask."""
    given, wanted = deferred_filter_of(request)
    if action not in ("run", "cancel"):
        raise HTTPException(404, "there is no such action")
    found = shown.find_deferred(wanted.asked())
    return views.page(request, "confirm_deferred.html", action=action, found=found, given=given)


@router.post("/groups/{group}/deferred/{action}")
def deferred_action(
    request: Request, views: Shown, shown: InGroup, by: By, form: Posted, action: str
) -> Response:
    """Try deferred transactions now, or give them up."""
    reason, to = reason_of(form), address(shown.name, "deferred")
    _, wanted = deferred_filter_of(request)
    if action == "run":
        count = shown.run_deferred(wanted.asked(), by.name, reason)
        return views.done(request, to, f"{_transactions(count)} due now.")
    if action == "cancel":
        count = shown.cancel_deferred(wanted.asked(), by.name, reason)
        return views.done(request, to, f"{_transactions(count)} given up: see the dead letters.")
    raise HTTPException(404, "there is no such action")


@router.get("/groups/{group}/dead-letters")
def dead_letters(
    request: Request,
    views: Shown,
    shown: InGroup,
    before: int | None = None,
    limit: int = PAGE,
) -> Response:
    """Dead transactions, by a search."""
    given, wanted = dead_filter_of(request)
    if "status" not in request.query_params:
        wanted = wanted.model_copy(update={"status": "dead"})
    statuses, kinds = shown.dead_kinds()
    found = shown.dead_letters(wanted.asked(), page_size(limit), before)
    return views.page(
        request,
        "dead_letters.html",
        found=found,
        given={**given, "status": wanted.status or ""},
        statuses=statuses,
        kinds=kinds,
        all_statuses=_STATUSES,
        handlers=sorted(shown.settings.handlers),
        sinks=sorted(shown.settings.sink_handlers),
        before=before,
    )


@router.get("/groups/{group}/dead-letters/{action}")
def dead_letters_ask(request: Request, views: Shown, shown: InGroup, action: str) -> Response:
    """Say what would be replayed or discarded, and ask."""
    given, wanted = dead_filter_of(request, status="dead")
    if action not in ("replay", "discard"):
        raise HTTPException(404, "there is no such action")
    found = shown.find_dead(wanted.asked())
    return views.page(request, "confirm_dead.html", action=action, found=found, given=given)


@router.post("/groups/{group}/dead-letters/{action}")
def dead_letters_action(
    request: Request, views: Shown, shown: InGroup, by: By, form: Posted, action: str
) -> Response:
    """Replay or discard dead transactions."""
    reason = reason_of(form)
    _, wanted = dead_filter_of(request, status="dead")
    one = wanted.ids[0] if len(wanted.ids) == 1 else None
    to = address(shown.name, "dead-letter" if one else "dead-letters", id=one)
    if action == "replay":
        replayed = shown.replay(wanted.asked(), by.name, reason)
        text = f"{_transactions(replayed.queued)} queued to be applied again."
        return views.done(request, to, text, replayed.warnings)
    if action == "discard":
        count = shown.discard(wanted.asked(), by.name, reason)
        return views.done(request, to, f"{_transactions(count)} discarded.")
    raise HTTPException(404, "there is no such action")


@router.get("/groups/{group}/dead-letter")
def dead_letter(
    request: Request, views: Shown, shown: InGroup, id: int, after: int | None = None
) -> Response:
    """A dead transaction: its events, why it died, and what was done about it."""
    found = shown.dead_letter(id, after=after)
    if not found.letters.rows:
        raise Missing(f"the dead transaction {found.number} has no more events")
    first = found.letters.rows[0]
    return views.page(
        request,
        "dead_letter.html",
        id=id,
        found=found,
        first=first,
        after=after,
        shown_characters=SHOWN_CHARACTERS,
        refresh=_OFTEN if first["status"] == "replaying" else None,
    )


@router.get("/groups/{group}/dead-letter/payload")
def payload(shown: InGroup, id: int) -> Response:
    """A whole payload, to be saved as a file."""
    return Response(
        shown.payload(id),
        media_type="application/json",
        headers={"content-disposition": f'attachment; filename="dead-letter-{id}.json"'},
    )


@router.post("/groups/{group}/dead-letter/edit")
def edit(request: Request, views: Shown, shown: InGroup, by: By, form: Posted) -> Response:
    """Give a dead event another payload."""
    dead_letter_id = number(form.get("id", ""))
    if dead_letter_id is None:
        raise ConfigurationError("id: is required")
    shown.edit(dead_letter_id, form.get("payload", ""), by.name, reason_of(form))
    to = address(shown.name, "dead-letter", id=dead_letter_id)
    return views.done(
        request, to, f"Dead letter {dead_letter_id} has the new payload. Replay it now."
    )


@router.get("/groups/{group}/actions")
def actions(
    request: Request, views: Shown, shown: InGroup, about: str = "group", before: int | None = None
) -> Response:
    """What was done, by whom and why."""
    of_dead = about == "dead-letters"
    found: Any = (
        shown.dead_letter_actions(before=before) if of_dead else shown.actions(before=before)
    )
    return views.page(
        request, "actions.html", found=found, about="dead-letters" if of_dead else "group"
    )


@router.get("/groups/{group}/")
def overview(
    request: Request, views: Shown, shown: InGroup, hours: float = HISTORY_HOURS
) -> Response:
    """Show the overview of the group."""
    status = shown.status()
    return views.page(
        request,
        "overview.html",
        status=status,
        troubles=shown.troubles(status),
        charts=[chart(each) for each in shown.history(hours)],
        hours=hours,
        all_hours=_HOURS,
        refresh=_RARELY,
    )


def _transactions(count: int) -> str:
    return "1 transaction is" if count == 1 else f"{count} transactions are"
