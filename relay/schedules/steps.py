"""What a schedule publishes when it is due, and where it goes on. No I/O."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from itertools import islice
from uuid import UUID, uuid5

from relay.store.schedules import DueTicks, ScheduleRow

GRACE = timedelta(seconds=60)
"""A time for which nothing is published for so long is missed."""
MOST_EVENTS = 100
"""The most events of a commit, where all missed times are published."""
MOST_TIMES = 10_000
"""The most times that are looked at for a commit."""


def event_id(schedule: UUID, moment: datetime) -> UUID:
    """Return the id of the event of a time, the same whoever publishes it."""
    return uuid5(schedule, moment.astimezone(UTC).isoformat())


def due_at(schedule: ScheduleRow, moment: datetime) -> datetime:
    """Return when the event of a time is published: its jitter is the same whoever computes it."""
    fraction = event_id(schedule.id, moment).int % 1_000_000 / 1_000_000
    return moment + schedule.jitter * fraction


def step(schedule: ScheduleRow, now: datetime) -> DueTicks:
    """Return what is published now, and the next time. What SQL declared and nobody understands stands still."""
    try:
        following = schedule.timing.after(schedule.begins)
    except ValueError as error:
        return DueTicks((), (), None, None, None, fault=str(error))
    passed: list[datetime] = []
    most = MOST_EVENTS if schedule.missed == "all" else MOST_TIMES
    upcoming = next(following, None)
    while upcoming is not None and len(passed) < most and due_at(schedule, upcoming) <= now:
        passed.append(upcoming)
        upcoming = next(following, None)
    late = {each for each in passed if now - due_at(schedule, each) > GRACE}
    chosen = passed
    if schedule.missed != "all":
        # What comes next has passed, too, after a portion of the times.
        has_more = upcoming is not None and due_at(schedule, upcoming) <= now
        chosen = [] if has_more else passed[-1:]
        if schedule.missed == "skip":
            chosen = [each for each in chosen if each not in late]
    return DueTicks(
        chosen,
        [event_id(schedule.id, each) for each in chosen],
        passed[-1] if passed else None,
        upcoming,
        None if upcoming is None else due_at(schedule, upcoming),
        len(late.union(passed).difference(set(chosen) - late)),
    )


def upcoming(schedule: ScheduleRow, count: int, now: datetime) -> list[datetime]:
    """Return the next times of a schedule, none of one that stands still."""
    try:
        return list(islice(schedule.timing.after(max(now, schedule.begins)), count))
    except ValueError:
        return []
