"""Renders pages: the templates, the values that all of them show, and filters that format values for a person."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote, urlencode

from fastapi import Request
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape
from starlette.responses import HTMLResponse, RedirectResponse, Response

from relay import __version__
from relay.admin import acts
from relay.admin.phrases import counted, duration, recently
from relay.console.charts import HEIGHT, WIDTH, amount
from relay.console.group import Kept
from relay.console.security import Guard

_FLASH = "relay_flash"
"""Name of the cookie with the message about the last action."""
_FLASH_SECONDS = 60
SECTIONS = (
    ("", "Overview"),
    ("sinks", "Sinks"),
    ("queues", "Queues"),
    ("sagas", "Sagas"),
    ("schedules", "Schedules"),
    ("events", "Events"),
    ("dead-letters", "Dead letters"),
    ("deferred", "Deferred"),
    ("partitions", "Partitions"),
    ("tokens", "Tokens"),
    ("actions", "Actions"),
)
"""Path and title of the pages of a group in the navigation."""


class Views:
    """Renders the pages of the console. Templates escape all values."""

    def __init__(self, guard: Guard, groups: Sequence[str]) -> None:
        self._guard = guard
        self._groups = groups
        self._templates = Environment(
            loader=PackageLoader("relay.console"),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self._templates.filters |= {
            "when": when,
            "ago": ago,
            "age": age,
            "due": due,
            "recently": recently,
            "amount": amount,
            "duration": duration,
            "number": number,
            "counted": of_many,
            "code": code,
            "sentence": sentence,
        }
        self._templates.globals |= {
            "address": address,
            "acts": acts.declared(),
            "option": acts.option,
            "sections": SECTIONS,
            "version": __version__,
            "chart_width": WIDTH,
            "chart_height": HEIGHT,
        }

    def page(
        self,
        request: Request,
        template: str,
        code: int = 200,
        *,
        old: Kept | None = None,
        **values: Any,
    ) -> HTMLResponse:
        """Render a page, of a group or of none, with the message about the last action.

        The values of `old` are the page's; it says from when they are if they could not be read again.
        """
        caller = getattr(request.state, "caller", None)
        message = self._guard.signer.read("flash", request.cookies.get(_FLASH, ""))
        group = request.path_params.get("group")
        context = {
            "group": group if group in self._groups else None,
            "groups": self._groups,
            "user": caller,
            "flash": message,
            "now": datetime.now(UTC),
            "old": old,
            **(old.values if old else {}),
            **values,
        }
        answer = HTMLResponse(self._templates.get_template(template).render(context), code)
        if message is not None:
            answer.delete_cookie(_FLASH, httponly=True, samesite="strict")
        return answer

    def error(self, request: Request, status: int, title: str, detail: str) -> Response:
        """Render the page of an error."""
        return self.page(request, "error.html", status, title=title, detail=detail)

    def done(self, request: Request, to: str, text: str, warnings: Sequence[str] = ()) -> Response:
        """Redirect to a page that shows `text` about the last action."""
        answer = RedirectResponse(to, 303)
        answer.set_cookie(
            _FLASH,
            self._guard.signer.sign("flash", {"text": text[:500], "warnings": list(warnings)[:5]}),
            max_age=_FLASH_SECONDS,
            httponly=True,
            samesite="strict",
            secure=request.url.scheme == "https",
        )
        return answer


def address(
    group: str, page: str = "", values: Mapping[str, Any] | None = None, **more: Any
) -> str:
    """Return the URL of a page of a group, with a query of the values that are not None or empty."""
    given = {
        name: value
        for name, value in {**(values or {}), **more}.items()
        if value is not None and value != []
    }
    query = urlencode(given, doseq=True)
    return f"/groups/{quote(group, safe='')}/{page}" + (f"?{query}" if query else "")


def when(moment: datetime | None) -> str:
    """Format a time in UTC, to the second."""
    return "-" if moment is None else moment.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S")


def ago(moment: datetime | None) -> str:
    """Format how long ago a time is."""
    if moment is None:
        return "-"
    seconds = (datetime.now(UTC) - moment).total_seconds()
    return f"{duration(seconds)} ago" if seconds >= 0 else f"in {duration(-seconds)}"


def due(moment: datetime | None) -> str:
    """Format when something is due; one that is due already waits for its turn."""
    return "due" if moment is not None and moment <= datetime.now(UTC) else ago(moment)


def age(moment: datetime | None) -> str:
    """Format the duration since a time."""
    return "-" if moment is None else duration((datetime.now(UTC) - moment).total_seconds())


def code(line: str) -> Markup:
    """Format text in which commands stand between backticks."""
    parts = line.split("`")
    marked = [
        Markup("<code>{}</code>").format(part) if n % 2 and n < len(parts) - 1 else escape(part)
        for n, part in enumerate(parts)
    ]
    return Markup("").join(marked)


def sentence(line: str) -> str:
    """Format a line of a command as a sentence."""
    return f"{line[:1].upper()}{line[1:]}" + ("" if line.endswith(".") else ".")


def of_many(count: int, one: str, many: str) -> str:
    """Format a count with separators of thousands, and its words."""
    return counted(count, one, many).replace(str(count), number(count), 1)


def number(value: int | None) -> str:
    """Format a count with separators of thousands."""
    return "-" if value is None else f"{value:,}"
