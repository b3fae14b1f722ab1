"""What a request to a page says: the group and the caller, the fields of its form or search."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Depends, Request
from starlette.exceptions import HTTPException

from relay.console.group import GroupView, Missing
from relay.console.models import (
    REASON_CHARACTERS,
    DeadLetterFilter,
    DeferredFilter,
    dead_letter_filter,
    deferred_filter,
)
from relay.console.security import Caller, equal
from relay.console.views import Views
from relay.faults import ConfigurationError

_DIGITS = 20
"""What a bigint has, with its sign."""

Form = dict[str, str]


def group_of(request: Request, group: str) -> GroupView:
    """The group that a path names. Raises Missing."""
    found: GroupView | None = request.app.state.groups.get(group)
    if found is None:
        raise Missing(f"there is no group {group!r} in this console")
    return found


def views_of(request: Request) -> Views:
    """What renders the pages of this console."""
    views: Views = request.app.state.views
    return views


def caller_of(request: Request) -> Caller:
    """Who makes the request; the gate has let them in."""
    caller: Caller = request.state.caller
    return caller


async def posted(request: Request) -> Form:
    """The fields of a form of this caller's own pages. Raises HTTPException for any other."""
    form = {name: value for name, value in (await request.form()).items() if isinstance(value, str)}
    if not equal(form.pop("form_token", ""), caller_of(request).form_token):
        raise HTTPException(403, "this form is not of your session: load its page again")
    return form


InGroup = Annotated[GroupView, Depends(group_of)]
Shown = Annotated[Views, Depends(views_of)]
By = Annotated[Caller, Depends(caller_of)]
Posted = Annotated[Form, Depends(posted)]


def reason_of(form: Form) -> str:
    """The reason that a form gives for an action. Raises ConfigurationError where it is empty or too long."""
    reason = form.get("reason", "").strip()
    if not reason or len(reason) > REASON_CHARACTERS:
        raise ConfigurationError(
            f"reason: say why, in at most {REASON_CHARACTERS} characters: it is kept with the action"
        )
    return reason


def number(text: str) -> int | None:
    """The number in a field; None where it is empty. Raises ConfigurationError for any other text."""
    if not text.strip():
        return None
    if not text.strip().isdecimal() or len(text) > _DIGITS:
        raise ConfigurationError(f"{text[:_DIGITS]!r} is no number")
    return int(text)


def page_size(limit: int) -> int:
    """How many rows a page shows of those asked for: 1 to 200."""
    return min(max(limit, 1), 200)


_IN_FORM = frozenset({"before", "after", "limit", "about"})


def _given(request: Request) -> dict[str, Any]:
    """The fields of a search that say something."""
    found: dict[str, Any] = {}
    for name, value in request.query_params.multi_items():
        if name in _IN_FORM or not value.strip():
            continue
        if name == "ids":
            found.setdefault("ids", []).extend(value.replace(",", " ").split())
        else:
            found[name] = value.strip()
    if found.get("sink") == "-":
        # An empty field says nothing; this one says the target.
        found["sink"] = ""
    return found


def dead_filter_of(
    request: Request, status: str | None = None
) -> tuple[dict[str, Any], DeadLetterFilter]:
    """The same of dead letters; `status` goes before the one that the search names."""
    given = _given(request)
    wanted = dead_letter_filter({**given, **({"status": status} if status else {})})
    return _shown(given), wanted


def deferred_filter_of(request: Request) -> tuple[dict[str, Any], DeferredFilter]:
    """The fields of a search for deferred transactions as its form repeats them, and the filter that they are."""
    given = _given(request)
    return _shown(given), deferred_filter(given)


def _shown(given: dict[str, Any]) -> dict[str, Any]:
    """The fields as a link or a form repeats them."""
    return {**given, **({"sink": "-"} if given.get("sink") == "" else {})}
