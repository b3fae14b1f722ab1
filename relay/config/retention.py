"""The section `retention` of the configuration: how long events stay in the outbox."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from relay.config.types import Section

_UNITS = {"m": "minutes", "h": "hours", "d": "days", "w": "weeks"}
_DURATION = re.compile(r"(\d{1,6})\s*([mhdw])")


def duration(value: Any) -> timedelta:
    """A time such as `30m`, `6h`, `7d` or `2w`. Raises ValueError."""
    found = _DURATION.fullmatch(value.strip()) if isinstance(value, str) else None
    if isinstance(value, timedelta) and value > timedelta(0):
        return value
    if found is None or not int(found[1]):
        raise ValueError("must be a number of minutes, hours, days or weeks: 30m, 6h, 7d, 2w")
    return timedelta(**{_UNITS[found[2]]: int(found[1])})


def written(length: timedelta) -> str:
    """A time as the configuration has it, in the largest unit that leaves no rest: `1d`, `90m`."""
    minutes = length // timedelta(minutes=1)
    for unit, size in (("w", 10_080), ("d", 1_440), ("h", 60)):
        if minutes % size == 0:
            return f"{minutes // size}{unit}"
    return f"{minutes}m"


Duration = Annotated[timedelta, BeforeValidator(duration)]
_DAY = timedelta(days=1)


class RetentionSettings(Section):
    """What relay removes from the outbox once every reader is past it, and from its own tables.

    Without `keep` nothing is removed from the outbox. `archive` names a Spark sink that must have every event first.
    A reader with unread events older than `max_lag` is given up; null: none is.
    """

    keep: Duration | None = None
    """How long events stay in the outbox once every reader is past them; null: for ever."""
    ahead: Duration = timedelta(days=14)
    """How far ahead partitions are created."""
    archive: str | None = None
    """A sink of `type: spark` that must have events before they are removed."""
    max_lag: Duration | None = None
    """A reader with an unread event older than this no longer holds events; null: it holds them."""
    keep_letters: Annotated[Duration, Field(ge=_DAY)] = timedelta(days=90)
    """How long settled dead letters and actions are kept, at least `1d`."""
