"""Lists schedules and acts on them, while relay runs or not, also through a pooler: `relay schedule`."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from datetime import datetime
from threading import Event

from relay.admin import acts
from relay.admin.acts import Acting, Done, EventAnswer, Missing, Subject
from relay.admin.connections import reach_source
from relay.config.settings import Settings
from relay.faults import ConfigurationError
from relay.schedules import steps
from relay.schedules.ticking import Ticker
from relay.store import schedules
from relay.store.connections import Connection
from relay.store.schedules import ScheduleRow

_NAMED = 20
"""At most so many schedules does an error name."""


class UnknownSchedule(Missing):
    """The outbox has no schedule of this name."""


def listed(settings: Settings, after: str = "", limit: int | None = None) -> list[ScheduleRow]:
    """Read the schedules of the outbox in the order of their names, or some after a name.

    Raises ConfigurationError, psycopg.Error.
    """
    _require_own_outbox(settings)
    with reach_source(settings, pooled=True) as source:
        return schedules.listed(source, after, limit)


def upcoming(settings: Settings, name: str, count: int) -> tuple[ScheduleRow, list[datetime]]:
    """Read a schedule, and compute its next times. Raises UnknownSchedule, ConfigurationError, psycopg.Error."""
    _require_own_outbox(settings)
    with reach_source(settings, pooled=True) as source:
        found = schedules.named(source, name)
        if found is None:
            raise _unknown(settings, source, name)
    try:
        return found, steps.upcoming(found, count, found.present)
    except (ValueError, OverflowError) as error:
        # No instance has looked at it yet.
        return replace(found, fault=str(error)), []


SCHEDULE = Subject("schedule", "SCHEDULE")


def _paused(act: Acting, paused: bool) -> bool:
    _require_own_outbox(act.settings)
    if schedules.named(act.source, act.name) is None:
        raise _unknown(act.settings, act.source, act.name)
    return schedules.pause(act.source, act.name, paused)


pause, resume = acts.pauses(
    SCHEDULE,
    "Let a schedule publish nothing; its times meanwhile are not missed.",
    "Let a paused schedule go on with its next time.",
    _paused,
)


@acts.declare(SCHEDULE, "run-now", answers=EventAnswer)
def run_now(act: Acting) -> Done:
    """Publish a schedule's event now, beside its times, also while it is paused."""
    _require_own_outbox(act.settings)
    published = schedules.run_now(act.source, act.name)
    if published is None:
        raise _unknown(act.settings, act.source, act.name)
    detail = {"event_id": str(published)}
    return Done(f"published event {published}", detail, EventAnswer(published))


ACTS = (pause, resume, run_now)


def run(settings: Settings, stop: Event) -> None:
    """Publish what is due until `stop` is set. Raises RelayError if that cannot go on."""
    _require_own_outbox(settings)
    with reach_source(settings, pooled=True):
        pass
    ticker = Ticker(settings, stop.set)
    with closing(ticker):
        ticker.start()
        stop.wait()
    if ticker.error is not None:
        raise ticker.error


def _require_own_outbox(settings: Settings) -> None:
    """Raise ConfigurationError unless the outbox is relay's own."""
    if not settings.source.owns_table:
        raise ConfigurationError(
            f"schedules need relay's own outbox, and {settings.source.outbox} is not: publish by a scheduler of yours"
        )


def _unknown(settings: Settings, source: Connection, name: str) -> UnknownSchedule:
    if name in settings.schedules:
        return UnknownSchedule(
            f"schedule {name!r} is in the configuration, but not declared yet: start relay, or `relay schedule run`"
        )
    found = [each.name for each in schedules.listed(source, limit=_NAMED + 1)]
    known = ", ".join([*found[:_NAMED], *["…"][: len(found) > _NAMED]])
    return UnknownSchedule(
        f"there is no schedule {name!r} (schedules: {known or 'none'}): put it into the configuration, or declare it "
        "with relay.declare_schedule"
    )
