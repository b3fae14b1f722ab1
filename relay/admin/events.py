"""Says where an event is, what caused it and what it has caused, while relay runs or not; searches for events."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from relay import causes
from relay.admin.connections import reach_source, reach_target
from relay.admin.deferred import DeferredTransactions
from relay.admin.sinks import MOVES
from relay.config.handlers import DeliveryHandler
from relay.config.settings import Settings
from relay.faults import ConfigurationError
from relay.model.events import Event
from relay.pipeline.routing import RouteRules
from relay.source.outbox.applied import (
    ReadPosition,
    position_of_mark,
    position_of_sink,
    position_of_target,
)
from relay.source.outbox.search import (
    SHOWN,
    EventPage,
    EventRow,
    EventSearch,
    SearchedOutbox,
)
from relay.source.outbox.unread import UnreadRows
from relay.store import actions, attempts, event_states
from relay.store.attempts import KeptAttempt
from relay.store.connections import Connection
from relay.store.dead_letters import queue_of
from relay.store.event_states import EventAction, StoredState
from relay.store.positions import sinks

TARGET, SINK, QUEUE = "target", "sink", "queue"
_PASSED = {
    TARGET: "applied, unless a handler dropped it, or the group began after it or was moved past it",
    SINK: "delivered, unless the sink dropped it, began after it or was moved past it",
}
_AT_ONCE = "delivered at the first attempt, unless what was kept of its attempts is gone"
"""The same where it is known that the sink was not moved past it, and attempts that end otherwise are kept."""
_BEFORE = "the sink began after it"
"""What may have become of an event that a position has passed, and of which nothing is stored."""
_MOST_MOVES = 100
_MOST_RELATED = 50
"""How many causes of an event are followed, and how many events that it has caused are shown."""


class UnknownEvent(ConfigurationError):
    """Neither the outbox nor the target knows an event of this id."""


@dataclass(frozen=True, slots=True)
class EventDestination:
    """Where an event goes, and how far it is there.

    `kind` is target, sink or queue, `name` that of the sink or queue; `handlers` are those of the target. `state` is
    waiting, delivered, dropped, skipped, before, passed, unrouted, deferred, cancelled, dead, replaying, replayed,
    discarded or that of a message of a queue; unknown for a sink that has never been worked. `delivered` and `dropped`
    are of an attempt that is kept; an operator has moved the sink past what is `skipped`, and it began after what is
    `before`. `passed` is all that a position says, and `reason` what it may be. `reference` is the id of its dead
    letter, deferred transaction or message, `until` when it is tried next.
    """

    kind: str
    name: str
    handlers: tuple[str, ...]
    state: str
    attempts: int | None = None
    since: datetime | None = None
    until: datetime | None = None
    reason: str | None = None
    reference: int | None = None


@dataclass(frozen=True, slots=True)
class RelatedEvent:
    """An event that another one has caused, or was caused by; without a type if the outbox does not have it."""

    id: str
    event_type: str | None
    event_ts: str | None


@dataclass(frozen=True, slots=True)
class FoundEvent(EventRow):
    """An event, and its destinations. If the outbox has it no more, all its fields but the id are None.

    `caused_by` is its cause, the cause of that, and so on; `caused` are the events that name it as their cause, None
    if that is not known. `actions` are those on its dead letters, `attempts` those that are kept of it, the newest
    first.
    """

    in_outbox: bool
    destinations: tuple[EventDestination, ...]
    caused_by: tuple[RelatedEvent, ...] = ()
    caused: tuple[RelatedEvent, ...] | None = ()
    actions: tuple[EventAction, ...] = ()
    attempts: tuple[KeptAttempt, ...] = ()


def find(settings: Settings, event_id: str) -> FoundEvent:
    """Find an event by its id, with its state at each destination that today's routes give it.

    Raises UnknownEvent, ConfigurationError if a database cannot be reached, psycopg.Error.
    """
    if "\0" in event_id:
        raise UnknownEvent("an id has no NUL character")
    rows = UnreadRows(settings)
    with reach_source(settings) as source, reach_target(settings) as target:
        event = rows.event(source, event_id)
        handlers = RouteRules(settings.routes).handlers(event) if event else ()
        read = _positions(settings, target)
        # After the positions: what has become of an event commits together with the position that passes it.
        stored = event_states.of(
            target,
            settings.group,
            event_id,
            event.text("transaction_id") if event else None,
            DeferredTransactions(settings, target).having(
                event_id, offset=event.c_offset if event else None
            ),
        )
        acted = event_states.actions(target, settings.group, event_id) if stored else []
        kept = attempts.of_event(target, settings.group, event_id)
        caused_by = tuple(_causes(rows, source, event)) if event else ()
        caused = SearchedOutbox(settings).caused(source, event_id, _MOST_RELATED) if event else []
        passed = {
            name: rows.has_read(source, at, event_id)
            for name, at in read.items()
            if event and name in ("", *handlers)
        }
        stored += _done(kept, {each.name for each in stored if each.found == "message"})
        stored += _known(settings, rows, source, target, event_id, kept, passed)
    if event is None and not stored and not kept:
        raise UnknownEvent(
            f"there is no event {event_id!r}: neither {settings.source.table} nor the dead letters and queues have it"
        )
    return FoundEvent(
        id=event_id,
        in_outbox=event is not None,
        **{name: event.text(name) if event else None for name in SHOWN},
        destinations=tuple(_destinations(settings, event, handlers, stored, passed)),
        caused_by=caused_by,
        caused=None
        if caused is None
        else tuple(RelatedEvent(each.id, each.event_type, each.event_ts) for each in caused),
        actions=tuple(acted),
        attempts=tuple(kept),
    )


def search(settings: Settings, wanted: EventSearch, before: str | None, limit: int) -> EventPage:
    """Find the newest events of the outbox that a search selects, or those before `next` of another page.

    Raises ConfigurationError, psycopg.Error.
    """
    with reach_source(settings) as source:
        return SearchedOutbox(settings).newest(source, wanted, before, limit)


def _causes(rows: UnreadRows, source: Connection, event: Event) -> Iterator[RelatedEvent]:
    """Yield the event's cause, the cause of that, and so on, as far as the outbox has them."""
    cause: Event | None = event
    known = {event.text("id")}
    while cause is not None and len(known) <= _MOST_RELATED:
        metadata = causes.metadata_of(cause)
        number = metadata.get(causes.CAUSATION) if isinstance(metadata, Mapping) else None
        if not isinstance(number, str) or number in known or "\0" in number:
            return
        known.add(number)
        cause = rows.event(source, number)
        yield RelatedEvent(
            number,
            None if cause is None else cause.text("event_type"),
            None if cause is None else cause.text("event_ts"),
        )


