"""`EventTypes`, a registry of event types in code. The configuration names it: `events: module:name`.

An event type has a current version. A pydantic model describes that version's payload, and for each older version an
upcaster, a function from a payload to that of the next version.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from typing import TypeVar

from relay.config.imports import find, find_function
from relay.config.settings import (
    VERSION_FROM,
    EventsSettings,
    EventTypeSettings,
    check_version_from,
)
from relay.event_types.event_type import EventType, Model, Upcaster
from relay.event_types.upcasting import Upcasting
from relay.faults import ConfigurationError
from relay.model.events import Event

ModelT = TypeVar("ModelT", bound=Model)
UpcasterT = TypeVar("UpcasterT", bound=Upcaster)


def _check_version(event_type: str, version: int) -> None:
    if version < 1:
        raise ValueError(f"{event_type}: {version} is not a version: versions count from 1")


class EventTypes:
    """A registry of event types, filled by decorators.

        events = EventTypes()

        @events.model("order.placed", version=2)
        class OrderPlaced(BaseModel): ...

        @events.upcast("order.placed", from_version=1)
        def with_currency(payload): ...

    `version_from` is the path to the version in an event. Raises ValueError if it leads into no field of an event.
    """

    def __init__(self, version_from: str = VERSION_FROM) -> None:
        self._version_from = check_version_from(version_from)
        self._types: dict[str, EventType] = {}

    def __iter__(self) -> Iterator[EventType]:
        return iter(self._types.values())

    def model(
        self, event_type: str, version: int = 1, *, version_from: str | None = None
    ) -> Callable[[ModelT], ModelT]:
        """Declare the model of an event type's current version. Raises ValueError if the type has one already."""
        _check_version(event_type, version)
        known = self._known(event_type)
        if known.model is not None:
            raise ValueError(f"{event_type}: has a model already: {known.model.__qualname__}")

        def register(model: ModelT) -> ModelT:
            path = known.version_from if version_from is None else check_version_from(version_from)
            # The type is read again: an upcaster may have been declared meanwhile.
            self._types[event_type] = replace(
                self._known(event_type), version=version, model=model, version_from=path
            )
            return model

        return register

    def upcast(self, event_type: str, from_version: int) -> Callable[[UpcasterT], UpcasterT]:
        """Declare the upcaster from a version to the next one. Raises ValueError if that version has one already."""
        _check_version(event_type, from_version)
        if from_version in self._known(event_type).upcasters:
            raise ValueError(f"{event_type}: has an upcaster from version {from_version} already")

        def register(upcaster: UpcasterT) -> UpcasterT:
            known = self._known(event_type)
            upcasters: dict[int, Upcaster] = {**known.upcasters, from_version: upcaster}
            self._types[event_type] = replace(known, upcasters=upcasters)
            return upcaster

        return register

    def current(self, event: Event) -> Event:
        """Return an event in the current version of its type; the same event if its type is not known.

        For readers of the log, after all types are declared. Raises InvalidEvent, and errors of upcasters.
        """
        return self._upcasting.current(event)

    @cached_property
    def _upcasting(self) -> Upcasting:
        problems = [problem for each in self for problem in each.problems()]
        if problems:
            raise ConfigurationError("\n".join(problems))
        return Upcasting(self)

    def _known(self, event_type: str) -> EventType:
        return self._types.get(event_type) or EventType(event_type, version_from=self._version_from)


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
