"""Lists sagas and acts on them, while workers run or not: `relay saga`."""

from __future__ import annotations

from typing import Annotated

import psycopg

from relay.admin import acts
from relay.admin.acts import Acting, Done, Given, Missing, Subject
from relay.admin.connections import reach_target
from relay.config.settings import Settings
from relay.faults import ConfigurationError
from relay.store import sagas
from relay.store.connections import Connection
from relay.store.sagas import SagaEntry, SagaRow, SagaSelection


class UnknownSaga(Missing):
    """The group has no saga of this id."""


def listed(settings: Settings, wanted: SagaSelection, limit: int, after: int = 0) -> list[SagaRow]:
    """Read the sagas of the group that a filter selects, the oldest first. Raises psycopg.Error."""
    with reach_target(settings) as target:
        return sagas.listed(target, settings.group, wanted, limit, after)


def shown(
    settings: Settings, name: str, limit: int | None = None, after: int = 0
) -> tuple[SagaRow, list[SagaEntry]]:
    """Read a saga by its id, and what has happened in it from a number on. Raises UnknownSaga, psycopg.Error."""
    with reach_target(settings) as target:
        found = _named(target, settings, name)
        return found, sagas.entries(target, found.id, limit, after)


SAGA = Subject("saga", "ID", "The id of the saga: see `relay saga list`.")


@acts.declare(SAGA, "skip")
def skip(
    act: Acting,
    result: Annotated[str | None, Given("What the step returns.", metavar="JSON")] = None,
) -> Done:
    """Let the step that fails, or its undo, count as done: somebody has done it by hand."""
    return _steer(act, "skip", result)


@acts.declare(SAGA, "undo", asks=True)
def undo(act: Acting) -> Done:
    """Let a saga fail: what it has done is undone, the last step first."""
    return _steer(act, "undo")


@acts.declare(SAGA, "give-up", asks=True)
def give_up(act: Acting) -> Done:
    """End a saga as it is: nothing more is done, and nothing undone."""
    return _steer(act, "give up")


@acts.declare(SAGA, "resume")
def resume(act: Acting) -> Done:
    """Let a saga that is stuck, or that waits for its next attempt, go on now."""
    return _steer(act, "resume")


ACTS = (skip, undo, give_up, resume)


def _steer(act: Acting, what: str, result: str | None = None) -> Done:
    """Act on a saga as `relay.steer_saga` does. Raises UnknownSaga, ConfigurationError where it is in a step."""
    saga = _named(act.target, act.settings, act.name)
    try:
        changed = sagas.steer(act.target, saga.saga, saga.id, what, act.reason, result)
    except psycopg.errors.LockNotAvailable as error:
        raise ConfigurationError(str(error.diag.message_primary)) from None
    except psycopg.DataError as error:
        raise ConfigurationError(f"result: is not JSON: {error.diag.message_primary}") from None
    if not changed:
        raise ConfigurationError(f"saga {saga.id} is {saga.state}: there is nothing to {what}")
    now = _named(act.target, act.settings, act.name)
    act.ask(f"Saga {saga.id} of {saga.saga}, with the key {saga.key}, is {now.state} then.")
    return Done(f"saga {saga.id} is {now.state}", {"name": saga.saga, "key": saga.key})


def _named(target: Connection, settings: Settings, name: str) -> SagaRow:
    wanted = SagaSelection(id=int(name)) if name.isdecimal() and len(name) < 19 else None
    found = [] if wanted is None else sagas.listed(target, settings.group, wanted, 1)
    if not found:
        raise UnknownSaga(
            f"the group {settings.group} has no saga {name}: `relay saga list` lists them"
        )
    return found[0]
