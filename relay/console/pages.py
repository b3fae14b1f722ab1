"""The routes of the pages, and of the login.

They render what a `GroupView` reads, or run the action of a form and report the result.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from fastapi import APIRouter, Request
from starlette.exceptions import HTTPException
from starlette.responses import RedirectResponse, Response

from relay.admin.acts import Act, Missing, option
from relay.admin.phrases import counted, dead_are, replayed_to
from relay.console.charts import chart
from relay.console.forms import (
    ActDep,
    FormDep,
    GroupDep,
    SubmissionDep,
    ViewsDep,
    number,
    page_size,
    require_action,
    search_of,
)
from relay.console.group import HISTORY_HOURS, PAGE, GroupView
from relay.console.models import (
    EventFilter,
    filter_of,
)
from relay.console.security import COOKIE, SESSION_SECONDS, Guard
from relay.console.views import SECTIONS, address, sentence
from relay.faults import ConfigurationError
from relay.source.outbox.search import SCANNED, EventSearch
from relay.store import states
from relay.store.api_tokens import RIGHTS
from relay.store.dead_letters import of_queue
from relay.store.dead_letters.selection import SHOWN_CHARACTERS, DeadLetterSelection
from relay.store.filters import DeferredSelection
from relay.store.queues import MessageSelection
from relay.store.sagas import SagaSelection

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


_SINK_ACTIONS = 10
_PATTERNS = 5
"""How many hosts and event types of a token are shown."""
_HOURS = (0.25, 1.0, HISTORY_HOURS)
_OWN_PAGES = ("sink", "queue", "saga", "schedule")
"""What has a page of its own beside that of the list."""
_OFTEN, _RARELY = 5, 15
"""Seconds between two refreshes of a page."""


@router.get("/")
def start(request: Request) -> Response:
    """Redirect to the first group."""
    return RedirectResponse(address(next(iter(request.app.state.groups))), 303)


@router.get("/groups/{group}/partitions")
def partitions(
    request: Request, views: ViewsDep, group: GroupDep, after: int = -1, limit: int = 100
) -> Response:
    """Show the positions of the partitions, and the form of a seek."""
    old = group.kept(
        ("partitions", after, limit),
        lambda: {"partitions": group.partitions(page_size(limit), after)},
    )
    return views.page(
        request,
        "partitions.html",
        after=after,
        limit=limit,
        refresh=_RARELY,
        old=old,
    )


@router.get("/groups/{group}/partitions/seek")
def partitions_seek(
    request: Request, views: ViewsDep, group: GroupDep, to: str, partition: str = ""
) -> Response:
    """Show what a seek of the group would do, and ask for confirmation."""
    move = group.plan_seek(to.strip(), number(partition))
    return views.page(
        request, "confirm_offsets.html", move=move, to=to.strip(), partition=partition
    )


@router.post("/groups/{group}/partitions/seek")
def partitions_moved(request: Request, views: ViewsDep, sent: SubmissionDep) -> Response:
    """Move the stopped group to another position."""
    partition = number(sent.fields.get("partition", ""))
    text = sent.group.seek(sent.fields.get("to", ""), partition, sent.operator, sent.reason)
    return views.done(request, address(sent.group.name, "partitions"), f"The group goes on {text}.")


@router.get("/groups/{group}/sinks")
def sinks(request: Request, views: ViewsDep, group: GroupDep) -> Response:
    """Show the sinks."""
    old = group.kept("sinks", lambda: {"sinks": group.sinks()})
    return views.page(request, "sinks.html", refresh=_OFTEN, old=old)


@router.get("/groups/{group}/sink")
def sink(
    request: Request, views: ViewsDep, group: GroupDep, name: str, hours: float = HISTORY_HOURS
) -> Response:
    """Show one sink, and the forms of its actions."""
    old = group.kept(
        ("sink", name),
        lambda: {
            "sink": group.sink(name),
            "endpoints": group.endpoints(name),
            "actions": group.actions(_SINK_ACTIONS, sink=name).rows,
        },
    )
    return views.page(
        request,
        "sink.html",
        old=old,
        mode=group.settings.source.mode,
        configured=name in group.settings.sink_handlers,
        has_endpoints=group.has_endpoints(name),
        charts=[chart(each) for each in group.history(hours, name)],
        hours=hours,
        all_hours=_HOURS,
        refresh=_OFTEN,
    )


@router.post("/groups/{group}/sink/resend")
def sink_resend(request: Request, views: ViewsDep, sent: SubmissionDep) -> Response:
    """Have a sink get an event again."""
    name, event_id = sent.fields.get("name", ""), sent.fields.get("event", "")
    endpoint = sent.fields.get("endpoint", "").strip() or None
    sent.group.resend(name, [event_id], EventSearch(), endpoint, sent.operator, sent.reason)
    text = f"The event is delivered to sink {name} again."
    return views.done(request, address(sent.group.name, "event", id=event_id), text)


@router.get("/groups/{group}/event")
def event(request: Request, views: ViewsDep, group: GroupDep, id: str = "") -> Response:
    """Show where an event is, and what it has caused, or a form that asks for its id."""
    wanted = id.strip()
    try:
        found, missing = group.event(wanted) if wanted else None, None
    except Missing as error:
        found, missing = None, str(error)
    return views.page(
        request,
        "event.html",
        id=wanted,
        event=found,
        missing=missing,
        delivering=group.delivering_sinks,
        names_endpoints=group.names_endpoints,
    )


@router.get("/groups/{group}/events")
def events(
    request: Request,
    views: ViewsDep,
    group: GroupDep,
    before: str | None = None,
    limit: int = PAGE,
) -> Response:
    """Search the outbox for events, or ask for the id of one."""
    given, wanted = search_of(request, EventFilter)
    old = group.kept(
        ("events", wanted.model_dump_json(), before, limit),
        lambda: {"page": group.events(wanted.search(), page_size(limit), before)},
    )
    return views.page(request, "events.html", old=old, given=given, before=before, most=SCANNED)


@router.get("/groups/{group}/queues")
def queues(request: Request, views: ViewsDep, group: GroupDep) -> Response:
    """Show the work queues."""
    old = group.kept("queues", lambda: {"queues": group.queues()})
    return views.page(request, "queues.html", refresh=_OFTEN, old=old)


@router.get("/groups/{group}/queue")
def queue(
    request: Request, views: ViewsDep, group: GroupDep, name: str, state: str = ""
) -> Response:
    """Show the messages of a queue that are not done, and the forms of its actions."""

    def read() -> dict[str, Any]:
        wanted = filter_of(MessageSelection, {"states": [state] if state else None})
        figures, items = group.queue(name, wanted)
        return {"queue": figures, "items": items}

    old = group.kept(("queue", name, state), read)
    return views.page(
        request,
        "queue.html",
        old=old,
        state=state,
        states=states.MESSAGES,
        at_rest=states.AT_REST,
        mode=group.settings.source.mode,
        refresh=_OFTEN,
    )


@router.get("/groups/{group}/queue/discard")
def queue_discard_confirmation(group: GroupDep, name: str) -> Response:
    """Redirect to the question before dead letters are discarded, for those of a queue."""
    return RedirectResponse(address(group.name, "dead-letters/discard", sink=of_queue(name)), 303)


@router.post("/groups/{group}/queue/run")
@router.post("/groups/{group}/queue/cancel")
def messages_action(request: Request, views: ViewsDep, sent: SubmissionDep) -> Response:
    """Let messages of a queue run, or cancel them."""
    name, operator, reason = sent.fields.get("name", ""), sent.operator, sent.reason
    names = ("id", "event_type", "key", "error")
    given = {each: sent.fields[each].strip() or None for each in names if each in sent.fields}
    states = [sent.fields["state"]] if sent.fields.get("state") else None
    wanted = filter_of(MessageSelection, {**given, "states": states})
    if request.url.path.endswith("/run"):
        changed = sent.group.move_messages(name, wanted, None, operator, reason)
        text = f"{counted(changed, 'message', 'messages')} can be taken now."
    else:
        changed = sent.group.cancel_messages(name, wanted, operator, reason)
        text = f"{counted(changed, 'message', 'messages')} cancelled."
    return views.done(request, address(sent.group.name, "queue", name=name), text)


@router.get("/groups/{group}/sagas")
def sagas(
    request: Request,
    views: ViewsDep,
    group: GroupDep,
    saga: str = "",
    state: str = "",
    after: int = 0,
    limit: int = PAGE,
) -> Response:
    """Show sagas, by default those that have not ended."""
    wanted = SagaSelection(saga=saga.strip() or None, states=[state] if state else None)
    old = group.kept(
        ("sagas", saga, state, after, limit),
        lambda: {"page": group.sagas(wanted, page_size(limit), after)},
    )
    given = {name: value for name, value in (("saga", saga), ("state", state)) if value}
    return views.page(
        *(request, "sagas.html"),
        old=old,
        given=given,
        after=after,
        states=states.SAGAS,
        refresh=_OFTEN,
    )


@router.get("/groups/{group}/saga")
def saga(
    request: Request, views: ViewsDep, group: GroupDep, name: str, after: int = 0, limit: int = PAGE
) -> Response:
    """Show a saga, what has happened in it, and the forms of its actions."""

    def read() -> dict[str, Any]:
        found, entries = group.saga(name, page_size(limit), after)
        return {"saga": found, "page": entries}

    old = group.kept(("saga", name, after, limit), read)
    return views.page(
        request, "saga.html", old=old, after=after, ended=states.ENDED_SAGAS, refresh=_OFTEN
    )


@router.get("/groups/{group}/schedules")
def schedules(
    request: Request, views: ViewsDep, group: GroupDep, after: str = "", limit: int = PAGE
) -> Response:
    """Show the schedules of the outbox, if it is relay's own."""

    def read() -> dict[str, Any]:
        rows, following = group.schedules(page_size(limit), after)
        return {"schedules": rows, "next": following}

    owns = group.settings.source.owns_table
    old = group.kept(
        ("schedules", after, limit), read if owns else lambda: {"schedules": [], "next": None}
    )
    return views.page(request, "schedules.html", refresh=_OFTEN, old=old, after=after, owns=owns)


