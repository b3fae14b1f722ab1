"""Extra columns of an outbox as the fields `headers.*`: their names, and their values as JSON. No I/O.

Source: CloudEvents specification 1.0.2, "Attribute Naming Convention".
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

FIELD = "headers"
"""All headers of an event: an object of texts and nulls in SQL, a mapping in Python, a map in Spark."""
PREFIX = f"{FIELD}."
"""What the field of a single header begins with, such as `headers.region`."""

_NAME = re.compile(r"[a-z][a-z0-9_]{0,62}", re.ASCII)

ATTRIBUTES = frozenset(
    {
        *("specversion", "id", "source", "type", "subject", "time"),
        *("data", "database64", "datacontenttype", "dataschema"),
        *("partitionkey", "sequence", "hostid", "userid", "aggregatetype", "aggregateversion"),
        *("transactionid", "transactionordinal", "transactioncount"),
    }
)
"""The attributes of a CloudEvent that the specification or relay gives a meaning."""


def is_name(name: str) -> bool:
    """Whether a header may have this name."""
    return _NAME.fullmatch(name) is not None


def attribute(name: str) -> str:
    """The CloudEvents extension attribute of a header: names of attributes have no underscores."""
    return name.replace("_", "")


def named(value: Any) -> Any:
    """The column of each header. A list names columns whose headers have the same name."""
    return {name: name for name in value} if isinstance(value, list) else value


def require_names(names: Iterable[str]) -> None:
    """Raise ValueError for a name that no header may have, or whose extension attribute is in use."""
    taken: dict[str, str] = {}
    for name in names:
        if not is_name(name):
            raise ValueError(
                f"{name!r} is no name of a header: write lower-case letters, digits and _, a letter first, at most 63; "
                "{name: column} gives a column another name"
            )
        found = attribute(name)
        if found in ATTRIBUTES:
            raise ValueError(
                f"{name!r} would be the CloudEvents attribute {found}, which has a meaning of its own: choose another "
                "name"
            )
        if found in taken:
            raise ValueError(
                f"{name!r} and {taken[found]!r} would both be the CloudEvents attribute {found}: choose another name"
            )
        taken[found] = name


def as_json(headers: Mapping[str, str | None]) -> str:
    """Headers as the text of a JSON object."""
    return json.dumps(dict(headers), ensure_ascii=False)


def from_json(text: str | None) -> dict[str, str | None]:
    """Headers as `as_json` has written them; none where the text is something else."""
    found = None if text is None else json.loads(text)
    if not isinstance(found, dict):
        return {}
    return {name: value for name, value in found.items() if value is None or isinstance(value, str)}
