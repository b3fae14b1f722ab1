"""Lists work queues and acts on them, while relay runs or not: `relay queue`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any, TypeVar

import psycopg

from relay.admin import acts
from relay.admin.acts import Acting, Done, FirstEvent, MessageCount, Missing, QueueRebuild, Subject
from relay.admin.connections import reach_target
from relay.admin.offsets import find_goal, moment_of
from relay.admin.phrases import counted
from relay.config.handlers import QueueHandler
from relay.config.settings import Settings
from relay.faults import ConfigurationError
from relay.retention import reader_positions
from relay.source.outbox.table import OutboxTable
from relay.store import actions, attempts, queues, states
from relay.store.attempts import KeptAttempt
from relay.store.positions import offsets
from relay.store.queues import MessageSelection, QueueFigures, QueueItem

Changed = TypeVar("Changed")


class UnknownQueue(Missing):
    """The group fills no queue of this name."""


def listed(settings: Settings) -> list[QueueFigures]:
    """Read the figures of the group's queues. Raises ConfigurationError, psycopg.Error."""
    with reach_target(settings) as target:
        return queues.figures(target, settings.group)


def shown(
    settings: Settings, name: str, wanted: MessageSelection, limit: int
) -> tuple[QueueFigures, list[QueueItem]]:
    """Read the figures of a queue, and at most `limit` of its items that a filter selects, the oldest first.

    Without states, done ones are none of them. Raises UnknownQueue, ConfigurationError, psycopg.Error.
    """
    if wanted.states is None:
        wanted = wanted.model_copy(update={"states": list(states.UNDONE)})
    with reach_target(settings) as target:
        figures = _figures(target, settings, name)
        return figures, queues.items(target, name, wanted, limit)


def attempts_of(settings: Settings, item: QueueItem) -> list[KeptAttempt]:
    """Read the last attempts of a message that are kept, the newest first. Raises ConfigurationError, psycopg.Error."""
    with reach_target(settings) as target:
        kept = attempts.of_event(target, settings.group, item.event_id)
    return [each for each in kept if each.message_id == item.id]


QUEUE = Subject("queue", "QUEUE")


def _paused(act: Acting, paused: bool) -> bool:
    require_known(act.target, act.settings, act.name)
    return queues.pause(act.target, act.name, paused)


pause, resume = acts.pauses(
    QUEUE,
    "Let nobody take from a queue; relay fills it all the same.",
    "Let workers take from a paused queue again.",
    _paused,
)


@acts.declare(QUEUE, "purge", answers=MessageCount, asks=True)
def purge(act: Acting) -> Done:
    """Delete the messages of a queue but those that workers have. Its dead letters stay: see `relay dlq discard`."""
    figures = _figures(act.target, act.settings, act.name)
    messages = counted(figures.undone - figures.leased, "message is", "messages are")
    act.ask(f"{messages} deleted. Its dead letters stay.")
    deleted = queues.purge(act.target, act.name)
    return Done(
        f"{counted(deleted, 'message', 'messages')} deleted",
        {"changed": deleted} if deleted else None,
        MessageCount(deleted),
    )


@acts.declare(QUEUE, "drop", asks=True, removes=True)
def drop(act: Acting) -> Done:
    """Drop a queue with its messages; a worker that declares it makes it again."""
    for handler, of in act.settings.handlers.items():
        if isinstance(of, QueueHandler) and (of.queue or handler) == act.name:
            raise ConfigurationError(
                f"handlers.{handler} puts events into the queue {act.name}, without which relay ends: remove the "
                "handler first"
            )
    figures = _figures(act.target, act.settings, act.name)
    messages = counted(figures.undone, "message", "messages")
    dead = counted(figures.dead, "dead letter", "dead letters")
    act.ask(f"It is deleted with {messages} and {dead}.")
    queues.drop(act.target, act.name)
    return Done(f"queue {act.name} is dropped")


@acts.declare(QUEUE, "rebuild", answers=QueueRebuild, asks=True, plans=True)
def rebuild(act: Acting, from_: FirstEvent = "beginning") -> Done:
    """Empty a queue, with its dead letters, and let relay fill it from the log again."""
    if act.settings.source.mode == "wal":
        raise ConfigurationError(
            "source.mode: is wal, and past events are only in the slot, which the whole group reads: set it to auto"
        )
    figures = _figures(act.target, act.settings, act.name)
    start, begins = _beginning(act, from_)
    planned = QueueRebuild(begins, figures.undone, figures.dead, done=False)
    messages = counted(figures.undone, "message", "messages")
    dead = counted(figures.dead, "dead letter", "dead letters")
    said = (
        f"queue {act.name} is filled again, beginning {begins}\n"
        f"{messages} and {dead} are deleted, also those that are not in the log"
    )
    act.ask(said, planned)
    queues.rebuild(act.target, act.name, start)
    # Before the commit, so that retention keeps the events that are read again.
    reader = reader_positions.of_queue(act.name)
    reader_positions.accept(act.log, act.target, act.settings, [reader])
    return Done(said, {"changed": True}, replace(planned, done=True))


