"""References to a value of an event in the configuration, and templates over them. No I/O.

A reference is a field, or a path into payload or metadata.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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

    def __init__(self, text: str) -> None:
        self._parts: list[tuple[str, str | None]] = []
        for literal, field, form, conversion in Formatter().parse(text):
            known = field is None or (is_name(field) and field not in JSON_FIELDS)
            if form or conversion or not known:
                raise ValueError(
                    f"{{{field}}} is neither a field of an event nor a path such as {{payload.customer.id}}"
                    f"{suggestion(field or '')}"
                )
            self._parts.append((literal, field))

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
