"""Reads requests to pages: the group, the caller, and the fields of a form or a search."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import Depends, Request
from starlette.exceptions import HTTPException

from relay.admin import acts
from relay.admin.acts import Act, Missing
from relay.console.group import GroupView
from relay.console.models import REASON_CHARACTERS, Wanted, filter_of
from relay.console.security import Caller, equal
from relay.console.views import Views
from relay.faults import ConfigurationError

_DIGITS = 20
"""The length of a bigint with its sign."""
_TARGET = "-"
"""Stands for the target in the field `sink` of a search, since an empty field is no condition."""

Form = dict[str, str]


def group_of(request: Request, group: str) -> GroupView:
    """Return the group that the path names. Raises Missing."""
    view: GroupView | None = request.app.state.groups.get(group)
    if view is None:
        raise Missing(f"there is no group {group!r} in this console")
    return view


def views_of(request: Request) -> Views:
    """Return the renderer of the console's pages."""
    views: Views = request.app.state.views
    return views


def caller_of(request: Request) -> Caller:
    """Return the caller, whom the gate has authenticated."""
    caller: Caller = request.state.caller
    return caller


async def form_of(request: Request) -> Form:
    """Return the fields of a form. Raises HTTPException if it is not from the caller's own pages."""
    form = {name: value for name, value in (await request.form()).items() if isinstance(value, str)}
    if not equal(form.pop("form_token", ""), caller_of(request).form_token):
        raise HTTPException(403, "the form is not from your session: reload its page")
    return form


GroupDep = Annotated[GroupView, Depends(group_of)]
ViewsDep = Annotated[Views, Depends(views_of)]
CallerDep = Annotated[Caller, Depends(caller_of)]
FormDep = Annotated[Form, Depends(form_of)]


@dataclass(frozen=True, slots=True)
class SubmittedForm:
    """A form of the caller's own pages that asks for an action on a group; `operator` names the caller."""

    group: GroupView
    operator: str
    fields: Form

    @property
    def reason(self) -> str:
        """The reason of the action. Raises ConfigurationError if it is empty or too long."""
        reason = self.fields.get("reason", "").strip()
        if not reason or len(reason) > REASON_CHARACTERS:
            raise ConfigurationError(
                f"reason: give one of at most {REASON_CHARACTERS} characters: it is stored with the action"
            )
        return reason


def submission_of(group: GroupDep, caller: CallerDep, form: FormDep) -> SubmittedForm:
    """Return the form with its group and its caller."""
    return SubmittedForm(group, caller.name, form)


SubmissionDep = Annotated[SubmittedForm, Depends(submission_of)]


def number(text: str) -> int | None:
    """Return the number in a field; None if it is empty. Raises ConfigurationError for any other text."""
    if not text.strip():
        return None
    if not text.strip().isdecimal() or len(text) > _DIGITS:
        raise ConfigurationError(f"{text[:_DIGITS]!r} is not a number")
    return int(text)


def page_size(limit: int) -> int:
    """Return how many rows a page shows: `limit`, bounded to 1 to 200."""
    return min(max(limit, 1), 200)


_NO_CONDITIONS = frozenset({"before", "after", "limit", "about"})


def search_of(request: Request, model: type[Wanted], **fixed: str) -> tuple[dict[str, Any], Wanted]:
    """Return the fields of a search, as links and forms repeat them, and their filter; `fixed` takes precedence.

    Raises ConfigurationError for invalid fields.
    """
    fields: dict[str, Any] = {}
    for name, value in request.query_params.multi_items():
        if name in _NO_CONDITIONS or not value.strip():
            continue
        if name == "ids":
            fields.setdefault("ids", []).extend(value.replace(",", " ").split())
        else:
            fields[name] = value.strip()
    target = {"sink": ""} if fields.get("sink") == _TARGET else {}
    return fields, filter_of(model, {**fields, **target, **fixed})


def act_of(subject: str, action: str) -> Act:
    """Return the act that a path names. Raises HTTPException."""
    found = acts.declared().get((subject, action))
    if found is None:
        raise HTTPException(404, f"there is no action {action!r} here")
    return found


ActDep = Annotated[Act, Depends(act_of)]


def require_action(action: str, *actions: str) -> None:
    """Raise HTTPException unless a page has the action."""
    if action not in actions:
        raise HTTPException(404, f"there is no action {action!r} here")
