"""The section `retention`: how long events stay in the outbox."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from relay.config.types import Section

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
_DAY = timedelta(days=1)


class RetentionSettings(Section):
    """How long events stay in the outbox once every reader is past them, and rows in relay's own tables.

    Without `keep`, relay removes nothing from the outbox. It removes no event that the Spark sink `archive` has not
    written. A reader with unread events older than `max_lag` no longer holds events back; null: every reader does.
    """

    keep: Duration | None = None
    """How long events stay in the outbox once every reader is past them; null: for ever."""
    ahead: Duration = timedelta(days=14)
    """How far ahead partitions are created."""
    archive: str | None = None
    """The sink of `type: spark` that must have written events before they are removed."""
    max_lag: Duration | None = None
    """The age of an unread event from which on its reader no longer holds events back; null: no limit."""
    keep_letters: Annotated[Duration, Field(ge=_DAY)] = timedelta(days=90)
    """How long replayed and discarded dead letters, and actions, are kept, at least `1d`."""
