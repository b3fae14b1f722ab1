"""Dataclasses as JSON values. No I/O."""

from __future__ import annotations

from dataclasses import asdict
from datetime import datetime, timedelta
from math import isfinite
from typing import TYPE_CHECKING, Any

from relay.model.exact_json import Number

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


def json_fields(item: DataclassInstance) -> dict[str, Any]:
    """Return the fields of a dataclass as JSON values: times in ISO 8601, durations in seconds.

    A number that no float holds, such as 1e400, becomes text.
    """
    return {key: _json(value) for key, value in asdict(item).items()}


def _json(value: Any) -> Any:
    match value:
        case datetime():
            return value.isoformat()
        case timedelta():
            return value.total_seconds()
        case list():
            return [_json(each) for each in value]
        case dict():
            return {key: _json(each) for key, each in value.items()}
        case Number() if not isfinite(value):
            return value.text
    return value