def _positions(settings: Settings, target: Connection) -> dict[str, ReadPosition]:
    """What the target, with the name '', and each sink have read."""
    group = settings.group
    stored = sinks.read(target, group, settings.sink_handlers.keys())
    return {
        "": position_of_target(target, group),
        **{each.sink: position_of_sink(target, group, each) for each in stored},
    }


def _done(kept: Sequence[KeptAttempt], stored: Set[str]) -> Iterator[StoredState]:
    """Yield the messages that were dropped, or had failed and are done, of queues where none of the event is stored."""
    last = {queue_of(each.consumer): each for each in reversed(kept)}
    for queue, each in last.items():
        if queue is not None and queue not in stored and each.outcome != "failed":
            yield StoredState(
                *("message", queue, each.message_id, "done", each.number, each.began_at),
                until=None,
                reason=each.error,
            )


def _known(
    settings: Settings,
    rows: UnreadRows,
    source: Connection,
    target: Connection,
    event_id: str,
    kept: Sequence[KeptAttempt],
    passed: Mapping[str, bool | None],
) -> Iterator[StoredState]:
    """Yield what is known of an event at sinks that have passed it, or that the outbox has no more.

    What the target stores of it beside attempts says more.
    """
    last = {each.consumer: each for each in reversed(kept)}
    for sink, attempt in last.items():
        if queue_of(sink) is None and attempt.outcome != "failed" and passed.get(sink) is not False:
            yield StoredState(
                "attempt",
                sink,
                None,
                attempt.outcome,
                sum(each.consumer == sink for each in kept),
                attempt.began_at,
                None,
                attempt.error or attempt.destination,
            )
    began = sinks.begun(target, settings.group)
    for sink in (name for name, has in passed.items() if has and name in began.keys() - last):
        moves = [
            each
            for each in actions.recent(target, settings.group, _MOST_MOVES, sink)
            if each.action in MOVES
        ]
        found = _left_out(
            lambda mark: bool(rows.has_read(source, position_of_mark(mark), event_id)),
            began[sink],
            moves[::-1],
        )
        if found is not None and (found[0] != "passed" or _keeps_failures(settings, sink)):
            state, since, reason = found
            yield StoredState("left out", sink, None, state, None, since, None, reason)


