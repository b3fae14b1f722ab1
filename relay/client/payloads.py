"""Payloads as JSON, exactly."""

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
    """The rows as a JSON array. Raises EventInvalid, which names the event and the path of what JSON cannot hold."""
    try:
        text = _ENCODER.encode(rows)
        # What a driver would refuse later, without a word on where it is.
        text.encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise _explained(rows, error) from None
    if "\\u0000" in text:
        _require_no_zero(rows)
    return text


def plain(value: object) -> Any:
    """One step towards what JSON knows. Raises TypeError for what has no exact form."""
    if isinstance(value, uuid.UUID):
        return str(value)
    if isinstance(value, Decimal):
        if not value.is_finite():
            raise TypeError(f"{value} is not a number of JSON")
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
    raise TypeError(f"{type(value).__name__} has no form in JSON")


_ENCODER = json.JSONEncoder(
    default=plain,
    allow_nan=False,
    ensure_ascii=False,
    separators=(",", ":"),
)


def _explained(rows: list[dict[str, Any]], error: Exception) -> EventInvalid:
    for number, row in enumerate(rows):
        for column, value in row.items():
            for path, what in _faults(value, column, 0):
                return EventInvalid(f"events[{number}].{path}: {what}")
    return EventInvalid(f"the events cannot be written as JSON: {type(error).__name__}")


def _require_no_zero(rows: list[dict[str, Any]]) -> None:
    for number, row in enumerate(rows):
        for column, value in row.items():
            for path, text in _texts(value, column):
                if "\0" in text:
                    raise EventInvalid(
                        f"events[{number}].{path}: has a zero character, which jsonb cannot hold"
                    )


_DEEPEST = 200


def _faults(value: Any, path: str, depth: int) -> Iterator[tuple[str, str]]:
    """Where a value cannot be written as JSON, and why."""
    if depth > _DEEPEST:
        yield path, "is nested too deeply, or in itself"
    elif isinstance(value, str):
        if _is_torn(value):
            yield path, "has half of a surrogate pair, which is no character"
    elif isinstance(value, dict):
        for key, each in value.items():
            if not isinstance(key, str | int | float | bool | None):
                yield path, f"has a key that is a {type(key).__name__}, not a text"
            else:
                yield from _faults(each, f"{path}.{key}", depth + 1)
    elif isinstance(value, list | tuple):
        for index, each in enumerate(value):
            yield from _faults(each, f"{path}[{index}]", depth + 1)
    elif isinstance(value, float):
        if not math.isfinite(value):
            yield path, f"{value} is not a number of JSON"
    elif not isinstance(value, int | None):
        try:
            step = plain(value)
        except Exception as error:
            yield path, str(error) if type(error) is TypeError else type(error).__name__
        else:
            yield from _faults(step, path, depth + 1)


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


def _is_torn(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False
