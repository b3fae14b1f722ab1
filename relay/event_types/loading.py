"""Loads the models and upcasters that the configuration names under `events`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from relay.config.event_types import EventsSettings, EventTypeSettings
from relay.config.imports import find, find_function
from relay.event_types.registry import EventType, EventTypes
from relay.faults import ConfigurationError


def registered(events: EventsSettings) -> list[EventType]:
    """Return a configuration's event types, sorted by name. Raises ConfigurationError with a line for each fault."""
    problems: list[str] = []
    types = list(_from_code(events) if isinstance(events, str) else _from_file(events, problems))
    for each in types:
        problems += each.problems()
    if problems:
        raise ConfigurationError("\n".join(problems))
    return sorted(types, key=lambda each: each.name)


def _from_code(path: str) -> EventTypes:
    registry = find("events", path)
    if not isinstance(registry, EventTypes):
        raise ConfigurationError(
            f"events: {path!r} is not a registry: name an object of relay.EventTypes"
        )
    return registry


def _from_file(events: Mapping[str, EventTypeSettings], problems: list[str]) -> Iterator[EventType]:
    """Yield the types whose modules can be imported; adds a line to `problems` for each of the others."""
    for name, each in events.items():
        key = f"events.{name}"
        try:
            model = None if each.model is None else find(f"{key}.model", each.model)
            upcasters = {
                version: find_function(f"{key}.upcast.{version}", path, "payload")
                for version, path in sorted(each.upcast.items())
            }
        except ConfigurationError as error:
            problems.append(str(error))
        else:
            yield EventType(name, each.version, model, upcasters, each.version_from)