def _beginning(act: Acting, start: str) -> tuple[str, str]:
    """Return where a fill begins that an operator gives as OFFSET, TIME or beginning, as SQL takes it and in words."""
    if start != "beginning" and not start.isdecimal():
        try:
            start = moment_of(start, "from", lsn=False).isoformat()
        except ConfigurationError:
            raise ConfigurationError(
                f"from: {start!r} is neither a c_offset, a time such as 2026-03-01T12:00, nor beginning"
            ) from None
    table = OutboxTable(act.settings)
    goal = find_goal(act.settings, act.log, table, start, "from", lsn=False)
    oldest = table.oldest_offset(act.log)
    if oldest is not None and offsets.FIRST < goal.polled_offset < oldest - 1:
        return start, f"at c_offset {oldest}, the oldest event"
    return start, goal.text


ACTS = (pause, resume, purge, rebuild, drop)


def _figures(target: psycopg.Connection[Any], settings: Settings, name: str) -> QueueFigures:
    """Read the figures of a queue. Raises UnknownQueue, psycopg.Error."""
    for found in queues.figures(target, settings.group, name):
        return found
    raise _unknown(target, settings, name)


def cancel(settings: Settings, name: str, wanted: MessageSelection, reason: str | None) -> int:
    """Cancel the messages of a queue that a filter selects, and that nobody has; returns how many.

    Raises ConfigurationError, psycopg.Error.
    """
    _require_selection(wanted, states.AT_REST)
    return _act(
        *(settings, name, "queue cancel", reason),
        lambda target: queues.cancel(target, name, wanted),
    )


def move(
    settings: Settings,
    name: str,
    wanted: MessageSelection,
    to: datetime | None,
    reason: str | None,
) -> int:
    """Give the messages that a filter selects, and that wait for their time, another one, None: now; returns how many.

    Raises ConfigurationError, psycopg.Error.
    """
    _require_selection(wanted, states.AT_REST)
    return _act(
        *(settings, name, "queue run" if to is None else "queue move", reason),
        lambda target: queues.move(target, name, wanted, to),
    )


def edit(settings: Settings, name: str, number: int, payload: str, reason: str | None) -> bool:
    """Give a message that nobody has, or a dead letter of a queue, another payload; returns whether there is one.

    Raises ConfigurationError if it is no JSON, psycopg.Error.
    """
    try:
        return _act(
            *(settings, name, "queue edit", reason),
            lambda target: queues.edit(target, name, number, payload, reason),
        )
    except psycopg.DataError as error:
        what = error.diag.message_primary or "is not text that PostgreSQL accepts"
        raise ConfigurationError(f"payload: is not JSON: {what}") from None


def _require_selection(wanted: MessageSelection, known: Sequence[str]) -> None:
    if wanted == MessageSelection():
        raise ConfigurationError(
            "name the messages by a filter, such as the id of an event, or a key: `relay queue purge` deletes all"
        )
    _require_states(wanted, known)


def _require_states(wanted: MessageSelection, known: Sequence[str]) -> None:
    unknown = [each for each in wanted.states or () if each not in known]
    if unknown:
        raise ConfigurationError(f"--state: {unknown[0]!r} is not {states.listed(tuple(known))}")


def _act(
    settings: Settings,
    name: str,
    action: str,
    reason: str | None,
    change: Callable[[psycopg.Connection[Any]], Changed],
) -> Changed:
    """Change a queue, and record the action where it has changed something. Raises UnknownQueue."""
    with reach_target(settings) as target, target.transaction():
        require_known(target, settings, name)
        changed = change(target)
        if changed:
            detail = {"queue": name, "changed": changed}
            actions.record(target, settings.group, "", action, reason, detail)
        return changed


def require_known(target: psycopg.Connection[Any], settings: Settings, name: str) -> None:
    """Raise UnknownQueue unless the group fills a queue of this name. Raises psycopg.Error."""
    if name not in queues.names(target, settings.group):
        raise _unknown(target, settings, name)


def _unknown(conn: psycopg.Connection[Any], settings: Settings, name: str) -> UnknownQueue:
    known = ", ".join(queues.names(conn, settings.group))
    return UnknownQueue(
        f"there is no queue {name!r} that group {settings.group} fills (its queues: {known or 'none'}): "
        "declare it with relay.declare_queue"
    )
