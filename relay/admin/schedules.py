"""Lists schedules and acts on them, while relay runs or not, also through a pooler: `relay schedule`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from datetime import datetime
from threading import Event
from uuid import UUID

from relay.admin.connections import reach_source, reach_target
from relay.config.settings import Settings
from relay.faults import ConfigurationError
from relay.schedules import steps
from relay.schedules.ticking import Ticker
from relay.store import actions, schedules
from relay.store.connections import Connection
from relay.store.schedules import ScheduleRow

_NAMED = 20
"""At most so many schedules does an error name."""


class UnknownSchedule(ConfigurationError):
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


def pause(settings: Settings, name: str, paused: bool, reason: str | None) -> bool:
    """Pause a schedule or let it go on; returns whether that changed anything.

    Raises UnknownSchedule, ConfigurationError, psycopg.Error.
    """
    with _acting(settings) as (source, target):
        if schedules.named(source, name) is None:
            raise _unknown(settings, source, name)
        changed = schedules.pause(source, name, paused)
        if changed:
            action = "schedule pause" if paused else "schedule resume"
            actions.record(target, settings.group, "", action, reason, {"schedule": name})
    return changed


def run_now(settings: Settings, name: str, reason: str | None) -> UUID:
    """Publish a schedule's event beside its times; returns its id.

    Raises UnknownSchedule, ConfigurationError, psycopg.Error.
    """
    with _acting(settings) as (source, target):
        published = schedules.run_now(source, name)
        if published is None:
            raise _unknown(settings, source, name)
        detail = {"schedule": name, "event_id": str(published)}
        actions.record(target, settings.group, "", "schedule run-now", reason, detail)
    return published


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


@contextmanager
def _acting(settings: Settings) -> Iterator[tuple[Connection, Connection]]:
    """Open connections to source and target: nothing is done that the target cannot record."""
    _require_own_outbox(settings)
    with (
        reach_target(settings, pooled=True) as target,
        reach_source(settings, pooled=True) as source,
    ):
        yield source, target


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
