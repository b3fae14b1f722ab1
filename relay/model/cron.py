"""When a schedule is due: cron expressions in a time zone, intervals, single times. No I/O.

Times that are fixed (neither minute nor hour begins with `*`) happen once on each day that has them: what a change of
the clock leaves out happens at its end, what it repeats happens the first time. Others follow real time. These are the
rules of Debian's cron.

Of the libraries, cronsim 2.8 is typed and has these rules for fixed times, but of `W` only `LW`, no `L-2`, no `FRIL`;
it reads `5-5/2` as `5/2`. Of 3,000 random expressions around the changes of tests/unit/test_cron.py, 117 differ from a
search through all minutes, none of which is fixed: it leaves out or adds times after a change of half an hour (Lord
Howe, 81) or at midnight (Apia, São Paulo, Havana, Cairo, 11), and after one a minute past midnight (St. John's until
2011, 25) it searches without end for 14. croniter 7.0 is untyped, repeats fixed times with the repeated hour, and
differs in 24 of the table's 165 cases; whenever 0.11 computes times, but has no cron. So this is relay's own.

Sources: cron(8) and crontab(5) of Debian; for `L`, `W` and `#` the documentation of Quartz.
"""

from __future__ import annotations

import calendar
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from typing import Protocol
from zoneinfo import ZoneInfo

_MONTHS = {name: n for n, name in enumerate(calendar.month_abbr) if name}
_MONTHS = {name.upper(): n for name, n in _MONTHS.items()}
_WEEKDAYS = {name: n for n, name in enumerate(["SUN", "MON", "TUE", "WED", "THU", "FRI", "SAT"])}
_ALIASES = {
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
    "@monthly": "0 0 1 * *",
    "@weekly": "0 0 * * 0",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@hourly": "0 * * * *",
}
_ITEM = re.compile(r"(\*|\?|(\w+)(?:-(\w+))?)(?:/(\d+))?")
_DAY_OF_MONTH = re.compile(r"L(?:-(\d{1,2}))?|(\d{1,2}|L)W")
_DAY_OF_WEEK = re.compile(r"(\w+?)(?:L|#([1-5]))")
_YEARS = 50
"""After so many years without a match, none comes: 29 February is on a given weekday every 40 years at least."""
_OVERLAP = timedelta(hours=24)
"""More than any change of a clock."""
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class Timing(Protocol):
    """When something is due."""

    def after(self, moment: datetime) -> Iterator[datetime]:
        """Yield the times after a moment, in order, in UTC."""
        ...


@dataclass(frozen=True, slots=True)
class At:
    """A single time."""

    at: datetime

    def after(self, moment: datetime) -> Iterator[datetime]:
        """Yield the time if it is after a moment."""
        if self.at > moment:
            yield self.at.astimezone(UTC)


@dataclass(frozen=True, slots=True)
class Every:
    """An interval, which is counted from the beginning of 1970 in UTC: `15m` is due at 0, 15, 30 and 45 past."""

    every: timedelta

    def after(self, moment: datetime) -> Iterator[datetime]:
        """Yield the times after a moment, without end."""
        number = (moment - EPOCH) // self.every
        while True:
            number += 1
            yield EPOCH + number * self.every


@dataclass(frozen=True, slots=True)
class Cron:
    """A cron expression of five fields, in a time zone."""

    minutes: tuple[int, ...]
    hours: tuple[int, ...]
    months: frozenset[int]
    days: frozenset[int]
    """Days of the month; those from the end and those of `W` are in `special_days`."""
    special_days: tuple[str, ...]
    weekdays: frozenset[int]
    """0 is Sunday."""
    special_weekdays: tuple[tuple[int, int], ...]
    """A weekday and which one of the month it is; 0: the last one."""
    any_day: bool
    any_weekday: bool
    fixed: bool
    zone: ZoneInfo

    @classmethod
    def parse(cls, text: str, zone: ZoneInfo) -> Cron:
        """Parse an expression, or an alias such as `@daily`. Raises ValueError, with the field."""
        fields = _ALIASES.get(text.strip().lower(), text).upper().split()
        if len(fields) != 5:
            raise ValueError(
                f"{text!r}: must be minute, hour, day of month, month and day of week, or one of {', '.join(_ALIASES)}"
            )
        minute, hour, day, month, weekday = fields
        special_days, plain_days = _split(day, _DAY_OF_MONTH)
        for each in special_days:
            number = each.removesuffix("W").removeprefix("L-").removeprefix("L")
            if number and not 1 <= int(number) <= (30 if each.startswith("L") else 31):
                raise ValueError(f"day of month: {each!r} is no day")
        special_weekdays, plain_weekdays = _split(weekday, _DAY_OF_WEEK)
        cron = cls(
            tuple(sorted(_numbers("minute", minute, 0, 59))),
            tuple(sorted(_numbers("hour", hour, 0, 23))),
            frozenset(_numbers("month", month, 1, 12, _MONTHS)),
            frozenset(_numbers("day of month", plain_days, 1, 31) if plain_days else ()),
            special_days,
            frozenset(
                n % 7
                for n in (
                    _numbers("day of week", plain_weekdays, 0, 7, _WEEKDAYS)
                    if plain_weekdays
                    else ()
                )
            ),
            tuple(map(_nth, special_weekdays)),
            day[0] in "*?",
            weekday[0] in "*?",
            minute[0] not in "*?" and hour[0] not in "*?",
            zone,
        )
        if next(cron.after(EPOCH), None) is None:
            raise ValueError(f"{text!r}: there is no such day")
        return cron

    def after(self, moment: datetime) -> Iterator[datetime]:
        """Yield the times after a moment. They end where none is left, or none in 50 years."""
        day = moment.astimezone(self.zone).date() - timedelta(days=2)
        matched, waiting = day, set[datetime]()
        while waiting or day.year - matched.year <= _YEARS:
            if day.year > 9990:
                break
            # A change of the clock at midnight gives one day times that are after the first ones of the next day.
            begins = datetime.combine(day, time(), self.zone).astimezone(UTC) - _OVERLAP
            passed = sorted(each for each in waiting if each < begins)
            waiting.difference_update(passed)
            yield from passed
            if self._has(day):
                matched = day
                waiting.update(each for each in self._times(day) if each > moment)
            day += timedelta(days=1)

    def _has(self, day: date) -> bool:
        """Whether there are times on a day."""
        if day.month not in self.months:
            return False
        weekday, last = day.isoweekday() % 7, calendar.monthrange(day.year, day.month)[1]
        by_day = day.day in self.days or any(_is(each, day, last) for each in self.special_days)
        by_weekday = weekday in self.weekdays or any(
            weekday == of and (day.day + 6) // 7 == nth
            if nth
            else weekday == of and day.day + 7 > last
            for of, nth in self.special_weekdays
        )
        if self.any_day or self.any_weekday:
            return by_day and by_weekday
        return by_day or by_weekday

    def _times(self, day: date) -> Iterator[datetime]:
        for hour in self.hours:
            for minute in self.minutes:
                local = datetime.combine(day, time(hour, minute), self.zone)
                first, second = local.astimezone(UTC), local.replace(fold=1).astimezone(UTC)
                if first.astimezone(self.zone).replace(tzinfo=None) != local.replace(tzinfo=None):
                    # The clock leaves it out.
                    if self.fixed:
                        yield self._end_of_gap(local)
                    continue
                yield first
                if second != first and not self.fixed:
                    yield second

    def _end_of_gap(self, local: datetime) -> datetime:
        while True:
            local += timedelta(minutes=1)
            instant = local.astimezone(UTC)
            if instant.astimezone(self.zone).replace(tzinfo=None) == local.replace(tzinfo=None):
                return instant


