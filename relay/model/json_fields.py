"""Dataclasses as JSON values. No I/O."""

from __future__ import annotations

from dataclasses import asdict
from datetime import datetime
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


def json_fields(item: DataclassInstance) -> dict[str, Any]:
    """Return the fields of a dataclass as JSON values: times in ISO 8601."""
    return {
        key: value.isoformat() if isinstance(value, datetime) else value
        for key, value in asdict(item).items()
    }
