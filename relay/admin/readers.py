"""Lists the readers of the log and acts on them: `relay reader`."""

from __future__ import annotations

from collections.abc import Callable

import psycopg

from relay.admin.connections import reach_source, reach_target
from relay.admin.publish import require_own_outbox
from relay.config.settings import Settings
from relay.faults import ConfigurationError, first_line
from relay.store import actions, log_readers
from relay.store.connections import Connection
from relay.store.log_readers import ReaderRow


class UnknownReader(ConfigurationError):
    """The outbox has no reader of this name."""


def listed(settings: Settings) -> list[ReaderRow]:
    """Read the readers of the outbox. Raises ConfigurationError, psycopg.Error."""
    require_own_outbox(settings)
    with reach_source(settings) as source:
        return log_readers.listed(source)


def shown(settings: Settings, name: str) -> ReaderRow:
    """Read one reader. Raises UnknownReader, ConfigurationError, psycopg.Error."""
    require_own_outbox(settings)
    with reach_source(settings) as source:
        return _named(source, name)


def seek(settings: Settings, name: str, to: str, reason: str | None) -> None:
    """Move a reader to `now`, `beginning` or a position. Raises ConfigurationError, psycopg.Error."""
    _act(settings, name, "reader seek", reason, lambda source: log_readers.seek(source, name, to))


def drop(settings: Settings, name: str, reason: str | None) -> None:
    """Drop a reader. Raises ConfigurationError, psycopg.Error."""
    _act(settings, name, "reader drop", reason, lambda source: log_readers.drop(source, name))


def _act(
    settings: Settings,
    name: str,
    action: str,
    reason: str | None,
    act: Callable[[Connection], None],
) -> None:
    require_own_outbox(settings)
    with reach_source(settings) as source:
        _named(source, name)
        try:
            act(source)
        except (
            psycopg.errors.InvalidParameterValue,
            psycopg.errors.ObjectNotInPrerequisiteState,
        ) as error:
            raise ConfigurationError(first_line(error).removeprefix("relay: ")) from error
    with reach_target(settings) as target:
        actions.record(target, settings.group, "", action, reason, {"reader": name})


def _named(source: Connection, name: str) -> ReaderRow:
    found = log_readers.listed(source, name)
    if found:
        return found[0]
    names = ", ".join(each.name for each in log_readers.listed(source))
    raise UnknownReader(f"the outbox has no reader {name!r} (it has {names or 'none'})")
