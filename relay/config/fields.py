"""References to a value of an event in the configuration, and templates over them. No I/O.

A reference is a field, or a path into payload or metadata.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from string import Formatter
from typing import Any

from relay.faults import Rejected
from relay.model import exact_json, headers
from relay.model.events import EVENT_FIELDS, Event

JSON_FIELDS = ("payload", "metadata")


def split(name: str) -> tuple[str, list[str]]:
    """The field and the path into its JSON that a name refers to; each header is a field."""
    if name.startswith(headers.PREFIX):
        return name, []
    head, *path = name.split(".")
    return head, path


def is_header(name: str) -> bool:
    """Whether a name is a header's field, such as `headers.region`."""
    return name.startswith(headers.PREFIX) and headers.is_name(name.removeprefix(headers.PREFIX))


def is_name(name: str) -> bool:
    """Whether a name is a field, such as `headers.region`, or a path such as `payload.customer.id`."""
    if is_header(name):
        return True
    head, path = split(name)
    return head in EVENT_FIELDS and (not path or (head in JSON_FIELDS and all(path)))


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word that is most similar to a word; None if none is similar."""
    by_lower_case = {each.lower(): each for each in known}
    matches = get_close_matches(word.lower(), by_lower_case, n=1, cutoff=0.65)
    return by_lower_case[matches[0]] if matches else None


def suggestion(name: str) -> str:
    """The end of an error about a name that is none: the field that may be meant; empty if none is similar."""
    head, path = split(name)
    near = nearest(head, EVENT_FIELDS)
    if near is None or near == head:
        return ""
    return f"; did you mean {'.'.join([near, *path])}?"


def dig(value: Any, path: Sequence[str]) -> tuple[bool, Any]:
    """Whether there is a value at a path of object keys and array indices, and the value."""
    for step in path:
        if isinstance(value, dict) and step in value:
            value = value[step]
        elif isinstance(value, list) and step.isdecimal() and int(step) < len(value):
            value = value[int(step)]
        else:
            return False, None
    return True, value


class Template:
    """A text with fields in braces, such as `orders.{event_type}` or `{payload.customer.id}`; `{{` is a brace.

    Raises ValueError for a name that is not a field of an event or a path into one.
    """

    _ALSO = ""

    def __init__(self, text: str) -> None:
        self._parts: list[tuple[str, str | None]] = []
        for literal, field, form, conversion in Formatter().parse(text):
            if form or conversion or not (field is None or self._knows(field)):
                raise ValueError(
                    f"{{{field}}} is neither a field of an event nor a path such as {{payload.customer.id}}{self._ALSO}"
                    f"{suggestion(field or '')}"
                )
            self._parts.append((literal, field))

    def _knows(self, field: str) -> bool:
        return is_name(field) and field not in JSON_FIELDS

    def fill(self, event: Event) -> str:
        """The text for an event. Raises Rejected if the event lacks a value of the template."""
        return "".join(
            literal + (_value(event, field) if field else "") for literal, field in self._parts
        )

    def is_null(self, event: Event) -> bool:
        """Whether the template is a single column, and the event's is null."""
        if len(self._parts) != 1:
            return False
        ((literal, field),) = self._parts
        if literal or not field or split(field)[1]:
            return False
        return event.text(field) is None

    @property
    def beginning(self) -> str:
        """What all texts begin with: after it comes what the publisher of the event chooses."""
        return self._parts[0][0] if self._parts else ""

    @property
    def names(self) -> list[str]:
        """The fields and paths in the template."""
        return [field for _, field in self._parts if field]


ENDPOINT = "endpoint"
"""What the row that a lookup returns is called in templates: `{endpoint.url}` is its column `url`."""
_COLUMN = re.compile(rf"{ENDPOINT}\.([A-Za-z_]\w*)")
_HAS_NAME = re.compile(r"(?<!\{)\{[A-Za-z_][\w.-]*\}")

Row = Mapping[str, str | None]
"""The values of an endpoint's row as texts, by column."""


class EndpointTemplate(Template):
    """A template over an event's fields and the columns of its endpoint's row, such as `Bearer {endpoint.token}`."""

    _ALSO = ", nor a column such as {endpoint.url}"

    def _knows(self, field: str) -> bool:
        return super()._knows(field) or _COLUMN.fullmatch(field) is not None

    @property
    def parts(self) -> Sequence[tuple[str, str | None]]:
        """Literal texts, each with the name of the value that follows it."""
        return self._parts

    @property
    def names(self) -> list[str]:
        """The fields and paths of events in the template."""
        return [name for name in super().names if not _COLUMN.fullmatch(name)]

    @property
    def columns(self) -> list[str]:
        """The columns of the endpoint's row in the template."""
        return [found[1] for name in super().names if (found := _COLUMN.fullmatch(name))]

    def text(self, event: Event, row: Row) -> str | None:
        """The text for an event and its endpoint's row; None if a column of the row is null.

        Raises Rejected if the event lacks a value of the template.
        """
        if any(row.get(column) is None for column in self.columns):
            return None
        return "".join(
            literal + (value_of(name, event, row) if name else "") for literal, name in self._parts
        )


def value_of(name: str, event: Event, row: Row) -> str:
    """The value of a name in a template. Raises Rejected if the event or the row has none."""
    found = _COLUMN.fullmatch(name)
    if found is None:
        return _value(event, name)
    value = row.get(found[1])
    if value is None:
        raise Rejected(f"the endpoint's row has no {found[1]}, which a template needs")
    return value


def has_name(text: str) -> bool:
    """Whether a text has a name in braces, as templates do, and not only braces, as JSON does."""
    return _HAS_NAME.search(text) is not None


def bound(event: Event, name: str) -> str | None:
    """The value of a field or path for a statement, as text; None if it is null or the event lacks it.

    Raises Rejected for a path into what is no JSON.
    """
    head, path = split(name)
    if not path:
        return event.text(head)
    try:
        found, value = dig(_json(event, head), path)
    except ValueError:
        raise Rejected(f"{head}: is not JSON, and a lookup needs {name}") from None
    if not found or value is None:
        return None
    return value if isinstance(value, str) else exact_json.dumps(value, name)


def _json(event: Event, field: str) -> Any:
    text = event.text(field)
    return None if text is None else exact_json.loads(text)


def _value(event: Event, name: str) -> str:
    head, path = split(name)
    try:
        _, value = dig(_json(event, head) if path else event.text(head), path)
    except ValueError:
        raise Rejected(f"{head}: is not JSON, and a template needs {name}") from None
    if value is None or isinstance(value, dict | list):
        raise Rejected(f"the event has no text or number at {name}, which a template needs")
    return value if isinstance(value, str) else exact_json.dumps(value, name)
