"""What a schedule publishes when it is due, and where it goes on. No I/O."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import UTC, datetime, timedelta
from itertools import chain, islice, pairwise
from uuid import UUID, uuid5

from relay.store.schedules import DueTicks, ScheduleRow

GRACE = timedelta(seconds=60)
"""A time for which nothing is published for so long is missed."""
MOST_EVENTS = 100
"""The most events of a commit, where all missed times are published."""
MOST_TIMES = 10_000
"""The most times that are looked at for a commit."""
_NOTHING = (None, None)


def event_id(schedule: UUID, moment: datetime) -> UUID:
    """Return the id of the event of a time, the same whoever publishes it."""
    return uuid5(schedule, moment.astimezone(UTC).isoformat())


def dues(schedule: ScheduleRow, times: Iterable[datetime]) -> Iterator[tuple[datetime, datetime]]:
    """Yield times of a schedule, in order, each with when its event is published: after its jitter.

    The jitter of a time is the same whoever computes it, and ends before the following time.
    """
    if not schedule.jitter:
        yield from ((each, each) for each in times)
        return
    for moment, following in pairwise(chain(times, [None])):
        assert moment is not None  # noqa: S101
        longest = min(schedule.jitter, following - moment) if following else schedule.jitter
        yield moment, moment + longest * (event_id(schedule.id, moment).int % 1_000_000 / 1_000_000)


def step(schedule: ScheduleRow, now: datetime) -> DueTicks:
    """Return what is published now, and the next time. What SQL declared and nobody understands stands still."""
    try:
        return _step(schedule, now)
    except (ValueError, OverflowError) as error:
        return DueTicks((), (), None, None, None, fault=str(error))


def _step(schedule: ScheduleRow, now: datetime) -> DueTicks:
    following = dues(schedule, schedule.timing.after(schedule.begins))
    passed: dict[datetime, datetime] = {}
    most = MOST_EVENTS if schedule.missed == "all" else MOST_TIMES
    upcoming, due = next(following, _NOTHING)
    while upcoming and due and due <= now and len(passed) < most:
        passed[upcoming] = due
        upcoming, due = next(following, _NOTHING)
    late = {each for each, since in passed.items() if now - since > GRACE}
    chosen = list(passed)
    if schedule.missed != "all":
        # What comes next has passed, too, after a portion of the times.
        chosen = [] if due and due <= now else chosen[-1:]
        if schedule.missed == "skip":
            chosen = [each for each in chosen if each not in late]
    return DueTicks(
        chosen,
        [event_id(schedule.id, each) for each in chosen],
        max(passed, default=None),
        upcoming,
        due,
        len(late.union(passed).difference(set(chosen) - late)),
    )


def upcoming(schedule: ScheduleRow, count: int, now: datetime) -> list[datetime]:
    """Return the next times of a schedule. Raises ValueError or OverflowError where they cannot be computed."""
    return list(islice(schedule.timing.after(max(now, schedule.begins)), count))
