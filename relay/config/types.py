"""The types of values in the configuration's sections."""

from __future__ import annotations

import re
from datetime import timedelta
from enum import Enum
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

T = TypeVar("T")


class Mark(Enum):
    """Whether the instances of a group must have a key alike: it says what becomes of events. Every key has a mark.

    The mark of a key that is a section is that of all keys in it, unless these have marks of their own.
    """

    ALIKE = "alike"
    OWN = "own"


Alike = Annotated[T, Mark.ALIKE]
"""A key that decides effects: all instances of a group must have it alike."""
Own = Annotated[T, Mark.OWN]
"""A key that each instance may have otherwise: a size, a limit, an address of a database or broker, or its retries."""


class Section(BaseModel):
    """A mapping with known keys; it is immutable."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def _no_boolean(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("must be a number")  # pydantic would convert YAML's `yes` to 1
    return value


Number = BeforeValidator(_no_boolean)
MOST_SECONDS = 1e9
"""With this bound, every time that relay computes is in the range of PostgreSQL and of Python."""
Seconds = Annotated[float, Field(gt=0, le=MOST_SECONDS), Number]
SecondsOrZero = Annotated[float, Field(ge=0, le=MOST_SECONDS), Number]
Name = Annotated[str, Field(min_length=1, max_length=63)]

_UNITS = {"m": "minutes", "h": "hours", "d": "days", "w": "weeks"}
_DURATION = re.compile(r"(\d{1,6})\s*([mhdw])")


def duration(value: Any) -> timedelta:
    """Parse a duration such as `30m`, `6h`, `7d` or `2w`. Raises ValueError."""
    match = _DURATION.fullmatch(value.strip()) if isinstance(value, str) else None
    if isinstance(value, timedelta) and value > timedelta(0):
        return value
    if match is None or not int(match[1]):
        raise ValueError("must be a number of minutes, hours, days or weeks: 30m, 6h, 7d, 2w")
    return timedelta(**{_UNITS[match[2]]: int(match[1])})


def written(length: timedelta) -> str:
    """A duration in the configuration's form, in the largest unit that divides it: `1d`, `90m`."""
    minutes = length // timedelta(minutes=1)
    for unit, size in (("w", 10_080), ("d", 1_440), ("h", 60)):
        if minutes % size == 0:
            return f"{minutes // size}{unit}"
    return f"{minutes}m"


Duration = Annotated[timedelta, BeforeValidator(duration)]