@router.get("/groups/{group}/schedule")
def schedule(request: Request, views: ViewsDep, group: GroupDep, name: str) -> Response:
    """Show the last and the next times of a schedule, and the forms of its actions."""

    def read() -> dict[str, Any]:
        found, times = group.schedule(name)
        return {"schedule": found, "times": times}

    old = group.kept(("schedule", name), read)
    return views.page(request, "schedule.html", refresh=_OFTEN, old=old)


@router.get("/groups/{group}/tokens")
def tokens(
    request: Request,
    views: ViewsDep,
    group: GroupDep,
    before: int | None = None,
    limit: int = PAGE,
) -> Response:
    """Show the tokens of the HTTP API, and the form that creates one."""
    owns = group.settings.source.owns_table
    old = group.kept(
        ("tokens", before, limit),
        lambda: {"page": group.tokens(page_size(limit), before) if owns else None},
    )
    return views.page(
        request,
        "tokens.html",
        old=old,
        before=before,
        rights=RIGHTS,
        shown=_PATTERNS,
        owns=owns,
        serves=group.settings.api is not None,
    )


@router.post("/groups/{group}/token/create")
def token_creation(request: Request, views: ViewsDep, sent: SubmissionDep) -> Response:
    """Create a token: the page of the answer is the only one that shows it."""
    name = sent.fields.get("name", "").strip()
    token = sent.group.create_token(
        name,
        [each for each in RIGHTS if f"right-{each}" in sent.fields],
        _lines(sent.fields.get("hosts", "")),
        _lines(sent.fields.get("types", "")),
        sent.fields.get("expires", "").strip() or None,
        sent.operator,
        sent.reason,
    )
    return views.page(request, "token.html", name=name, token=token)


