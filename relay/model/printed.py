"""Prints values of JSON as PostgreSQL prints those of a column's type, for rows that no server has printed. No I/O."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any
from uuid import UUID

from relay.model import exact_json
from relay.model.events import microseconds, timestamp


class InvalidValue(ValueError):
    """A value is none of its type. The text does not contain it, and is to follow the name of its field."""


def printed(kind: str, value: Any) -> str:
    """The text of a value of the SQL type `kind`.

    Raises InvalidValue, or another ValueError or OverflowError, for a value that is none of the type, or that
    PostgreSQL cannot store.
    """
    text = _PRINTED[kind](value)
    text.encode()
    if "\0" in text:
        raise InvalidValue("has a zero character, which PostgreSQL cannot store in text")
    return text


def _uuid(value: Any) -> str:
    if not isinstance(value, str):
        raise InvalidValue("is not of type uuid")
    return str(UUID(value))


def _scalar(value: Any) -> str:
    """The text of a value, as the operator ->> returns it."""
    if isinstance(value, str):
        return value
    if isinstance(value, dict | list):
        raise InvalidValue("is not text")
    return exact_json.dumps(value, "")


def _bigint(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise InvalidValue("is not a whole number")
    number = int(value)
    if not -(2**63) <= number < 2**63:
        raise InvalidValue("is out of range")
    return str(number)


def _time(value: Any) -> str:
    if not isinstance(value, str):
        raise InvalidValue("is not a time")
    try:
        moment = datetime.fromisoformat(value)
    except ValueError:
        raise InvalidValue("is not a time such as 2026-11-01T00:00:00+00:00") from None
    if moment.tzinfo is None:
        raise InvalidValue("has no time zone")
    return timestamp(microseconds(moment))


_PRINTED: Mapping[str, Callable[[Any], str]] = {
    "uuid": _uuid,
    "text": _scalar,
    "bigint": _bigint,
    "int": _bigint,
    "timestamptz": _time,
    "jsonb": lambda value: exact_json.dumps(value, ""),
}
