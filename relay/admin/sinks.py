"""Lists, pauses, resumes, moves and drops sinks, while relay runs or not: `relay sink`."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from typing import Annotated, Any
from urllib.parse import urlsplit

import psycopg

from relay.admin import acts, phrases
from relay.admin.acts import Acting, Count, Done, FirstEvent, Given, Missing, Moved, Subject
from relay.admin.connections import reach_source, reach_target
from relay.admin.offsets import cover_goal, find_goal, move_sink
from relay.admin.phrases import counted
from relay.admin.status import reading_outbox
from relay.config.settings import Settings
from relay.faults import ConfigurationError, Unreachable
from relay.retention import reader_positions
from relay.source.outbox.applied import ReadPosition, position_of_sink
from relay.source.outbox.table import OutboxTable
from relay.source.outbox.unread import Backlog, UnreadRows
from relay.store import (
    activity,
    admission,
    completeness,
    deferred,
    presence,
)
from relay.store.connections import Connection
from relay.store.deferred import selection as deferred_selection
from relay.store.positions import offsets, sinks

SINK = Subject("sink", "NAME", "The sink: a handler's name.", of_sink=True)
MOVES = "sink seek", "sink rebuild"
"""The actions that move a sink."""


@dataclass(frozen=True, slots=True)
class SinkStatus:
    """A sink of the group. `state` is attached, lagging, caught up or paused, or names what an operator has to do.

    `destination` is the type of the sink, and its host if it has a URL, without anything secret.
    `unread` counts the rows of the outbox that the sink has not read yet, and `oldest` is their least event_ts; None if
    the stream feeds the sink, or the rows cannot be counted. `seconds_left` is about how long it takes to read them, if
    it is known how fast it reads. `since` is when it was paused, or when its fault began. In a sink of type spark every
    event committed before `complete_before` is there; None where that is not known. `recent` has the delivery
    attempts of the last minutes, None if there were none.
    """

    name: str
    state: str
    unread: int | None
    oldest: datetime | None
    deferred: int
    fault: str | None
    since: datetime | None
    paused_by: str | None
    reason: str | None
    instance: str | None
    destination: str | None = None
    seconds_left: float | None = None
    recent: activity.RecentActivity | None = None
    complete_before: datetime | None = None

    @property
    def why(self) -> str | None:
        """Return why nothing is delivered: who has paused the sink, or the fault."""
        if self.paused_by is None:
            return self.fault
        return f"by {self.paused_by}: {self.reason}" if self.reason else f"by {self.paused_by}"

    def as_json(self) -> dict[str, Any]:
        """Return the sink as JSON values."""
        return {
            key: value.isoformat() if isinstance(value, datetime) else value
            for key, value in asdict(self).items()
        }


def listed(
    settings: Settings,
    away: Callable[[Unreachable], None] | None = None,
    deadline: float = math.inf,
) -> list[SinkStatus]:
    """List the configured sinks, and sinks that are no longer configured and have a position.

    `away` is called if the source cannot be reached: then nothing is counted. A count is None if it would begin after
    `deadline`, in seconds of the monotonic clock, or is ended by the session's statement_timeout. Raises
    ConfigurationError if a database cannot be reached or the group is not initialised.
    """
    with reach_target(settings) as target:
        offsets.initialised(target, settings.group)
        stored = sinks.read(target, settings.group, settings.sink_handlers)
        counts = deferred_selection.count_by_sink(target, settings.group)
        running = presence.instances(target, settings.group)
        positions = _positions(target, settings, stored, running)
        recent = activity.recent_attempts(target, settings.group)
        marks = completeness.watermarks(target, settings.group, counts=False)
    complete = {each.reader: each.complete_before for each in marks}
    unread: dict[str, Backlog] = {}
    try:
        unread = _count(settings, positions, deadline)
    except Unreachable as error:
        if away is None:
            raise
        away(error)
    return [
        SinkStatus(
            name=each.sink,
            state=each.state_in(running),
            unread=unread[each.sink].events if each.sink in unread else None,
            oldest=unread[each.sink].oldest if each.sink in unread else None,
            deferred=counts.get(each.sink, 0),
            fault=each.fault,
            since=each.paused_at or each.fault_since,
            paused_by=each.paused_by,
            reason=each.reason,
            instance=each.instance,
            destination=_destination(settings, each.sink),
            seconds_left=_seconds_left(each, unread.get(each.sink), recent.get(each.sink)),
            recent=recent.get(each.sink),
            complete_before=complete.get(each.sink),
        )
        for each in stored
    ]


def _positions(
    target: Connection, settings: Settings, stored: Sequence[sinks.StoredSink], running: list[str]
) -> dict[str, ReadPosition]:
    """Read the positions of the sinks that read the outbox themselves."""
    return {
        each.sink: position_of_sink(target, settings.group, each)
        for each in reading_outbox(stored, running)
    }


def _count(
    settings: Settings, positions: Mapping[str, ReadPosition], deadline: float = math.inf
) -> dict[str, Backlog]:
    """Count what sinks have not read. A count is missing if it would begin after `deadline`, or is ended in time."""
    unread: dict[str, Backlog] = {}
    with reach_source(settings) as source:
        rows = UnreadRows(settings)
        for name, position in positions.items():
            if time.monotonic() > deadline:
                break
            with suppress(psycopg.errors.QueryCanceled):
                unread[name] = rows.count(source, position)
    return unread


def _destination(settings: Settings, sink: str) -> str | None:
    """The type of a sink, and the host of its URL: user, path and query may be secret."""
    if sink not in settings.sink_handlers:
        return None
    handler = settings.handlers[sink]
    url = getattr(handler, "url", None)
    host = urlsplit(url).netloc.rpartition("@")[2] if isinstance(url, str) else ""
    return " ".join(filter(None, (handler.type, host)))


def _seconds_left(
    sink: sinks.StoredSink,
    unread: Backlog | None,
    recent: activity.RecentActivity | None,
) -> float | None:
    if sink.state != sinks.LAGGING or sink.fault or not unread or not unread.events:
        return None
    if recent is None or not recent.rows_per_second:
        return None
    return unread.events / recent.rows_per_second


def lag_seconds(settings: Settings) -> dict[str, float]:
    """Return the age in seconds of the oldest event that each sink has not read, by event_ts, if it is known.

    Raises ConfigurationError like `listed`.
    """
    with reach_target(settings) as target:
        offsets.initialised(target, settings.group)
        stored = sinks.read(target, settings.group, settings.sink_handlers)
        running = presence.instances(target, settings.group)
        positions = _positions(target, settings, stored, running)
    unread = _count(settings, positions)
    ages = {name: backlog.oldest_seconds for name, backlog in unread.items()}
    return {name: max(0.0, age) for name, age in ages.items() if age is not None}


def _paused(act: Acting, paused: bool) -> bool:
    require_begun(act.target, act.settings, act.name)
    if not paused:
        _require_held(act)
    return sinks.pause(act.target, act.group, act.name, paused, act.reason)


def _moved(act: Acting, to: str, option: str) -> Done:
    """Move a sink to `to` (OFFSET, TIME, beginning or end), while relay runs or not."""
    require_begun(act.target, act.settings, act.name)
    if act.settings.source.mode == "wal":
        raise ConfigurationError(
            "source.mode: is wal, and past events are only in the slot, which the whole group reads: move the "
            "group with `relay offsets seek`, or set source.mode: auto"
        )
    if "/" in to:
        raise ConfigurationError(
            f"{option}: {to!r} is a position in the WAL, which the whole group reads: give a c_offset or a time"
        )
    goal = find_goal(act.settings, act.log, OutboxTable(act.settings), to, option, lsn=False)
    before = sinks.mark(act.target, act.group, act.name)
    given_up = move_sink(act.target, act.settings, act.name, goal)
    said = "\n".join([f"sink {act.name} goes on {goal.text}", *phrases.given_up(given_up)])
    moved = Moved(goal.text, given_up.dead, given_up.deferred, done=False)
    act.ask(said, moved)
    marks = {"from": before, "to": sinks.mark(act.target, act.group, act.name)}
    # Before the commit, so that retention keeps the events that are read again.
    reader_positions.accept(act.log, act.target, act.settings, [act.name])
    cover_goal(act.log, act.target, act.settings, goal)
    detail = {"goes on": goal.text, **given_up._asdict(), "positions": marks}
    return Done(said, detail, replace(moved, done=True))


@acts.declare(SINK, "seek", answers=Moved, asks=True, plans=True)
def seek(
    act: Acting,
    to: Annotated[str, Given("The new position.", metavar="OFFSET|TIME|beginning|end")],
) -> Done:
    """Move a sink to another position; the other sinks keep theirs."""
    return _moved(act, to, "to")


@acts.declare(SINK, "rebuild", answers=Moved, asks=True, plans=True)
def rebuild(act: Acting, from_: FirstEvent = "beginning") -> Done:
    """Deliver everything to a sink again; the other sinks keep their positions."""
    return _moved(act, from_, "from")


pause, resume = acts.pauses(
    SINK,
    "Pause a sink: it keeps its position, nothing is lost, and the other sinks go on.",
    "Resume a paused sink at its position.",
    _paused,
)


@acts.declare(SINK, "drop", answers=Count, asks=True, removes=True)
def drop(act: Acting) -> Done:
    """Delete position and deferred transactions of a sink that is no longer configured; its dead letters stay."""
    # A configuration that has it, this one or that of an instance, would create it again, at its `start`.
    if act.name in act.settings.sink_handlers:
        raise ConfigurationError(
            f"handlers.{act.name}: is configured: take it out first, or run `relay sink pause {act.name}`"
        )
    require_begun(act.target, act.settings, act.name)
    if act.name in admission.running_handlers(act.target, act.group):
        raise ConfigurationError(
            f"handlers.{act.name}: an instance of group {act.group!r} runs with a configuration that still has "
            "it: restart all instances without it first"
        )
    sinks.remove(act.target, act.group, [act.name])
    deleted = deferred.forget(act.target, act.group, act.name)
    what = counted(deleted, "deferred transaction", "deferred transactions")
    act.ask(f"Its position is deleted, with {what}. Its dead letters stay.")
    return Done(f"sink {act.name} is dropped, with {what}", {"deferred": deleted}, Count(deleted))


def _require_held(act: Acting) -> None:
    """Raise ConfigurationError if retention has given the sink up."""
    if act.name in reader_positions.given_up(act.source, act.target, act.group):
        raise ConfigurationError(
            f"handlers.{act.name}: was given up by retention (max_lag), and events that it has not read may be gone: "
            f"choose its position with `relay sink seek {act.name} --to …`, then resume it"
        )


def require_begun(target: Connection, settings: Settings, name: str) -> None:
    """Raise Missing unless there is such a sink, ConfigurationError unless the group has a position of it."""
    stored = sinks.read(target, settings.group, settings.sink_handlers)
    known = [each.sink for each in stored if each.state != sinks.NEW]
    if name in settings.sink_handlers and name not in known:
        raise ConfigurationError(
            f"handlers.{name}: the sink has not begun: run `relay init`, or start relay"
        )
    if name in settings.handlers and name not in known:
        raise ConfigurationError(
            f"handlers.{name}: is not a sink but a transactional handler: move the group with `relay offsets seek`"
        )
    if name not in known:
        raise Missing(
            f"there is no sink {name!r} in group {settings.group!r} (sinks: {', '.join(known) or 'none'})"
        )


ACTS = (pause, resume, seek, rebuild, drop)