def _lines(text: str) -> list[str]:
    return [each.strip() for each in text.splitlines() if each.strip()]


@router.get("/groups/{group}/deferred")
def deferred(
    request: Request, views: ViewsDep, group: GroupDep, after: int = 0, limit: int = PAGE
) -> Response:
    """List deferred transactions that a search selects."""
    given, wanted = search_of(request, DeferredSelection)
    old = group.kept(
        ("deferred", wanted.model_dump_json(), after, limit),
        lambda: {"page": group.deferred(wanted, page_size(limit), after)},
    )
    return views.page(
        request,
        "deferred.html",
        old=old,
        given=given,
        kinds=states.DEFERRED,
        handlers=sorted(group.settings.handlers),
        sinks=sorted(group.settings.sink_handlers),
        after=after,
        refresh=_RARELY,
    )


@router.get("/groups/{group}/deferred/{action}")
def deferred_confirmation(
    request: Request, views: ViewsDep, group: GroupDep, action: str
) -> Response:
    """Show how many deferred transactions an action concerns, and ask for confirmation."""
    require_action(action, "run", "cancel")
    given, wanted = search_of(request, DeferredSelection)
    selected = group.find_deferred(wanted)
    return views.page(
        request, "confirm_deferred.html", action=action, selected=selected, given=given
    )


