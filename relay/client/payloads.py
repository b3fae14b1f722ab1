"""Encodes payloads as JSON without loss."""

from __future__ import annotations

import dataclasses
import datetime
import enum
import json
import math
import sys
import uuid
from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Any

from relay.client.errors import EventInvalid


def encode(rows: list[dict[str, Any]]) -> str:
    """Return the rows as a JSON array. Raises EventInvalid, which names the event and the path of a value."""
    return _encoded(rows, {f"events[{number}].": row for number, row in enumerate(rows)})


def encode_object(values: dict[str, Any]) -> str:
    """Return an object of JSON. Raises EventInvalid, which names the path of a value."""
    return _encoded(values, {"": values})


def _encoded(given: Any, objects: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a value as JSON; `objects` are those that it has, by what their paths begin with."""
    try:
        text = _ENCODER.encode(given)
        # A driver would refuse a lone surrogate, too, but not say where it is.
        text.encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise _explained(objects, error) from None
    if "\\u0000" in text:
        _require_no_nul(objects)
    return text


def plain(value: object) -> Any:
    """Convert a value one step towards JSON. Raises TypeError for a value that JSON cannot represent exactly."""
    if isinstance(value, uuid.UUID):
        return str(value)
    if isinstance(value, Decimal):
        if not value.is_finite():
            raise TypeError(f"{value} is not a JSON number")
        return str(value)
    if isinstance(value, datetime.datetime | datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, Mapping):
        return dict(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}
    if hasattr(value, "model_dump_json"):
        return value.model_dump(mode="json")  # type: ignore[attr-defined]
    msgspec = sys.modules.get("msgspec")
    if msgspec is not None and isinstance(value, msgspec.Struct):
        return msgspec.to_builtins(value)
    raise TypeError(f"{type(value).__name__} cannot be represented in JSON")


_ENCODER = json.JSONEncoder(
    default=plain,
    allow_nan=False,
    ensure_ascii=False,
    separators=(",", ":"),
)


def _explained(objects: Mapping[str, Mapping[str, Any]], error: Exception) -> EventInvalid:
    for prefix, values in objects.items():
        for column, value in values.items():
            for path, what in _faults(value, f"{prefix}{column}", 0):
                return EventInvalid(f"{path}: {what}")
    return EventInvalid(f"the events cannot be written as JSON: {type(error).__name__}")


def _require_no_nul(objects: Mapping[str, Mapping[str, Any]]) -> None:
    for prefix, values in objects.items():
        for column, value in values.items():
            for path, text in _texts(value, f"{prefix}{column}"):
                if "\0" in text:
                    raise EventInvalid(f"{path}: has a NUL character, which jsonb cannot store")


_MAX_DEPTH = 200


def _faults(value: Any, path: str, depth: int) -> Iterator[tuple[str, str]]:
    """Yield the path of each part of a value that cannot be written as JSON, and the reason."""
    if depth > _MAX_DEPTH:
        yield path, "is nested too deeply, or contains itself"
    elif isinstance(value, str):
        if _has_lone_surrogate(value):
            yield path, "has a lone surrogate, which is not a character"
    elif isinstance(value, dict):
        for key, each in value.items():
            if not isinstance(key, str | int | float | bool | None):
                yield path, f"has a key of the type {type(key).__name__}, which is not a text"
            else:
                yield from _faults(each, f"{path}.{key}", depth + 1)
    elif isinstance(value, list | tuple):
        for index, each in enumerate(value):
            yield from _faults(each, f"{path}[{index}]", depth + 1)
    elif isinstance(value, float):
        if not math.isfinite(value):
            yield path, f"{value} is not a JSON number"
    elif not isinstance(value, int | None):
        try:
            converted = plain(value)
        except Exception as error:
            yield path, str(error) if type(error) is TypeError else type(error).__name__
        else:
            yield from _faults(converted, path, depth + 1)


def _texts(value: Any, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, dict):
        for key, each in value.items():
            yield f"{path}.{key}".replace("\0", "?"), str(key)
            yield from _texts(each, f"{path}.{key}".replace("\0", "?"))
    elif isinstance(value, list | tuple):
        for index, each in enumerate(value):
            yield from _texts(each, f"{path}[{index}]")
    elif not isinstance(value, float | int | None):
        yield from _texts(plain(value), path)


def _has_lone_surrogate(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False
