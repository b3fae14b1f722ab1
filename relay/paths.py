"""How configuration names a value of an event: a field, or a path into payload or metadata. No I/O."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from relay.events import EVENT_FIELDS

JSON_FIELDS = ("payload", "metadata")

_KEY = re.compile(r"[A-Za-z_][\w-]{0,62}", re.ASCII)


def safe_key(key: str) -> str:
    """A key of an object for a log: `*` for one that does not look like a field's name, which may be a value."""
    return key if _KEY.fullmatch(key) else "*"


def is_name(name: str) -> bool:
    """Whether this is a field, or a path such as `payload.customer.id`."""
    head, *path = name.split(".")
    return head in EVENT_FIELDS and (not path or (head in JSON_FIELDS and all(path)))


def dig(value: Any, path: Sequence[str]) -> tuple[bool, Any]:
    """The value at a path of object keys and array positions, and whether there is one."""
    for step in path:
        if isinstance(value, dict) and step in value:
            value = value[step]
        elif isinstance(value, list) and step.isdecimal() and int(step) < len(value):
            value = value[int(step)]
        else:
            return False, None
    return True, value
