"""Lists sagas and acts on them, while workers run or not: `relay saga`."""

from __future__ import annotations

from typing import Any

import psycopg

from relay.admin.connections import reach_target
from relay.config.settings import Settings
from relay.faults import ConfigurationError
from relay.store import actions, sagas, states
from relay.store.sagas import SagaEntry, SagaRow, SagaSelection


def listed(settings: Settings, wanted: SagaSelection, limit: int) -> list[SagaRow]:
    """Read the sagas of the group that a filter selects, the oldest first; by default those that have not ended.

    Raises ConfigurationError if there is no such state, psycopg.Error.
    """
    unknown = [each for each in wanted.states or () if each not in states.SAGAS]
    if unknown:
        raise ConfigurationError(f"--state: {unknown[0]!r} is not {states.listed(states.SAGAS)}")
    with reach_target(settings) as target:
        return sagas.listed(target, settings.group, wanted, limit)


def shown(settings: Settings, number: int) -> tuple[SagaRow, list[SagaEntry]]:
    """Read a saga and what has happened in it. Raises ConfigurationError if there is none, psycopg.Error."""
    with reach_target(settings) as target:
        return _named(target, settings, number), sagas.entries(target, number)


def steer(
    settings: Settings, number: int, act: str, reason: str | None, result: str | None = None
) -> bool:
    """Act on a saga as `relay.steer_saga` does; returns whether there was something to do.

    Raises ConfigurationError if there is no such saga, it is in a step, or the result is no JSON; psycopg.Error.
    """
    with reach_target(settings) as target, target.transaction():
        saga = _named(target, settings, number)
        try:
            changed = sagas.steer(target, saga.saga, number, act, reason, result)
        except psycopg.errors.LockNotAvailable as error:
            raise ConfigurationError(str(error.diag.message_primary)) from None
        except psycopg.DataError as error:
            raise ConfigurationError(f"result: {error.diag.message_primary}") from None
        if changed:
            detail = {"saga": saga.saga, "id": number}
            actions.record(target, settings.group, "", f"saga {act}", reason, detail)
        return changed


def _named(target: psycopg.Connection[Any], settings: Settings, number: int) -> SagaRow:
    found = sagas.listed(target, settings.group, SagaSelection(id=number), 1)
    if not found:
        raise ConfigurationError(
            f"the group {settings.group} has no saga {number}: `relay saga list` lists them"
        )
    return found[0]
