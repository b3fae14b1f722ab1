"""When cron expressions are due: against a search through all minutes, on the days on which clocks change."""

from __future__ import annotations

import random
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from itertools import islice, product
from zoneinfo import ZoneInfo

import pytest

from relay.model.cron import Cron, timing

MINUTE = timedelta(minutes=1)


def searched(cron: Cron, after: datetime, until: datetime) -> list[datetime]:
    """The times between two moments: each minute of real time is asked what the clock shows."""
    found, minute = [], after.replace(second=0, microsecond=0) + MINUTE
    before = (minute - MINUTE).astimezone(cron.zone).replace(tzinfo=None)
    shown = set[datetime]()
    # What the clock shows before a change back counts for the hours after it.
    for back in range(1, 24 * 60):
        shown.add((minute - back * MINUTE).astimezone(cron.zone).replace(tzinfo=None))
    while minute <= until:
        now = minute.astimezone(cron.zone).replace(tzinfo=None)
        if not cron.fixed:
            matches = is_shown(cron, now)
        else:
            left_out = list(between(before, now)) if now - before > MINUTE else []
            matches = any(is_shown(cron, each) for each in [*left_out, now] if each not in shown)
        if matches:
            found.append(minute)
        shown.add(now)
        before, minute = now, minute + MINUTE
    return found


def between(first: datetime, last: datetime) -> Iterator[datetime]:
    """The minutes between two, without them."""
    while (first := first + MINUTE) < last:
        yield first


def is_shown(cron: Cron, local: datetime) -> bool:
    """Whether an expression without L, W and # names what a clock shows."""
    by_day, by_weekday = local.day in cron.days, (local.weekday() + 1) % 7 in cron.weekdays
    both = cron.any_day or cron.any_weekday
    return (
        local.minute in cron.minutes
        and local.hour in cron.hours
        and local.month in cron.months
        and ((by_day and by_weekday) if both else (by_day or by_weekday))
    )


CHANGES = [
    ("Europe/Paris", "2026-03-29"),
    ("Europe/Paris", "2026-10-25"),
    ("America/New_York", "2026-03-08"),
    ("America/New_York", "2026-11-01"),
    ("Australia/Lord_Howe", "2026-04-05"),
    ("Australia/Lord_Howe", "2026-10-04"),
    ("Africa/Cairo", "2026-04-24"),
    ("Africa/Cairo", "2026-10-29"),
    ("America/Havana", "2026-03-08"),
    ("America/Havana", "2026-11-01"),
    ("America/Sao_Paulo", "2018-02-17"),
    ("America/Sao_Paulo", "2018-11-04"),
    ("Pacific/Apia", "2011-12-30"),
    ("America/St_Johns", "2010-11-07"),
    ("Asia/Kolkata", "2026-06-01"),
]
EXPRESSIONS = [
    "30 2 * * *",
    "0 3 * * *",
    "0,30 0-3 * * *",
    "30 * * * *",
    "*/15 * * * *",
    "*/10 2 * * *",
    "5 */2 * * *",
    "59 23 * * *",
    "0 0 * * *",
    "15 1,2,3 * * sun",
    "30 0 1,29 * 6",
]


def test_days_on_which_clocks_change(subtests: pytest.Subtests) -> None:
    for (zone, day), expression in product(CHANGES, EXPRESSIONS):
        with subtests.test(f"{expression} in {zone}, {day}"):
            cron = Cron.parse(expression, ZoneInfo(zone))
            begins = datetime.fromisoformat(f"{day}T00:00:00+00:00") - timedelta(hours=30)
            until = begins + timedelta(hours=84)
            found = []
            for each in cron.after(begins):
                if each > until:
                    break
                found.append(each)
            assert found == searched(cron, begins, until)


