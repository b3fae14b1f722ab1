"""A type of events: its versions, and what leads from one to the next."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel

from relay.config.imports import unfinished_kind, wrong_arguments
from relay.config.settings import VERSION_FROM

Upcaster = Callable[[Any], Any]
"""Takes the payload of one version, as `json` reads it, and returns that of the next. It may change its argument."""
Model = type[BaseModel]


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