@router.post("/groups/{group}/deferred/{action}")
def deferred_action(
    request: Request, views: ViewsDep, sent: SubmissionDep, action: str
) -> Response:
    """Make deferred transactions due now, or cancel them."""
    require_action(action, "run", "cancel")
    _, wanted = search_of(request, DeferredSelection)
    selection, reason = wanted, sent.reason
    if action == "run":
        text = (
            f"{_transactions(sent.group.run_deferred(selection, sent.operator, reason))} due now."
        )
    else:
        count = sent.group.cancel_deferred(selection, sent.operator, reason)
        text = f"{_transactions(count)} given up: see the dead letters."
    return views.done(request, address(sent.group.name, "deferred"), text)


@router.get("/groups/{group}/dead-letters")
def dead_letters(
    request: Request,
    views: ViewsDep,
    group: GroupDep,
    before: int | None = None,
    limit: int = PAGE,
) -> Response:
    """List dead letters that a search selects, by default those that are neither replayed nor discarded."""
    given, wanted = search_of(request, DeadLetterSelection)
    if "status" not in request.query_params:
        wanted = wanted.model_copy(update={"status": "dead"})

    def read() -> dict[str, Any]:
        statuses, kinds = group.dead_kinds()
        found = group.dead_letters(wanted, page_size(limit), before)
        consumers = group.dead_consumers()
        return {"statuses": statuses, "kinds": kinds, "page": found, "sinks": consumers}

    old = group.kept(("dead letters", wanted.model_dump_json(), before, limit), read)
    return views.page(
        request,
        "dead_letters.html",
        old=old,
        given={**given, "status": wanted.status or ""},
        all_statuses=states.DEAD,
        handlers=sorted(group.settings.handlers),
        before=before,
    )


@router.get("/groups/{group}/dead-letters/{action}")
def dead_letters_confirmation(
    request: Request, views: ViewsDep, group: GroupDep, action: str
) -> Response:
    """Show how many dead transactions an action concerns, and ask for confirmation."""
    require_action(action, "replay", "discard")
    given, wanted = search_of(request, DeadLetterSelection, status="dead")
    selected = group.find_dead(wanted)
    return views.page(request, "confirm_dead.html", action=action, selected=selected, given=given)


@router.post("/groups/{group}/dead-letters/{action}")
def dead_letters_action(
    request: Request, views: ViewsDep, sent: SubmissionDep, action: str
) -> Response:
    """Replay or discard dead letters."""
    require_action(action, "replay", "discard")
    _, wanted = search_of(request, DeadLetterSelection, status="dead")
    selection, reason = wanted, sent.reason
    found = sent.group.find_dead(selection)
    if selection.queue is not None:
        # A message that is no dead letter any more has no page.
        to = address(sent.group.name, "queue", name=selection.queue)
    else:
        one = wanted.ids[0] if len(wanted.ids) == 1 else None
        to = address(sent.group.name, "dead-letter" if one else "dead-letters", id=one)
    if action == "discard":
        count = sent.group.discard(selection, sent.operator, reason)
        return views.done(request, to, f"{dead_are(count, found)} discarded.")
    replayed = sent.group.replay(selection, sent.operator, reason)
    text = f"{dead_are(replayed.queued, found)} {replayed_to(found)}."
    return views.done(request, to, text, replayed.warnings)


@router.get("/groups/{group}/dead-letter")
def dead_letter(
    request: Request,
    views: ViewsDep,
    group: GroupDep,
    id: int,
    queue: str | None = None,
    after: int | None = None,
) -> Response:
    """Show a dead transaction, or message of a queue: its fault, its events, and the actions on it."""
    dead = group.dead_letter(id, queue, after=after)
    if not dead.events.rows:
        raise Missing(f"the dead transaction {dead.number} has no more events")
    first = dead.events.rows[0]
    return views.page(
        request,
        "dead_letter.html",
        id=id,
        queue=queue,
        dead=dead,
        first=first,
        after=after,
        shown_characters=SHOWN_CHARACTERS,
        refresh=_OFTEN if first["status"] == "replaying" else None,
    )


