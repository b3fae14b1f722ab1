"""The configuration's `events`: the types in the file itself, or the name of a registry in code."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, PositiveInt, Tag

from relay.config.fields import JSON_FIELDS, is_name
from relay.config.types import Number, Section

VERSION_FROM = "metadata.version"
"""Where an event says which version it has, unless something else is configured."""


def check_version_from(path: str) -> str:
    """The path itself. Raises ValueError if it does not lead into payload or metadata."""
    if not is_name(path) or path in JSON_FIELDS or path.partition(".")[0] not in JSON_FIELDS:
        raise ValueError(f"{path!r} is no path into payload or metadata, such as {VERSION_FROM}")
    return path


def _path(value: Any) -> Any:
    if not isinstance(value, str) or not re.fullmatch(r"[\w.]+:[\w.]+", value):
        raise ValueError("must be module:name, such as shop.events:OrderPlaced")
    return value


Path = Annotated[str, BeforeValidator(_path)]
Version = Annotated[PositiveInt, Number]


class EventTypeSettings(Section):
    """A type of events: its current version, the model of that, and the upcasters by the version that they take."""

    version: Version | None = None
    """The current version; null: the one after the last upcaster, else 1."""
    model: Path | None = None
    """`module:name` of a pydantic model of the current version's payload."""
    upcast: dict[Version, Path] = Field(default_factory=dict)
    """For each older version `module:function`, which takes its payload and returns that of the next version."""
    version_from: Annotated[str, AfterValidator(check_version_from)] = VERSION_FROM
    """The path into payload or metadata where an event has its version; without a value there it has version 1."""


TYPES, REGISTRY = "types", "registry"
"""What pydantic names the two forms in the location of a fault."""


def _form(value: Any) -> str:
    return REGISTRY if isinstance(value, str) else TYPES


EventsSettings = Annotated[
    Annotated[dict[str, EventTypeSettings], Tag(TYPES)] | Annotated[Path, Tag(REGISTRY)],
    Discriminator(_form),
]