def _split(field: str, special: re.Pattern[str]) -> tuple[tuple[str, ...], str]:
    """Split a field into the items of a special form, and the others."""
    items = field.split(",")
    found = tuple(each for each in items if special.fullmatch(each) and each not in _WEEKDAYS)
    return found, ",".join(each for each in items if each not in found)


def _numbers(
    what: str, field: str, least: int, most: int, names: Mapping[str, int] | None = None
) -> Iterator[int]:
    for item in field.split(","):
        match = _ITEM.fullmatch(item)
        if match is None:
            raise ValueError(f"{what}: {item!r} is neither a number, a range, a step nor *")
        whole, first, last, step = match.groups()
        if step is not None and int(step) == 0:
            raise ValueError(f"{what}: {item!r} has a step of 0")
        if whole in "*?":
            start, end = least, most - (what == "day of week")
        else:
            start = _number(what, first, least, most, names)
            end = _number(what, last, least, most, names) if last else most if step else start
            if names is _WEEKDAYS and last and end == 0:
                end = 7
            if end < start:
                raise ValueError(f"{what}: {item!r} ends before it begins")
        yield from range(start, end + 1, int(step or 1))


def _number(what: str, text: str, least: int, most: int, names: Mapping[str, int] | None) -> int:
    if names is not None and text in names:
        return names[text]
    if not text.isascii() or not text.isdigit() or not least <= int(text) <= most:
        raise ValueError(f"{what}: {text!r} is not from {least} to {most}")
    return int(text)


def _nth(item: str) -> tuple[int, int]:
    match = _DAY_OF_WEEK.fullmatch(item)
    assert match is not None  # noqa: S101
    return _number("day of week", match[1], 0, 7, _WEEKDAYS) % 7, int(match[2] or 0)


def _is(item: str, day: date, last: int) -> bool:
    """Whether a day of a month with `last` days is `L`, `L-3`, `15W` or `LW`."""
    if not item.endswith("W"):
        return day.day == last - int(item[2:] or 0)
    number = last if item == "LW" else int(item[:-1])
    if number > last:
        return False
    weekday = day.replace(day=number).isoweekday()
    if weekday == 6:
        number += -1 if number > 1 else 2
    elif weekday == 7:
        number += 1 if number < last else -2
    return day.day == number


def timing(cron: str | None, every: timedelta | None, at: datetime | None, timezone: str) -> Timing:
    """Return when a schedule is due; one of the three is given. Raises ValueError."""
    if cron is not None:
        return Cron.parse(cron, zone_of(timezone))
    if every is not None:
        if every < timedelta(seconds=1):
            raise ValueError("every: must be at least a second")
        return Every(every)
    assert at is not None  # noqa: S101
    return At(at)


_NO_ZONES = re.compile(r"(posix|right)/|(localtime|posixrules|Factory)$")
"""Files that lie among those of the time zones."""


def zone_of(name: str) -> ZoneInfo:
    """Return a time zone. Raises ValueError if there is none of this name, or it is another one on another host."""
    try:
        if not _NO_ZONES.match(name):
            return ZoneInfo(name)
    except (KeyError, ValueError, OSError):
        pass
    raise ValueError(f"{name!r} is not a time zone such as Europe/Paris")