@router.get("/groups/{group}/dead-letter/payload")
def payload(group: GroupDep, id: int, queue: str | None = None) -> Response:
    """Download the whole payload of a dead letter."""
    return Response(
        group.payload(id, queue),
        media_type="application/json",
        headers={"content-disposition": f'attachment; filename="dead-letter-{id}.json"'},
    )


@router.post("/groups/{group}/dead-letter/edit")
def edit(request: Request, views: ViewsDep, sent: SubmissionDep) -> Response:
    """Replace the payload of a dead letter."""
    dead_letter_id = number(sent.fields.get("id", ""))
    if dead_letter_id is None:
        raise ConfigurationError("id: is required")
    queue = sent.fields.get("queue")
    new = sent.fields.get("payload", "")
    sent.group.edit(dead_letter_id, new, sent.operator, sent.reason, queue)
    to = address(sent.group.name, "dead-letter", id=dead_letter_id, queue=queue)
    return views.done(
        request, to, f"Dead letter {dead_letter_id} has the new payload. Replay it now."
    )


@router.get("/groups/{group}/actions")
def actions(
    request: Request,
    views: ViewsDep,
    group: GroupDep,
    about: str = "group",
    before: int | None = None,
) -> Response:
    """List actions, with their operators and reasons."""
    of_dead = about == "dead-letters"

    def read() -> dict[str, Any]:
        rows: Any = group.dead_letter_actions if of_dead else group.actions
        return {"page": rows(before=before)}

    old = group.kept(("actions", of_dead, before), read)
    return views.page(
        request,
        "actions.html",
        about="dead-letters" if of_dead else "group",
        old=old,
    )


@router.get("/groups/{group}/")
def overview(
    request: Request, views: ViewsDep, group: GroupDep, hours: float = HISTORY_HOURS
) -> Response:
    """Show the overview of a group."""
    status = group.status()
    return views.page(
        request,
        "overview.html",
        status=status,
        troubles=group.troubles(status),
        charts=[chart(each) for each in group.history(hours)],
        hours=hours,
        all_hours=_HOURS,
        refresh=_RARELY,
    )


@router.get("/groups/{group}/{subject}/{action}")
def act_confirmation(
    request: Request, views: ViewsDep, group: GroupDep, act: ActDep, name: str
) -> Response:
    """Show what an act would do, and ask for confirmation."""
    given = _given(act, request.query_params)
    effect = group.rehearse(act, name, given).said.splitlines()
    return views.page(
        *(request, "confirm_act.html"),
        act=act,
        name=name,
        given=given,
        effect=effect,
        back=_page_of(group, act, name),
    )


@router.post("/groups/{group}/{subject}/{action}")
def act(request: Request, views: ViewsDep, sent: SubmissionDep, act: ActDep) -> Response:
    """Do an act."""
    name = sent.fields.get("name", "")
    given = _given(act, sent.fields)
    done = sent.group.act(act, name, given, sent.operator, sent.reason)
    said, *more = map(sentence, done.said.splitlines())
    to = _page_of(sent.group, act, name, is_there=not act.removes)
    return views.done(request, to, said, more)


def _given(act: Act, fields: Mapping[str, str]) -> dict[str, Any]:
    """Return what the fields of a form give to an act; an empty one gives nothing. Raises ConfigurationError."""
    given = {each.name: fields.get(option(each), "").strip() for each in act.parameters}
    for each in act.parameters:
        if not given[each.name] and each.default is each.empty:
            raise ConfigurationError(f"{option(each)}: is required")
    return {name: value for name, value in given.items() if value}


def _page_of(group: GroupView, act: Act, name: str, is_there: bool = True) -> str:
    """Return the URL of the page of what an act is on, else that of its list, else that of the group."""
    if is_there and act.of in _OWN_PAGES:
        return address(group.name, act.of, name=name)
    listed = f"{act.of}s"
    return address(group.name, listed if listed in dict(SECTIONS) else "")


def _transactions(count: int) -> str:
    return counted(count, "transaction is", "transactions are")
