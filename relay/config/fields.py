"""References to a value of an event in the configuration: a field, or a path into payload or metadata. No I/O."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from relay.config.suggestions import nearest
from relay.model import headers
from relay.model.events import EVENT_FIELDS

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
