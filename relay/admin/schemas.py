"""Writes the JSON Schema of each event type's current version: `relay schema`.

Source: JSON Schema 2020-12, the dialect that pydantic writes.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from pydantic import PydanticUserError

from relay.config.settings import EventsSettings
from relay.event_types.event_type import EventType
from relay.event_types.registry import registered
from relay.faults import ConfigurationError

_DIALECT = "https://json-schema.org/draft/2020-12/schema"


@dataclass(frozen=True, slots=True)
class Schema:
    """The JSON Schema of the payload of one event type in its current version."""

    event_type: str
    version: int
    document: dict[str, Any]

    @property
    def file(self) -> str:
        """The name of its file: the event type, with characters percent-encoded that a file name cannot have."""
        name = quote(self.event_type, safe=" ")
        return f"%2E{name[1:]}.json" if name.startswith(".") else f"{name}.json"

    @property
    def text(self) -> str:
        """The document as text, the same for the same model."""
        return json.dumps(self.document, indent=2, ensure_ascii=False) + "\n"


def schemas(events: EventsSettings) -> tuple[list[Schema], list[str]]:
    """Return the schemas in the order of the types, and the types that have no model.

    Raises ConfigurationError with a line for each fault.
    """
    types = registered(events)
    described = [each for each in types if each.model is not None]
    return [_schema(each) for each in described], [
        each.name for each in types if each.model is None
    ]


def write(described: list[Schema], folder: Path) -> list[Path]:
    """Write a file for each schema; returns their paths. Raises ConfigurationError if a file cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        paths = [folder / each.file for each in described]
        for path, each in zip(paths, described, strict=True):
            path.write_text(each.text, encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(
            f"--dir: {error.filename}: cannot be written ({error.strerror}): name a folder that relay may write to"
        ) from None
    return paths


def _schema(event_type: EventType) -> Schema:
    assert event_type.model is not None  # noqa: S101
    try:
        document = event_type.model.model_json_schema()
    except PydanticUserError as error:
        raise ConfigurationError(
            f"events.{event_type.name}.model: JSON Schema cannot describe it: {error.message}: change the field, or "
            "give the model a __get_pydantic_json_schema__"
        ) from None
    name, version = event_type.name, event_type.current
    head = {"$schema": _DIALECT, "x-event-type": name, "x-version": version}
    return Schema(name, version, {**head, **document})
