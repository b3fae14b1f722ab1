"""The section `events`: event types in the file itself, or the name of a registry in code."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, PositiveInt, Tag

from relay.config.fields import JSON_FIELDS, is_name
from relay.config.types import Number, Section

VERSION_FROM = "metadata.version"
"""The default path of an event's version."""


def check_version_from(path: str) -> str:
    """Return the path unchanged. Raises ValueError if it does not lead into payload or metadata."""
    if not is_name(path) or path in JSON_FIELDS or path.partition(".")[0] not in JSON_FIELDS:
        raise ValueError(f"{path!r} is not a path into payload or metadata, such as {VERSION_FROM}")
    return path


def _path(value: Any) -> Any:
    if not isinstance(value, str) or not re.fullmatch(r"[\w.]+:[\w.]+", value):
        raise ValueError("must be module:name, such as shop.events:OrderPlaced")
    return value


Path = Annotated[str, BeforeValidator(_path)]
Version = Annotated[PositiveInt, Number]


class EventTypeSettings(Section):
    """An event type: its current version, the model of that version, and the upcasters from older versions."""

    version: Version | None = None
    """The current version; null: the one after the last upcaster's, else 1."""
    model: Path | None = None
    """`module:name` of a pydantic model of the current version's payload."""
    upcast: dict[Version, Path] = Field(default_factory=dict)
    """`module:function` for each older version: it takes the version's payload and returns the next version's."""
    version_from: Annotated[str, AfterValidator(check_version_from)] = VERSION_FROM
    """The path to an event's version in payload or metadata; an event without a value there has version 1."""


TYPES, REGISTRY = "types", "registry"
"""The names of the two forms in the location of a pydantic error."""


def _form(value: Any) -> str:
    return REGISTRY if isinstance(value, str) else TYPES


EventsSettings = Annotated[
    Annotated[dict[str, EventTypeSettings], Tag(TYPES)] | Annotated[Path, Tag(REGISTRY)],
    Discriminator(_form),
]
