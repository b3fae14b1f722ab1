"""Templates over an event's fields, for topics, subjects and keys. No I/O."""

from __future__ import annotations

from string import Formatter
from typing import Any

from relay.config.fields import JSON_FIELDS, dig, is_name, split, suggestion
from relay.faults import Rejected
from relay.model import exact_json
from relay.model.events import Event


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
