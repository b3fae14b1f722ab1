"""Extra columns of an outbox as the fields `headers.*`: their names, and their values as JSON. No I/O.

Source: CloudEvents specification 1.0.2, "Attribute Naming Convention".
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

FIELD = "headers"
"""The field of all headers of an event: a JSON object in SQL, a mapping in Python, a map in Spark."""
PREFIX = f"{FIELD}."
"""The prefix of a single header's field, such as `headers.region`."""

RESEND = "relay_resend"
"""The header that relay gives an event that it delivers again because somebody asked for it: a number of the resend."""

_NAME = re.compile(r"[a-z][a-z0-9_]{0,62}", re.ASCII)

ATTRIBUTES = frozenset(
    {
        *("specversion", "id", "source", "type", "subject", "time"),
        *("data", "database64", "datacontenttype", "dataschema"),
        *("partitionkey", "sequence", "hostid", "userid", "aggregatetype", "aggregateversion"),
        *("transactionid", "transactionordinal", "transactioncount", "relayresend"),
    }
)
"""The attributes of a CloudEvent that the specification or relay defines."""


def is_name(name: str) -> bool:
    """Whether a name is valid for a header."""
    return _NAME.fullmatch(name) is not None


def attribute(name: str) -> str:
    """The CloudEvents extension attribute of a header: the name without underscores, which attributes cannot have."""
    return name.replace("_", "")


def named(value: Any) -> Any:
    """The column of each header, from a mapping or a list of columns, whose headers have the columns' names."""
    return {name: name for name in value} if isinstance(value, list) else value


def require_names(names: Iterable[str]) -> None:
    """Raise ValueError for an invalid header name, or one whose extension attribute is in use."""
    used: dict[str, str] = {}
    for name in names:
        if not is_name(name):
            raise ValueError(
                f"{name!r} is not the name of a header: write lower-case letters, digits and _, a letter first, at "
                "most 63; {name: column} gives a column another name"
            )
        extension = attribute(name)
        if extension in ATTRIBUTES:
            raise ValueError(
                f"{name!r} would be the CloudEvents attribute {extension}, which is already defined: choose another "
                "name"
            )
        if extension in used:
            raise ValueError(
                f"{name!r} and {used[extension]!r} would both be the CloudEvents attribute {extension}: choose "
                "another name"
            )
        used[extension] = name


def as_json(headers: Mapping[str, str | None]) -> str:
    """Headers as the text of a JSON object."""
    return json.dumps(dict(headers), ensure_ascii=False)


def from_json(text: str | None) -> dict[str, str | None]:
    """The headers in a text of `as_json`; empty for any other JSON."""
    value = None if text is None else json.loads(text)
    if not isinstance(value, dict):
        return {}
    return {name: each for name, each in value.items() if each is None or isinstance(each, str)}
