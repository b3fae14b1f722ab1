"""Lists schedules and acts on them, while relay runs or not: `relay schedule`."""

from __future__ import annotations

from contextlib import closing
from datetime import datetime
from threading import Event
from uuid import UUID

from relay.admin.connections import reach_source, reach_target
from relay.admin.publish import require_own_outbox
from relay.config.settings import Settings
from relay.faults import ConfigurationError
from relay.schedules import steps
from relay.schedules.ticking import Ticker
from relay.store import actions, schedules
from relay.store.connections import Connection
from relay.store.schedules import ScheduleRow


class UnknownSchedule(ConfigurationError):
    """The outbox has no schedule of this name."""


def listed(settings: Settings) -> list[ScheduleRow]:
    """Read the schedules of the outbox. Raises ConfigurationError, psycopg.Error."""
    require_own_outbox(settings)
    with reach_source(settings) as source:
        return schedules.listed(source)


def upcoming(settings: Settings, name: str, count: int) -> tuple[ScheduleRow, list[datetime]]:
    """Read a schedule, and compute its next times. Raises UnknownSchedule, ConfigurationError, psycopg.Error."""
    require_own_outbox(settings)
    with reach_source(settings) as source:
        found = schedules.named(source, name)
        if found is None:
            raise _unknown(source, name)
    return found, steps.upcoming(found, count, found.present)


def pause(settings: Settings, name: str, paused: bool, reason: str | None) -> bool:
    """Pause a schedule or let it go on; returns whether that changed anything.

    Raises ConfigurationError, psycopg.Error.
    """
    require_own_outbox(settings)
    with reach_source(settings) as source:
        if schedules.named(source, name) is None:
            raise _unknown(source, name)
        changed = schedules.pause(source, name, paused)
    if changed:
        _record(settings, "schedule pause" if paused else "schedule resume", name, reason)
    return changed


def run_now(settings: Settings, name: str, reason: str | None) -> UUID:
    """Publish a schedule's event beside its times; returns its id. Raises ConfigurationError, psycopg.Error."""
    require_own_outbox(settings)
    with reach_source(settings) as source:
        published = schedules.run_now(source, name)
        if published is None:
            raise _unknown(source, name)
    _record(settings, "schedule run-now", name, reason)
    return published


def run(settings: Settings, stop: Event) -> None:
    """Publish what is due until `stop` is set. Raises RelayError if that cannot go on."""
    require_own_outbox(settings)
    with reach_source(settings):
        pass
    ticker = Ticker(settings, stop.set)
    with closing(ticker):
        ticker.start()
        stop.wait()
    if ticker.error is not None:
        raise ticker.error


def _record(settings: Settings, action: str, name: str, reason: str | None) -> None:
    with reach_target(settings) as target:
        actions.record(target, settings.group, "", action, reason, {"schedule": name})


def _unknown(source: Connection, name: str) -> UnknownSchedule:
    known = ", ".join(each.name for each in schedules.listed(source))
    return UnknownSchedule(
        f"there is no schedule {name!r} (schedules: {known or 'none'}): put it into the configuration, or declare it "
        "with relay.declare_schedule"
    )
