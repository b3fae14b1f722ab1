"""Times and intervals that PostgreSQL has and Python has not: infinity, years before 1 and after 9999. No I/O.

Others write them into tables that relay reads. Each becomes the nearest one that Python has, so that whoever lists or
compares them goes on.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

EARLIEST = datetime.min.replace(tzinfo=UTC)
LATEST = datetime.max.replace(tzinfo=UTC)


def moment_of(text: str) -> datetime:
    """Parse a time with a zone as PostgreSQL prints it, in ISO 8601; the result can be converted to UTC.

    Raises ValueError for a text that is no time.
    """
    try:
        moment = datetime.fromisoformat(text)
        moment.astimezone(UTC)
    except OverflowError:
        # The year 1 in a zone east of UTC.
        return nearest(is_early=text.startswith("0001"))
    except ValueError:
        digits = text.lstrip("-").partition("-")[0]
        if not (text.endswith((" BC", "infinity")) or (digits.isdecimal() and len(digits) > 4)):
            raise
        return nearest(is_early=text.startswith("-") or text.endswith(" BC"))
    return moment


def nearest(is_early: bool) -> datetime:
    """The first or the last time that Python has, in UTC."""
    return EARLIEST if is_early else LATEST


def nearest_interval(is_negative: bool) -> timedelta:
    """The longest interval that Python has, backwards or forwards."""
    return timedelta.min if is_negative else timedelta.max