@pytest.mark.parametrize("seed", range(20))
def test_any_expression_and_day(seed: int) -> None:
    chance = random.Random(seed)

    def field(least: int, most: int) -> str:
        kind = chance.randrange(5)
        first = chance.randint(least, most)
        if kind == 0:
            return f"*/{chance.randint(1, most)}"
        if kind == 1:
            return f"{first}-{chance.randint(first, most)}/{chance.randint(1, 9)}"
        if kind == 2:
            return ",".join(str(chance.randint(least, most)) for _ in range(3))
        return "*" if kind == 3 else str(first)

    zone, day = chance.choice(CHANGES)
    text = f"{field(0, 59)} {field(0, 23)} {chance.choice(['*', field(1, 31)])} * {chance.choice(['*', field(0, 7)])}"
    cron = Cron.parse(text, ZoneInfo(zone))
    begins = datetime.fromisoformat(f"{day}T00:00:00+00:00") - timedelta(
        hours=chance.randint(20, 60)
    )
    until = begins + timedelta(hours=80)
    found = [each for each in islice(cron.after(begins), 6000) if each <= until]
    assert found == searched(cron, begins, until), text
    for each in found[:20]:
        assert next(cron.after(each - timedelta(seconds=1))) == each
        assert next(cron.after(each)) > each


@pytest.mark.parametrize(
    ("expression", "days"),
    [
        ("0 0 L * *", ["01-31", "02-28", "03-31"]),
        ("0 0 L-2 * *", ["01-29", "02-26", "03-29"]),
        ("0 0 LW * *", ["01-30", "02-27", "03-31"]),
        ("0 0 15W * *", ["01-15", "02-16", "03-16"]),
        ("0 0 1W * *", ["01-01", "02-02", "03-02"]),
        ("0 0 31W * *", ["01-30", "03-31", "05-29"]),
        ("0 0 * * 5L", ["01-30", "02-27", "03-27"]),
        ("0 0 * * FRIL", ["01-30", "02-27", "03-27"]),
        ("0 0 * * MON#1", ["01-05", "02-02", "03-02"]),
        ("0 0 * * 1#5", ["03-30", "06-29", "08-31"]),
        ("0 0 13 * FRI", ["01-02", "01-09", "01-13"]),
        ("0 0 29 2 ?", ["02-29", "02-29", "02-29"]),
        ("0 0 ? JAN,mar SAT-SUN", ["01-03", "01-04", "01-10"]),
        ("@monthly", ["01-01", "02-01", "03-01"]),
        ("@weekly", ["01-04", "01-11", "01-18"]),
        ("0 0 * * 7", ["01-04", "01-11", "01-18"]),
    ],
)
def test_days(expression: str, days: list[str]) -> None:
    cron = Cron.parse(expression, ZoneInfo("UTC"))
    found = islice(cron.after(datetime(2025, 12, 31, 23, tzinfo=UTC)), 3)
    assert [f"{each:%m-%d}" for each in found] == days


@pytest.mark.parametrize(
    ("expression", "fault"),
    [
        ("* * * *", "must be minute, hour"),
        ("0 * * * * *", "must be minute, hour"),
        ("60 * * * *", "minute: '60' is not from 0 to 59"),
        ("* 24 * * *", "hour: '24'"),
        ("* * 0 * *", "day of month: '0'"),
        ("* * 32W * *", "day of month: '32W' is no day"),
        ("* * * 13 *", "month: '13'"),
        ("* * * * 8", "day of week: '8'"),
        ("* * * * MON#6", "day of week"),
        ("*/0 * * * *", "has a step of 0"),
        ("5-1 * * * *", "ends before it begins"),
        ("a * * * *", "minute: 'A'"),
        ("1,, * * * *", "minute: ''"),
        ("0 0 30 2 *", "there is no such day"),
        ("@never", "must be minute, hour"),
        ("²  * * * *", "minute"),
    ],
)
def test_an_expression_that_is_refused(expression: str, fault: str) -> None:
    with pytest.raises(ValueError, match=fault.replace("*", r"\*")):
        Cron.parse(expression, ZoneInfo("UTC"))


def test_intervals_do_not_depend_on_when_they_are_asked_for() -> None:
    every = timing(None, timedelta(minutes=15), None, "UTC")
    found = islice(every.after(datetime(2026, 3, 29, 0, 7, 3, tzinfo=UTC)), 3)
    assert [f"{each:%H:%M:%S}" for each in found] == ["00:15:00", "00:30:00", "00:45:00"]


def test_an_unknown_zone_is_refused() -> None:
    with pytest.raises(ValueError, match="'Europe/Pariss' is not a time zone"):
        timing("@daily", None, None, "Europe/Pariss")
