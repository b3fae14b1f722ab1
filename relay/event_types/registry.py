"""`EventTypes`, a registry of event types in code. The configuration names it: `events: module:name`.

An event type has a current version. A pydantic model describes that version's payload, and for each older version an
upcaster, a function from a payload to that of the next version.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel

from relay.config.imports import find, find_function, unfinished_kind, wrong_arguments
from relay.config.settings import (
    VERSION_FROM,
    EventsSettings,
    EventTypeSettings,
    check_version_from,
)
from relay.faults import ConfigurationError
from relay.model.events import Event

if TYPE_CHECKING:
    from relay.event_types.upcasting import Upcasting

Upcaster = Callable[[Any], Any]
"""Takes the payload of one version, as `json` reads it, and returns that of the next. It may change its argument."""
Model = type[BaseModel]
ModelT = TypeVar("ModelT", bound=Model)
UpcasterT = TypeVar("UpcasterT", bound=Upcaster)


@dataclass(frozen=True, slots=True)
class EventType:
    """A type of events: the current version, its model, and the upcasters by the version that they take.

    Without `version`, the current version is the one after the last upcaster, or 1. `version_from` is the path to the
    version in payload or metadata; an event without a value at this path has version 1.
    """

    name: str
    version: int | None = None
    model: Model | None = None
    upcasters: Mapping[int, Upcaster] = field(default_factory=dict)
    version_from: str = VERSION_FROM

    @property
    def current(self) -> int:
        """The current version."""
        return max(self.upcasters, default=0) + 1 if self.version is None else self.version

    @property
    def oldest(self) -> int:
        """The oldest version that can be upcast."""
        return min(self.upcasters, default=self.current)

    def problems(self) -> Iterator[str]:
        """Yield a line for each fault, which begins with the configuration key."""
        key = f"events.{self.name}"
        model: Any = self.model
        if model is not None and not (isinstance(model, type) and issubclass(model, BaseModel)):
            yield f"{key}.model: is not a pydantic model: name a class that derives from pydantic.BaseModel"
        elif model is not None and model.model_rebuild(raise_errors=False) is False:
            yield f"{key}.model: {model.__qualname__} refers to a type that is not defined: define or import it"
        for version in sorted(self.upcasters):
            if not 1 <= version < self.current:
                yield (
                    f"{key}.upcast.{version}: cannot lead to the current version {self.current}: set version to "
                    f"{version + 1}, or remove the upcaster"
                )
            kind = unfinished_kind(self.upcasters[version])
            if kind is not None:
                yield f"{key}.upcast.{version}: is {kind}; relay calls plain functions"
            wrong = wrong_arguments(self.upcasters[version], ["payload"])
            if wrong is not None:
                yield f"{key}.upcast.{version}: {wrong}"
        for version in range(self.oldest, self.current):
            if version not in self.upcasters:
                yield (
                    f"{key}.upcast: no upcaster leads from version {version} to {version + 1}: add one from "
                    f"{version}, or remove those from older versions"
                )


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
        from relay.event_types.upcasting import Upcasting

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