def _keeps_failures(settings: Settings, sink: str) -> bool:
    handler = settings.handlers[sink]
    return (
        isinstance(handler, DeliveryHandler)
        and (handler.attempts or settings.attempts.record) != "none"
    )


def _left_out(
    had_read: Callable[[Mapping[str, Any]], bool],
    began: Mapping[str, Any],
    moves: Sequence[actions.Action],
) -> tuple[str, datetime | None, str] | None:
    """Whether a sink began after an event or was moved past it, since when, and why, by its positions of then.

    None where it is not known of each move from where it led to where.
    """
    found: tuple[str, datetime | None, str] = "passed", None, _AT_ONCE
    if had_read(began):
        found = "before", None, _BEFORE
    for move in moves:
        marks = (move.detail or {}).get("positions", {})
        before, after = marks.get("from"), marks.get("to")
        if before is None or after is None:
            return None
        if not had_read(after):
            found = "passed", None, _AT_ONCE
        elif not had_read(before):
            why = f"{move.action} by {move.who}: {move.reason or '-'}"
            found = "skipped", move.acted_at, why
    return found


def _destinations(
    settings: Settings,
    event: Event | None,
    handlers: Sequence[str],
    stored: Sequence[StoredState],
    passed: Mapping[str, bool | None],
) -> Iterator[EventDestination]:
    own = tuple(name for name in handlers if name not in settings.sink_handlers)
    kept = {each.name: each for each in reversed(stored) if each.found != "message"}
    queued = [each for each in stored if each.found == "message"]
    if own or "" in kept or (event and not handlers and not queued):
        done = "passed" if own else "unrouted"
        yield _destination(TARGET, "", own, done, kept.get(""), passed.get(""))
    routed = [name for name in handlers if name in settings.sink_handlers]
    for name in dict.fromkeys((*routed, *filter(None, kept))):
        yield _destination(SINK, name, (), "passed", kept.get(name), passed.get(name))
    for each in queued:
        yield _stored(QUEUE, each.name, (), each)


def _destination(
    kind: str,
    name: str,
    handlers: tuple[str, ...],
    done: str,
    kept: StoredState | None,
    passed: bool | None,
) -> EventDestination:
    if kept is not None:
        return _stored(kind, name, handlers, kept)
    state = "unknown" if passed is None else done if passed else "waiting"
    reason = _PASSED[kind] if state == "passed" else None
    return EventDestination(kind, name, handlers, state, reason=reason)


def _stored(kind: str, name: str, handlers: tuple[str, ...], kept: StoredState) -> EventDestination:
    return EventDestination(
        kind,
        name,
        handlers,
        kept.state,
        kept.attempts,
        kept.since,
        kept.until,
        kept.reason,
        kept.id,
    )
